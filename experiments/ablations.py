"""Ablations of training: variants of a head on the same text, one after the other, and one table of them.

  python -m experiments.ablations --table=losses --data=DATA --output=DIR [--steps=200]

Each row of a table is a run of experiments.train_drafter in a folder of its own below ``--output``: a killed
command goes on where it was, and finished rows are not trained again. Rows differ in the head alone: data,
seed, steps and rates are the same. ``--table=all`` makes every table.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence

from absl import flags

from experiments import flags as shared
from experiments import plots, results, training_plots
from specjax.training.recipes import make_recipe
from specjax.training.records import CONFIG, read_config, read_metrics


@dataclasses.dataclass(frozen=True)
class Ablation:
  """A table: what it is about, and the head of each row by its name."""

  title: str
  heads: dict[str, str]


_EAGLE3 = "eagle3[steps={steps},judged=3,draft_vocab=8192,start=28,output=target{more}]"
_INPUTS = ("both", "feature", "token")
_LOSSES = ("cross_entropy", "kl", "total_variation", "log_acceptance", "tokens")

TABLES: dict[str, Ablation] = {
  "losses": Ablation(
    "EAGLE-3 on one depth by loss",
    {loss: _EAGLE3.format(steps=1, more=f",loss={loss}") for loss in _LOSSES},
  ),
  "depths": Ablation(
    "EAGLE-3 by steps of the training-time test",
    {f"{steps} steps": _EAGLE3.format(steps=steps, more="") for steps in (1, 2, 3)},
  ),
  "inputs": Ablation(
    "EAGLE-1 by what a row sees (EAGLE: inputs of the draft model)",
    {inputs: f"eagle[inputs={inputs},judged=3,draft_vocab=8192,start=28]" for inputs in _INPUTS},
  ),
  "features": Ablation(
    "EAGLE-3 without its parts, and EAGLE-1",
    {
      "EAGLE-3": _EAGLE3.format(steps=3, more=""),
      "no fused features": _EAGLE3.format(steps=3, more=",tap_layers=(30,)"),
      "no training-time test": _EAGLE3.format(steps=1, more=""),
      "neither": _EAGLE3.format(steps=1, more=",tap_layers=(30,)"),
      "EAGLE-1": "eagle[judged=3,draft_vocab=8192,start=28]",
    },
  ),
}

TABLE = flags.DEFINE_enum("table", "losses", [*TABLES, "all"], "Which table.")
DATA = flags.DEFINE_list("data", [], "Folders of data sets, written by experiments.distill_data.")
STEPS = flags.DEFINE_integer("steps", 200, "Optimizer steps a row.", 1)
ROW_LENGTH = flags.DEFINE_integer("row_length", 704, "Tokens a step; longer samples are cut.", 16, 2**17)
LEARNING_RATE = flags.DEFINE_float("learning_rate", 3e-3, "Highest learning rate.", 0.0, 1.0)
START_FROM = flags.DEFINE_string("start_from", "", "Folder of a head that every row starts as.")

USED = ("model", "dtype", "seed", "output", "compilation_cache")


def command(head: str, folder: str) -> list[str]:
  """The run of a row, as one would type it."""
  values = {
    "head": head,
    "data": ",".join(DATA.value),
    "output": folder,
    "steps": STEPS.value,
    "row_length": ROW_LENGTH.value,
    "batch_rows": 1,
    "learning_rate": LEARNING_RATE.value,
    "start_from": START_FROM.value,
    "evaluate_every": 0,
    "log_every": 20,
    "model": shared.MODEL.value,
    "dtype": shared.DTYPE.value,
    "seed": shared.SEED.value,
  }
  named = [f"--{name}={value}" for name, value in values.items()]
  return [sys.executable, "-m", "experiments.train_drafter", *named]


def train(head: str, folder: str) -> None:
  """Runs a row to its end.

  Raises:
    ValueError: the run failed; it has said why.
  """
  done = subprocess.run(command(head, folder), check=False, stdout=subprocess.DEVNULL)
  if done.returncode:
    raise ValueError(f"{folder}: train_drafter --head={head!r} ended with {done.returncode}, see above")


def main(_: Sequence[str]) -> None:
  defined = {flag.name for flag in flags.FLAGS.flags_by_module_dict()[shared.__name__]}
  shared.refuse(sorted(defined - set(USED)), "ablations", "its own flags")
  for flag in (DATA, shared.OUTPUT):
    if not flag.value:
      raise ValueError(f"--{flag.name} is empty; see --help")
  if START_FROM.value and not os.path.isdir(START_FROM.value):
    raise ValueError(f"--start_from = {START_FROM.value!r} is not a folder")
  plots.check()
  if plots.PLOT.value and TABLE.value == "all":
    raise ValueError(f"--plot = {plots.PLOT.value!r} is one file; --table=all draws one a table, in --output")
  chosen = TABLES if TABLE.value == "all" else {TABLE.value: TABLES[TABLE.value]}
  for name, ablation in chosen.items():
    runs = {}
    for row, head in ablation.heads.items():
      make_recipe(head)
      folder = os.path.join(shared.OUTPUT.value, name, row.replace(" ", "_"))
      train(head, folder)
      runs[row] = read_metrics(folder)
    digest = read_config(folder, CONFIG)["settings"]["--data"]
    print(f"\n{ablation.title} (data {digest[:12]})\n")
    results.table(training_plots.HEADER, training_plots.table(runs))
    if plots.can_draw():
      path = plots.PLOT.value or os.path.join(shared.OUTPUT.value, f"{name}.png")
      training_plots.plot(runs, path)
      print(f"\nplot: {path}")


if __name__ == "__main__":
  shared.run(main)
