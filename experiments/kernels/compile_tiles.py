"""Choosing tiles from compiler reports, where no device is at hand to measure them.

Static numbers say what a tile cannot be (one that spills, one that does not fit) and little about what is
fast. So the choice is the first of the kernel's own candidates that compiles for every case of its class
without spilling; `experiments.kernel_bench --tune` replaces it with times.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from experiments.kernels import attention_cases, kernel_modules
from experiments.kernels.attention_cases import Case
from experiments.kernels.compile_pool import Answer, Request
from experiments.kernels.devices import Target
from experiments.kernels.kernel_modules import Tile
from specjax.kernels.tree_attention import tiles

HEADER = ("target", "key", "cases", "tile", "tried", "spills")


@dataclasses.dataclass
class Group:
  """One class of shapes on one target, and what has been tried for it.

  Attributes:
    target: to compile for.
    key: of the tile.
    cases: of the class; a tile must serve all of them.
    candidates: in the kernel's order.
    spills: of each candidate tried, the most registers that a case spilled; None where one failed.
  """

  target: Target
  key: str
  cases: tuple[Case, ...]
  candidates: tuple[Tile, ...]
  spills: list[int | None] = dataclasses.field(default_factory=list)

  @property
  def done(self) -> bool:
    """A candidate is clean, or there is none left."""
    return 0 in self.spills or len(self.spills) == len(self.candidates)

  def requests(self) -> list[Request]:
    """To compile for the next candidate."""
    tile = self.candidates[len(self.spills)]
    ask = {"kernel": self.target.kernel, "target": self.target.name, "tile": tile}
    return [ask | {"case": case.json()} for case in self.cases]

  def take(self, answers: Sequence[Answer]) -> None:
    """What became of `requests`."""
    failed = any(answer["status"] != "ok" or answer.get("resident_programs") == 0 for answer in answers)
    spilled = lambda answer: answer["spill_stores"] + answer["spill_loads"]
    self.spills.append(None if failed else max(map(spilled, answers)))

  @property
  def best(self) -> Tile | None:
    """The first candidate that spills least; None where none compiled."""
    found = [(count, place) for place, count in enumerate(self.spills) if count is not None]
    return self.candidates[min(found)[1]] if found else None

  def describe(self) -> list[Any]:
    counts = [count for count in self.spills if count is not None]
    sizes = self.best and " ".join(f"{name}={value}" for name, value in self.best.items())
    return [self.target.name, self.key, len(self.cases), sizes, len(self.spills), min(counts, default=None)]


def plan(targets: Sequence[Target], models: Sequence[str], most: int) -> list[Group]:
  """For each target and key the cases that have it, and the first ``most`` candidates."""
  groups = []
  for target in targets:
    by_key: dict[str, list[Case]] = {}
    for case in attention_cases.default_cases(models):
      by_key.setdefault(case.tile_key, []).append(case)
    for key, cases in by_key.items():
      # Prefix and batch change nothing in a TPU's program, and in a GPU's no more than the splits.
      unlike = {dataclasses.replace(case, prefix=8192, batch=1): None for case in cases}
      # The class's tallest case has the fewest candidates that fit.
      tallest = max(unlike, key=lambda case: (case.rows, case.heads.kv))
      found = kernel_modules.candidates(target.kernel, tallest)[:most]
      groups.append(Group(target, key, tuple(unlike), tuple(found)))
  return groups


def write(target: Target, picks: dict[str, Tile], source: str = "compiled") -> pathlib.Path:
  """The tiles of a target into the package; keys that were not tried stay as they are."""
  old = tiles.read(target.name)
  kept = {} if old is None or old["kernel"] != target.kernel else old["tiles"]
  return tiles.write(
    {
      "device": target.name,
      "device_kinds": list(target.device_kinds),
      "kernel": target.kernel,
      "source": source,
      "tiles": kept | picks,
      "verified": None,
    }
  )
