"""Leviathan, Kalman, Matias 2023: predicted and measured speedup of two-model chains, and lenience."""

from __future__ import annotations

from experiments import published, rule_figures
from experiments.render import Table
from experiments.run_files import Figures, Run, chains
from experiments.tables.inputs import Inputs, chain_where, number
from specjax import analysis, options

# A window no draft of the paper is longer than.
_LONGEST = 64


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


def _our_leviathan(found: Figures, inputs: Inputs) -> list[str | None]:
  alpha, c = found.alpha, inputs.draft_cost(found)
  predicted = own = None
  if alpha is not None and c is not None:
    predicted = analysis.leviathan_speedup(alpha, found.window, c)
    verify = inputs.costs.relative(found.window + 1, batch=found.batch, live=found.live)
    tokens = analysis.iid_tokens(alpha, found.window)
    own = analysis.speedup(tokens, verify=verify, draft=found.window * c)
  return [
    *chain_where(found),
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
