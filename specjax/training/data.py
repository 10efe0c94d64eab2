"""Training data on disk: samples of tokens and loss masks in shards, their provenance in a manifest.

A folder holds ``manifest.json``, ``shard-00000.safetensors`` and so on. A shard is whole or absent, and the
unit of resuming: who writes it anew from the same settings gets the same bits. Its tensors, for n samples of
T tokens in all, sample by sample:

- ``tokens`` int32 ``[T]``; ``mask`` uint8 ``[T]``, 1 for tokens of answers, which are to be learned;
- ``starts`` int64 ``[n + 1]``, where samples begin, and T;
- ``numbers`` int64 ``[n]``, which sample of the whole set each is;
- ``hashes`` uint64 ``[n, 2]`` of its question and its answer, for finding duplicates;
- perhaps ``taps`` bfloat16 ``[T, taps, D]``, the target's hidden states at each position; zeros at the last
  one of a sample, for which the target had no row.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from specjax.checkpoints.files import read_json, write_whole, writing

FORMAT = 1
MANIFEST = "manifest.json"
_METADATA = "specjax"
_TYPES = {"tokens": "int32", "mask": "uint8", "starts": "int64", "numbers": "int64", "hashes": "uint64"}
# What a manifest says, and of which type.
_FIELDS = {"provenance": dict, "shards": list, "counts": dict, "digest": str}
_SHARD_FIELDS = {
  "file": str,
  "sha256": str,
  "bytes": int,
  "samples": int,
  "tokens": int,
  "answer_tokens": int,
  "info": dict,
}
_COUNTS = ("samples", "tokens", "answer_tokens")


class Sample(NamedTuple):
  """One text.

  Attributes:
    tokens: int32 ``[T]``.
    mask: bool ``[T]``, tokens of answers, which are to be learned; the others are context.
  """

  tokens: np.ndarray
  mask: np.ndarray


def digest_of(value: Any) -> str:
  """SHA-256 of something that JSON can write, whatever the order of its fields."""
  return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def shard_file(index: int) -> str:
  return f"shard-{index:05d}.safetensors"


class Dataset:
  """A finished data set, or what there is of one. Tokens are in memory, features are read when asked for.

  Attributes:
    path: the folder.
    manifest: what ``manifest.json`` holds: provenance, shards, counts, statistics.
    digest: SHA-256 over the digests of the shards, in order.
  """

  def __init__(self, path: str, manifest: dict[str, Any], shards: list[_Shard]):
    self.path, self.manifest, self._shards = path, manifest, shards
    self.digest: str = manifest["digest"]
    self._ends = np.cumsum([len(shard) for shard in shards])

  @classmethod
  def open(cls, path: str) -> Dataset:
    """Reads the folder and checks every shard against its SHA-256.

    Raises:
      ValueError: no data set, no finished shard, or one that is missing or damaged; names file and field.
    """
    manifest = read_manifest(path)
    shards = [_Shard(path, manifest, index) for index in range(len(manifest["shards"]))]
    if not sum(map(len, shards)):
      raise ValueError(f"{os.path.join(path, MANIFEST)}: shards hold no sample yet")
    return cls(path, manifest, shards)

  def __len__(self) -> int:
    return int(self._ends[-1])

  def __getitem__(self, i: int) -> Sample:
    shard, row = self._place(i)
    return shard.sample(row)

  def number(self, i: int) -> int:
    """Which sample of the whole set it is: those that were dropped have numbers, too."""
    shard, row = self._place(i)
    return int(shard.numbers[row])

  def features(self, i: int) -> np.ndarray | None:
    """bfloat16 ``[T - 1, taps, D]`` of sample i, row t that of position t; None if none were stored.

    ``manifest["provenance"]["taps"]`` names the layers whose input they are.
    """
    shard, row = self._place(i)
    return shard.features(row)

  def _place(self, i: int) -> tuple[_Shard, int]:
    if not 0 <= i < len(self):
      raise IndexError(f"sample {i}; there are samples 0 to {len(self) - 1}")
    index = int(np.searchsorted(self._ends, i, side="right"))
    return self._shards[index], i - int(self._ends[index]) + len(self._shards[index])


def read_manifest(path: str) -> dict[str, Any]:
  """``manifest.json`` of a folder, checked in itself.

  Raises:
    ValueError: none there, another format, or a field that is missing or does not fit the others.
  """
  file = os.path.join(path, MANIFEST)
  if not os.path.exists(file):
    raise ValueError(f"{path}: no {MANIFEST}; this is not a data set")
  manifest = read_json(file)
  if manifest.get("format") != FORMAT:
    raise ValueError(f"{file}: format = {manifest.get('format')!r}; this version reads {FORMAT}")
  _check_fields(file, manifest, _FIELDS)
  for index, entry in enumerate(manifest["shards"]):
    if not isinstance(entry, dict):
      raise ValueError(f"{file}: shard {index} = {entry!r}; an object is needed")
    _check_fields(f"{file}: shard {index}", entry, _SHARD_FIELDS)
    if entry["file"] != shard_file(index):
      raise ValueError(f"{file}: shard {index}: file = {entry['file']!r}; it must be {shard_file(index)!r}")
  found = _digest(manifest["shards"])
  if manifest["digest"] != found:
    raise ValueError(f"{file}: digest = {manifest['digest']!r}; its shards give {found!r}")
  return manifest


def _check_fields(where: str, value: Mapping[str, Any], fields: Mapping[str, type]) -> None:
  for name, kind in fields.items():
    if type(value.get(name)) is not kind:
      raise ValueError(f"{where}: {name} = {value.get(name)!r}; it must be of type {kind.__name__}")


def _digest(shards: Sequence[Mapping[str, Any]]) -> str:
  return hashlib.sha256("".join(shard["sha256"] for shard in shards).encode()).hexdigest()


def _sha256(path: str) -> str:
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


class _Shard:
  """One file, checked: small tensors in memory, taps where they are."""

  def __init__(self, path: str, manifest: Mapping[str, Any], index: int):
    entry = manifest["shards"][index]
    file = self.path = os.path.join(path, entry["file"])
    again = "delete the file and write the data set again: finished shards before it are kept"
    if not os.path.exists(file):
      raise ValueError(f"{file}: no such file, but {MANIFEST} names it; write the data set again")
    size = os.path.getsize(file)
    if size != entry["bytes"]:
      raise ValueError(f"{file}: {size} bytes, {MANIFEST} says {entry['bytes']}; {again}")
    found = _sha256(file)
    if found != entry["sha256"]:
      raise ValueError(f"{file}: SHA-256 is {found}, {MANIFEST} says {entry['sha256']}; {again}")
    try:
      self._file = safetensors.safe_open(file, "np")
      self.tokens, self.mask, self.starts, self.numbers, self.hashes = map(self._file.get_tensor, _TYPES)
    except (safetensors.SafetensorError, OSError) as error:
      raise ValueError(f"{file}: not a shard ({error})") from None
    self.mask = self.mask.astype(bool)
    self._has_taps = "taps" in self._file.keys()
    self._check(entry)

  def _check(self, entry: Mapping[str, Any]) -> None:
    total, samples = len(self.tokens), len(self.numbers)
    sound = self.starts.shape == (samples + 1,) and self.starts[0] == 0 and self.starts[-1] == total
    if not sound or (np.diff(self.starts) < 1).any() or self.mask.shape != (total,):
      raise ValueError(f"{self.path}: starts or mask do not fit the {total} tokens of {samples} samples")
    for name, value in (("samples", samples), ("tokens", total), ("answer_tokens", int(self.mask.sum()))):
      if entry[name] != value:
        raise ValueError(f"{self.path}: {name} = {value}, {MANIFEST} says {entry[name]}")

  def __len__(self) -> int:
    return len(self.numbers)

  def sample(self, row: int) -> Sample:
    cut = slice(*self.starts[row : row + 2])
    return Sample(self.tokens[cut], self.mask[cut])

  def features(self, row: int) -> np.ndarray | None:
    if not self._has_taps:
      return None
    start, end = self.starts[row : row + 2].tolist()
    return self._file.get_slice("taps")[start : end - 1]

  def answer_lengths(self) -> list[int]:
    return np.add.reduceat(self.mask, self.starts[:-1], dtype=np.int64).tolist() if len(self) else []


class ShardWriter:
  """Writes a data set shard by shard, and goes on where it ended.

  Attributes:
    path: the folder.
    provenance: what the data is made from; a folder with another one is refused.
    shards: entries of the finished shards; the next one to write is number ``len(shards)``.
    hashes: of all their samples, ``(question, answer)``.
  """

  def __init__(self, path: str, provenance: Mapping[str, Any]):
    """Opens the folder; shards from the first missing one on are to be written.

    Args:
      path: is made if it does not exist.
      provenance: goes into the manifest as JSON. Its ``taps`` (layers, None without features) and
        ``tap_width`` (D) say what `add` takes.

    Raises:
      ValueError: a folder of something else, of another provenance, or with a damaged shard.
    """
    self.path = path
    self.provenance: dict[str, Any] = json.loads(json.dumps(provenance))
    self.shards: list[dict[str, Any]] = []
    self.hashes: list[tuple[int, int]] = []
    self._lengths: list[int] = []
    self._pending: list[tuple[Sample, int, tuple[int, int], np.ndarray | None]] = []
    if os.path.exists(os.path.join(path, MANIFEST)):
      self._resume()
      return
    others = [name for name in os.listdir(path) if not name.endswith(".part")] if os.path.isdir(path) else []
    if others:
      raise ValueError(f"{path} is not empty and holds no data set ({others[0]}); name a new folder")
    with writing(path, "making the folder"):
      os.makedirs(path, exist_ok=True)
    self._write_manifest({})

  def _resume(self) -> None:
    manifest = read_manifest(self.path)
    theirs = manifest["provenance"]
    for name in self.provenance | theirs:
      before, now = theirs.get(name), self.provenance.get(name)
      if before != now:
        raise ValueError(
          f"{self.path} holds data with {name} = {before!r}; now it is {now!r}. Name a new folder"
        )
    for index, entry in enumerate(manifest["shards"]):
      if not os.path.exists(os.path.join(self.path, entry["file"])):
        break
      shard = _Shard(self.path, manifest, index)
      self.shards.append(entry)
      self.hashes.extend(map(tuple, shard.hashes.tolist()))
      self._lengths.extend(shard.answer_lengths())

  @property
  def answer_tokens(self) -> int:
    """Of finished shards."""
    return sum(self._lengths)

  @property
  def pending(self) -> int:
    """Samples added to the shard that is not finished."""
    return len(self._pending)

  @property
  def infos(self) -> list[dict[str, Any]]:
    """What `commit` was told of each finished shard."""
    return [entry["info"] for entry in self.shards]

  def add(
    self, sample: Sample, *, number: int, hashes: tuple[int, int] = (0, 0), features: np.ndarray | None = None
  ) -> None:
    """Adds a sample to the shard that is being made.

    Args:
      sample: of at least one token.
      number: which of the whole set it is; ascending.
      hashes: of its question and its answer.
      features: bfloat16 ``[T - 1, taps, D]``, if the provenance has taps.

    Raises:
      ValueError: shapes that do not fit each other.
    """
    length, taps = len(sample.tokens), self.provenance.get("taps")
    if not length or sample.mask.shape != (length,):
      raise ValueError(f"sample {number} has {length} tokens and a mask of shape {sample.mask.shape}")
    wanted = None if taps is None else (length - 1, len(taps), self.provenance["tap_width"])
    found = None if features is None else features.shape
    if found != wanted:
      raise ValueError(f"sample {number} has features of shape {found}; taps = {taps} need {wanted}")
    self._pending.append((sample, number, hashes, features))

  def commit(
    self, info: Mapping[str, Any], report: Mapping[str, Any], made_with: Mapping[str, Any] | None = None
  ) -> dict[str, Any]:
    """Writes the shard and the manifest, each aside and renamed; returns the shard's entry.

    Args:
      info: of this shard, kept in its entry and in its file.
      report: on all shards, this one included; goes into the manifest.
      made_with: versions and device, kept in the entry alone: other ones may well give the same bits.

    Raises:
      CheckpointError: it cannot be written; shards before it stay.
    """
    index = len(self.shards)
    pending, self._pending = self._pending, []
    arrays, lengths, hashes = _arrays(pending, self.provenance)
    about = {"format": FORMAT, "provenance": self.provenance, "shard": index, "info": dict(info)}
    metadata = {_METADATA: json.dumps(about, sort_keys=True)}
    file = os.path.join(self.path, shard_file(index))
    with writing(file, "writing"):
      part = f"{file}.part"
      safetensors.numpy.save_file(arrays, part, metadata=metadata)
      with open(part, "r+b") as stream:
        os.fsync(stream.fileno())
      entry = {
        "file": shard_file(index),
        "sha256": _sha256(part),
        "bytes": os.path.getsize(part),
        "samples": len(pending),
        "tokens": len(arrays["tokens"]),
        "answer_tokens": sum(lengths),
        "info": json.loads(json.dumps(info)),
        "made_with": dict(made_with or {}),
      }
      os.replace(part, file)
    self.shards.append(entry)
    self.hashes.extend(hashes)
    self._lengths.extend(lengths)
    self._write_manifest(report)
    return entry

  def _write_manifest(self, report: Mapping[str, Any]) -> None:
    sums = {name: sum(entry[name] for entry in self.shards) for name in _COUNTS}
    manifest = {
      "format": FORMAT,
      "provenance": self.provenance,
      "counts": sums,
      "answer_lengths": length_statistics(self._lengths),
      "report": dict(report),
      "shards": self.shards,
      "digest": _digest(self.shards),
    }
    file = os.path.join(self.path, MANIFEST)
    with writing(file, "writing"):
      write_whole(file, json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")


def _arrays(pending, provenance) -> tuple[dict[str, np.ndarray], list[int], list[tuple[int, int]]]:
  """A shard's tensors, its answers' lengths and its hashes. Takes the features out of ``pending``."""
  lengths = [int(sample.mask.sum()) for sample, *_ in pending]
  hashes = [pair for _, _, pair, _ in pending]
  starts = np.cumsum([0, *(len(sample.tokens) for sample, *_ in pending)], dtype=np.int64)
  join = lambda arrays, dtype: np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)
  arrays = {
    "tokens": join([sample.tokens for sample, *_ in pending], np.int32),
    "mask": join([sample.mask for sample, *_ in pending], np.uint8),
    "starts": starts,
    "numbers": np.array([number for _, number, _, _ in pending], np.int64),
    "hashes": np.array(hashes, np.uint64).reshape(-1, 2),
  }
  if provenance.get("taps") is not None:
    shape = (int(starts[-1]), len(provenance["taps"]), provenance["tap_width"])
    taps = arrays["taps"] = np.zeros(shape, jnp.bfloat16)
    for i, (sample, number, pair, features) in enumerate(pending):
      taps[starts[i] : starts[i + 1] - 1] = features
      pending[i] = (sample, number, pair, None)  # one copy in memory, not two
  return arrays, lengths, hashes


def length_statistics(lengths: Sequence[int]) -> dict[str, float]:
  """Mean and quantiles of the answers' tokens; empty without any."""
  if not lengths:
    return {}
  quantiles = np.quantile(lengths, [0.0, 0.1, 0.5, 0.9, 1.0])
  named = dict(zip(("min", "p10", "median", "p90", "max"), map(float, quantiles), strict=True))
  return {"mean": round(float(np.mean(lengths)), 2), **named}
