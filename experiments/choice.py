"""Which method runs where none is named: the one that is fastest here, as far as is known.

Known are, in this order: what this device's calibration predicts, if it has costs and acceptance of more than
one method; what the table recorded with the shipped heads says; that prompt lookup needs nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from experiments.calibration_tables import expected_rate
from experiments.methods import CHOICE, HEADS, parse_method
from specjax.analysis import CostTable
from specjax.checkpoints import shipped

# Tokens of a text in the middle of its answer, for which predictions are compared.
_LIVE = 256


class Choice(NamedTuple):
  """A method as in ``--drafter``, and why it is the one."""

  method: str
  why: str


def candidates(kinds: Collection[str]) -> list[str]:
  """Methods that can run with heads of these kinds, prompt lookup first."""
  return [CHOICE, *(f"adaptive[of={drafter}]" for drafter, kind in HEADS.items() if kind in kinds)]


def predicted(table: CostTable, method: str) -> float | None:
  """Speedup over plain decoding of a method that stays at its best width, by measured costs and acceptance.

  None where the table lacks one of its widths.
  """
  widths = parse_method(method).widths
  if not all(width in table.drafts and width in table.acceptance for width in widths):
    return None
  where = dict(batch=1, live=_LIVE)
  best = max(expected_rate(table, width, **where) for width in widths)
  return max(1.0, best * table.round_ms_at(1, **where) / 1e3)


def choose(model: str, kinds: Collection[str], table: CostTable | None) -> Choice:
  """The method for a target.

  Args:
    model: its name, as in ``--model``.
    kinds: of the trained heads at hand.
    table: the calibration of this device and target, None without.
  """
  able = candidates(kinds)
  if table is not None:
    speeds = {method: speed for method in able if (speed := predicted(table, method)) is not None}
    if len(speeds) > 1 or list(speeds) == able:
      best = max(speeds, key=speeds.__getitem__)
      return Choice(best, f"calibration of {table.made}: {speeds[best]:.2f} x predicted")
  recorded = shipped.shipped_results(model)
  if recorded is not None and recorded["best"] in able:
    return Choice(recorded["best"], f"fastest as recorded on {recorded['device']}; not calibrated here")
  return Choice(CHOICE, "it needs no trained head")
