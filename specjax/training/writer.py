"""Writes a data set shard by shard; see `data` for what lies on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from specjax.checkpoints.files import write_whole, writing
from specjax.training.data import (
  FORMAT,
  MANIFEST,
  METADATA,
  Sample,
  Shard,
  read_manifest,
  sha256,
  shard_file,
  shards_digest,
)

_COUNTS = ("samples", "tokens", "answer_tokens")


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
      shard = Shard(self.path, manifest, index)
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
    metadata = {METADATA: json.dumps(about, sort_keys=True)}
    file = os.path.join(self.path, shard_file(index))
    with writing(file, "writing"):
      part = f"{file}.part"
      safetensors.numpy.save_file(arrays, part, metadata=metadata)
      with open(part, "r+b") as stream:
        os.fsync(stream.fileno())
      entry = {
        "file": shard_file(index),
        "sha256": sha256(part),
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
      "digest": shards_digest(self.shards),
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
