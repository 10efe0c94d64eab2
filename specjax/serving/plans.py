"""What a scheduler tells an engine to do in one step. No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from specjax.serving.requests import Request


class Prefix(NamedTuple):
  """Rows that a KV manager has kept: the first tokens of a text need not be run again.

  Attributes:
    tokens: how many, counted from the text's beginning.
    source: where they are; the manager's own business.
  """

  tokens: int
  source: Any = None


# Asked once for each admission, in order, with the request and the text that its row is to hold; None where
# nothing is kept. What it answered must stay until the plan was carried out.
PrefixLookup = Callable[[Request, tuple[int, ...]], Prefix | None]


class Eviction(NamedTuple):
  """A row that is free from here on. Its request has ended, or waits again.

  Attributes:
    row: which.
    id: of the request that had it.
    preempted: whether it waits again; it will come back with all of its text to be prefilled.
  """

  row: int
  id: str
  preempted: bool


class Admission(NamedTuple):
  """A request gets a row.

  Attributes:
    row: which; it is free, after the plan's evictions.
    request: whose.
    text: the prompt and what was emitted before a preemption; the last token is the first root, the rows of
      those before it must be cached. Where new text begins stays where the prompt ends.
    cached: of those rows, how many are copied from ``prefix``: all that are needed, or a multiple of the
      narrowest chunk, so that chunks fit the buffer.
    prefix: what the lookup found, None if nothing of it is used.
  """

  row: int
  request: Request
  text: tuple[int, ...]
  cached: int
  prefix: Prefix | None

  @property
  def emitted(self) -> int:
    """New tokens before this admission; 0 unless the request was preempted."""
    return len(self.text) - len(self.request.prompt)


class Chunk(NamedTuple):
  """Tokens ``start … start + count`` of a text are run through target and drafter.

  Attributes:
    row, id: whose.
    start: position of the first, a multiple of the narrowest width.
    count: how many.
    width: the compiled width that holds them, which is what counts as tokens of the step; only the last chunk
      of a text has fewer than its width.
    last: the row can decode behind it.
  """

  row: int
  id: str
  start: int
  count: int
  width: int
  last: bool


class Seat(NamedTuple):
  """A row, and the request in it."""

  row: int
  id: str


@dataclasses.dataclass(frozen=True)
class Plan:
  """One step, to be done in this order: evictions, admissions, chunks, rounds.

  Attributes:
    number: of the step, from 0.
    evict: rows that become free.
    admit: requests that get a row.
    prefill: chunks, those of one row in order.
    decode: rows that run rounds together: all whose prompt is read, or none. Those that are read to the end
      by this very plan are among them as far as the step's budget allows.
    depth: the deepest draft of these rounds: widths that draft deeper must not run; 0 for plain ones.
    rounds: how many of them, at most.
    tokens: what the step takes of its budget, at most.
  """

  number: int
  evict: tuple[Eviction, ...]
  admit: tuple[Admission, ...]
  prefill: tuple[Chunk, ...]
  decode: tuple[Seat, ...]
  depth: int
  rounds: int
  tokens: int

  @property
  def works(self) -> bool:
    """Whether anything runs on the device."""
    return bool(self.prefill or self.decode)
