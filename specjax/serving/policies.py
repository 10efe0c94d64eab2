"""Policies of a server, by name: how prompts and decoding share a step, and how deep it may speculate.

A new policy is one frozen class and one row of `POLICIES`. No jax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from specjax import options


class Load(NamedTuple):
  """How busy a server is, before a step.

  Attributes:
    decoding: rows whose prompt is read; they can run a round.
    prefilling: rows whose prompt is not read to the end.
    waiting: requests without a row.
    slots: rows there are.
  """

  decoding: int
  prefilling: int
  waiting: int
  slots: int


class PrefillPolicy(Protocol):
  """How prompts and decoding share a step.

  Attributes:
    tokens: budget of a step: widths of prompt chunks, and nodes that the target runs over for decoding rows.
  """

  name: ClassVar[str]
  tokens: int

  def decodes(self, load: Load) -> bool:
    """Whether rows decode in this step; what they leave of the budget is for prompts.

    It must be true where no row is prefilling.
    """
    ...


class SpeculationPolicy(Protocol):
  """How deep a round may draft."""

  name: ClassVar[str]

  def depth(self, load: Load) -> int | None:
    """The deepest draft: 0 is plain decoding, None is no limit. `Load.decoding` counts who would draft."""
    ...


@dataclasses.dataclass(frozen=True)
class PrefillFirst:
  """While there are prompts to read, nothing else is done: first tokens come early, streams pause."""

  tokens: int = 512

  name: ClassVar[str] = "prefill_first"

  def __post_init__(self):
    _at_least(self, "tokens", 1)

  def decodes(self, load: Load) -> bool:
    return not load.prefilling


@dataclasses.dataclass(frozen=True)
class Interleave:
  """All rows decode in each step, and prompts are read in chunks beside them (Sarathi, Agrawal et al. 2024).

  How long a stream pauses is bounded by the budget, and so is how fast prompts are read.
  """

  tokens: int = 256

  name: ClassVar[str] = "interleave"

  def __post_init__(self):
    _at_least(self, "tokens", 1)

  def decodes(self, load: Load) -> bool:
    return True


@dataclasses.dataclass(frozen=True)
class Always:
  """Rounds draft as deep as the controller likes."""

  name: ClassVar[str] = "always"

  def depth(self, load: Load) -> int | None:
    return None


@dataclasses.dataclass(frozen=True)
class Never:
  """Plain decoding."""

  name: ClassVar[str] = "never"

  def depth(self, load: Load) -> int | None:
    return 0


@dataclasses.dataclass(frozen=True)
class Below:
  """Rounds draft while fewer than ``rows`` rows decode."""

  rows: int = 4

  name: ClassVar[str] = "below"

  def __post_init__(self):
    _at_least(self, "rows", 1)

  def depth(self, load: Load) -> int | None:
    return None if load.decoding < self.rows else 0


@dataclasses.dataclass(frozen=True)
class Windows:
  """The deepest draft by how many rows decode.

  Attributes:
    table: pairs ``(rows, depth)``, rows ascending from 1: from so many rows on, drafts are so deep at most.
  """

  table: tuple[tuple[int, int], ...] = ((1, 7), (4, 3), (8, 0))

  name: ClassVar[str] = "windows"

  def __post_init__(self):
    wrong = ValueError(
      f"windows: table = {self.table!r}; it must be pairs (rows, depth), rows ascending from 1 and depth "
      f"at least 0"
    )
    pair = lambda entry: isinstance(entry, Sequence) and len(entry) == 2 and all(map(_is_int, entry))
    if not isinstance(self.table, Sequence) or not self.table or not all(map(pair, self.table)):
      raise wrong
    rows = [entry[0] for entry in self.table]
    if rows[0] != 1 or rows != sorted(set(rows)) or min(entry[1] for entry in self.table) < 0:
      raise wrong
    object.__setattr__(self, "table", tuple(map(tuple, self.table)))

  def depth(self, load: Load) -> int | None:
    return next(depth for rows, depth in reversed(self.table) if rows <= max(load.decoding, 1))


PREFILL_POLICIES: dict[str, type[PrefillPolicy]] = {
  policy.name: policy for policy in (PrefillFirst, Interleave)
}
SPECULATION_POLICIES: dict[str, type[SpeculationPolicy]] = {
  policy.name: policy for policy in (Always, Never, Below, Windows)
}


@dataclasses.dataclass(frozen=True)
class Policies:
  """One of each kind."""

  prefill: PrefillPolicy = dataclasses.field(default_factory=Interleave)
  speculation: SpeculationPolicy = dataclasses.field(default_factory=Always)

  @property
  def name(self) -> str:
    """As `make_policies` reads it, with every option."""
    return "+".join(
      options.write(part.name, dataclasses.asdict(part)) for part in (self.prefill, self.speculation)
    )


def make_policies(text: str) -> Policies:
  """``"interleave[tokens=128]+below[rows=4]"`` → `Policies`; of a kind that is not named, the default.

  Raises:
    ValueError: an unknown name, two of a kind, or options that a policy does not take.
  """
  found: dict[str, Any] = {}
  for part in options.split(text, "+"):
    name, own = options.parse("policy", part)
    kind = "prefill" if name in PREFILL_POLICIES else "speculation"
    make = PREFILL_POLICIES.get(name) or SPECULATION_POLICIES.get(name)
    if make is None:
      known = ", ".join((*PREFILL_POLICIES, *SPECULATION_POLICIES))
      raise ValueError(f"policy = {part!r}; it must be one of {known}")
    if kind in found:
      raise ValueError(f"policies = {text!r}; it names two for {kind}")
    found[kind] = options.make("policy", part, make, own)
  return Policies(**found)


def _is_int(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)


def _at_least(policy: Any, field: str, least: int) -> None:
  value = getattr(policy, field)
  if not _is_int(value) or value < least:
    raise ValueError(f"{policy.name}: {field} = {value!r}; it must be a whole number of at least {least}")
