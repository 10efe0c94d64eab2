"""Figures of `rule_bench`: laws of lossy rules, tables from rows, and the plot. Needs no model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import results
from specjax import options
from specjax.base import Rule
from specjax.verify import RULES

# A rule, and what it is compared with where both take a proposal.
PAIRS = (
  ("block_verification", "speculative_sampling"),
  ("traversal_verification", "recursive_rejection"),
  ("recursive_rejection", "draw_and_follow"),
)
Row = dict[str, Any]


# --- the law of a lossy rule's first token ---------------------------------------------------------


def lenient_law(p: np.ndarray, q: np.ndarray, lenience: float) -> np.ndarray:
  """Of the token `LenientSpeculativeSampling` emits where a draft from q is judged by p, ``[V]`` each."""
  kept = np.minimum(q, p / lenience)
  residual = np.maximum(p - q, 0.0)
  left, total = max(1 - kept.sum(), 0.0), residual.sum()
  return kept + (left / total) * residual if total > 0 else kept


def typical_law(p: np.ndarray, q: np.ndarray, epsilon: float, delta: float) -> np.ndarray:
  """The same of `TypicalAcceptance`: drafts that pass, else the most likely token."""
  law = np.where(p > min(epsilon, delta * math.exp(-entropy(p))), q, 0.0)
  law[np.argmax(p)] += max(1 - law.sum(), 0.0)
  return law


def first_law(rule: Rule, p: np.ndarray, q: np.ndarray) -> np.ndarray:
  law = typical_law if rule.name == "typical_acceptance" else lenient_law
  return law(p, q, **dataclasses.asdict(rule))


def divergence(law: np.ndarray, p: np.ndarray) -> float:
  """KL(law ‖ p) in nats, where law has mass only on tokens that p has."""
  has = law > 0
  return max(float(np.sum(law[has] * np.log(law[has] / p[has]))), 0.0)


def surprise(law: np.ndarray, log_p: np.ndarray) -> float:
  """Mean of -log p under the law, in nats."""
  has = law > 0
  return -float(np.sum(law[has] * log_p[has]))


def entropy(p: np.ndarray) -> float:
  has = p > 0
  return -float(np.sum(p[has] * np.log(p[has])))


# --- tables and the plot ---------------------------------------------------------------------------


def by_context(rows: Sequence[Row], figure: str = "tokens", **where: Any) -> dict[tuple, float]:
  """A figure of the rows that have the given fields, by question and position."""
  return {
    (row["question_id"], row["position"]): row[figure]
    for row in rows
    if where.items() <= row.items() and row.get(figure) is not None
  }


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
  """The mean and its standard error, None of a single value."""
  values = np.asarray(values, np.float64)
  error = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
  return float(values.mean()), error


def difference(mine: dict[tuple, float], theirs: dict[tuple, float]) -> tuple[float, float | None] | None:
  """Mean and standard error of what they differ by at the contexts of both, None without any."""
  shared_contexts = [context for context in mine if context in theirs]
  return mean_and_error([mine[c] - theirs[c] for c in shared_contexts]) if shared_contexts else None


def _cell(found: tuple[float, float | None] | None, form: str = ".3f") -> str | None:
  if found is None:
    return None
  mean, error = found
  return f"{mean:{form}}" if error is None else f"{mean:{form}} ± {error:.3f}"


def rule_table(rows: Sequence[Row], temperature: float, proposals: Sequence[str]) -> list[list[str | None]]:
  """Tokens a round, rules × proposals; then what the rules of `PAIRS` differ by."""
  figures = lambda rule, proposal: by_context(rows, temperature=temperature, proposal=proposal, rule=rule)
  lines = []
  for rule in RULES:
    found = [figures(rule, proposal) for proposal in proposals]
    if any(found):
      cells = [_cell(mean_and_error(list(values.values()))) if values else None for values in found]
      lines.append([rule, *cells])
  for one, other in PAIRS:
    found = [difference(figures(one, proposal), figures(other, proposal)) for proposal in proposals]
    if any(found):
      lines.append([f"{one} − {other}", *(_cell(value, "+.3f") for value in found)])
  return lines


def lossy_points(rows: Sequence[Row], temperature: float) -> dict[str, dict[str, tuple[float, float | None]]]:
  """Mean and error of each figure by rule with its options; first lossless ones on the same chain."""
  chain = next((row["proposal"] for row in rows if "divergence" in row), None)
  where = dict(temperature=temperature, proposal=chain)
  rows = [row for row in rows if where.items() <= row.items()]
  lossy = [rule for rule in dict.fromkeys(row["rule"] for row in rows) if "[" in rule]
  points = {}
  for rule in (*reversed(PAIRS[0]), *lossy) if lossy else ():
    mine = [row for row in rows if row["rule"] == rule]
    names = {"tokens": "tokens", "divergence": "divergence", "surprise": "surprise"}
    if "[" not in rule:  # the law is the target's own
      names |= {"divergence": None, "surprise": "own_surprise"}
    figures = {
      name: [row[field] if field else 0.0 for row in mine if field is None or field in row]
      for name, field in names.items()
    }
    points[rule] = {name: mean_and_error(values) for name, values in figures.items() if values}
  return points


def show(rows: Sequence[Row]) -> None:
  """Prints the tables, one of each kind a temperature."""
  proposals = list(dict.fromkeys(row["proposal"] for row in rows))
  numbers = {proposal: f"({number})" for number, proposal in enumerate(proposals, start=1)}
  for temperature in dict.fromkeys(row["temperature"] for row in rows):
    here = [row for row in rows if row["temperature"] == temperature]
    contexts = {(row["question_id"], row["position"]) for row in here}
    print(f"\nTemperature {temperature:g}: tokens a round ± standard error, {len(contexts)} contexts")
    results.table(["rule", *numbers.values()], rule_table(rows, temperature, proposals))
    for proposal, number in numbers.items():
      mine = [row for row in here if row["proposal"] == proposal]
      nodes = by_context(mine, "proposed").values()
      overlap = list(by_context(mine, "overlap").values())
      said = f"; Σ min(p, q) behind the root {_cell(mean_and_error(overlap))}" if overlap else ""
      if nodes:
        print(f"{number} {proposal}: {np.mean(list(nodes)):.1f} drafts a round{said}")
    points = lossy_points(rows, temperature)
    if points:
      _show_lossy(here, points, temperature)


def _show_lossy(here: Sequence[Row], points, temperature: float) -> None:
  chain = next(row["proposal"] for row in here if "divergence" in row)
  print(f"\nTemperature {temperature:g}, {chain}: the law of a round's first token against the target's p")
  lines = [[rule, *map(_cell, figures.values())] for rule, figures in points.items()]
  results.table(["rule", "tokens a round", "KL(law ‖ p), nats", "-log p_raw, nats"], lines)
  openness = list(by_context(here, "entropy", proposal=chain).values())
  print(f"entropy of p: {_cell(mean_and_error(openness))} nats")


def plot(rows: Sequence[Row], path: str) -> None:
  """Tokens a round against divergence: a curve for each lossy rule and temperature.

  Raises:
    ValueError: no lossy rule was run.
  """
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
  if not any(lossy_points(rows, temperature) for temperature in temperatures):
    raise ValueError("--plot: no lossy rule was run; --proposals needs a sampled chain")
  figure, all_axes = plt.subplots(
    1, len(temperatures), figsize=(5.5 * len(temperatures), 4.5), sharey=True, squeeze=False
  )
  for axes, temperature in zip(all_axes[0], temperatures, strict=True):
    curves: dict[str, list[tuple[float, float, str]]] = {}
    for rule, figures in lossy_points(rows, temperature).items():
      name, settings = options.parse("rule", rule)
      value = next((f"{value:g}" for value in settings.values()), "")
      point = figures["divergence"][0], figures["tokens"][0], value
      curves.setdefault(name, []).append(point)
    for name, points in curves.items():
      if name == "speculative_sampling":  # lenience 1
        continue
      lossy = name != "block_verification"
      x, y, values = zip(*points, strict=True)
      axes.plot(x, y, "o-" if lossy else "*", markersize=5 if lossy else 11, label=name)
      symbol = "l" if name.startswith("lenient") else "ε"
      for point, value in zip(zip(x, y, strict=True), values, strict=True):
        said = f"{symbol} = {value}" if lossy else ""
        axes.annotate(said, point, textcoords="offset points", xytext=(7, -10), fontsize=8)
    axes.margins(x=0.2, y=0.1)
    axes.set_title(f"temperature {temperature:g}")
    axes.set_xlabel("KL(law of the first token ‖ target), nats")
    axes.grid(alpha=0.3)
  all_axes[0][0].set_ylabel("tokens a round")
  figure.legend(
    *all_axes[0][0].get_legend_handles_labels(), loc="upper center", ncols=3, bbox_to_anchor=(0.5, 0)
  )
  figure.savefig(path, dpi=150, bbox_inches="tight")
  plt.close(figure)
