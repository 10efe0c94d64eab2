"""Tables of papers beside what their formulas predict and what our runs measured.

  python -m experiments.paper_tables --runs=runs/first,runs/rules --ablations=runs/ablations --output=tables/

Reads run directories of `spec_bench` and `rule_bench`, training runs (--ablations) and, with --calibration,
the costs of the device; runs nothing. Each table is written as Markdown, CSV and LaTeX, and printed. What no
run holds is a dash.
"""

from __future__ import annotations

from collections.abc import Callable

from absl import flags

from experiments import flags as shared
from experiments import render
from experiments.render import Table
from experiments.run_files import Run
from experiments.tables.batch import batch
from experiments.tables.chen import chen
from experiments.tables.eagle import eagle1, eagle1_inputs, eagle2, eagle3
from experiments.tables.early_exit import early_exit
from experiments.tables.inputs import Inputs
from experiments.tables.leviathan import leviathan, leviathan_lenience
from experiments.tables.medusa import medusa, medusa_heads, medusa_trees
from experiments.tables.spec_bench import spec_bench
from experiments.training_files import read_trained
from specjax.analysis import CostTable

RUNS = flags.DEFINE_list("runs", [], "Run directories, with commas between; without any only published rows.")
ABLATIONS = flags.DEFINE_list(
  "ablations",
  [],
  "Training runs, with commas between: an --output of experiments.ablations, a run folder of "
  "experiments.train_drafter, or a shipped head's.",
)
TABLES_FLAG = flags.DEFINE_list("tables", [], "Which tables, with commas between. Default: all.")

# A new table is a function of one of the modules above; its name is that of its files.
TABLES: dict[str, Callable[[Inputs], Table]] = {
  table.__name__: table
  for table in (
    leviathan,
    leviathan_lenience,
    chen,
    eagle1,
    eagle1_inputs,
    eagle2,
    eagle3,
    medusa,
    medusa_heads,
    medusa_trees,
    early_exit,
    spec_bench,
    batch,
  )
}


def read_inputs() -> Inputs:
  """What the flags name; runs, then folders of training runs, are numbered as notes call them.

  Raises:
    ValueError: one that is not there or is something else.
  """
  runs = [Run.read(path, number) for number, path in enumerate(dict.fromkeys(RUNS.value), start=1)]
  folders = enumerate(dict.fromkeys(ABLATIONS.value), start=len(runs) + 1)
  heads = [head for number, path in folders for head in read_trained(path, number)]
  return Inputs(runs, CostTable.read(shared.CALIBRATION.value) if shared.CALIBRATION.value else None, heads)


def main(_: list[str]) -> None:
  if not shared.OUTPUT.value:
    raise ValueError("--output is empty; a folder for the tables is needed, e.g. --output=tables")
  names = list(dict.fromkeys(TABLES_FLAG.value)) or list(TABLES)
  for name in names:
    if name not in TABLES:
      raise ValueError(f"--tables has {name!r}; it must be of {', '.join(TABLES)}")
  inputs = read_inputs()
  for name in names:
    table = TABLES[name](inputs)
    render.write(table, shared.OUTPUT.value)
    print(render.markdown(table))


if __name__ == "__main__":
  shared.run(main)
