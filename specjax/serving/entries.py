"""A scheduler's books: requests that have not ended, and counts of what was done. No jax."""

from __future__ import annotations

import collections
import dataclasses

from specjax.serving.requests import Phase, Reason, Request


@dataclasses.dataclass
class Counts:
  """What a scheduler has done since it was made.

  Attributes:
    submitted: requests; each is live, or counted once in ``ended``.
    ended: by reason.
    admissions: rows given, again after a preemption included.
    preemptions: rows taken away from requests that had not ended.
    prompt_tokens: rows that were prefilled, again after a preemption included.
    prefix_tokens: rows that were copied instead.
    emitted: tokens passed on.
    steps: plans reported.
  """

  submitted: int = 0
  ended: collections.Counter[Reason] = dataclasses.field(default_factory=collections.Counter)
  admissions: int = 0
  preemptions: int = 0
  prompt_tokens: int = 0
  prefix_tokens: int = 0
  emitted: int = 0
  steps: int = 0


@dataclasses.dataclass
class Entry:
  """A request that has not ended.

  Attributes:
    request: as it came.
    number: of its arrival: who has the smaller one is older.
    emitted: its new tokens.
    row: None while it waits.
    cached: rows of its text that are cached, counted while it is prefilled.
    phase: where it is.
    preemptions: how often it lost its row.
  """

  request: Request
  number: int
  emitted: list[int] = dataclasses.field(default_factory=list)
  row: int | None = None
  cached: int = 0
  phase: Phase = Phase.WAITING
  preemptions: int = 0

  @property
  def length(self) -> int:
    """Tokens of its text."""
    return len(self.request.prompt) + len(self.emitted)

  @property
  def left(self) -> int:
    """Tokens it may still emit."""
    return self.request.max_new_tokens - len(self.emitted)

  @property
  def to_read(self) -> int:
    """Rows that must be prefilled before it decodes: all of its text but the root."""
    return self.length - 1 - self.cached
