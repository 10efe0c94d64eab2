"""What a calibration predicts for rows of results, beside what was measured: by method and category."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from experiments import summary
from experiments.results import ratio
from experiments.summary import BASELINE, OVERALL, Row
from specjax.analysis import CostTable, Prediction, predicted_seconds

HEADER = ("method", "category", "draft", "verify", "needs τ", "τ", "predicted", "measured", "error")


@dataclasses.dataclass(frozen=True)
class Line:
  """A method on a category.

  Attributes:
    draft, verify: what a round took of each by the calibration, in plain rounds.
    tau: tokens a round; the speedup is above 1 where it is above ``draft + verify``.
    predicted, measured: speedup of decoding.
  """

  method: str
  category: str
  draft: float
  verify: float
  tau: float
  predicted: float
  measured: float

  @property
  def error(self) -> float:
    """Of the prediction, relative to what was measured."""
    return self.predicted / self.measured - 1 if self.measured else 0.0


def drafted_rounds(row: Row) -> dict[str, int]:
  """Drafter, as a calibration names it → rounds that asked it."""
  widths = row["settings"]["widths"]
  counts = {int(width): rounds for width, rounds in row["width_counts"].items()}
  return {widths[width - 1]: rounds for width, rounds in counts.items() if width}


def predict(table: CostTable, row: Row, *, drafts: bool = True) -> Prediction:
  """Of a row of results; without its drafts, the verifying alone."""
  return predicted_seconds(
    table,
    prompt_tokens=row["prompt_tokens"],
    new_tokens=row["new_tokens"],
    node_counts=row["node_counts"],
    drafted=drafted_rounds(row) if drafts and row["drafter"] != BASELINE else {},
    missed=row["missed"] if drafts else 0,
    batch=row["settings"]["batch_size"],
  )


def unknown(table: CostTable, rows: Sequence[Row]) -> list[str]:
  """Methods of which the table cannot say what their drafts cost: not measured, or with other nodes."""
  return [
    method
    for method, answered in summary.by_method(rows).items()
    if method != BASELINE and not all(_knows(table, row["settings"]) for row in answered.values())
  ]


def _knows(table: CostTable, settings: Row) -> bool:
  known = [table.drafts[name]["nodes"] for name in settings["widths"] if name in table.drafts]
  return len(known) == len(settings["widths"]) and max(known) == settings["nodes"]


def lines(table: CostTable, rows: Sequence[Row]) -> list[Line]:
  """Method × category on what the baseline has answered too; methods that are `unknown` are left out."""
  methods = summary.by_method(rows)
  baseline, found, left_out = methods.pop(BASELINE), [], unknown(table, rows)
  for method, answered in methods.items():
    if method in left_out:
      continue
    shared = [row for k, row in answered.items() if k in baseline and row["new_tokens"]]
    of = {summary.key(row): (predict(table, row), predict(table, row, drafts=False)) for row in shared}
    for category in summary.categories(shared) if shared else ():
      mine = [row for row in shared if category in (row["category"], OVERALL)]
      both, verify = zip(*(of[summary.key(row)] for row in mine))
      plain_s, verify_s = sum(p.plain_s for p in both), sum(p.decode_s for p in verify)
      rounds, tokens = (sum(row[name] for row in mine) for name in ("rounds", "new_tokens"))
      a_round = plain_s / tokens
      plain = [baseline[summary.key(row)] for row in mine]
      found.append(
        Line(
          method,
          category,
          draft=(sum(p.decode_s for p in both) - verify_s) / rounds / a_round,
          verify=verify_s / rounds / a_round,
          tau=summary.tau(mine),
          predicted=plain_s / sum(p.decode_s for p in both),
          measured=ratio(summary.decode_rate(mine), summary.decode_rate(plain)),
        )
      )
  return found


def mean_error(found: Sequence[Line]) -> float:
  """Mean absolute relative error over method × category, totals left out."""
  return statistics.fmean(abs(line.error) for line in found if line.category != OVERALL)


def cells(found: Sequence[Line]) -> list[list[str]]:
  """Lines for `HEADER`; a round that costs more than it emits is a loss, and says so."""
  return [
    [
      line.method,
      line.category,
      f"{line.draft:.2f}",
      f"{line.verify:.2f}",
      f"> {line.draft + line.verify:.2f}",
      f"{line.tau:.2f}",
      f"{line.predicted:.2f} x" + (" slower" if line.predicted < 1 else ""),
      f"{line.measured:.2f} x" + (" slower" if line.measured < 1 else ""),
      f"{100 * line.error:+.0f} %",
    ]
    for line in found
  ]
