"""The best tree for a head: from its held-out acceptance by rank, under this device's measured costs.

  python -m experiments.grow_tree --run=RUN [--most_nodes=16]

``--run`` is a training run's folder, or a shipped head's; its log says how often the target's most likely
token was a head's first, second, … guess at each depth. Costs are those of the calibration (of
experiments.calibrate, at one row). For each number of nodes the tree with most expected tokens a round
(Sequoia's dynamic programme), what its round costs in plain rounds, and its speedup; then the best of them,
as options of a drafter.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags

from experiments import calibration, results, runtime, summary, training_plots
from experiments import flags as shared
from experiments.methods import HEADS
from specjax.analysis import BestTree, CostTable, best_tree, best_tree_under
from specjax.checkpoints import shipped
from specjax.drafters import parse_drafter
from specjax.training.recipes import make_recipe
from specjax.training.records import CONFIG, read_config, read_metrics
from specjax.tree import TokenTree

RUN = flags.DEFINE_string("run", "", "Folder of a training run, or of a shipped head.")
MOST_NODES = flags.DEFINE_integer("most_nodes", 16, "Nodes of the largest tree, the root included.", 2, 128)
AT_LIVE = flags.DEFINE_integer("at_live", 256, "Tokens of the text at which rounds are priced.", 1)

# A draft whose levels are forwards of their own costs by depth, the other at once.
_BY_DEPTH = frozenset({"eagle", "eagle3", "two_model"})


def acceptance_by_rank(run: str) -> tuple[str, np.ndarray]:
  """The drafter, and acceptance ``[depth, rank]`` as far as anything was measured.

  Raises:
    ValueError: no run there, or one without held-out acceptance by rank.
  """
  record = os.path.join(run, shipped.TRAINING)
  config = read_config(run, shipped.TRAINING if os.path.exists(record) else CONFIG)
  last = training_plots.last_held_out(read_metrics(run))
  if last is None or not last["held_out"].get("ranks"):
    raise ValueError(
      f"--run = {run!r}: its log has no held-out acceptance by rank; train with --held_out_tokens"
    )
  known = [row for row in last["held_out"]["ranks"] if row is not None]
  kind = make_recipe(config["settings"]["--head"]).kind
  if kind == "early_exit":
    raise ValueError(f"--run = {run!r}: an early exit drafts chains, no trees")
  return next(drafter for drafter, taken in HEADS.items() if taken == kind), np.array(known)


def cost_of(table: CostTable, drafter: str, live: int):
  """``(nodes, depth) → cost`` of a round in plain rounds, its draft as the calibrated widths of the drafter.

  Raises:
    ValueError: the calibration lacks the drafter.
  """
  names = [name for name in table.drafts if parse_drafter(name)[0] == drafter]
  if not names:
    raise ValueError(f"the calibration lacks {drafter}: python -m experiments.calibrate --drafters={drafter}")
  plain = table.round_ms_at(1, live=live)
  draft_ms = lambda name: table.draft_ms_at(name, live=live)
  a_level = np.mean([draft_ms(name) / table.drafts[name]["depth"] for name in names])
  at_once = np.mean([draft_ms(name) for name in names])

  def cost(nodes: int, depth: int) -> float:
    draft = 0.0 if nodes == 1 else depth * a_level if drafter in _BY_DEPTH else at_once
    return float((table.round_ms_at(nodes, live=live) + draft) / plain)

  return cost


def option_of(drafter: str, tree: BestTree) -> str:
  """The tree as it is written for a drafter: Medusa's by its paths, of others a dynamic one of its size."""
  children = TokenTree(tree.parents).children
  paths: list[tuple[int, ...]] = [()]
  for node, parent in enumerate(tree.parents[1:], start=1):
    paths.append((*paths[parent], children[parent].index(node)))
  paths = tuple(paths[1:])
  if drafter == "medusa":
    return f"medusa[tree={str(paths).replace(' ', '')}]"
  return f"{drafter}[nodes={tree.nodes},beam={max(map(max, paths)) + 1},window={tree.depth}]"


def main(_: Sequence[str]) -> None:
  if not RUN.value:
    raise ValueError("--run is empty; see --help")
  drafter, acceptance = acceptance_by_rank(RUN.value)
  job = runtime.load_job([summary.BASELINE])
  table = calibration.load(runtime.calibration_key(job))
  if table is None:
    raise ValueError("this device is not calibrated: python -m experiments.calibrate")
  cost = cost_of(table, drafter, AT_LIVE.value)
  ranks = [f"rank {rank}" for rank in range(1, acceptance.shape[1] + 1)]
  shares = [[str(depth), *(f"{share:.2f}" for share in row)] for depth, row in enumerate(acceptance, start=1)]
  results.table(["depth", *ranks], shares)
  print()
  lines: list[list[Any]] = []
  for nodes in range(2, MOST_NODES.value + 1):
    tree = best_tree(acceptance, nodes, max_depth=len(acceptance))
    price = cost(tree.nodes, tree.depth)
    lines.append([nodes, tree.depth, f"{tree.tokens:.2f}", f"{price:.2f}", f"{tree.tokens / price:.2f} x"])
  results.table(["nodes", "depth", "tokens", "costs", "speedup"], lines)
  best = best_tree_under(acceptance, cost, MOST_NODES.value, len(acceptance))
  if best.nodes == 1:
    print("\nno tree gains: plain decoding is best", file=sys.stderr)
    return
  price = cost(best.nodes, best.depth)
  print(f"\nbest: {option_of(drafter, best)}, {best.tokens:.2f} tokens for {price:.2f} plain rounds")


if __name__ == "__main__":
  shared.run(main)
