"""What a scheduler must know of its engine. No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from specjax.serving.policies import Load, Policies


class Width(NamedTuple):
  """One of the widths that a round may have besides plain.

  Attributes:
    depth: of its deepest draft.
    nodes: that the target runs over, the root included.
  """

  depth: int
  nodes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
  """What a scheduler must know of its engine, and its policies.

  Attributes:
    slots: rows.
    length_limit: most tokens of a row, prompt included.
    capacity: rows of a slot's buffer, `DecodeConfig.slots`: no chunk ends behind it. None: the length limit,
      rounded up to a multiple of the narrowest chunk.
    kv_budget: most tokens over all rows; None: all that the slots hold.
    queue_limit: most requests that wait beside those that free rows are for; a further one is refused.
      (Preempted ones wait too, and are kept.)
    prefill_widths: chunk widths of the engine, ascending, each a multiple of the first.
    widths: of rounds besides plain ones, of `DecodeConfig.trees`.
    rounds_per_step: rounds of a step, at most.
    reserved_share: of the tokens that a request may still emit, set aside when it is admitted.
    policies: see `policies`.

  Raises:
    ValueError: naming the field, the value and the limit.
  """

  slots: int
  length_limit: int
  capacity: int | None = None
  kv_budget: int | None = None
  queue_limit: int = 256
  prefill_widths: Sequence[int] = (16, 64, 128, 256)
  widths: Sequence[Width] = ()
  rounds_per_step: int = 1
  reserved_share: float = 0.25
  policies: Policies = dataclasses.field(default_factory=Policies)

  def __post_init__(self):
    put = lambda field, value: object.__setattr__(self, field, value)
    for field, least in (
      ("slots", 1),
      ("length_limit", 2),
      ("kv_budget", 2),
      ("queue_limit", 0),
      ("rounds_per_step", 1),
    ):
      value = getattr(self, field)
      if field == "kv_budget" and value is None:
        value = self.slots * self.length_limit
        put(field, value)
      if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{field} = {value!r}; it must be a whole number of at least {least}")
    if not 0 <= self.reserved_share <= 1:
      raise ValueError(f"reserved_share = {self.reserved_share!r}; it must be in [0, 1]")
    put("prefill_widths", tuple(self.prefill_widths))
    widths = self.prefill_widths
    if not widths or widths[0] < 1 or list(widths) != sorted(set(widths)):
      raise ValueError(f"prefill_widths = {widths}; they must ascend from 1 or more")
    if any(width % widths[0] for width in widths):
      raise ValueError(f"prefill_widths = {widths}; each must be a multiple of the first")
    if self.capacity is None:
      put("capacity", -(-self.length_limit // widths[0]) * widths[0])
    if self.capacity < self.length_limit or self.capacity % widths[0]:
      raise ValueError(
        f"capacity = {self.capacity}; it must be a multiple of {widths[0]}, the narrowest chunk, and at "
        f"least length_limit = {self.length_limit}"
      )
    put("widths", tuple(Width(*width) for width in self.widths))
    for width in self.widths:
      if not 1 <= width.depth < width.nodes:
        raise ValueError(f"widths has {tuple(width)}; depth must be in [1, nodes)")
    least = self.slots * self.rounds_per_step + widths[0]
    if self.policies.prefill.tokens < least:
      raise ValueError(
        f"{self.policies.prefill.name}: tokens = {self.policies.prefill.tokens}; {self.slots} slots of "
        f"{self.rounds_per_step} plain rounds and a chunk of {widths[0]} need at least {least}"
      )

  def nodes(self, depth: int | None) -> int:
    """The most nodes of a round that drafts no deeper."""
    return max((w.nodes for w in self.widths if depth is None or w.depth <= depth), default=1)

  def deepest(self, depth: int | None) -> int:
    """The deepest draft there is within the limit."""
    return max((w.depth for w in self.widths if depth is None or w.depth <= depth), default=0)

  @property
  def deepest_planned(self) -> int:
    """The deepest draft that the speculation policy allows at any load."""
    loads = (Load(decoding, 0, 0, self.slots) for decoding in range(self.slots + 1))
    return max(self.deepest(self.policies.speculation.depth(load)) for load in loads)
