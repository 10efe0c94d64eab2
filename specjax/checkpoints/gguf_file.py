"""Reading GGUF files: metadata at once, tensors on demand.

`gguf.GGUFReader` makes several Python objects for every token of the vocabulary (3 s for 49152);
this reader takes a fraction of a second and names the field at which a damaged file breaks off.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from typing import Any

import gguf
import numpy as np

from specjax.checkpoints.files import CheckpointError
from specjax.checkpoints.fill import StoredTensor

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_MAX_RANK = 4
_PLAIN = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}
_CHUNK = 4096  # blocks; the temporaries of a chunk stay in a core's cache


@dataclasses.dataclass(frozen=True)
class GGUFFile:
  """Metadata and tensors of one file."""

  path: str
  metadata: dict[str, Any]
  tensors: dict[str, StoredTensor]

  def get(self, key: str, kind: type, default: Any = None) -> Any:
    """A metadata value of type ``kind`` (str, int, float, bool, list of strings or numpy array).

    Raises:
      CheckpointError: the key is missing and there is no default, or the value has another type.
    """
    value = self.metadata.get(key, default)
    if value is None:
      raise CheckpointError(f"{self.path}: metadata key {key} is missing")
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
      raise CheckpointError(f"{self.path}: {key} = {value!r:.80}; it must be of type {kind.__name__}")
    return value


class _Cursor:
  """Walks the header; running over the end of the file is one clear error."""

  def __init__(self, path: str, data: np.ndarray):
    self.path, self.offset, self.doing = path, 0, "the header"
    self._data = memoryview(data)

  def take(self, size: int) -> memoryview:
    end = self.offset + size
    if end > len(self._data):
      raise CheckpointError(
        f"{self.path}: truncated: {self.doing} ends at byte {end}, the file has {len(self._data)}"
      )
    view = self._data[self.offset : end]
    self.offset = end
    return view

  def scalar(self, code: str) -> Any:
    return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

  def string(self) -> str:
    return str(self.take(self.scalar("Q")), "utf-8", "replace")

  def value(self, kind: int) -> Any:
    if kind in _SCALARS:
      return self.scalar(_SCALARS[kind])
    if kind == _STRING:
      return self.string()
    if kind != _ARRAY:
      raise CheckpointError(f"{self.path}: {self.doing} has unknown value type {kind}; the file is damaged")
    item, count = self.scalar("I"), self.scalar("Q")
    if item in _SCALARS:
      return np.frombuffer(self.take(count * struct.calcsize("<" + _SCALARS[item])), "<" + _SCALARS[item])
    return [self.value(item) for _ in range(count)]


def read_gguf(path: str) -> GGUFFile:
  """Reads a file's metadata and maps its tensors.

  Returns:
    Strings, numbers, lists of strings and numpy arrays of numbers by key; tensors by name.

  Raises:
    CheckpointError: not GGUF, an unknown version, truncated, or a tensor that reaches past the end.
  """
  try:
    data = np.memmap(path, np.uint8, mode="r")
  except FileNotFoundError:
    raise CheckpointError(f"{path}: no such file") from None
  except (OSError, ValueError) as error:
    raise CheckpointError(f"{path}: cannot be read ({error})") from None
  cursor = _Cursor(path, data)
  if bytes(cursor.take(4)) != b"GGUF":
    raise CheckpointError(f"{path}: not a GGUF file (it does not start with GGUF)")
  version = cursor.scalar("I")
  if version not in _VERSIONS:
    raise CheckpointError(f"{path}: GGUF version {version}; supported: {_VERSIONS}, little-endian")
  num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
  metadata = {}
  for i in range(num_keys):
    cursor.doing = f"metadata key {i + 1} of {num_keys}"
    key = cursor.string()
    cursor.doing = f"metadata key {key}"
    metadata[key] = cursor.value(cursor.scalar("I"))
  infos = []
  for i in range(num_tensors):
    cursor.doing = f"tensor {i + 1} of {num_tensors}"
    name, rank = cursor.string(), cursor.scalar("I")
    if rank > _MAX_RANK:
      raise CheckpointError(
        f"{path}: tensor {name} has {rank} axes, at most {_MAX_RANK}; the file is damaged"
      )
    shape = tuple(cursor.scalar("Q") for _ in range(rank))[::-1]
    infos.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
  align = GGUFFile(path, metadata, {}).get("general.alignment", int, 32)
  if align < 1:
    raise CheckpointError(f"{path}: general.alignment = {align}; it must be at least 1")
  start = -(-cursor.offset // align) * align
  tensors = {name: _tensor(path, data, name, *rest, start) for name, *rest in infos}
  return GGUFFile(path, metadata, tensors)


def _tensor(
  path: str, data: np.ndarray, name: str, shape: tuple[int, ...], kind: int, offset: int, start: int
) -> StoredTensor:
  try:
    quant = gguf.GGMLQuantizationType(kind)
    block, size = gguf.GGML_QUANT_SIZES[quant]
  except (ValueError, KeyError):
    raise CheckpointError(f"{path}: tensor {name} has unknown type {kind}") from None
  if not shape or shape[-1] % block:
    raise CheckpointError(
      f"{path}: tensor {name} has shape {list(shape)}; rows of {quant.name} are multiples of {block}"
    )
  first = start + offset
  end = first + math.prod(shape) // block * size
  if end > len(data):
    raise CheckpointError(f"{path}: truncated: tensor {name} ends at byte {end}, the file has {len(data)}")

  def read() -> np.ndarray:
    if quant.name in _PLAIN:
      return data[first:end].view(_PLAIN[quant.name]).reshape(shape)
    kind = getattr(gguf.quants, quant.name, None)
    if kind is None:
      raise CheckpointError(f"{path}: tensor {name} is {quant.name}, which cannot be dequantized")
    return _dequantize(data[first:end].reshape(-1, size), kind, block).reshape(shape)

  return StoredTensor(shape, read)


def _dequantize(blocks: np.ndarray, kind, block: int) -> np.ndarray:
  """Blocks of bytes → float32. `gguf.quants.dequantize` works on 16 rows at a time, mostly overhead."""
  kind.init_grid()
  out = np.empty((len(blocks), block), np.float32)
  for i in range(0, len(blocks), _CHUNK):
    out[i : i + _CHUNK] = kind.dequantize_blocks(blocks[i : i + _CHUNK])
  return out
