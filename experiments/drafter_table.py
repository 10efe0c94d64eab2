"""All drafters side by side: what each costs, what it shares with the target, and what it gains.

  python -m experiments.drafter_table --runs=runs/t0,runs/t1 --output=tables/ [--plot=drafters.png]

Reads run directories of `spec_bench`, one a temperature, and with --calibration what they were predicted to
gain (a calibration of another device, model or head predicts nothing); runs nothing. The table is written as
Markdown, CSV and LaTeX, the figure as PNG.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from experiments import compare_runs, plots, render, summary
from experiments import flags as shared
from experiments.methods import parse_method
from experiments.paper_tables import RUNS
from experiments.render import Table
from experiments.run_files import Run, figures
from experiments.tables.inputs import Inputs, number, positions
from specjax.analysis import CostTable

NAME = "drafters"


@dataclasses.dataclass(frozen=True)
class Family:
  """A way to draft, as the field groups them.

  Attributes:
    name: of the group.
    pieces: what must be made, kept or served beside the target.
    kv: whose keys and values the draft attends to.
  """

  name: str
  pieces: str
  kv: str


# By drafter. What a row of the table says of memory and training is measured; this is what no file holds.
FAMILIES = {
  "prompt_lookup": Family("lookup", "none", "none"),
  "two_model": Family("two models", "second model, its cache", "its own"),
  "self_speculation": Family("self-speculation", "list of sublayers", "the target's"),
  "early_exit": Family(
    "self-speculation", "adapter, its cache, split verification", "the target's, one layer"
  ),
  "medusa": Family("multi-head", "heads", "none"),
  "block": Family("multi-head", "block head, its cache, features", "its own, one layer"),
  "eagle": Family("feature level", "head, its cache, features", "its own, one layer"),
  "eagle3": Family("feature level", "head, its cache, fused features", "its own, one layer"),
}
_COLOURS = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(f.name for f in FAMILIES.values()))}


@dataclasses.dataclass(frozen=True)
class Cell:
  """A method at one temperature, over all questions that plain decoding answered too.

  Attributes:
    tau: tokens a round.
    positions: acceptance by position.
    speedup: of decoding, with its 95 % interval over questions.
    draft: what drafting took of a round, in plain rounds, and
    predicted: the speedup, both by the calibration; None where it is of something else.
    identical: texts that are plain decoding's.
    rows: how many there are.
  """

  tau: float
  positions: tuple[float, ...]
  speedup: tuple[float, float, float]
  draft: float | None
  predicted: float | None
  identical: int
  rows: int


@dataclasses.dataclass(frozen=True)
class Line:
  """A method: its footprint as `run.json` has it, and a `Cell` a temperature."""

  method: str
  footprint: dict[str, Any]
  cells: dict[float, Cell] = dataclasses.field(default_factory=dict)

  @property
  def family(self) -> Family:
    drafter = parse_method(self.method).drafter
    return FAMILIES.get(drafter, Family("others", "?", "?"))

  @property
  def weights(self) -> float:
    """Bytes of its own arrays over the target's."""
    return self.footprint["weight_bytes"] / self.footprint["target_bytes"]

  @property
  def cache(self) -> float:
    """Bytes of its own state a token over the target's cache a token."""
    return self.footprint["token_bytes"] / self.footprint["target_token_bytes"]

  @property
  def training(self) -> dict[str, Any]:
    return self.footprint["head"] or {}


def temperature_of(run: Run) -> float:
  """Raises ValueError unless all rows of the run have one."""
  found = {row["settings"]["temperature"] for row in run.rows}
  if len(found) > 1:
    raise ValueError(f"--runs: {run.path}: rows have temperatures {sorted(found)}; one is needed")
  return found.pop()


def lines_of(inputs: Inputs, samples: int) -> list[Line]:
  """A line a method under rules that keep the target's law, in the order of the first run that has it.

  Args:
    samples: resamples of the questions, for intervals.

  Raises:
    ValueError: no run of spec_bench, two at one temperature, one that is not finished or has no footprints.
  """
  if not inputs.runs:
    raise ValueError("--runs is empty; run directories of spec_bench are needed, one a temperature")
  temperatures: set[float] = set()
  for run in inputs.runs:
    if run.info["script"] != "spec_bench" or "finished" not in run.info:
      raise ValueError(f"--runs: {run.path} is no finished run of spec_bench")
    if "methods" not in run.info:
      raise ValueError(f"--runs: {run.path}: run.json has no field methods; an older version wrote it")
    temperature = temperature_of(run)
    if temperature in temperatures:
      raise ValueError(f"--runs: {run.path}: another run has temperature {temperature:g} too")
    temperatures.add(temperature)
  lines: dict[str, Line] = {}
  for found in figures(inputs.runs, by_category=False):
    line = lines.setdefault(found.method, Line(found.method, found.run.info["methods"][found.method]))
    predicted = inputs.prediction(found)
    line.cells[found.temperature] = Cell(
      tau=found.tau,
      positions=tuple(found.positions),
      speedup=compare_runs.speedup(found.rows, found.plain, samples),
      draft=None if predicted is None else predicted.draft,
      predicted=None if predicted is None else predicted.predicted,
      identical=summary.identical(found.rows, found.plain),
      rows=len(found.rows),
    )
  return list(lines.values())


def _speed(cell: Cell) -> str:
  value, low, high = cell.speedup
  return f"{value:.2f} [{low:.2f}, {high:.2f}]" + (" slower" if high < 1 else "")


def table(lines: Sequence[Line], inputs: Inputs) -> Table:
  """One row a method."""
  temperatures = sorted({t for line in lines for t in line.cells})
  header = ["method", "family", "own weights", "own cache a token", "draft reads", "trained parameters"]
  header += ["tokens trained", "minutes", "draft of a round"]
  for t in temperatures:
    header += [f"τ, T={t:g}", f"by position, T={t:g}", f"decode ×, T={t:g}", f"predicted ×, T={t:g}"]
  rows = []
  for line in lines:
    trained = line.training
    row = [
      line.method,
      line.family.name,
      f"{line.footprint['weight_bytes'] / 1e6:.1f} MB ({100 * line.weights:.1f} %)",
      f"{line.footprint['token_bytes']} B ({100 * line.cache:.1f} %)",
      line.family.kv,
      f"{trained['trained_parameters'] / 1e6:.1f} M" if "trained_parameters" in trained else None,
      f"{trained['tokens'] / 1e6:.2f} M" if "tokens" in trained else None,
      f"{trained['seconds'] / 60:.0f}" if "seconds" in trained else None,
      next((number(cell.draft) for cell in line.cells.values() if cell.draft is not None), None),
    ]
    for t in temperatures:
      cell = line.cells.get(t)
      row += [number(cell.tau), positions(cell.positions), _speed(cell)] if cell else [None] * 3
      row.append(number(cell.predicted) if cell else None)
    rows.append(row)
  greedy = [line.cells[0.0] for line in lines if 0.0 in line.cells]
  same = f"{sum(cell.identical for cell in greedy)} of {sum(cell.rows for cell in greedy)}"
  notes = [
    "own weights: arrays that the target does not have, and their share of its bytes; own cache: state that "
    "grows by a token, and its share of the target's.",
    "draft of a round: what drafting takes of a plain round, by the calibration and the rounds that were "
    "run.",
    "decode ×: decode rate over plain decoding's on the same questions in the same run, compilation "
    "excluded, with the 95 % interval over questions; slower: the whole interval is below 1.",
    *([f"texts that equal plain decoding's at T=0: {same}."] if greedy else []),
    *inputs.notes(),
  ]
  return Table(NAME, "All drafters", tuple(header), rows, notes)


def plot(lines: Sequence[Line], path: str) -> None:
  """Bars by method, a colour a family: speed, τ, own weights, own cache, training."""
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  temperatures = sorted({t for line in lines for t in line.cells})
  figure, axes = plt.subplots(
    1, 5, figsize=(17, 1.6 + 0.5 * len(lines)), sharey=True, width_ratios=(3, 3, 2, 2, 2)
  )
  places, height = range(len(lines)), 0.8 / max(len(temperatures), 1)
  colours = [_COLOURS.get(line.family.name, "gray") for line in lines]
  for number_, t in enumerate(temperatures):
    for place, line in zip(places, lines):
      cell = line.cells.get(t)
      if cell is None:
        continue
      at = place + (number_ - (len(temperatures) - 1) / 2) * height
      looks = dict(height=0.9 * height, color=colours[place], alpha=1.0 if number_ == 0 else 0.45)
      value, low, high = cell.speedup
      axes[0].barh(at, value, xerr=[[value - low], [high - value]], ecolor="black", capsize=2, **looks)
      if cell.predicted is not None:
        axes[0].plot(cell.predicted, at, "k|", markersize=9)
      axes[1].barh(at, cell.tau, **looks)
      axes[1].text(cell.tau, at, f" {cell.tau:.2f}", va="center", fontsize=7)
  axes[0].axvline(1.0, color="black", linewidth=0.8)
  shades = ", ".join(f"T={t:g} {'full' if i == 0 else 'pale'}" for i, t in enumerate(temperatures))
  axes[0].set_title(f"decode speed / plain\n{shades}; | predicted", fontsize=9)
  most = max(cell.tau for line in lines for cell in line.cells.values())
  axes[1].set_xlim(1.0, 1.0 + 1.15 * (most - 1.0) + 0.01)  # room for the number behind the longest bar
  axes[1].set_title("τ, tokens a round", fontsize=9)
  for ax, of, form, title in (
    (axes[2], lambda line: 100 * line.weights, "{:.1f} %", "own weights,\n% of the target's"),
    (axes[3], lambda line: 100 * line.cache, "{:.1f} %", "own cache a token,\n% of the target's"),
    (axes[4], lambda line: line.training.get("tokens", 0) / 1e6, "{:.2f} M", "tokens trained, millions"),
  ):
    values = [of(line) for line in lines]
    ax.barh(places, values, color=colours)
    for place, value in zip(places, values):
      ax.text(value, place, " " + (form.format(value) if value else "none"), va="center", fontsize=7)
    ax.set_xlim(right=max([*values, 1e-9]) * 1.45)
    ax.set_title(title, fontsize=9)
  # A controller's widths, one a line.
  labels = [
    f"{line.method.replace('|', '|' + chr(10))}\n{line.family.name}: {line.family.pieces}" for line in lines
  ]
  axes[0].set_yticks(list(places), labels, fontsize=7)
  axes[0].invert_yaxis()
  for ax in axes:
    ax.grid(axis="x", alpha=0.3)
    ax.set_axisbelow(True)
  figure.tight_layout()
  figure.savefig(path, dpi=120)
  plt.close(figure)


def main(_: list[str]) -> None:
  if not shared.OUTPUT.value:
    raise ValueError("--output is empty; a folder for the table is needed, e.g. --output=tables")
  plots.check()
  shared.refuse(["tables", "ablations"], "drafter_table", "--runs")
  runs = [Run.read(path, place) for place, path in enumerate(dict.fromkeys(RUNS.value), start=1)]
  inputs = Inputs(runs, CostTable.read(shared.CALIBRATION.value) if shared.CALIBRATION.value else None)
  lines = lines_of(inputs, compare_runs.SAMPLES.value)
  made = table(lines, inputs)
  render.write(made, shared.OUTPUT.value)
  print(render.markdown(made))
  if plots.can_draw():
    path = plots.PLOT.value or os.path.join(shared.OUTPUT.value, f"{NAME}.png")
    plot(lines, path)
    print(f"plot: {path}")


if __name__ == "__main__":
  shared.run(main)
