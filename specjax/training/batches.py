"""Samples packed into rows of one length, and the order in which rows are seen.

Several samples share a row. Each has a segment number and positions from its own start; attention never
crosses segments. Rows are packed once; epochs shuffle rows, as a function of (seed, epoch) alone, so that the
step is all a resumed run must know.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Sequence
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array

# Learned tokens a row are rounded up to this.
_COUNTED_MULTIPLE = 16
# Rows that are open at once while packing.
_OPEN_ROWS = 64
# Share of the samples that may be held out.
HELD_OUT_SHARE = 0.05


class Samples(Protocol):
  """What of a `data.Dataset` is needed here."""

  def __len__(self) -> int: ...

  def __getitem__(self, i: int) -> Any:
    """``tokens`` int32 ``[T]`` and ``mask`` bool ``[T]``, tokens to be learned."""

  def features(self, i: int) -> np.ndarray | None:
    """``[T or T - 1, taps, D]``, or None where they were not recorded."""


@flax.struct.dataclass
class Batch:
  """Packed rows. Axis 0 of every leaf is the row.

  Attributes:
    tokens: int32 ``[B, T]``.
    segments: int32 ``[B, T]``: 1, 2, … the samples of a row, 0 padding.
    positions: int32 ``[B, T]``, from the start of the token's sample.
    counted: int32 ``[B, P]``, ascending places in the row of the tokens that are learned, then -1.
    taps: ``[B, T, taps, D]``, the target's hidden states, or None.
    best: int32 ``[B, P]``, the target's most likely token at those places, of its whole vocabulary; only for
      evaluation.
    mass: float32 ``[B, P]``, its probability of the draft vocabulary there; only for evaluation.
  """

  tokens: Array
  segments: Array
  positions: Array
  counted: Array
  taps: Array | None = None
  best: Array | None = None
  mass: Array | None = None


# --- places in a batch -------------------------------------------------------------------------------


def rows_at(x: Array, places: Array) -> Array:
  """``x [B, T, …]`` at ``places [B, P]`` of each row: ``[B, P, …]``; places below 0 read place 0."""
  places = jnp.maximum(places, 0)
  return jnp.take_along_axis(x, places.reshape(*places.shape, *(1,) * (x.ndim - 2)), axis=1)


def chain_counts(batch: Batch, depth: int, lag: int) -> Array:
  """Which learned tokens begin a chain of drafts that reaches ``depth``.

  The chain that begins at entry k of ``batch.counted`` drafts that token at depth 0, and at depth d the token
  d places on: it counts where that is one of the same sample and learned, as all between them.

  Args:
    depth: d, below P.
    lag: how many positions before the last known token the draft's input ends: the drafts of a chain that
      begins at place u come from what was known at u - 1 (lag 0: a model of its own) or from features of
      u - 2 (lag 1: a head on the target's hidden states, which has none of the last token yet).

  Returns:
    bool ``[B, P - d]``; entry k drafts entry k + d.
  """
  first, last = batch.counted[:, : batch.counted.shape[1] - depth], batch.counted[:, depth:]
  begin, end = rows_at(batch.positions, first), rows_at(batch.positions, last)
  return (first >= 0) & (last == first + depth) & (end == begin + depth) & (begin >= 1 + lag)


# --- packing -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Split:
  """Which samples are trained on, and which are held out; int64 arrays of numbers."""

  train: np.ndarray
  held_out: np.ndarray


def split(
  dataset: Samples, *, seed: int, held_out_tokens: int, max_tokens: int | None = None, longest: int
) -> Split:
  """Divides a dataset; a dataset that has grown since keeps what was held out.

  Args:
    seed: of the choice.
    held_out_tokens: samples are held out, at random, until they have so many tokens; at most
      `HELD_OUT_SHARE` of the samples, but at least one. 0: none.
    max_tokens: the first samples of what is left are trained on, up to so many tokens; None: all.
    longest: tokens of a sample beyond this are not counted (they are cut off).

  Raises:
    ValueError: nothing is left to train on.
  """
  # One stream of numbers: those of the first samples do not depend on how many follow.
  lot = np.random.default_rng(seed).random(len(dataset))
  length = np.array([min(len(dataset[i].tokens), longest) for i in range(len(dataset))], np.int64)
  held = np.zeros(len(dataset), bool)
  if held_out_tokens and len(dataset):
    chosen = np.flatnonzero(lot < HELD_OUT_SHARE)
    chosen = chosen if chosen.size else np.array([np.argmin(lot)])
    before = np.cumsum(length[chosen]) - length[chosen]
    held[chosen[before < held_out_tokens]] = True
  train = np.flatnonzero(~held)
  if max_tokens is not None:
    train = train[np.cumsum(length[train]) <= max_tokens]
  if not train.size:
    raise ValueError(f"no sample to train on: {len(dataset)} samples, max_tokens = {max_tokens}")
  return Split(train, np.flatnonzero(held))


class Packed:
  """Samples in rows.

  Attributes:
    row_length: T.
    num_rows: rows.
    width: P, learned tokens that a row has room for.
    row_tokens: int64 ``[rows]``, tokens that are no padding.
    has_features: batches bring the target's hidden states.
    stats: counts for the log: samples, rows, tokens, learned tokens, samples and tokens cut off, samples
      without a learned token (left out).
  """

  def __init__(
    self,
    dataset: Samples,
    indices: Sequence[int] | np.ndarray,
    *,
    row_length: int,
    seed: int = 0,
    columns: Sequence[int] | None = None,
    context: bool = False,
  ):
    """
    Args:
      indices: samples, each packed once.
      row_length: T; longer samples are cut there.
      seed: of the order in which they are packed.
      columns: which of the recorded hidden states a batch brings; None: none.
      context: tokens of the context, which are not in a sample's mask, are learned as well.

    Raises:
      ValueError: rows of fewer than 2 tokens, or nothing to learn.
    """
    if row_length < 2:
      raise ValueError(f"row_length = {row_length}; it must be at least 2")
    self.row_length = row_length
    self._dataset = dataset
    self._columns = None if columns is None else list(columns)
    self._context = context
    lengths, learned = {}, {}
    stats = dict(samples=0, rows=0, tokens=0, learned=0, cut_samples=0, cut_tokens=0, empty_samples=0)
    for i in map(int, indices):
      sample = dataset[i]
      whole, mask = len(sample.tokens), self._learned(sample)[1:]
      if not mask.any():
        stats["empty_samples"] += 1
        continue
      lengths[i], learned[i] = min(whole, row_length), int(mask.sum())
      stats["cut_samples"] += whole > row_length
      stats["cut_tokens"] += max(whole - row_length, 0)
    if not lengths:
      raise ValueError(f"none of {len(indices)} samples has a token to learn in its first {row_length}")
    self._rows = _fill(lengths, row_length, seed)
    self.row_tokens = np.array([sum(lengths[i] for i in row) for row in self._rows], np.int64)
    most = max(sum(learned[i] for i in row) for row in self._rows)
    self.width = min(row_length, -(-most // _COUNTED_MULTIPLE) * _COUNTED_MULTIPLE)
    stats |= dict(samples=len(lengths), rows=len(self._rows), tokens=int(self.row_tokens.sum()))
    self.stats = stats | {"learned": sum(learned.values())}

  @property
  def num_rows(self) -> int:
    return len(self._rows)

  @property
  def has_features(self) -> bool:
    return self._columns is not None

  def samples_of(self, row: int) -> tuple[int, ...]:
    """Numbers of the samples in a row, in their order."""
    return self._rows[row]

  def read(self, rows: Sequence[int] | np.ndarray) -> Batch:
    """Rows by number, as host arrays; -1 is an empty row.

    Raises:
      ValueError: hidden states are wanted and a sample has none.
    """
    shape = len(rows), self.row_length
    tokens, segments, positions = (np.zeros(shape, np.int32) for _ in range(3))
    counted = np.full((len(rows), self.width), -1, np.int32)
    taps = None
    for b, row in enumerate(rows):
      start, entries = 0, []
      for segment, i in enumerate(self._rows[row] if row >= 0 else (), start=1):
        sample = self._dataset[i]
        size = min(len(sample.tokens), self.row_length)
        here = slice(start, start + size)
        tokens[b, here] = sample.tokens[:size]
        segments[b, here], positions[b, here] = segment, np.arange(size)
        # Nothing is known before a sample's first token: no one drafts it.
        entries.append(start + 1 + np.flatnonzero(self._learned(sample)[1:]))
        if self._columns is not None:
          features = self._features(i)
          if taps is None:
            taps = np.zeros((*shape, len(self._columns), features.shape[2]), features.dtype)
          known = min(size, len(features))  # the last token may have none
          taps[b, start : start + known] = features[:known, self._columns]
        start += size
      if entries:
        places = np.concatenate(entries)
        counted[b, : len(places)] = places
    return Batch(tokens, segments, positions, counted, taps)

  def _learned(self, sample: Any) -> np.ndarray:
    """bool ``[T]``, up to where the sample is cut: the tokens to be learned."""
    mask = sample.mask[: self.row_length]
    return np.ones_like(mask) if self._context else mask

  def _features(self, i: int) -> np.ndarray:
    features = self._dataset.features(i)
    if features is None:
      raise ValueError(f"sample {i} has no recorded features")
    return features


def _fill(lengths: dict[int, int], row_length: int, seed: int) -> list[tuple[int, ...]]:
  """First fit over a few open rows, in an order drawn by the seed."""
  order = sorted(lengths)
  random.Random(seed).shuffle(order)
  rows: list[list[int]] = []
  opened: list[tuple[int, int]] = []  # number of a row, room in it
  for i in order:
    size = lengths[i]
    at = next((k for k, (_, room) in enumerate(opened) if room >= size), None)
    if at is None:
      rows.append([i])
      opened.append((len(rows) - 1, row_length - size))
    else:
      row, room = opened[at]
      rows[row].append(i)
      opened[at] = row, room - size
    opened = [(row, room) for row, room in opened if room > 1][-_OPEN_ROWS:]
  return [tuple(row) for row in rows]


# --- order -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Order:
  """The rows of each step: all rows once an epoch, one epoch behind the other.

  Attributes:
    num_rows: rows there are.
    batch: B, rows a step.
    seed: with the epoch's number it decides the epoch's order.
  """

  num_rows: int
  batch: int
  seed: int

  def rows(self, step: int) -> np.ndarray:
    """Numbers of the rows of a step, counted from 0: int64 ``[B]``."""
    at = np.arange(step * self.batch, (step + 1) * self.batch)
    epochs, places = at // self.num_rows, at % self.num_rows
    return np.array([_shuffled(self.num_rows, self.seed, int(e))[p] for e, p in zip(epochs, places)])

  def tokens(self, row_tokens: np.ndarray, steps: int) -> int:
    """Tokens seen in the first steps."""
    epochs, places = divmod(steps * self.batch, self.num_rows)
    part = _shuffled(self.num_rows, self.seed, epochs)[:places]
    return int(epochs * row_tokens.sum() + row_tokens[part].sum())


@functools.lru_cache(maxsize=4)
def _shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
  return np.random.default_rng([seed, epoch]).permutation(count)
