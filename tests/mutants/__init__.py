"""Faults put into the core on purpose, and the command that shows which test notices each of them.

``python -m tests.mutants`` is no part of the ordinary suite: it takes minutes. `tests/test_mutants.py`,
which is, holds the list to the sources.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutant:
  """One fault.

  Attributes:
    name: short and unique.
    breaks: what goes wrong, in one line.
    file: below the project's root.
    old: text that occurs exactly once in the file.
    new: what it becomes.
    tests: test files, or node ids in them, of which at least one must fail.
  """

  name: str
  breaks: str
  file: str
  old: str
  new: str
  tests: tuple[str, ...]


class StaleMutant(ValueError):
  """A mutant whose text is not there exactly once."""


def apply(mutant: Mutant, source: str) -> str:
  """The source with the fault in it.

  Raises:
    StaleMutant: the old text is missing, or there more than once, or nothing would change.
  """
  count = source.count(mutant.old)
  if count != 1:
    raise StaleMutant(
      f"mutant {mutant.name!r}: its text occurs {count} times in {mutant.file}, not once: {mutant.old!r}"
    )
  if mutant.old == mutant.new:
    raise StaleMutant(f"mutant {mutant.name!r} changes nothing")
  return source.replace(mutant.old, mutant.new)
