"""Compares methods and runs of `spec_bench`, with bootstrap confidence intervals over questions.

  python -m experiments.compare_runs runs/first runs/second

Each method is set against plain decoding of its own run (decode speedup and τ), and each further run
against the first, method by method. Token ids are compared, not scores. Runs with unlike targets,
prompts, stop rules or token budgets are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import flags

from experiments import flags as shared
from experiments import results, summary
from experiments.summary import BASELINE, Row

SAMPLES = flags.DEFINE_integer("bootstrap_samples", 2000, "Resamples of the questions.", 100)

# What must agree for two runs to be comparable: fields of run.json and of each row's settings.
RUN_FIELDS = ("model", "dtype", "prompts_sha256", "stop_ids", "max_new_tokens", "length_limit")
SETTINGS_FIELDS = (
  "temperature",
  "top_k",
  "top_p",
  "min_p",
  "seed",
  "repetition_penalty",
  "presence_penalty",
  "frequency_penalty",
  "logit_bias",
  "min_new_tokens",
)


def check_alike(paths: Sequence[str], runs: Sequence[dict[str, Any]], rows: Sequence[list[Row]]) -> None:
  """Raises `ValueError` naming the first field in which a run differs from the first one."""
  for path, info, answered in zip(paths, runs, rows, strict=True):
    if info.get("script") != "spec_bench" or not answered:
      raise ValueError(f"{path}: no rows of spec_bench")
    for field in RUN_FIELDS:
      if info.get(field) != runs[0].get(field):
        raise ValueError(
          f"{field} differs: {runs[0].get(field)!r} in {paths[0]}, {info.get(field)!r} in {path}"
        )
    for field in SETTINGS_FIELDS:
      mine, first = answered[0]["settings"][field], rows[0][0]["settings"][field]
      if mine != first:
        raise ValueError(f"{field} differs: {first!r} in {paths[0]}, {mine!r} in {path}")
    lengths = {summary.key(row): row["prompt_tokens"] for row in rows[0]}
    for row in answered:
      expected = lengths.get(summary.key(row))
      if expected is not None and expected != row["prompt_tokens"]:
        raise ValueError(
          f"prompt_tokens differs: {expected} in {paths[0]}, {row['prompt_tokens']} in {path}, for "
          f"question {row['question_id']}, turn {row['turn']}"
        )


def interval(
  questions: Sequence[Any], figure: Callable[[np.ndarray], np.ndarray], samples: int, seed: int = 0
) -> tuple[float, float, float]:
  """A figure and its 95 % percentile interval when the questions are drawn again.

  Args:
    questions: what is drawn, with replacement.
    figure: ``[R, n]`` counts of how often each question was drawn → ``[R]`` figures.
    samples: R.
    seed: of the draws; all figures of a table see the same ones.
  """
  n = len(questions)
  draws = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=samples)
  low, high = np.percentile(figure(draws), [2.5, 97.5])
  return float(figure(np.ones((1, n)))[0]), float(low), float(high)


def _sums(rows: Sequence[Row], questions: Sequence[Any], field: str) -> np.ndarray:
  """Per question, the sum of a field over its turns."""
  sums = dict.fromkeys(questions, 0.0)
  for row in rows:
    sums[row["question_id"]] += row[field]
  return np.array(list(sums.values()))


def _form(value: tuple[float, float, float], questions: int) -> str:
  """A single question has no interval."""
  return f"{value[0]:.2f}" + (f" [{value[1]:.2f}, {value[2]:.2f}]" if questions > 1 else "")


def _ratio(mine: Sequence[Row], other: Sequence[Row], per: str, samples: int) -> tuple[float, float, float]:
  """Tokens per ``per`` of rows over those of other rows on the same prompts, with its interval."""
  questions = list(dict.fromkeys(row["question_id"] for row in mine))
  a, b = ({field: _sums(rows, questions, field) for field in ("new_tokens", per)} for rows in (mine, other))

  def relative(w: np.ndarray) -> np.ndarray:
    return (w @ a["new_tokens"]) * (w @ b[per]) / ((w @ a[per]) * (w @ b["new_tokens"]))

  return interval(questions, relative, samples)


def speedup(mine: Sequence[Row], plain: Sequence[Row], samples: int) -> tuple[float, float, float]:
  """Decode rate over plain decoding's, of rows on the same prompts, with its 95 % interval."""
  return _ratio(mine, plain, "decode_s", samples)


def pair(mine: Sequence[Row], other: Sequence[Row], samples: int) -> tuple[str, str, str]:
  """Ratio of decode rates, ratio of τ, and identical rows, of rows on the same prompts."""
  count = len({row["question_id"] for row in mine})
  speed, length = speedup(mine, other, samples), _ratio(mine, other, "rounds", samples)
  words = _form(speed, count) + (" slower" if speed[2] < 1 else "")
  return words, _form(length, count), f"{summary.identical(mine, other)} of {len(mine)}"


def lines(
  mine: dict[Any, Row], other: dict[Any, Row], name: str, samples: int
) -> list[tuple[str, str, str, str, str]]:
  """Table lines of one comparison, by category, on the prompts both have."""
  shared_rows = [row for k, row in mine.items() if k in other]
  out = []
  for category in summary.categories(shared_rows) if shared_rows else ():
    chosen = [row for row in shared_rows if category in (row["category"], summary.OVERALL)]
    out.append((name, category, *pair(chosen, [other[summary.key(row)] for row in chosen], samples)))
  return out


def main(paths: list[str]) -> None:
  if not paths:
    raise ValueError("no run directory given; usage: compare_runs DIR…")
  runs = [results.read_run(path) for path in paths]
  rows = [results.read_rows(path) for path in paths]
  check_alike(paths, runs, rows)
  methods = [summary.by_method(answered) for answered in rows]
  print("Against plain decoding of the same run (95 % intervals over questions):\n")
  found = []
  for path, answered in zip(paths, methods, strict=True):
    for method in answered:
      if method != BASELINE:
        name = f"{path}: {method}"
        found += lines(answered[method], answered[BASELINE], name, SAMPLES.value)
  results.table(("run: method", "category", "decode speed, ratio", "τ, ratio", "identical"), found)
  for path, answered in zip(paths[1:], methods[1:], strict=True):
    print(f"\n{path} against {paths[0]}, method by method:\n")
    found = []
    for method in answered:
      found += lines(answered[method], methods[0].get(method, {}), method, SAMPLES.value)
    results.table(("method", "category", "decode speed, ratio", "τ, ratio", "identical"), found)


if __name__ == "__main__":
  shared.run(main, takes_arguments=True)
