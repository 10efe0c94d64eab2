"""Curves and a table of training runs, from their logs alone.

  python -m experiments.training_plots RUN [RUN …] [--plot=curves.png]

Several runs side by side compare losses, or sizes of the data. Acceptance is of held-out samples: by depth,
of greedy rounds that get there; τ is what a greedy round with a chain of so many drafts emits.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from experiments import flags as shared
from experiments import plots, results
from specjax.training.records import read_config, read_metrics

Rows = Sequence[dict[str, Any]]


def last_held_out(rows: Rows) -> dict[str, Any] | None:
  """The last held-out row, None without one."""
  return next((row for row in reversed(rows) if "held_out" in row), None)


def _name(folder: str) -> str:
  return os.path.basename(os.path.normpath(folder))


def table(runs: dict[str, Rows]) -> list[list[Any]]:
  """A line a run: steps, tokens, hours, loss, then held-out figures; None where nothing was held out."""
  lines = []
  for name, rows in runs.items():
    steps = [row for row in rows if "loss" in row]
    row, last = last_held_out(rows), steps[-1] if steps else None
    found = row["held_out"] if row else None
    rate = lambda values: " ".join("-" if value is None else f"{value:.2f}" for value in values)
    cells = ["-"] * 5
    if found:
      cells = [f"{found['tau']:.2f}", *(rate(found[key]) for key in ("acceptance", "agreement", "overlap"))]
      cells.append(f"{found['coverage']:.3f}")
    trained = (
      [last["step"], last["tokens"], f"{last['seconds'] / 60:.1f}", f"{last['loss']:.3f}"] if last else []
    )
    lines.append([name, *(trained or ["-"] * 4), *cells])
  return lines


HEADER = [
  "run",
  "steps",
  "tokens",
  "minutes",
  "loss",
  "τ",
  "acceptance",
  "agreement",
  "Σ min(p, q)",
  "coverage",
]


def plot(runs: dict[str, Rows], path: str) -> None:
  """Loss, acceptance by depth and τ against tokens trained; a colour a run, a line style a depth."""
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  figure, (loss, accepted, tau) = plt.subplots(1, 3, figsize=(15, 4.5))
  styles = ("-", "--", "-.", ":")
  for number, (name, rows) in enumerate(runs.items()):
    colour = f"C{number % 10}"
    steps = [row for row in rows if "loss" in row]
    tokens = [row["tokens"] for row in steps]
    loss.plot(tokens, [row["loss"] for row in steps], color=colour, linewidth=0.6, alpha=0.4)
    loss.plot(tokens, _smoothed([row["loss"] for row in steps]), color=colour, label=name)
    held_out = [row for row in rows if "held_out" in row]
    tokens = [row["tokens"] for row in held_out]
    tau.plot(tokens, [row["held_out"]["tau"] for row in held_out], "o-", color=colour, markersize=3)
    for depth in range(len(held_out[0]["held_out"]["acceptance"]) if held_out else 0):
      values = [row["held_out"]["acceptance"][depth] for row in held_out]
      values = [float("nan") if value is None else value for value in values]
      label = f"depth {depth + 1}" if number == 0 else None
      accepted.plot(tokens, values, styles[depth % len(styles)], color=colour, label=label)
  for axes, title in (
    (loss, "training loss"),
    (accepted, "held-out acceptance by depth"),
    (tau, "held-out τ of a greedy chain"),
  ):
    axes.set_title(title)
    axes.set_xlabel("tokens trained")
    axes.grid(alpha=0.3)
  for axes in (loss, accepted):
    if axes.get_legend_handles_labels()[1]:
      axes.legend(fontsize=8)
  figure.tight_layout()
  figure.savefig(path, dpi=120)
  plt.close(figure)


def _smoothed(values: Sequence[float], memory: float = 0.9) -> list[float]:
  """Exponential means, each over what there was so far."""
  smooth, total, weight = [], 0.0, 0.0
  for value in values:
    total, weight = memory * total + value, memory * weight + 1
    smooth.append(total / weight)
  return smooth


def main(folders: list[str]) -> None:
  if not folders:
    raise ValueError("name at least one run folder of train_drafter")
  plots.check()
  for folder in folders:
    read_config(folder)
  names = {folder: _name(folder) for folder in folders}
  if len(set(names.values())) < len(folders):
    names = {folder: folder for folder in folders}
  runs = {names[folder]: read_metrics(folder) for folder in folders}
  results.table(HEADER, table(runs))
  if plots.PLOT.value:
    plot(runs, plots.PLOT.value)
    print(f"plot: {plots.PLOT.value}")


if __name__ == "__main__":
  shared.run(main, takes_arguments=True)
