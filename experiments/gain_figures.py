"""Figures of `gain_map`: the border of gain, tables and the plot, from rows alone. Needs no model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments import results

Row = Mapping[str, Any]
# Of the drafters that are marked on the map.
_MARKERS = "os^Dv*P"
_ALPHA = 0.85


def prediction_error(rows: Sequence[Row]) -> float:
  """Mean over cells and responses of |predicted / measured - 1|, decode only."""
  return float(np.mean([abs(row["predicted"] / row["speedup"] - 1) for row in rows]))


def axes_of(rows: Sequence[Row]) -> tuple[list[float], list[tuple[float, int]]]:
  """Acceptances, and ``(c, layers)`` of the drafts, both ascending."""
  costs = sorted({(row["c"], row["layers"]) for row in rows})
  return sorted({row["acceptance"] for row in rows}), costs


def grid_of(rows: Sequence[Row], response: int, field: str) -> np.ndarray:
  """A figure of a response, ``[drafts, acceptances]``; NaN where there is no row."""
  acceptances, costs = axes_of(rows)
  grid = np.full((len(costs), len(acceptances)), np.nan)
  for row in rows:
    if row["response"] == response:
      place = costs.index((row["c"], row["layers"])), acceptances.index(row["acceptance"])
      grid[place] = row[field]
  return grid


def crossing(acceptances: Sequence[float], speedups: Sequence[float]) -> float | None:
  """The acceptance from which on there is a gain, linear between the measured ones.

  The last one below which there is none; the first acceptance if all gain, None if the last does not.
  """
  known = [(a, s) for a, s in zip(acceptances, speedups, strict=True) if not math.isnan(s)]
  if not known or known[-1][1] < 1:
    return None
  above = known[-1][0]
  for (a, s), (b, t) in zip(reversed(known[:-1]), reversed(known[1:]), strict=True):
    if s < 1:
      return a + (b - a) * (1 - s) / (t - s)
    above = a
  return above


def sentence(rows: Sequence[Row]) -> str:
  """Where the border runs, in one sentence, from the longest response's measured speedups."""
  response = max(row["response"] for row in rows)
  acceptances, costs = axes_of(rows)
  grid = grid_of(rows, response, "speedup")
  crossings = [crossing(acceptances, speedups) for speedups in grid]
  # From this draft on, in the order of their costs, there is no gain.
  end = max((number + 1 for number, at in enumerate(crossings) if at is not None), default=0)
  start = f"With {rows[0]['window']} drafts a round and responses of {response} tokens, speculation "
  if not end:
    return f"{start}never gains here: acceptance up to {acceptances[-1]:g}, c from {costs[0][0]:.2f}."
  gains = [_gain(*cost, at, acceptances[0]) for cost, at in zip(costs[:end], crossings, strict=False)]
  never = (
    f"; at c = {costs[end][0]:.2f} and more it does not, up to {acceptances[-1]:g}" if costs[end:] else ""
  )
  return f"{start}gains here if acceptance is {', '.join(gains)}{never}."


def _gain(c: float, layers: int, at: float | None, least: float) -> str:
  name = "a free draft" if not layers else f"a draft of {_layers(layers)} (c = {c:.2f})"
  if at is None:
    return f"never enough for {name}"
  return (
    f"from {least:g} on, the least that was run, for {name}" if at == least else f"above {at:.2f} for {name}"
  )


def _layers(number: int) -> str:
  return f"{number} layer{'s' * (number > 1)}"


def show(rows: Sequence[Row]) -> None:
  """Prints a table of measured / predicted speedups, the error of prediction, and the border."""
  acceptances, costs = axes_of(rows)
  for response in sorted({row["response"] for row in rows}):
    measured, predicted = (grid_of(rows, response, field) for field in ("speedup", "predicted"))
    whole = grid_of(rows, response, "speedup_with_prefill")
    print(f"\nSpeedup at {response} new tokens by acceptance: decode only / predicted (with prefill)")
    lines = []
    for number, (c, layers) in enumerate(costs):
      figures = zip(measured[number], predicted[number], whole[number], strict=True)
      cells = [None if math.isnan(m) else f"{m:.2f} / {p:.2f} ({w:.2f})" for m, p, w in figures]
      lines.append([f"{_layers(layers)}, c = {c:.3f}" if layers else "free, c = 0", *cells])
    results.table(["draft", *(f"{acceptance:g}" for acceptance in acceptances)], lines)
  compiles = sum({(row["layers"], row["acceptance"]): row["compiles"] for row in rows}.values())
  print(
    f"\nmean |error| of prediction {prediction_error(rows):.1%} over {len(rows)} cells; "
    f"{compiles} programs compiled while timing"
  )
  print(sentence(rows))


# --- the plot --------------------------------------------------------------------------------------


def plot(rows: Sequence[Row], points: Sequence[Row], path: str, key: Mapping[str, Any]) -> None:
  """A map a response length, and measured against predicted speedups.

  Args:
    rows: of the run.
    points: ``drafter``, ``acceptance`` and ``c`` of drafters that are marked.
    path: of the PNG.
    key: of the calibration, for the title.
  """
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  responses = sorted({row["response"] for row in rows})
  acceptances, costs = axes_of(rows)
  columns = min(len(responses), 2)
  lines = -(-len(responses) // columns)
  width, height = 1.0 * len(acceptances) * columns + 5.5, (0.62 * len(costs) + 1.0) * lines + 0.9
  figure = plt.figure(figsize=(max(width, 11), max(height, 5)), layout="constrained")
  maps, side = figure.subfigures(1, 2, width_ratios=(len(acceptances) * columns + 1.5, 4.0))
  panels = maps.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
  span = max(abs(math.log2(row[field])) for row in rows for field in ("speedup", "predicted"))
  image = None
  for number, axes in enumerate(panels.flat):
    if number >= len(responses):
      axes.set_visible(False)
      continue
    image = _draw_map(axes, rows, responses[number], points, max(span, 0.1))
  for axes in panels[:, 0]:
    axes.set_ylabel("draft cost c")
  for axes in panels[-1]:
    axes.set_xlabel("acceptance α")
  _draw_colours(maps, image, panels, max(span, 0.1))
  handles = panels[0, 0].get_legend_handles_labels()[0] + [
    plt.Line2D([], [], color="black", linestyle=style, label=f"{what} speedup 1")
    for what, style in (("measured", "solid"), ("predicted", "dashed"))
  ]
  maps.legend(handles=handles, loc="outside lower center", ncols=2 if columns > 1 else 1, fontsize=7)
  _draw_scatter(side.subplots(), rows, responses)
  figure.suptitle(
    f"{key['model']} on {key['cpu'] if key['platform'] == 'cpu' else key['device_kind']}, "
    f"{key['dtype']}: {rows[0]['window']} drafts a round, measured / predicted speedup"
  )
  figure.savefig(path, dpi=130)
  plt.close(figure)


def _draw_map(axes, rows, response, points, span):
  """Cells of one size each: their numbers must be readable, whatever the costs are."""
  from matplotlib.patheffects import withStroke

  acceptances, costs = axes_of(rows)
  measured, predicted = (grid_of(rows, response, field) for field in ("speedup", "predicted"))
  image = axes.imshow(
    np.log2(measured), origin="lower", aspect="auto", cmap="RdBu", vmin=-span, vmax=span, alpha=_ALPHA
  )
  for (y, x), value in np.ndenumerate(measured):
    if not math.isnan(value):
      dark = abs(math.log2(value)) > 0.65 * span
      said = f"{value:.2f} / {predicted[y, x]:.2f}"
      text = axes.text(x, y + 0.28, said, ha="center", va="center", fontsize=8, zorder=5)
      # The border may run through a number: an edge in the colour of the ground keeps it readable.
      ground = [_ALPHA * part + 1 - _ALPHA for part in image.cmap(image.norm(math.log2(value)))[:3]]
      text.set_color("white" if dark else "black")
      text.set_path_effects([withStroke(linewidth=2.5, foreground=ground)])
  for grid, style in ((measured, "solid"), (predicted, "dashed")):
    _draw_border(axes, grid, style)
  _draw_points(axes, points, acceptances, costs)
  axes.set_title(f"{response} new tokens", fontsize=10)
  axes.set_xticks(range(len(acceptances)), [f"{acceptance:g}" for acceptance in acceptances])
  names = [f"{c:.2f}\n({_layers(layers)})" if layers else "0\n(free)" for c, layers in costs]
  axes.set_yticks(range(len(costs)), names, fontsize=8)
  return image


def _draw_border(axes, grid, style) -> None:
  """Where the figure is 1, linear between the cells' middles."""
  known = grid[~np.isnan(grid)]
  if min(grid.shape) > 1 and known.size and known.min() < 1 < known.max():
    axes.contour(grid, levels=[1.0], colors="black", linestyles=style, linewidths=1.8)


def _draw_points(axes, points, acceptances, costs) -> None:
  """Drafters, between the cells as far as their acceptance and cost lie between those of the cells.

  One that lies outside of the map stands at its edge; the legend has its figures.
  """

  def at(value: float, grid: Sequence[float]) -> float:
    ends = {True: -0.42, False: len(grid) - 0.58}
    outside = value < grid[0] or value > grid[-1]
    return ends[value < grid[0]] if outside else float(np.interp(value, grid, range(len(grid))))

  for number, point in enumerate(points):
    x, y = at(point["acceptance"], acceptances), at(point["c"], [c for c, _ in costs])
    name = f"{point['drafter']}: α = {point['acceptance']:.2f}, c = {point['c']:.2f}"
    shape = _MARKERS[number % len(_MARKERS)]
    axes.plot(
      x, y, shape, color="gold", markeredgecolor="black", markersize=9, zorder=4, linestyle="none", label=name
    )


def _draw_colours(figure, image, panels, span) -> None:
  bar = figure.colorbar(image, ax=panels, shrink=0.9, pad=0.01)
  ticks = [value for value in (0.25, 0.33, 0.5, 0.7, 1, 1.4, 2, 3, 4) if abs(math.log2(value)) <= span]
  bar.set_ticks([math.log2(value) for value in ticks], labels=[f"{value:g} ×" for value in ticks])
  bar.set_label("measured speedup, decode only", fontsize=8)


def _draw_scatter(axes, rows, responses) -> None:
  for response in responses:
    mine = [row for row in rows if row["response"] == response]
    x, y = ([row[field] for row in mine] for field in ("predicted", "speedup"))
    axes.plot(x, y, "o", markersize=4, alpha=0.8, label=f"{response} tokens")
  values = [row[field] for row in rows for field in ("predicted", "speedup")]
  ends = np.array([min(values) / 1.1, max(values) * 1.1])
  axes.plot(ends, ends, "k-", linewidth=1)
  for factor in (0.9, 1.1):
    axes.plot(ends, factor * ends, "k:", linewidth=1, label="± 10 %" if factor > 1 else None)
  axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
  ticks = [value for value in (0.25, 0.5, 0.7, 1, 1.5, 2, 3, 4) if ends[0] <= value <= ends[1]]
  for axis in (axes.xaxis, axes.yaxis):
    axis.set_ticks(ticks, labels=[f"{value:g}" for value in ticks])
    axis.set_ticks([], minor=True)
  axes.set_box_aspect(1)
  axes.set_xlabel("predicted speedup")
  axes.set_ylabel("measured speedup")
  axes.set_title(f"mean |error| {prediction_error(rows):.1%}", fontsize=10)
  axes.legend(fontsize=8)
  axes.grid(alpha=0.3)
