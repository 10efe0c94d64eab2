"""Ablations of training: variants of a head on the same text, one after the other, and one table of them.

  python -m experiments.ablations --table=losses --data=DATA --output=DIR [--steps=200]

Each row of a table is a run of experiments.train_drafter in a folder of its own below ``--output``: a killed
command goes on where it was, and finished rows are not trained again. Rows differ in the head alone: data,
seed, steps and rates are the same; they are train_drafter's flags. ``--table=all`` makes every table. Heads
start as layer 28, and so they are for targets of about 30 layers: smollm2-135m.

Most rows train on the hidden states that experiments.distill_data recorded: of 30 layers those after 2, 15
and 27, and the last. Early exits after other layers, and Medusa-2, run the target in every step, which takes
several times as long. experiments.paper_tables sets the results beside the papers'.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence

from absl import flags

from experiments import flags as shared
from experiments import plots, results, train_drafter, training_plots
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
  "medusa": Ablation(
    "Medusa-1 and Medusa-2 (which changes the target: held-out figures are those of the changed one)",
    {
      "Medusa-1": "medusa[heads=4,draft_vocab=8192]",
      "Medusa-2": "medusa2[heads=4,draft_vocab=8192,lora=32]",
    },
  ),
  "early_exit": Ablation(
    "Early exit by layers before the adapter",
    {f"exit {exit}": f"early_exit[exit={exit},judged=3,draft_vocab=8192]" for exit in (2, 6, 10, 15)},
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

TABLE = flags.DEFINE_enum(
  "table",
  "losses",
  [*TABLES, "all"],
  "Which table. early_exit: exits after layers 2 and 15 have their hidden states recorded, those after 6 and "
  "10 run the target in every step; so does Medusa-2 in medusa.",
)

# Flags of train_drafter that rows share, where they are not given.
_ROW = {
  "steps": 200,
  "row_length": 704,
  "batch_rows": 1,
  "learning_rate": 3e-3,
  "evaluate_every": 0,
  "log_every": 20,
}
# What makes a row a row.
_OF_ROWS = ("head", "output")


def command(head: str, folder: str) -> list[str]:
  """The run of a row, as one would type it."""
  values = dict(_ROW)
  own = {holder.name for holder in vars(train_drafter).values() if isinstance(holder, flags.FlagHolder)}
  for name in sorted((own | set(train_drafter.USED)) - set(_OF_ROWS)):
    flag = flags.FLAGS[name]
    if not flag.using_default_value:
      values[name] = ",".join(flag.value) if isinstance(flag.value, list) else flag.value
  named = [f"--{name}={value}" for name, value in (values | {"head": head, "output": folder}).items()]
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
  shared.refuse(sorted(defined - set(train_drafter.USED)), "ablations", "its own flags")
  shared.refuse(["head"], "ablations", "--table, which has the heads")
  for flag in (train_drafter.DATA, shared.OUTPUT):
    if not flag.value:
      raise ValueError(f"--{flag.name} is empty; see --help")
  start = train_drafter.START_FROM.value
  if start and not os.path.isdir(start):
    raise ValueError(f"--start_from = {start!r} is not a folder")
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
