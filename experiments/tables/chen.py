"""Chen, Borgeaud, Irving et al. 2023, table 1: milliseconds a token of chains of four drafts."""

from __future__ import annotations

from experiments import published
from experiments.render import Table
from experiments.run_files import Figures, chains
from experiments.tables.inputs import Inputs, chain_where, number
from specjax import analysis


def chen(inputs: Inputs) -> Table:
  """Table 1: milliseconds a token, what they imply, and our two-model chains of four drafts."""
  header = (
    "source",
    "device",
    "task",
    "draft",
    "T",
    "K",
    "plain ms a token",
    "ms a token",
    "published ×",
    "recomputed ×",
    "predicted upper bound ×",
    "implied tokens a round",
    "implied α",
    "ours ×",
    "ours τ",
  )
  rows = [_published_chen(row) for row in published.CHEN]
  rows += [_our_chen(found, inputs) for found in chains(inputs.runs) if found.window == published.CHEN_WINDOW]
  plain, step, window = published.CHEN_TARGET_MS, published.CHEN_DRAFT_MS, published.CHEN_WINDOW
  notes = [
    f"Published: {published.CHEN_SOURCE}; target {published.CHEN_TARGET}, {plain} ms a token, draft "
    f"{published.CHEN_DRAFT}, {step} ms a token, batch 1.",
    f"recomputed ×: plain ms over ms. predicted upper bound ×: {window + 1} / ({window}c + 1) with c the "
    "draft's step over a plain step: every draft accepted, verifying as fast as a plain step.",
    f"implied tokens a round: ({window} · {step} + {plain}) / ms, which takes verifying for a plain step; "
    "implied α gives these tokens, for our rows τ, by (1 − α^(K+1)) / (1 − α).",
    "ours: decode speed over plain decoding on the same prompts; K = 4 only; c is from the calibration.",
  ]
  for row in published.CHEN:
    ratio = plain / row.ms
    if abs(ratio - row.speedup) > 0.02:
      notes.append(f"{row.task}: the printed {row.speedup} is not {plain} / {row.ms} = {ratio:.3f}.")
  title = "Chen et al. 2023, table 1: milliseconds a token"
  return Table("chen", title, header, rows, notes + inputs.notes(("spec_bench",)))


def _bound(c: float) -> float:
  """Speedup if every draft were accepted."""
  return analysis.leviathan_speedup(1.0, published.CHEN_WINDOW, c)


def _published_chen(row: published.ChenRow) -> list[str | None]:
  plain, step, window = published.CHEN_TARGET_MS, published.CHEN_DRAFT_MS, published.CHEN_WINDOW
  tokens = (window * step + plain) / row.ms
  return [
    "published",
    published.CHEN_DEVICE,
    row.task,
    published.CHEN_DRAFT,
    None,
    str(window),
    number(plain),
    number(row.ms),
    number(row.speedup),
    number(plain / row.ms),
    number(_bound(step / plain)),
    number(tokens),
    number(analysis.alpha_from_tokens(tokens, window)),
    None,
    None,
  ]


def _our_chen(found: Figures, inputs: Inputs) -> list[str | None]:
  c = inputs.draft_cost(found)
  alpha = analysis.alpha_from_tokens(found.tau, found.window) if found.tau >= 1 else None
  return [
    *chain_where(found),
    number(1e3 / found.plain_rate),
    number(1e3 / found.rate),
    None,
    None,
    None if c is None else number(_bound(c)),
    None,
    number(alpha),
    number(found.speedup),
    number(found.tau),
  ]
