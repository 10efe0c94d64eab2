"""Finished runs as tables read them: rows, device, the command that made them. Reads files only."""

from __future__ import annotations

import copy
import dataclasses
import os
import shlex
from collections.abc import Callable, Iterator
from typing import Any

from absl import flags

from experiments import questions as _questions  # noqa: F401  its flags have defaults that are left out
from experiments import results, summary
from experiments.methods import parse_method
from experiments.summary import Row
from specjax import options
from specjax.training.records import history
from specjax.verify import RULES

SCRIPTS = ("spec_bench", "rule_bench")
# Kinds of heads, where a recipe has another name.
_KINDS = {"medusa2": "medusa", "distilled": "draft"}


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
    return device_of(self.info)

  @property
  def target(self) -> str:
    """The model that was drafted for; Medusa-2's is another than the one it was made from."""
    return self.info["model"]

  def head(self, method: str) -> dict[str, Any] | None:
    """What ``run.json`` knows of a method's trained head: its digest, and how it was trained."""
    return self.info.get("methods", {}).get(method, {}).get("head")

  def recipe(self, method: str) -> tuple[str, dict[str, Any]]:
    """``--head`` that a method's head was trained with, taken apart; an empty name where it is not known.

    Where ``run.json`` does not say it (an older run) the records beside the heads of ``--drafter_path`` do,
    if they still lie there.
    """
    known = (self.head(method) or {}).get("recipe")
    if known is not None:
      return options.parse("head", known)
    kind = parse_method(method).head
    folders = (self.flag("drafter_path") or "").split(",")
    trained = [history(folder)[0]["settings"]["--head"] for folder in folders if folder and history(folder)]
    recipes = [options.parse("head", text) for text in trained]
    return next((recipe for recipe in recipes if _KINDS.get(recipe[0], recipe[0]) == kind), ("", {}))

  @property
  def command(self) -> str:
    """The script with the flags that are not at their defaults; files by their names, wherever they lay."""
    given = [_without_folders(line) for line in self.flag_lines if line not in _defaults()]
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


def device_of(info: dict[str, Any]) -> str:
  """Device kind, on CPU its model; how many, if several. ``info`` as `results.environment` has it."""
  if info["platform"] == "cpu":
    return f"{info['cpu']}, {info['cpu_count']} cores"
  count = info["device_count"]
  return info["device_kind"] if count == 1 else f"{count} x {info['device_kind']}"


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
class Figures:
  """Rows of a method in a category, and plain decoding of the same prompts.

  Attributes:
    run: where they are from.
    method: as in ``--drafter``.
    category: or `summary.OVERALL`.
    rows: of the method.
    plain: of the baseline, in the same order.
  """

  run: Run
  method: str
  category: str
  rows: list[Row]
  plain: list[Row]

  @property
  def settings(self) -> dict[str, Any]:
    """Of its rows."""
    return self.rows[0]["settings"]

  @property
  def temperature(self) -> float:
    return self.settings["temperature"]

  @property
  def window(self) -> int:
    """Drafts along a path: γ of a chain."""
    return self.settings["window"]

  @property
  def batch(self) -> int:
    """Rows decoded together."""
    return self.settings["batch_size"]

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
  def positions(self) -> list[float]:
    """Acceptance by position."""
    return summary.acceptance_by_position(self.rows)

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


def is_lossless(row: Row) -> bool:
  """Whether the row's rule keeps the target's law."""
  rule, _ = options.parse("rule", row["rule"])
  return rule in RULES and RULES[rule].lossless


def _is_chain(row: Row) -> bool:
  """A two-model chain."""
  name, _ = options.parse("drafter", row["drafter"])
  settings = row["settings"]
  return name == "two_model" and settings["nodes"] == settings["window"] + 1


def figures(
  runs: list[Run], keep: Callable[[Row], bool] = lambda row: True, *, by_category: bool = True
) -> Iterator[Figures]:
  """Figures of every method of the `spec_bench` runs under rules that keep the target's law.

  Args:
    keep: which rows are looked at.
    by_category: figures of each category before those of all; where there is one, of it alone. Else over
      all categories only.
  """
  for run in runs:
    methods = summary.by_method(run.rows) if run.info["script"] == "spec_bench" else {}
    plain = methods.pop(summary.BASELINE, {})
    for method, answered in methods.items():
      shared = [row for key, row in answered.items() if key in plain and is_lossless(row) and keep(row)]
      found = summary.categories(shared) if shared else []
      chosen = found[-1:] if not by_category else found if len(found) > 2 else found[:1]
      for category in chosen:
        mine = [row for row in shared if category in (row["category"], summary.OVERALL)]
        yield Figures(run, method, category, mine, [plain[summary.key(row)] for row in mine])


def chains(runs: list[Run]) -> Iterator[Figures]:
  """Figures of every two-model chain, by category, then over all of them."""
  return figures(runs, _is_chain)


def _without_folders(line: str) -> str:
  """``--questions=/a/b.jsonl`` → ``--questions=b.jsonl``: another machine has other folders."""
  name, equals, value = line.partition("=")
  parts = (os.path.basename(part) if os.path.isabs(part) else part for part in value.split(","))
  return name + equals + ",".join(parts)
