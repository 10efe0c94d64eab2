"""Tables of papers beside what their formulas predict and what our runs measured.

  python -m experiments.paper_tables --runs=runs/first,runs/rules --output=tables/

Reads run directories of `spec_bench` and `rule_bench` and, with --calibration, the costs of the device;
runs nothing. Each table is written as Markdown, CSV and LaTeX, and printed. What no run holds is a dash.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from absl import flags

from experiments import flags as shared
from experiments import published, render, rule_figures
from experiments.render import Table
from experiments.run_files import ChainFigures, Run, chains
from specjax import analysis, options
from specjax.analysis import CostTable

RUNS = flags.DEFINE_list("runs", [], "Run directories, with commas between; without any only published rows.")
TABLES_FLAG = flags.DEFINE_list("tables", [], "Which tables, with commas between. Default: all.")

# A window no draft of the papers is longer than.
_LONGEST = 64
# Fields of a calibration's key that a run has to agree with.
_KEY = ("platform", "device_kind", "cpu", "model", "draft_model", "dtype")


@dataclasses.dataclass(frozen=True)
class Inputs:
  """What tables are made from: the runs and, if given, the costs of their device."""

  runs: list[Run]
  costs: CostTable | None = None

  def fits(self, run: Run) -> bool:
    """Whether the costs are those of the run's device, model and precision."""
    return self.costs is not None and all(self.costs.key.get(name) == run.info.get(name) for name in _KEY)

  def draft_cost(self, found: ChainFigures) -> float | None:
    """c of the drafter on its device, None where the calibration does not tell."""
    if not self.fits(found.run) or found.drafter not in self.costs.drafts:
      return None
    return self.costs.draft_cost(found.drafter, batch=found.batch, live=found.live)

  def notes(self, scripts: Sequence[str]) -> list[str]:
    """A line a run of the given scripts, and what the calibration was used for."""
    mine = [run for run in self.runs if run.info["script"] in scripts]
    lines = [run.note for run in mine]
    for run in mine if self.costs is not None else ():
      if not self.fits(run):
        differ = [name for name in _KEY if self.costs.key.get(name) != run.info.get(name)]
        lines.append(f"[{run.number}]: the calibration has another {', '.join(differ)} and was not used.")
    return lines


def number(value: float | None, form: str = ".2f") -> str | None:
  """A cell; None stays None, and what rounds to 0 has no minus."""
  if value is None:
    return None
  text = f"{value:{form}}"
  return text if float(text) else f"{0.0:{form}}"


# --- Leviathan et al. 2023 -------------------------------------------------------------------------


def leviathan(inputs: Inputs) -> Table:
  """Tables 2 and 4: α, predicted and measured speedup, and our two-model chains."""
  header = (
    "source",
    "device",
    "task",
    "draft",
    "T",
    "γ",
    "α",
    "c",
    "published predicted ×",
    "predicted ×",
    "predicted − published",
    "predicted × with own verify cost",
    "predicted operations ×",
    "published measured ×",
    "ours ×",
    "ours τ",
  )
  rows = [_published_leviathan(row) for row in published.LEVIATHAN]
  rows += [_our_leviathan(found, inputs) for found in chains(inputs.runs)]
  notes = [
    f"Published: {published.LEVIATHAN_SOURCE}; target {published.LEVIATHAN_TARGET}, batch 1.",
    "predicted ×: (1 − α^(γ+1)) / (1 − α) / (γc + 1), which takes a round's verifying for a plain step; "
    "for published rows from their α, γ and c, rounded as printed.",
    "predicted × with own verify cost: the same tokens over the device's cost of γ + 1 nodes and the draft.",
    "predicted operations ×: theorem 3.11, with ĉ as the ratio of the parameters.",
    "ours: α is the mean Σ min(p, q) over judged drafts, in greedy runs their accepted share; c is from the "
    "calibration; × is decode speed over plain decoding on the same prompts; τ is tokens a round. Sampled "
    "chains are judged by the run's rule; block verification accepts more than the formula has.",
  ]
  title = "Leviathan et al. 2023: predicted and measured speedup"
  return Table("leviathan", title, header, rows, notes + inputs.notes(("spec_bench",)))


def _published_leviathan(row: published.LeviathanRow) -> list[str | None]:
  c = published.LEVIATHAN_C[row.draft]
  c_hat = published.LEVIATHAN_PARAMETERS[row.draft] / published.LEVIATHAN_PARAMETERS["XXL"]
  predicted = analysis.leviathan_speedup(row.alpha, row.window, c)
  return [
    "published",
    published.LEVIATHAN_DEVICE,
    row.task,
    row.draft,
    f"{row.temperature:g}",
    str(row.window),
    number(row.alpha),
    number(c),
    number(row.predicted, ".1f"),
    number(predicted),
    number(predicted - row.predicted, "+.2f"),
    None,
    number(analysis.operations_factor(row.alpha, row.window, c_hat)),
    number(row.measured, ".1f"),
    None,
    None,
  ]


def _whose(found: ChainFigures) -> list[str]:
  """First cells of a line of ours: source, device, task, draft, T, γ."""
  where = [found.run.name, found.device, found.category, found.drafter]
  return [*where, f"{found.temperature:g}", str(found.window)]


def _our_leviathan(found: ChainFigures, inputs: Inputs) -> list[str | None]:
  alpha, c = found.alpha, inputs.draft_cost(found)
  predicted = own = None
  if alpha is not None and c is not None:
    predicted = analysis.leviathan_speedup(alpha, found.window, c)
    verify = inputs.costs.relative(found.window + 1, batch=found.batch, live=found.live)
    tokens = analysis.iid_tokens(alpha, found.window)
    own = analysis.speedup(tokens, verify=verify, draft=found.window * c)
  return [
    *_whose(found),
    number(alpha),
    number(c),
    None,
    number(predicted),
    None,
    number(own),
    None,
    None,
    number(found.speedup),
    number(found.tau),
  ]


def leviathan_lenience(inputs: Inputs) -> Table:
  """What lenience gives: published α and speedup, and tokens a round of our rule runs."""
  header = (
    "source",
    "device",
    "draft",
    "T",
    "l",
    "γ",
    "α",
    "predicted tokens",
    "ours tokens",
    "predicted ×",
    "predicted × at the best γ",
    "best γ",
    "published measured ×",
    "ours KL, nats",
  )
  rows = [_published_lenience(row) for row in published.LENIENCE]
  rows += [line for run in inputs.runs if run.info["script"] == "rule_bench" for line in _our_lenience(run)]
  c = published.LEVIATHAN_C[published.LENIENCE_DRAFT]
  notes = [
    f"Published: {published.LENIENCE_SOURCE}; {published.LENIENCE_TASK}, draft {published.LENIENCE_DRAFT}. "
    "γ is not printed with these figures; 7 is that of the same pair at the same α in table 2.",
    "predicted tokens: (1 − α^(γ+1)) / (1 − α). "
    f"predicted ×: tokens over γc + 1 with the paper's c = {c}, at this γ and at the γ where it is largest.",
    "ours: tokens a round ± standard error over contexts; α is the one that gives these tokens by the "
    "formula at this γ, so the predicted × of our rows say what the paper's device would make of our "
    "acceptance. No time was measured. KL(law of the first token ‖ target) is what lenience pays.",
  ]
  title = "Leviathan et al. 2023: lenience"
  return Table("leviathan_lenience", title, header, rows, notes + inputs.notes(("rule_bench",)))


def _by_lenience(alpha: float, window: int) -> list[str | None]:
  """Cells that follow from α: speedup at γ and at the best γ with the paper's c, and that γ."""
  c = published.LEVIATHAN_C[published.LENIENCE_DRAFT]
  best = analysis.best_window(alpha, lambda nodes: 1.0, lambda drafts: c * drafts, max_window=_LONGEST)
  at = lambda gamma: number(analysis.leviathan_speedup(alpha, gamma, c))
  return [at(window), at(best), str(best)]


def _published_lenience(row: published.LenienceRow) -> list[str | None]:
  window = 7
  return [
    "published",
    published.LEVIATHAN_DEVICE,
    published.LENIENCE_DRAFT,
    None,
    f"{row.lenience:g}",
    str(window),
    number(row.alpha),
    number(analysis.iid_tokens(row.alpha, window)),
    None,
    *_by_lenience(row.alpha, window),
    number(row.measured, ".1f"),
    None,
  ]


def _our_lenience(run: Run) -> list[list[str | None]]:
  """A line a temperature and lenience; the proposals of lossy rules are chains of one window."""
  groups: dict[tuple[float, str, float], list[rule_figures.Row]] = {}
  for row in run.rows:
    rule, settings = options.parse("rule", row["rule"])
    if rule == "lenient_speculative_sampling":
      key = row["temperature"], row["proposal"], settings.get("lenience", 1.0)
      groups.setdefault(key, []).append(row)
  lines = []
  for (temperature, proposal, lenience), rows in groups.items():
    window = _window_of(run, proposal)
    tokens, error = rule_figures.mean_and_error([row["tokens"] for row in rows])
    alpha = analysis.alpha_from_tokens(tokens, window)
    paid = [row["divergence"] for row in rows if row.get("divergence") is not None]
    lines.append(
      [
        run.name,
        run.device,
        proposal,
        f"{temperature:g}",
        f"{lenience:g}",
        str(window),
        number(alpha),
        None,
        number(tokens) + ("" if error is None else f" ± {error:.2f}"),
        *_by_lenience(alpha, window),
        None,
        number(rule_figures.mean_and_error(paid)[0], ".3f") if paid else None,
      ]
    )
  return lines


def _window_of(run: Run, proposal: str) -> int:
  """γ of a chain that `rule_bench` judged: of its own options, of --window, or the drafter's default."""
  name, settings = options.parse("proposal", proposal)
  given = settings.get("window", run.flag("window"))
  if given is None:
    from experiments import runtime  # needs the models' modules, which the tables do without

    given = runtime.DEFAULT_WINDOWS[name]
  return int(given)


# --- Chen et al. 2023 ------------------------------------------------------------------------------


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


def _our_chen(found: ChainFigures, inputs: Inputs) -> list[str | None]:
  c = inputs.draft_cost(found)
  alpha = analysis.alpha_from_tokens(found.tau, found.window) if found.tau >= 1 else None
  return [
    *_whose(found),
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


# --- the script ------------------------------------------------------------------------------------

# A new table is a function here.
TABLES: dict[str, Callable[[Inputs], Table]] = {
  "leviathan": leviathan,
  "leviathan_lenience": leviathan_lenience,
  "chen": chen,
}


def main(_: list[str]) -> None:
  if not shared.OUTPUT.value:
    raise ValueError("--output is empty; a folder for the tables is needed, e.g. --output=tables")
  names = list(dict.fromkeys(TABLES_FLAG.value)) or list(TABLES)
  for name in names:
    if name not in TABLES:
      raise ValueError(f"--tables has {name!r}; it must be of {', '.join(TABLES)}")
  runs = [Run.read(path, number) for number, path in enumerate(dict.fromkeys(RUNS.value), start=1)]
  inputs = Inputs(runs, CostTable.read(shared.CALIBRATION.value) if shared.CALIBRATION.value else None)
  for name in names:
    table = TABLES[name](inputs)
    render.write(table, shared.OUTPUT.value)
    print(render.markdown(table))


if __name__ == "__main__":
  shared.run(main)
