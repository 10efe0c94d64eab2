"""Spec-Bench (Xia et al. 2024): method × category, beside its leaderboard."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from experiments import published
from experiments.render import Table
from experiments.results import ratio
from experiments.run_files import Figures, figures
from experiments.summary import OVERALL, Row
from experiments.tables.inputs import (
  COST_NOTE,
  MEASURES,
  WHERE,
  Inputs,
  measures,
  number,
  published_measures,
  published_where,
  where,
)


def spec_bench(inputs: Inputs) -> Table:
  """Speedup and τ of every drafter of the runs, by category."""
  header = (*WHERE, "method", "category", "rows", *MEASURES, "predicted / ours", "ours × as Spec-Bench")
  rows: list[list[str | None]] = []
  for row in published.SPEC_BENCH:
    place = published_where(row, published.SPEC_BENCH_DEVICE)
    rows.append([*place, row.method, OVERALL, None, *published_measures(row), None, None])
  errors: dict[int, list[float]] = {}
  for found in figures(inputs.runs):
    predicted = inputs.predicted(found)
    error = predicted / found.speedup - 1 if predicted is not None and found.speedup else None
    if error is not None and (found.category != OVERALL):
      errors.setdefault(found.run.number, []).append(abs(error))
    cells = [found.method, found.category, str(len(found.rows)), *measures(found, inputs)]
    said = None if error is None else f"{100 * error:+.0f} %"
    rows.append([*where(found), *cells, said, number(as_spec_bench(found))])
  notes = [
    f"Published: {published.SPEC_BENCH_SOURCE}. Prefill is in its speeds, so what to set beside them is the "
    "last column: mean over questions of new tokens by wall time, prefill included, over the same of plain "
    "decoding. Its τ is the mean over rounds, bonus included, as ours.",
    "ours ×: decode speed over plain decoding on the same prompts; rules that keep the target's law only. "
    "predicted ×: by the calibration and the rounds that were run.",
    COST_NOTE,
    *(
      f"[{run}]: predicted × is off by {100 * statistics.fmean(sizes):.1f} % on average of method × category."
      for run, sizes in errors.items()
    ),
    "Not reproduced at this scale: Vicuna 7B on an A100 verifies dozens of nodes in about the time of one, "
    "its drafts cost little beside that, and its heads saw tens of thousands of conversations. There are no "
    "drafters like Hydra, REST and Lookahead here.",
  ]
  title = "Spec-Bench: method × category"
  return Table("spec_bench", title, header, rows, notes + inputs.notes())


def as_spec_bench(found: Figures) -> float:
  """As Spec-Bench computes it: mean tokens a second over questions, turns summed, prefill included."""
  return ratio(_mean_speed(found.rows), _mean_speed(found.plain))


def _mean_speed(rows: Sequence[Row]) -> float:
  tokens: dict[object, float] = {}
  seconds: dict[object, float] = {}
  for row in rows:
    question = row["question_id"]
    tokens[question] = tokens.get(question, 0) + row["new_tokens"]
    seconds[question] = seconds.get(question, 0.0) + row["prefill_s"] + row["decode_s"]
  return statistics.fmean(ratio(tokens[question], seconds[question]) for question in tokens)
