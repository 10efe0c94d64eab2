"""Figures from rows: τ, speeds, acceptance, identity, by method and category. Reads rows only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from experiments.results import ratio
from specjax.analysis import rates_from_counts

Row = dict[str, Any]
OVERALL = "overall"
BASELINE = "none"


def key(row: Row) -> tuple[Any, int]:
  """What was asked: question and turn."""
  return row["question_id"], row["turn"]


def by_method(rows: Sequence[Row]) -> dict[str, dict[tuple[Any, int], Row]]:
  """Rows by drafter and by question and turn, the baseline first."""
  methods: dict[str, dict[tuple[Any, int], Row]] = {BASELINE: {}}
  for row in rows:
    methods.setdefault(row["drafter"], {})[key(row)] = row
  return methods


def categories(rows: Sequence[Row]) -> list[str]:
  """Categories in the order they come up, then `OVERALL`."""
  return [*dict.fromkeys(row["category"] for row in rows), OVERALL]


def tau(rows: Sequence[Row]) -> float:
  """Tokens emitted a round over all rounds, bonus included (micro average)."""
  return ratio(sum(row["new_tokens"] for row in rows), sum(row["rounds"] for row in rows))


def decode_rate(rows: Sequence[Row]) -> float:
  """Tokens a second of decoding: Σ tokens / Σ seconds."""
  return ratio(sum(row["new_tokens"] for row in rows), sum(row["decode_s"] for row in rows))


def whole_rate(rows: Sequence[Row]) -> float:
  """Tokens a second, prefill included."""
  seconds = sum(row["decode_s"] + row["prefill_s"] for row in rows)
  return ratio(sum(row["new_tokens"] for row in rows), seconds)


def acceptance(rows: Sequence[Row]) -> float | None:
  """Accepted share of the proposed depth, None when nothing was proposed."""
  proposed = sum(row["proposed_depth"] for row in rows)
  return sum(row["accepted"] for row in rows) / proposed if proposed else None


def acceptance_by_position(rows: Sequence[Row]) -> list[float]:
  """Of the rounds that reached depth d, the share that accepted there; d = 1 first."""
  sums = lambda name: list(map(sum, itertools.zip_longest(*(row[name] for row in rows), fillvalue=0)))
  return rates_from_counts(sums("accept_counts"), sums("reach_counts")).tolist()


def position_table(rows: Sequence[Row]) -> list[list[str | None]]:
  """A line a method that proposed anything: name, nodes proposed a round, acceptance by position."""
  lines = []
  for method, answered in by_method(rows).items():
    mine = list(answered.values())
    positions = acceptance_by_position(mine)
    if positions:
      nodes = ratio(sum(row["proposed"] for row in mine), sum(row["rounds"] for row in mine))
      lines.append([method, f"{nodes:.2f}", *(f"{share:.2f}" for share in positions)])
  width = max(map(len, lines), default=0)
  return [line + [None] * (width - len(line)) for line in lines]


def identical(rows: Sequence[Row], baseline: Sequence[Row]) -> int:
  """How many rows have the baseline's token ids."""
  return sum(a["token_ids"] == b["token_ids"] for a, b in zip(rows, baseline, strict=True))


HEADER = (
  "method",
  "category",
  "rows",
  "tokens",
  "τ",
  "acceptance",
  "tokens/s",
  "speedup",
  "with prefill",
  "identical",
)


def method_table(rows: Sequence[Row]) -> list[list[str | None]]:
  """Lines for `HEADER`: method × category, on the questions that the baseline has answered too.

  τ and the rates are sums over sums. speedup is the ratio of the decode rates on the same prompts;
  below 1 it says slower.
  """
  methods = by_method(rows)
  baseline, lines = methods[BASELINE], []
  for method, answered in methods.items():
    shared = [row for k, row in answered.items() if k in baseline]
    for category in categories(shared) if shared else ():
      mine = [row for row in shared if category in (row["category"], OVERALL)]
      plain = [baseline[key(row)] for row in mine]
      speedup = ratio(decode_rate(mine), decode_rate(plain))
      accepted = acceptance(mine)
      lines.append(
        [
          method,
          category,
          str(len(mine)),
          str(sum(row["new_tokens"] for row in mine)),
          f"{tau(mine):.2f}",
          None if accepted is None else f"{100 * accepted:.1f} %",
          f"{decode_rate(mine):.1f}",
          None if method == BASELINE else f"{speedup:.2f} x" + (" slower" if speedup < 1 else ""),
          None if method == BASELINE else f"{ratio(whole_rate(mine), whole_rate(plain)):.2f} x",
          None if method == BASELINE else f"{identical(mine, plain)} of {len(mine)}",
        ]
      )
  return lines
