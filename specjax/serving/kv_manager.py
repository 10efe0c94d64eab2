"""The KV manager: which rows are whose, lanes in which prompts are read, and prefixes that are kept.

The batch is compiled for a few sizes, and moves to the smallest that holds the rows in it: a round's cost is
that of its batch, so a few rows in a large one would pay for all of it.

A prompt is read in a lane of its own beside the running batch, then placed into its row. The lane is not
thrown away: its rows stay as a kept prefix, and a later text that begins alike copies them instead of running
the target again, the drafter's rows among them. What a drafter knows besides rows (the last features of a
ring, lengths that lag) was noted behind every chunk, so a text can go on at any chunk's end that it shares.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax import decode
from specjax.base import Weights
from specjax.decode import DecodeConfig, DecodeState
from specjax.serving import programs
from specjax.serving.plans import Prefix
from specjax.serving.programs import RowInputs
from specjax.serving.requests import Request


@dataclasses.dataclass(eq=False)
class Lane:
  """A row outside of the batch.

  Attributes:
    state: of one row; None before it is begun.
    text: int32 ``[T]``, what is read in it.
    marks: by how many positions had been read, what `programs.read` noted then.
    users: admissions that are going to copy from it; while there are any it is not given up.
  """

  state: DecodeState | None
  text: np.ndarray
  marks: dict[int, Any] = dataclasses.field(default_factory=dict)
  users: int = 0


@dataclasses.dataclass(eq=False)
class _Reading:
  """A row that was given away and is not in the batch yet.

  Attributes:
    inputs: what it is begun with.
    carried: see `programs.begin`.
    source: the kept prefix to copy, if any.
    cached: how many rows of it.
    lane: where it is read.
  """

  inputs: RowInputs
  carried: Any
  source: Lane | None
  cached: int
  lane: Lane


class KVManager:
  """See the module.

  Memory: the batch (two of them while it moves), a lane for each prompt that is being read (one, as long as
  the oldest is read first), and ``kept`` lanes for prefixes. Each is as large as a row, and is used again.

  Attributes:
    state: the batch.
    sizes: that it may have, ascending.
    gone: bool ``[B]``, rows of it that are to be emptied by the next rounds.
  """

  def __init__(self, weights: Weights, config: DecodeConfig, *, sizes: Sequence[int], kept: int):
    """
    Args:
      weights, config: of decoding.
      sizes: of the batch, ascending; the last holds all rows.
      kept: most prefixes that are kept; of more the one that was used longest ago is given up.

    Raises:
      ValueError: naming the field, the value and the limit.
    """
    if kept < 0:
      raise ValueError(f"kept_prefixes = {kept}; it must be at least 0")
    if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
      raise ValueError(f"batches = {tuple(sizes)}; they must ascend from 1 or more to slots")
    self.sizes = tuple(sizes)
    self._weights, self._config, self._most = weights, config, kept
    self.state = programs.empty(weights, config, self.sizes[0])
    self.gone = np.zeros(self.sizes[0], bool)
    self._place: dict[int, int] = {}
    self._reading: dict[int, _Reading] = {}
    self._kept: collections.OrderedDict[int, Lane] = collections.OrderedDict()
    self._spare: list[DecodeState] = []

  # --- prefixes --------------------------------------------------------------------------------------

  def lookup(self, request: Request, text: Sequence[int]) -> Prefix | None:
    """The most rows that a text need not be read for: a `PrefixLookup`."""
    text = np.asarray(text, np.int32)
    best = Prefix(0)
    for lane in self._kept.values():
      shared = _shared(lane.text, text)
      usable = [count for count in lane.marks if count <= shared and self._may_go_on(count, len(text) - 1)]
      best = max(best, Prefix(max(usable, default=0), lane), key=lambda prefix: prefix.tokens)
    return best if best.tokens else None

  def _may_go_on(self, count: int, needed: int) -> bool:
    """Whether a text may be read on behind ``count`` rows: chunks begin at multiples of the narrowest."""
    return count == needed or (count < needed and count % self._config.prefill_widths[0] == 0)

  def _keep(self, lane: Lane) -> None:
    """Keeps a lane whose text is read; what it shares with one that is kept is kept once."""
    for key, other in list(self._kept.items()):
      if max(other.marks) <= _shared(other.text, lane.text) and not other.users:
        lane.marks = other.marks | lane.marks
        self._give_up(key)
    self._kept[id(lane)] = lane
    for key in [key for key, other in self._kept.items() if not other.users]:
      if len(self._kept) <= self._most:
        break
      self._give_up(key)

  def _give_up(self, key: int) -> None:
    self._spare.append(self._kept.pop(key).state)

  # --- rows ------------------------------------------------------------------------------------------

  def admit(
    self, row: int, text: Sequence[int], inputs: RowInputs, carried: Any, prefix: Prefix | None, cached: int
  ) -> None:
    """Gives a row away. Nothing runs before its first chunk, or before it is placed.

    Args:
      row: which; it is free.
      text: that it is to hold.
      inputs, carried: as `programs.begin` takes them.
      prefix: what `lookup` found, ``cached`` rows of which are to be copied.
    """
    source = None if prefix is None else prefix.source
    if source is not None:
      source.users += 1
      self._kept.move_to_end(id(source))
    lane = Lane(None, np.asarray(text, np.int32))
    self._reading[row] = _Reading(inputs, carried, source, cached, lane)

  def lane(self, row: int) -> Lane:
    """Where the text of a row is read, begun and with the rows of its prefix."""
    reading = self._reading[row]
    lane, source = reading.lane, reading.source
    if lane.state is None:
      free = self._spare.pop() if self._spare else programs.empty(self._weights, self._config, 1)
      lane.state = programs.begin(self._weights, free, reading.inputs, reading.carried, self._config)
      if source is not None:
        lane.state = programs.copy_prefix(lane.state, source.state, source.marks[reading.cached])
        lane.marks = {count: mark for count, mark in source.marks.items() if count <= reading.cached}
        self._release(reading)
    return lane

  def place(self, row: int) -> None:
    """Puts a row whose text is read into the batch, unless it is there."""
    if row not in self._reading:
      return
    lane = self.lane(row)
    del self._reading[row]
    if len(self._place) == len(self.gone):
      self._move(len(self._place) + 1)
    at = min(set(range(len(self.gone))).difference(self._place.values()))
    self.state = decode.insert_row(self.state, np.int32(at), lane.state, np.int32(0))
    self._place[row], self.gone[at] = at, False
    if self._most and max(lane.marks, default=0) >= self._config.prefill_widths[0]:
      self._keep(lane)
    else:
      self._spare.append(lane.state)

  def carry(self, row: int) -> Any:
    """What a row that will come back takes with it; None if it was not in the batch."""
    return programs.carry(self.state, np.int32(self._place[row])) if row in self._place else None

  def evict(self, row: int) -> None:
    """Frees a row. One in the batch is emptied by the next rounds, see `take_gone`."""
    if row in self._place:
      self.gone[self._place.pop(row)] = True
      return
    reading = self._reading.pop(row)
    self._release(reading)
    if reading.lane.state is not None:
      self._spare.append(reading.lane.state)

  def at(self, row: int) -> int:
    """Where in the batch a row is."""
    return self._place[row]

  def take_gone(self) -> np.ndarray:
    """bool ``[B]``: rows of the batch to be emptied, asked once, before rounds run; the batch may move."""
    if self._size(len(self._place)) < len(self.gone):
      self._move(len(self._place))
    gone, self.gone = self.gone, np.zeros_like(self.gone)
    return gone

  def _size(self, rows: int) -> int:
    return next(size for size in self.sizes if size >= rows)

  def _move(self, rows: int) -> None:
    """To a batch of the smallest size for so many rows."""
    batch = programs.empty(self._weights, self._config, self._size(rows))
    for to, (row, at) in enumerate(sorted(self._place.items())):
      batch = decode.insert_row(batch, np.int32(to), self.state, np.int32(at))
      self._place[row] = to
    self.state, self.gone = batch, np.zeros(self._size(rows), bool)

  def _release(self, reading: _Reading) -> None:
    if reading.source is not None:
      reading.source.users -= 1
      reading.source = None


def _shared(a: np.ndarray, b: np.ndarray) -> int:
  """How many tokens two texts begin alike with."""
  length = min(len(a), len(b))
  differ = np.flatnonzero(a[:length] != b[:length])
  return int(differ[0]) if len(differ) else length
