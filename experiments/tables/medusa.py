"""Medusa (Cai et al. 2024): both recipes, accuracy by head and rank, and the size of the tree."""

from __future__ import annotations

from typing import Any

from experiments import published
from experiments.render import Table
from experiments.run_files import Figures
from experiments.tables.inputs import (
  AT_LIVE,
  COST_NOTE,
  MEASURED_NOTE,
  MEASURES,
  WHERE,
  Inputs,
  measures,
  number,
  positions,
  published_measures,
  published_where,
  trained_measures,
  trained_where,
  where,
)
from experiments.training_files import TrainedHead
from specjax import analysis, options

_NAMES = {"medusa": "Medusa-1", "medusa2": "Medusa-2"}
# Nodes of the trees that are predicted, the root included.
_SIZES = (2, 4, 8, 16, 32, 64)
_SCALE_NOTE = (
  "Not reproduced at this scale: the paper's heads saw tens of thousands of conversations and draft for "
  "models of 7 billion parameters and more, on devices where 64 nodes are verified in little more than the "
  "time of one; where a node costs, the best tree is smaller."
)


def _trained(inputs: Inputs) -> list[TrainedHead]:
  return inputs.trained(tuple(_NAMES), "medusa")


def medusa(inputs: Inputs) -> Table:
  """Medusa-1 and Medusa-2: speed and τ."""
  header = (*WHERE, "recipe", "draft", "tokens trained", "acceptance by position", "ours KL, nats", *MEASURES)
  rows = [
    [*published_where(row), row.method, None, None, None, None, *published_measures(row)]
    for row in published.MEDUSA
  ]
  heads = _trained(inputs)
  for head in heads:
    cells = [_NAMES.get(head.recipe[0]), head.chain, head.tokens, positions(head.acceptance)]
    kl = number(head.figures.get("kl"), ".4f")
    predicted = inputs.chain_speedup(head, "medusa")
    rows.append([*trained_where(head), *cells, kl, *trained_measures(head, predicted)])
  for found in inputs.drafted(("medusa",)):
    recipe = _NAMES.get(found.run.recipe(found.method)[0])
    cells = [recipe, found.method, None, positions(found.positions), None]
    rows.append([*where(found), *cells, *measures(found, inputs)])
  notes = [
    f"Published: {published.MEDUSA_SOURCE}.",
    "Medusa-2 changes the backbone: its runs (further --runs) have another target, the folder that training "
    "wrote, and are compared with plain decoding of that one. KL: from the original to the changed target, a "
    "token of held-out text. Lossless rules keep the changed target's law, not the original's.",
    MEASURED_NOTE,
    COST_NOTE,
    _SCALE_NOTE,
  ]
  return Table(
    "medusa", "Medusa-1 and Medusa-2: speed and τ", header, rows, notes + inputs.notes(heads=heads)
  )


def medusa_heads(inputs: Inputs) -> Table:
  """How often each head's guesses are right."""
  header = (
    *WHERE,
    "recipe",
    "head",
    "published top-1",
    "ours top-1",
    "ours by rank",
    "predicted τ at most",
    "ours τ",
  )
  rows, sure = [], 1.0
  for place, rate in enumerate(published.MEDUSA_TOP1, start=1):
    sure += rate
    where_ = ["published", None, published.MEDUSA_TARGET, None]
    rows.append([*where_, None, str(place), number(rate, ".3f"), None, None, number(sure), None])
  heads = _trained(inputs)
  for head in heads:
    rows += _by_head(head)
  notes = [
    f"Published: {published.MEDUSA_SOURCE.split(',')[0]}, {published.MEDUSA_TARGET}.",
    "top-1: how often the head's most likely token is right, whatever the heads before it said; ours: is the "
    "target's most likely token, given held-out text.",
    "by rank: of greedy rounds with a tree that get there, how often the first, second, … guess is right.",
    "τ: of a greedy chain up to this head. predicted at most: 1 + Σ top-1, since a chain gets to a depth no "
    "more often than that depth's head is right.",
  ]
  title = "Medusa: accuracy by head and rank"
  return Table("medusa_heads", title, header, rows, notes + inputs.notes((), heads))


def _by_head(head: TrainedHead) -> list[list[str | None]]:
  """A line a head, as far as the log knows them."""
  right, ranks = head.figures.get("agreement", []), head.figures.get("ranks", [])
  lines, sure = [], 1.0
  for depth, rate in enumerate(right):
    if rate is None:
      break
    sure += rate
    by_rank = positions(ranks[depth]) if depth < len(ranks) and ranks[depth] is not None else None
    known = head.acceptance[: depth + 1]
    tau = analysis.chain_tokens(known) if len(known) > depth else None
    cells = [_NAMES.get(head.recipe[0]), str(depth + 1), None, number(rate, ".3f"), by_rank]
    lines.append([*trained_where(head), *cells, number(sure), number(tau)])
  return lines


def medusa_trees(inputs: Inputs) -> Table:
  """The tree's size against speed: the best trees of a head by its ranks, and those that were run."""
  header = (*WHERE, "recipe", "nodes", "drafts by depth", *MEASURES)
  tree = published.MEDUSA_TREE
  rows = [
    [
      *["published", None, published.MEDUSA_TARGET, None],
      *[None, str(1 + sum(tree)), "/".join(map(str, tree))],
      *[None] * len(MEASURES),
    ]
  ]
  heads = _trained(inputs)
  for head in heads:
    rows += _best_trees(head, inputs)
  mine = sorted(
    inputs.drafted(("medusa",)), key=lambda found: (found.run.number, found.settings["nodes"], found.method)
  )
  for found in mine:
    recipe = _NAMES.get(found.run.recipe(found.method)[0])
    cells = [recipe, str(found.settings["nodes"]), _by_depth(found)]
    rows.append([*where(found), *cells, *measures(found, inputs)])
  notes = [
    f"Published: {published.MEDUSA_SOURCE.split(',')[0]}: the sparse tree; size against speed is a figure "
    "there. nodes: the root included.",
    "Rows of training runs: for each size the tree with most expected tokens by held-out acceptance by rank; "
    f"predicted × at what the calibration says that {AT_LIVE} tokens of text, these nodes and a draft cost.",
    MEASURED_NOTE,
    COST_NOTE,
    _SCALE_NOTE,
  ]
  title = "Medusa: size of the tree against speed"
  return Table("medusa_trees", title, header, rows, notes + inputs.notes(heads=heads))


def _best_trees(head: TrainedHead, inputs: Inputs) -> list[list[str | None]]:
  """A line a size, until larger trees would have nodes that are never accepted."""
  ranks = [row for row in head.figures.get("ranks", []) if row is not None]
  lines, before = [], 1
  for nodes in _SIZES if ranks else ():
    tree = analysis.best_tree(ranks, nodes, max_depth=len(ranks))
    if tree.nodes <= before:
      break
    before = tree.nodes
    cells = [_NAMES.get(head.recipe[0]), str(tree.nodes), _depths(tree.parents)]
    predicted = inputs.tree_speedup(head, "medusa", tree)
    speeds = [None, number(predicted), None, None, number(tree.tokens), None, None]
    lines.append([*trained_where(head), *cells, *speeds])
  return lines


def _depths(parents: Any) -> str:
  """Drafts by depth of a tree given by its parents."""
  depth = [0]
  for parent in parents[1:]:
    depth.append(depth[parent] + 1)
  return "/".join(str(depth.count(d)) for d in range(1, max(depth) + 1))


def _by_depth(found: Figures) -> str:
  """Drafts by depth of a method's tree: its paths, or what its branches make of its window."""
  _, given = options.parse("drafter", found.method)
  if "tree" in given:
    lengths = [len(path) for path in given["tree"]]
    return "/".join(str(lengths.count(d)) for d in range(1, max(lengths) + 1))
  counts, width = [], 1
  branching = (*given.get("branching", ()), *[1] * found.window)[: found.window]
  for children in branching:
    width *= children
    counts.append(width)
  return "/".join(map(str, counts))
