"""EAGLE-1, EAGLE-2 and EAGLE-3 (Li et al. 2024, 2024, 2025): chains and trees, and the papers' ablations."""

from __future__ import annotations

from typing import Any

from experiments import published
from experiments.published import Speed
from experiments.render import Table
from experiments.run_files import Figures
from experiments.tables.inputs import (
  COST_NOTE,
  MEASURED_NOTE,
  MEASURES,
  WHERE,
  Inputs,
  measures,
  positions,
  published_measures,
  published_where,
  trained_measures,
  trained_where,
  where,
)
from experiments.training_files import TrainedHead
from specjax import analysis, options

# Why heads of this kind do less here than in the papers.
_SCALE_NOTE = (
  "Not reproduced at this scale: the papers' heads saw tens of thousands of conversations and draft for "
  "models of 7 billion parameters and more, on devices where a draft step is a small share of a plain round "
  "and dozens of nodes are verified in about the time of one. What ours saw is in the table, or in the runs' "
  "`run.json`."
)
_HELD_OUT_NOTE = (
  "Rows of training runs: acceptance by position and τ are those of greedy rounds on held-out text, with a "
  "chain as long as acceptance is known; predicted × is what that chain would be on the calibration's device."
)


def _listed(counts: tuple[int, ...]) -> str:
  return "/".join(map(str, counts))


# --- EAGLE-1 ---------------------------------------------------------------------------------------


def eagle1(inputs: Inputs) -> Table:
  """Acceptance by position of a chain, and trees against chains."""
  header = (*WHERE, "draft", "acceptance by position", *MEASURES)
  chain, rates = published.EAGLE1_CHAIN, published.EAGLE1_POSITIONS
  by_formula = analysis.chain_tokens(rates)
  rows = [
    [
      *published_where(chain),
      f"{chain.method} of {len(rates)}",
      positions(rates),
      *published_measures(chain, predicted_tau=by_formula),
    ]
  ]
  tree = f"{sum(published.EAGLE1_TREE)} drafts, {_listed(published.EAGLE1_TREE)} by depth"
  rows += [
    [*published_where(row), f"{row.method} of {tree}", None, *published_measures(row)]
    for row in published.EAGLE1
  ]
  rows += [_our_eagle1(found, inputs) for found in inputs.drafted(("eagle",), _is_static)]
  shorter = analysis.chain_tokens(rates[:-1])
  notes = [
    f"Published: {published.EAGLE1_SOURCE}.",
    f"predicted τ: 1 + Σ Π of acceptance by position; of the printed rates {by_formula:.2f} for all "
    f"{len(rates)} drafts and {shorter:.2f} without the last, beside the printed {chain.tau:.2f}.",
    f"Tree against chain, published: {published.EAGLE1[0].tau / chain.tau:.2f} times the tokens a round (T = "
    "0, Vicuna 7B).",
    MEASURED_NOTE,
    COST_NOTE,
    _SCALE_NOTE,
  ]
  title = "EAGLE-1: acceptance by position, and trees against chains"
  return Table("eagle1", title, header, rows, notes + inputs.notes())


def _is_static(row: dict[str, Any]) -> bool:
  """Not a tree that follows the head's probabilities."""
  return "nodes" not in options.parse("drafter", row["drafter"])[1]


def _our_eagle1(found: Figures, inputs: Inputs) -> list[str | None]:
  rates = found.positions
  return [
    *where(found),
    found.method,
    positions(rates),
    *measures(found, inputs, predicted_tau=analysis.chain_tokens(rates)),
  ]


_SEEN = {"both": "feature + shifted token"}


def eagle1_inputs(inputs: Inputs) -> Table:
  """What the head sees: the paper's speeds, our held-out acceptance."""
  header = (*WHERE, "inputs", "draft", "tokens trained", "acceptance by position", *MEASURES)
  rows = [
    [*published_where(row), row.method, None, None, None, *published_measures(row, form=".1f")]
    for row in (Speed(name, "Vicuna 7B", 0, value) for name, value in published.EAGLE1_INPUTS.items())
  ]
  order = list(published.EAGLE1_INPUTS)
  place = lambda head: order.index(_inputs_of(head.recipe[1]))
  heads = sorted(inputs.trained(("eagle",), "inputs"), key=place)
  rows += [_our_head(head, _inputs_of(head.recipe[1]), "eagle", inputs) for head in heads]
  for found in inputs.drafted(("eagle",)):
    name, given = found.run.recipe(found.method)
    if name == "eagle":
      rates = positions(found.positions)
      cells = [_inputs_of(given), found.method, None, rates]
      rows.append([*where(found), *cells, *measures(found, inputs)])
  notes = [
    f"Published: {published.EAGLE1_SOURCE}; Vicuna 7B.",
    _HELD_OUT_NOTE,
    MEASURED_NOTE,
    _SCALE_NOTE,
  ]
  title = "EAGLE-1: what the head sees"
  return Table("eagle1_inputs", title, header, rows, notes + inputs.notes(heads=heads))


def _inputs_of(given: dict[str, Any]) -> str:
  """What a head of ``eagle[inputs=…]`` sees, in the paper's words."""
  seen = given.get("inputs", "both")
  return _SEEN.get(seen, seen)


def _our_head(head: TrainedHead, name: str, drafter: str, inputs: Inputs) -> list[str | None]:
  """A line of a training run: WHERE, its name, the chain, tokens, positions, MEASURES."""
  cells = [name, head.chain, head.tokens, positions(head.acceptance)]
  return [*trained_where(head), *cells, *trained_measures(head, inputs.chain_speedup(head, drafter))]


# --- EAGLE-2 ---------------------------------------------------------------------------------------


def eagle2(inputs: Inputs) -> Table:
  """A dynamic tree without its parts."""
  header = (*WHERE, "tree", "draft", "nodes", *MEASURES)
  first = published.EAGLE2_ABLATION[0]
  paid = first.tau / first.speedup
  rows = [
    [*published_where(row), row.method, None, None, *published_measures(row, predicted=row.tau / paid)]
    for row in published.EAGLE2_ABLATION
  ]
  rows += [
    [*published_where(row), row.method, None, None, *published_measures(row)]
    for row in published.EAGLE2
    if row not in published.EAGLE2_ABLATION
  ]
  order = [row.method for row in published.EAGLE2_ABLATION]
  mine = [found for found in inputs.drafted(("eagle", "eagle3")) if _shape(found) is not None]
  for found in sorted(mine, key=lambda found: (found.run.number, _shape(found), order.index(_part(found)))):
    cells = [_part(found), found.method, str(found.settings["nodes"])]
    rows.append([*where(found), *cells, *measures(found, inputs)])
  notes = [
    f"Published: {published.EAGLE2_SOURCE}; {published.EAGLE2_NODES} nodes, the {published.EAGLE2_BEAM} best "
    "of a level expanded.",
    f"predicted × of published rows: their τ at what a round of '{first.method}' cost, {paid:.2f} plain "
    "rounds: the parts change τ, hardly the cost.",
    "no value: a level is picked by each node's own probability (`expand=confidence`), not by its path's. no "
    "re-rank: nodes are proposed as they were expanded (`rerank=False`). Rows of `eagle3` are the same trees "
    "with EAGLE-3's head. nodes: the root included.",
    MEASURED_NOTE,
    COST_NOTE,
    _SCALE_NOTE,
  ]
  title = "EAGLE-2: dynamic trees without their parts"
  return Table("eagle2", title, header, rows, notes + inputs.notes())


def _shape(found: Figures) -> tuple[Any, ...] | None:
  """What the variants of one tree share; None for a tree that is not dynamic."""
  name, given = options.parse("drafter", found.method)
  if "nodes" not in given:
    return None
  return name, given["nodes"], given.get("beam"), found.window


def _part(found: Figures) -> str:
  """Which of the tree's parts there are, in the paper's words."""
  _, given = options.parse("drafter", found.method)
  by_value, reranked = given.get("expand", "value") == "value", given.get("rerank", True)
  if by_value:
    return "full" if reranked else "no re-rank"
  return "no value" if reranked else "neither"


# --- EAGLE-3 ---------------------------------------------------------------------------------------

# Rows of `ablations --table=features`, in the order of the paper's.
_OURS = {
  "EAGLE-1": "EAGLE-1's head (EAGLE-2)",
  "neither": "neither",
  "no training-time test": "fused features, no training-time test",
  "no fused features": "training-time test (no feature loss)",
  "EAGLE-3": "+ fused features (EAGLE-3)",
}


def eagle3(inputs: Inputs) -> Table:
  """EAGLE-3 without its parts, and its speeds."""
  header = (*WHERE, "head", "draft", "tokens trained", "acceptance by position", *MEASURES)
  known = set(published.EAGLE3_ABLATION)
  printed = [*published.EAGLE3_ABLATION, *(row for row in published.EAGLE3 if row not in known)]
  rows = [[*published_where(row), row.method, None, None, None, *published_measures(row)] for row in printed]
  order = list(_OURS)
  place = lambda head: order.index(_made_of(*head.recipe))
  heads = sorted(inputs.trained(("eagle", "eagle3"), "features"), key=place)
  for head in heads:
    rows.append(_our_head(head, _OURS[_made_of(*head.recipe)], head.recipe[0], inputs))
  for found in inputs.drafted(("eagle3",)):
    made = _made_of(*found.run.recipe(found.method))
    cells = [_OURS.get(made), found.method, None, positions(found.positions)]
    rows.append([*where(found), *cells, *measures(found, inputs)])
  notes = [
    f"Published: {published.EAGLE3_SOURCE}.",
    "no feature loss: the head is trained on chains of its own states (training-time test) with the last "
    "layer's feature alone; + fused features: with those of three layers.",
    _HELD_OUT_NOTE,
    MEASURED_NOTE,
    COST_NOTE,
    _SCALE_NOTE,
  ]
  title = "EAGLE-3: without its parts"
  return Table("eagle3", title, header, rows, notes + inputs.notes(heads=heads))


def _made_of(name: str, given: dict[str, Any]) -> str:
  """The row of `ablations --table=features` that a recipe is; empty for one that is not known."""
  if name == "eagle":
    return "EAGLE-1"
  if name != "eagle3":
    return ""
  taps = given.get("tap_layers")
  fused, tested = taps is None or len(taps) > 1, given.get("steps", 4) > 1
  if fused:
    return "EAGLE-3" if tested else "no training-time test"
  return "no fused features" if tested else "neither"
