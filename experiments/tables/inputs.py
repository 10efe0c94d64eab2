"""What tables are made from, and the cells that several of them have."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence

from experiments import predictions, published, training_files
from experiments.run_files import Figures, Run, figures
from experiments.summary import Row
from experiments.training_files import TrainedHead
from specjax import analysis, options
from specjax.analysis import CostTable

# Fields of a calibration's key that a run has to agree with.
_KEY = ("platform", "device_kind", "cpu", "model", "draft_model", "dtype")
# Tokens of the text at which drafts of trained heads are priced.
AT_LIVE = 256
# Drafters all of whose levels come from one pass.
_AT_ONCE = ("medusa", "block")

# First cells of a line, and the last ones: what papers print, what follows from a formula or a calibration,
# what was measured.
WHERE = ("source", "device", "target", "T")
SPEEDS = ("published ×", "predicted ×", "ours ×")
MEASURES = (*SPEEDS, "published τ", "predicted τ", "ours τ", "τ / ×")

MEASURED_NOTE = (
  "ours: × is decode speed over plain decoding on the same prompts, all categories together; τ is tokens a "
  "round; rules that keep the target's law only. predicted ×: by the calibration and the rounds that were "
  "run."
)
COST_NOTE = "τ / ×: what a round cost, draft included, in plain rounds."


@dataclasses.dataclass(frozen=True)
class Inputs:
  """The runs, the costs of their device and the training runs, as far as they are given."""

  runs: list[Run]
  costs: CostTable | None = None
  heads: list[TrainedHead] = dataclasses.field(default_factory=list)

  def fits(self, run: Run) -> bool:
    """Whether the costs are those of the run's device, model and precision."""
    return self.costs is not None and all(self.costs.key.get(name) == run.info.get(name) for name in _KEY)

  def draft_cost(self, found: Figures) -> float | None:
    """c of the drafter on its device, None where the calibration does not tell."""
    if not self.fits(found.run) or found.method not in self.costs.drafts:
      return None
    return self.costs.draft_cost(found.method, batch=found.batch, live=found.live)

  def drafted(
    self, names: Sequence[str], keep: Callable[[Row], bool] = lambda row: True
  ) -> Iterable[Figures]:
    """Figures over all categories of drafters of these names, without a controller."""
    return figures(
      self.runs,
      lambda row: options.parse("drafter", row["drafter"])[0] in names and keep(row),
      by_category=False,
    )

  def trained(self, recipes: Sequence[str], table: str) -> list[TrainedHead]:
    """Training runs of these recipes, of a table of `ablations` or alone."""
    return [head for head in self.heads if head.recipe[0] in recipes and head.table in (None, table)]

  def prediction(self, found: Figures) -> predictions.Line | None:
    """What the calibration says of these rows over all their categories, by the rounds that were run.

    None where it is of something else: another device, model, head, or drafts that were not measured.
    """
    if not self.fits(found.run) or self._has_another_head(found):
      return None
    lines = predictions.lines(self.costs, [*found.plain, *found.rows])
    return lines[-1] if lines else None

  def predicted(self, found: Figures) -> float | None:
    """The speedup of `prediction`."""
    line = self.prediction(found)
    return None if line is None else line.predicted

  def _has_another_head(self, found: Figures) -> bool:
    head, known = found.run.head(found.method), self.costs.drafts
    widths = [name for name in found.settings["widths"] if name in known]
    return head is not None and any(known[name].get("head") != head["digest"] for name in widths)

  def chain_speedup(self, head: TrainedHead, drafter: str) -> float | None:
    """Speedup of a chain with a head's held-out acceptance, as long as that is known; see `_speedup`."""
    if not head.acceptance:
      return None
    depth = len(head.acceptance)
    return self._speedup(head, drafter, analysis.chain_tokens(head.acceptance), depth + 1, depth)

  def tree_speedup(self, head: TrainedHead, drafter: str, tree: analysis.BestTree) -> float | None:
    """The same of a static tree."""
    return self._speedup(head, drafter, tree.tokens, tree.nodes, tree.depth)

  def _speedup(self, head: TrainedHead, drafter: str, tokens: float, nodes: int, depth: int) -> float | None:
    """By calibrated costs: a level of the draft costs what those of the drafter's calibrated drafts do.

    None without such a draft, or where the calibration is of another device, model or precision.
    """
    if self.costs is None:
      return None
    about = head.config["about"] | {"model": head.target, "dtype": head.settings["--dtype"]}
    if any(self.costs.key.get(name) != about.get(name) for name in _KEY if name != "draft_model"):
      return None
    drafts = [name for name in self.costs.drafts if options.parse("drafter", name)[0] == drafter]
    if not drafts:
      return None
    at_once = drafter in _AT_ONCE
    costs = [
      self.costs.draft_cost(name, live=AT_LIVE) * (self.costs.drafts[name]["depth"] if at_once else depth)
      for name in drafts
    ]
    verify = self.costs.relative(nodes, live=AT_LIVE)
    return analysis.speedup(tokens, verify=verify, draft=statistics.fmean(costs))

  def notes(self, scripts: Sequence[str] = ("spec_bench",), heads: Sequence[TrainedHead] = ()) -> list[str]:
    """A line a run of the given scripts and a folder of training runs, and what was not predicted."""
    mine = [run for run in self.runs if run.info["script"] in scripts]
    lines = [run.note for run in mine]
    for run in mine if self.costs is not None else ():
      if not self.fits(run):
        differ = [name for name in _KEY if self.costs.key.get(name) != run.info.get(name)]
        lines.append(f"[{run.number}]: the calibration has another {', '.join(differ)} and was not used.")
        continue
      others = [found.method for found in figures([run], by_category=False) if self._has_another_head(found)]
      if others:
        lines.append(
          f"[{run.number}]: the calibration has {', '.join(others)} with another head: not predicted."
        )
    return lines + training_files.notes(list(heads))


# --- cells -----------------------------------------------------------------------------------------


def number(value: float | None, form: str = ".2f") -> str | None:
  """A cell; None stays None, and what rounds to 0 has no minus."""
  if value is None:
    return None
  text = f"{value:{form}}"
  return text if float(text) else f"{0.0:{form}}"


def positions(rates: Sequence[float]) -> str | None:
  """Shares in one cell, e.g. acceptance by position; None where there is none."""
  return " ".join(f"{rate:.2f}".lstrip("0") for rate in rates) or None


def chain_where(found: Figures) -> list[str]:
  """First cells of a chain's line: source, device, task, draft, T, window."""
  place = [found.run.name, found.device, found.category, found.method]
  return [*place, f"{found.temperature:g}", str(found.window)]


def where(found: Figures) -> list[str]:
  """Cells of `WHERE` of a measured line."""
  return [found.run.name, found.device, found.run.target, f"{found.temperature:g}"]


def trained_where(head: TrainedHead) -> list[str]:
  """Of a trained head's line; held-out rounds are greedy."""
  return [head.name, head.device, head.target, "0"]


def published_where(row: published.Speed, device: str | None = None) -> list[str | None]:
  """Of a printed line."""
  return ["published", device, row.target, None if row.temperature is None else f"{row.temperature:g}"]


def published_measures(
  row: published.Speed,
  *,
  predicted: float | None = None,
  predicted_tau: float | None = None,
  form: str = ".2f",
) -> list[str | None]:
  """Cells of `MEASURES` of a printed line; ``form`` has as many digits as the speedup was printed with."""
  speedup = number(row.speedup, form)
  cost = row.tau / row.speedup if row.tau is not None and row.speedup is not None else None
  said = f"≤ {speedup}" if row.at_most else speedup
  return [said, number(predicted), None, number(row.tau), number(predicted_tau), None, number(cost)]


def measures(found: Figures, inputs: Inputs, *, predicted_tau: float | None = None) -> list[str | None]:
  """Cells of `MEASURES` of a measured line."""
  cost = found.tau / found.speedup if found.speedup else None
  cells = [None, number(inputs.predicted(found)), number(found.speedup), None, number(predicted_tau)]
  return [*cells, number(found.tau), number(cost)]


def trained_measures(head: TrainedHead, predicted: float | None) -> list[str | None]:
  """Cells of `MEASURES` of a trained head: no time was measured, τ is that of a greedy held-out chain."""
  return [None, number(predicted), None, None, None, number(head.figures.get("tau")), None]
