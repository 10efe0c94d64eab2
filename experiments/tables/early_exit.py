"""Drafts of the target's own layers: early exits with an adapter (Kangaroo), prefixes and skipped layers."""

from __future__ import annotations

from experiments import published
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
from specjax import options

_DRAFTERS = ("early_exit", "self_speculation")


def early_exit(inputs: Inputs) -> Table:
  """Early exit by layer, beside drafts of the target's own layers without training."""
  header = (*WHERE, "draft", "layers", "tokens trained", "acceptance by position", *MEASURES)
  kangaroo = published.SELF[0].method
  rows = []
  for row in published.SELF:
    layers = str(published.KANGAROO_EXIT) if row.method == kangaroo else None
    rows.append([*published_where(row), row.method, layers, None, None, *published_measures(row)])
  heads = sorted(inputs.trained(("early_exit",), "early_exit"), key=lambda head: head.recipe[1]["exit"])
  for head in heads:
    cells = [head.chain, str(head.recipe[1]["exit"]), head.tokens, positions(head.acceptance)]
    rows.append([*trained_where(head), *cells, *trained_measures(head, None)])
  for found in sorted(inputs.drafted(_DRAFTERS), key=_place):
    cells = [found.method, _layers(found), None, positions(found.positions)]
    rows.append([*where(found), *cells, *measures(found, inputs)])
  notes = [
    f"Published: {'; '.join(published.SELF_SOURCES.values())}; the most over tasks and models. Kangaroo's 7B "
    f"models exit after layer {published.KANGAROO_EXIT}, draft at most {published.KANGAROO_WINDOW} tokens "
    f"and stop below a confidence of {published.KANGAROO_CONFIDENCE}.",
    "layers: of the target, before the adapter or before its head. A draft step costs more with each, so a "
    "draft that is right more often may gain less.",
    "Rows of training runs: greedy rounds on held-out text. No × is predicted for them, since a calibration "
    "has the draft of one exit. `self_speculation[layers=n]` is a prefix without adapter or training "
    "(LayerSkip drafts so, from a target trained for it), `skips` a set found by search (Draft & Verify).",
    MEASURED_NOTE,
    COST_NOTE,
    "Not reproduced at this scale: every draft step reads the output head, a fifth of what a plain step of a "
    "model of 135 million parameters computes and a fiftieth of one of 7 billion; and LayerSkip's targets "
    "were trained to be left early.",
  ]
  title = "Early exit by layer, and self-speculation"
  return Table("early_exit", title, header, rows, notes + inputs.notes(heads=heads))


def _layers(found: Figures) -> str | None:
  """Layers that draft; None where neither the drafter nor the head's record says."""
  own = options.parse("drafter", found.method)[1].get("layers")
  layers = found.run.recipe(found.method)[1].get("exit") if own is None else own
  return None if layers is None else str(layers)


def _place(found: Figures) -> tuple[int, str, int]:
  """Order of measured lines: by run, drafter and layers."""
  name = options.parse("drafter", found.method)[0]
  return found.run.number, name, int(_layers(found) or 0)
