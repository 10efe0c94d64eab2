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

import numpy as np
import safetensors
import safetensors.numpy

from specjax.checkpoints.files import read_json

FORMAT = 1
MANIFEST = "manifest.json"
METADATA = "specjax"
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
    manifest: what ``manifest.json`` holds, provenance, shards, counts, statistics; of several folders, the
      first one's.
    digest: SHA-256 over the digests of the shards, in order; of several folders, over theirs.
  """

  def __init__(self, manifest: dict[str, Any], digest: str, shards: list[Shard], kept: np.ndarray):
    """
    Args:
      kept: int64 ``[samples]``, ascending places among the samples of all shards.
    """
    self.manifest, self.digest = manifest, digest
    self._shards, self._kept = shards, kept
    self._ends = np.cumsum([len(shard) for shard in shards])

  @classmethod
  def open(cls, path: str, *others: str) -> Dataset:
    """Reads the folder and checks every shard against its SHA-256.

    Args:
      others: folders that follow it, written with other seeds or settings. Of these, samples whose question
        or answer is in a folder before are left out.

    Raises:
      ValueError: no data set, no finished shard, or one that is missing or damaged, naming file and field;
        or folders of different models or features.
    """
    digests, shards, kept, seen = [], [], [], (set(), set())
    first, count = None, 0
    for folder in (path, *others):
      manifest = read_manifest(folder)
      own = [Shard(folder, manifest, index) for index in range(len(manifest["shards"]))]
      if not sum(map(len, own)):
        raise ValueError(f"{os.path.join(folder, MANIFEST)}: shards hold no sample yet")
      first = manifest if first is None else first
      _check_alike(path, first["provenance"], folder, manifest["provenance"])
      hashes = [pair for shard in own for pair in shard.hashes.tolist()]
      new = [not any(key in before for key, before in zip(pair, seen)) for pair in hashes]
      kept.append(count + np.flatnonzero(new))
      for before, keys in zip(seen, zip(*hashes)):
        before.update(keys)
      digests.append(manifest["digest"])
      shards += own
      count += len(hashes)
    digest = digests[0] if len(digests) == 1 else digest_of(digests)
    return cls(first, digest, shards, np.concatenate(kept))

  def __len__(self) -> int:
    return len(self._kept)

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

  def _place(self, i: int) -> tuple[Shard, int]:
    if not 0 <= i < len(self):
      raise IndexError(f"sample {i}; there are samples 0 to {len(self) - 1}")
    place = int(self._kept[i])
    index = int(np.searchsorted(self._ends, place, side="right"))
    return self._shards[index], place - int(self._ends[index]) + len(self._shards[index])


def _check_alike(path: str, first: Mapping[str, Any], folder: str, other: Mapping[str, Any]) -> None:
  """Raises ``ValueError`` unless the second folder's text and features are of the first one's model."""
  model = lambda provenance: (provenance.get("model") or {}).get("sha256")
  for name, of in (
    ("model", model),
    ("taps", lambda p: p.get("taps")),
    ("width", lambda p: p.get("tap_width")),
  ):
    if of(first) != of(other):
      raise ValueError(f"{folder}: {name} = {of(other)!r}; that of {path} is {of(first)!r}")


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
  found = shards_digest(manifest["shards"])
  if manifest["digest"] != found:
    raise ValueError(f"{file}: digest = {manifest['digest']!r}; its shards give {found!r}")
  return manifest


def _check_fields(where: str, value: Mapping[str, Any], fields: Mapping[str, type]) -> None:
  for name, kind in fields.items():
    if type(value.get(name)) is not kind:
      raise ValueError(f"{where}: {name} = {value.get(name)!r}; it must be of type {kind.__name__}")


def shards_digest(shards: Sequence[Mapping[str, Any]]) -> str:
  return hashlib.sha256("".join(shard["sha256"] for shard in shards).encode()).hexdigest()


def sha256(path: str) -> str:
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


class Shard:
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
    found = sha256(file)
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
