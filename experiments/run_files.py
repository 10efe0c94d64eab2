"""Finished runs as tables read them: rows, device, the command that made them. Reads files only."""

from __future__ import annotations

import copy
import dataclasses
import os
import shlex
from collections.abc import Iterator
from typing import Any

from absl import flags

from experiments import questions as _questions  # noqa: F401  its flags have defaults that are left out
from experiments import results, summary
from experiments.summary import Row
from specjax import options
from specjax.verify import RULES

SCRIPTS = ("spec_bench", "rule_bench")


@dataclasses.dataclass(frozen=True)
class Run:
  """A run directory.

  Attributes:
    number: as notes name it, from 1.
    path: as given.
    info: ``run.json``.
    flag_lines: of ``flags.txt``.
    rows: of ``rows.jsonl``.
  """

  number: int
  path: str
  info: dict[str, Any]
  flag_lines: tuple[str, ...]
  rows: list[Row]

  @classmethod
  def read(cls, path: str, number: int = 1) -> Run:
    """A directory of one of `SCRIPTS`.

    Raises:
      ValueError: no run there, one of another schema or script, or one without rows.
    """
    info, rows = results.read_run(path), results.read_rows(path)
    if info.get("script") not in SCRIPTS:
      raise ValueError(f"{path}: a run of {info.get('script')}; tables read {' and '.join(SCRIPTS)}")
    if not rows:
      raise ValueError(f"{path}: no rows")
    with open(os.path.join(path, results.FLAGS_FILE), encoding="utf-8") as file:
      lines = tuple(line.strip() for line in file if line.strip())
    return cls(number, path, info, lines, rows)

  @property
  def name(self) -> str:
    """How rows of tables call it."""
    return f"ours [{self.number}]"

  @property
  def device(self) -> str:
    """Device kind, on CPU its model; how many, if several."""
    if self.info["platform"] == "cpu":
      return f"{self.info['cpu']}, {self.info['cpu_count']} cores"
    count = self.info["device_count"]
    return self.info["device_kind"] if count == 1 else f"{count} x {self.info['device_kind']}"

  @property
  def command(self) -> str:
    """The script with the flags that are not at their defaults."""
    given = [line for line in self.flag_lines if line not in _defaults()]
    return " ".join(["python -m", f"experiments.{self.info['script']}", *map(shlex.quote, given)])

  def flag(self, name: str) -> str | None:
    """The value of a flag as text, None where it was not set."""
    start = f"--{name}="
    return next((line.removeprefix(start) for line in self.flag_lines if line.startswith(start)), None)

  @property
  def note(self) -> str:
    """Where its rows come from, in one line."""
    whole = self.info["script"] != "spec_bench" or "finished" in self.info
    commit = (self.info.get("commit") or "unknown")[:12]
    said = f"[{self.number}] `{self.path}`: `{self.command}` on {self.device}, commit {commit}"
    return said if whole else f"{said}; not finished"


def _defaults() -> set[str]:
  """Lines of flags at their defaults, of the flags defined in this process."""
  lines = set()
  for name in flags.FLAGS:
    flag = copy.deepcopy(flags.FLAGS[name])
    flag.value = flag.default
    if flag.value is not None:
      lines.add(flag.serialize())
  return lines


@dataclasses.dataclass(frozen=True)
class ChainFigures:
  """Rows of a two-model chain in a category, and plain decoding of the same prompts.

  Attributes:
    run: where they are from.
    drafter: as in ``--drafter``.
    category: or `summary.OVERALL`.
    temperature: of the target.
    window: γ.
    batch: rows decoded together.
    rows: of the drafter.
    plain: of the baseline, in the same order.
  """

  run: Run
  drafter: str
  category: str
  temperature: float
  window: int
  batch: int
  rows: list[Row]
  plain: list[Row]

  @property
  def device(self) -> str:
    """The run's, with the batch where it is more than one row."""
    return self.run.device if self.batch == 1 else f"{self.run.device}, batch {self.batch}"

  @property
  def alpha(self) -> float | None:
    """α: mean Σ min(p, q) over judged drafts; where that is not known (greedy) their accepted share."""
    judged = sum(sum(row["reach_counts"]) for row in self.rows)
    if not judged:
      return None
    if any(row["overlap"] is None and sum(row["reach_counts"]) for row in self.rows):
      return sum(row["accepted"] for row in self.rows) / judged
    known = [row for row in self.rows if row["overlap"] is not None]
    return sum(row["overlap"] * sum(row["reach_counts"]) for row in known) / judged

  @property
  def tau(self) -> float:
    """Tokens a round, bonus included."""
    return summary.tau(self.rows)

  @property
  def rate(self) -> float:
    """Tokens a second of decoding."""
    return summary.decode_rate(self.rows)

  @property
  def plain_rate(self) -> float:
    """The same of plain decoding."""
    return summary.decode_rate(self.plain)

  @property
  def speedup(self) -> float:
    """Of decoding alone."""
    return results.ratio(self.rate, self.plain_rate)

  @property
  def live(self) -> float:
    """Mean committed tokens over rounds."""
    rounds = sum(row["rounds"] for row in self.rows)
    lived = sum(row["rounds"] * (row["prompt_tokens"] + row["new_tokens"] / 2) for row in self.rows)
    return results.ratio(lived, rounds)


def _is_chain(row: Row) -> bool:
  """A two-model chain under a rule that keeps the target's law."""
  name, _ = options.parse("drafter", row["drafter"])
  rule, _ = options.parse("rule", row["rule"])
  settings = row["settings"]
  lossless = rule in RULES and RULES[rule].lossless
  return name == "two_model" and lossless and settings["nodes"] == settings["window"] + 1


def chains(runs: list[Run]) -> Iterator[ChainFigures]:
  """Figures of every two-model chain of the `spec_bench` runs, by category, then over all of them."""
  for run in runs:
    methods = summary.by_method(run.rows) if run.info["script"] == "spec_bench" else {}
    for drafter, answered in methods.items():
      plain = methods[summary.BASELINE]
      shared = [row for key, row in answered.items() if key in plain and _is_chain(row)]
      found = summary.categories(shared) if shared else []
      for category in found if len(found) > 2 else found[:1]:
        mine = [row for row in shared if category in (row["category"], summary.OVERALL)]
        settings = mine[0]["settings"]
        yield ChainFigures(
          run=run,
          drafter=drafter,
          category=category,
          temperature=settings["temperature"],
          window=settings["window"],
          batch=settings["batch_size"],
          rows=mine,
          plain=[plain[summary.key(row)] for row in mine],
        )
