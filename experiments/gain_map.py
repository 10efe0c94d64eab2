"""Where speculation gains on this device: acceptance × draft cost × response length, measured and predicted.

  python -m experiments.gain_map --output=runs/gain [--quick] [--plot=gain.png]

Real rounds of the real model under the ``synthetic`` rule, which accepts drafts at a given rate whatever they
say: the text is not the target's, the cost is. Drafts are the target's own first layers, a chain of --window;
``free`` drafts cost nothing. Plain decoding and the cells of a draft take turns of a few rounds, so that a
machine whose speed drifts is the same for all. One run serves all response lengths: it decodes to the first
limit, then to the next. Short ones are repeated under other seeds, until --least_tokens of each are seen.

Predictions come from the calibration of this device (`experiments.calibrate`), and are what the tokens of a
round, cut at each limit, cost at the length they start from. The table, the sentence about the border and the
plot come from the rows alone; a killed run goes on with the cells that are missing.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from absl import flags

from experiments import bench as timing
from experiments import calibration, calibration_tables, gain_figures, loops, measure, plots, results, runtime
from experiments import flags as shared
from specjax import decode
from specjax.analysis import CostTable
from specjax.decode import Finish
from specjax.sampling import Settings
from specjax.tree import TokenTree
from specjax.verify import make_rule

ACCEPTANCES = flags.DEFINE_list(
  "acceptances", None, "Rates at which drafts are accepted. Default: 0.2,0.4,0.6,0.8,0.95, quick 0.4,0.8."
)
# Another script has a flag of this name, type and default; one process may import both.
LAYERS = flags.DEFINE_list(
  "layers",
  None,
  "Layers of the target that draft. Default: 1,5,10,20, quick 1,10.",
  allow_override=True,
)
RESPONSES = flags.DEFINE_list("responses", None, "New tokens. Default: 16,64,256,1024, quick 16,64.")
PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 64, "Tokens of the prompt.", 2)
LEAST_TOKENS = flags.DEFINE_integer(
  "least_tokens", 256, "Short responses are repeated up to so many tokens.", 1
)
QUICK = flags.DEFINE_bool("quick", False, "Fewer rates, sizes and responses.", allow_override=True)

NOT_USED = (
  "seed",
  "top_k",
  "top_p",
  "min_p",
  "repetition_penalty",
  "presence_penalty",
  "frequency_penalty",
  "logit_bias",
  "chat",
  "draft_model",
  "drafter_path",
  "drafter",
  "draft_policy",
  "rule",
  "temperature",
  "batch_size",
  "max_new_tokens",
  "min_new_tokens",
  "max_length",
  "warmup",
  "repeats",
)
FREE = 0  # layers of a draft that costs nothing
_PREFILLS = 5
# Cells of one draft that take turns with plain decoding; each has a state of its own.
_TOGETHER = 5


# --- what is asked ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plan:
  """The flags, checked; ``layers`` begin with the free draft."""

  acceptances: tuple[float, ...]
  layers: tuple[int, ...]
  responses: tuple[int, ...]
  window: int
  prompt: int
  least_tokens: int

  def cells(self) -> list[tuple[int, float]]:
    return [(layers, acceptance) for layers in self.layers for acceptance in self.acceptances]

  def pending(self, rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Cells that lack a response; they are measured whole."""
    done = {(row["layers"], row["acceptance"], row["response"]) for row in rows}
    return [
      cell for cell in self.cells() if any((*cell, response) not in done for response in self.responses)
    ]

  def runs(self) -> Iterator[tuple[int, ...]]:
    """Responses of each run of a cell: all in the first, then the short ones alone."""
    repeats = {response: -(-self.least_tokens // response) for response in self.responses}
    for number in range(max(repeats.values())):
      yield tuple(response for response in self.responses if not number or repeats[response] > number)

  def drafter(self, layers: int) -> str:
    return f"self_speculation[layers={layers},window={self.window}]" if layers != FREE else "free"


def plan_from_flags() -> Plan:
  """Raises ValueError for what can be known to be wrong before a model is there."""
  shared.refuse(NOT_USED, "gain_map", "--acceptances, --layers and --responses")
  quick, window = QUICK.value, shared.WINDOW.value
  if window == 0:
    raise ValueError("--window = 0; a round needs at least 1 draft")
  plots.check()
  return Plan(
    acceptances=_rates((0.4, 0.8) if quick else (0.2, 0.4, 0.6, 0.8, 0.95)),
    layers=(FREE, *shared.ascending(LAYERS, (1, 10) if quick else (1, 5, 10, 20))),
    responses=shared.ascending(RESPONSES, (16, 64) if quick else (16, 64, 256, 1024)),
    window=4 if window is None else window,
    prompt=PROMPT_TOKENS.value,
    least_tokens=LEAST_TOKENS.value,
  )


def _rates(default: Sequence[float]) -> tuple[float, ...]:
  texts = ACCEPTANCES.value
  try:
    rates = [float(text) for text in texts] if texts is not None else list(default)
  except ValueError:
    rates = []
  if not rates or not all(0 <= rate <= 1 for rate in rates) or rates != sorted(set(rates)):
    raise ValueError(f"--acceptances = {','.join(texts)!r}; rates in [0, 1] that ascend are needed")
  return tuple(rates)


# --- prediction ------------------------------------------------------------------------------------


def visits(acceptance: float, window: int, responses: Sequence[int]) -> np.ndarray:
  """Probability that a round starts behind n new tokens, ``[longest response]``.

  Far from limits it is one over the expected tokens a round, (1 - α^(G+1)) / (1 - α). A limit cuts the round
  that reaches it, and the next one starts there.

  Args:
    acceptance: α, of each draft behind an accepted one.
    window: G, drafts a round.
    responses: limits, ascending.
  """
  emits = [acceptance**accepted * (1 - acceptance) for accepted in range(window)] + [acceptance**window]
  starts = np.zeros(responses[-1] + 1)
  starts[0] = 1.0
  limits = iter(responses)
  limit = next(limits)
  for at in range(responses[-1]):
    limit = next(limits) if at == limit else limit
    for accepted, chance in enumerate(emits):
      starts[min(at + accepted + 1, limit)] += starts[at] * chance
  return starts[:-1]


def predicted_ms(
  table: CostTable, drafter: str | None, acceptance: float, window: int, prompt: int, responses: Sequence[int]
) -> list[float]:
  """Milliseconds of decoding up to each response length, in calls of `measure.TURN` rounds.

  Args:
    drafter: as the table has it; None is a free draft.
    acceptance, window: of its drafts; plain decoding has a window of 0.
    prompt: tokens before the first new one.
  """
  starts = visits(acceptance, window, responses)
  # Costs are linear between the calibration's live lengths: a few points are exact enough.
  grid = np.unique(np.linspace(0, len(starts) - 1, 65).astype(int))
  draft = lambda live: table.draft_ms_at(drafter, live=live) if drafter else 0.0
  costs = [table.round_ms_at(window + 1, live=prompt + n) + draft(prompt + n) for n in grid.tolist()]
  spent = np.cumsum(starts * np.interp(np.arange(len(starts)), grid, costs))
  calls = np.maximum(np.cumsum(starts) / measure.TURN, 1)
  return [float(spent[r - 1] + calls[r - 1] * table.call_ms) for r in responses]


def needed_calibration(plan: Plan, job: runtime.Job) -> CostTable:
  """The calibration of this device with the plan's drafters, or the command that makes it.

  Raises:
    ValueError: there is none, or it lacks a drafter.
  """
  drafters = [plan.drafter(layers) for layers in plan.layers if layers != FREE]
  table = calibration.load(runtime.calibration_key(job))
  lacking = drafters if table is None else [name for name in drafters if name not in table.drafts]
  if not lacking:
    return table
  what = "no calibration of this device and target" if table is None else f"it lacks {', '.join(lacking)}"
  given = [shared.MODEL, shared.DTYPE, shared.ATTENTION, shared.CALIBRATION]
  others = "".join(f" --{flag.name}={flag.value}" for flag in given if flag.value != flag.default)
  names = ",".join(dict.fromkeys([*(table.drafts if table else ["prompt_lookup"]), *drafters]))
  raise ValueError(
    f'calibration: {what}; make it with python -m experiments.calibrate{others} --drafters="{names}"'
  )


# --- measuring -------------------------------------------------------------------------------------


class GainMap:
  """The models, compiled loops and states of the cells."""

  def __init__(self, plan: Plan, directory: results.RunDirectory, job: runtime.Job):
    self.plan, self.directory, self.job = plan, directory, job
    self.limit = plan.prompt + plan.responses[-1]
    most = job.target.config.max_length
    if self.limit > most:
      raise ValueError(
        f"--prompt_tokens = {plan.prompt} and --responses = {plan.responses[-1]} need {self.limit} tokens; "
        f"the model was made for {most} positions"
      )
    self.plain = runtime.make_method(job, "none", self.limit)
    self.drafting = {layers: self._drafting(layers) for layers in plan.layers}
    self.table = needed_calibration(plan, job)
    self.prompt = [int(i) % job.target.config.num_real_tokens for i in 100 + np.arange(plan.prompt) % 37]
    # By draft, None for plain, and by place among the cells that run together.
    self.states: dict[tuple[int | None, int], decode.DecodeState] = {}
    self.prefill_ms: dict[int | None, float] = {}

  def _drafting(self, layers: int) -> runtime.Method:
    if layers != FREE:
      return runtime.make_method(self.job, self.plan.drafter(layers), self.limit)
    nodes = self.plan.window + 1
    return timing.fixed(self.plain, TokenTree.chain(nodes - 1), slots=self.limit + nodes)

  def method(self, layers: int, acceptance: float) -> runtime.Method:
    """The draft under a rule that accepts at this rate."""
    method = self.drafting[layers]
    rule = make_rule("synthetic", rates=(acceptance,))
    return dataclasses.replace(method, config=dataclasses.replace(method.config, rule=rule))

  def prefill(self, method: runtime.Method) -> decode.DecodeState:
    """A prompt that no stop id ends."""
    most = self.plan.responses[-1]
    settings = Settings.create(1)
    return decode.prefill(
      method.weights, method.config, [self.prompt], settings=settings, max_new_tokens=most, mesh=self.job.mesh
    )

  def prepare(self, cells: Sequence[tuple[int, float]]) -> int:
    """Compiles everything and times the prefills; returns the number of programs."""
    before = measure.compile_count()
    sizes = list(dict.fromkeys(layers for layers, _ in cells))
    for few in tqdm.tqdm([[], *self.together(cells)], desc="compiling", unit="group", file=sys.stderr):
      for seed in range(2):  # a state that came back may lie on its device in another way
        self.run(few, seed, self.plan.responses[:1], rounds=1)
    for layers in [None, *sizes]:
      method = self.plain if layers is None else self.drafting[layers]
      cases = [timing.blocked(lambda method=method: self.prefill(method)) for _ in range(_PREFILLS)]
      self.prefill_ms[layers] = 1e3 * results.median(case() for case in cases)
    return measure.compile_count() - before

  @staticmethod
  def together(cells: Sequence[tuple[int, float]]) -> list[list[tuple[int, float]]]:
    """The cells in groups of one draft that run together."""
    by_draft = [list(group) for _, group in itertools.groupby(cells, key=lambda cell: cell[0])]
    return [group[i : i + _TOGETHER] for group in by_draft for i in range(0, len(group), _TOGETHER)]

  def start(self, layers: int | None, place: int, seed: int) -> decode.DecodeState:
    """The state of a place, behind the prompt."""
    if (layers, place) not in self.states:
      # Those of another draft go.
      self.states = {key: state for key, state in self.states.items() if key[0] in (None, layers)}
      self.states[layers, place] = self.prefill(self.plain if layers is None else self.drafting[layers])
    state = loops.rewind(self.states.pop((layers, place)), self.plan.prompt)
    return state.replace(settings=state.settings.replace(seed=jnp.full_like(state.settings.seed, seed)))

  def run(
    self, few: Sequence[tuple[int, float]], seed: int, responses: Sequence[int], rounds: int = measure.TURN
  ) -> list[dict[int, tuple[float, int]]]:
    """Plain decoding and some cells of one draft in turns of some rounds, to one length after the other.

    Returns:
      Of each, plain first, milliseconds and rounds up to a length, by response.
    """
    methods = [self.plain, *(self.method(*cell) for cell in few)]
    keys = [(None, 0), *((layers, place) for place, (layers, _) in enumerate(few))]
    states = [self.start(*key, seed) for key in keys]
    found: list[dict[int, tuple[float, int]]] = [{} for _ in methods]
    spent = np.zeros(len(methods))
    for response in responses:
      states = jax.block_until_ready([_until(state, self.plan.prompt + response) for state in states])
      spent += 1e3 * np.array(measure.in_turns(methods, states, rounds))
      for one, ms, state in zip(found, spent.tolist(), states, strict=True):
        one[response] = ms, int(state.log.rounds[0])
    self.states.update(zip(keys, states, strict=True))
    return found

  def timed(self, few: Sequence[tuple[int, float]]) -> list[dict[int, tuple[float, float]]]:
    """Means of milliseconds and rounds over the runs, of plain decoding and each cell, by response."""
    seen = [{response: [] for response in self.plan.responses} for _ in range(len(few) + 1)]
    for seed, responses in enumerate(self.plan.runs()):
      for one, found in zip(seen, self.run(few, seed, responses), strict=True):
        for response, pair in found.items():
          one[response].append(pair)
    return [
      {response: tuple(np.mean(pairs, axis=0).tolist()) for response, pairs in one.items()} for one in seen
    ]

  def measure(self, cells: Sequence[tuple[int, float]]) -> Iterator[list[dict[str, Any]]]:
    """The rows of each cell."""
    for few in self.together(cells):
      compiles = measure.compile_count()
      plain, *found = self.timed(few)
      compiles = measure.compile_count() - compiles
      for cell, times in zip(few, found, strict=True):
        yield rows_of(self.plan, self.table, cell, times, plain, self.prefill_ms, compiles)


def _until(state: decode.DecodeState, length: int) -> decode.DecodeState:
  """The state, to be decoded up to this length."""
  none = jnp.full_like(state.finish, Finish.NONE)
  return state.replace(limit=jnp.full_like(state.limit, length), finish=none)


def rows_of(
  plan: Plan,
  table: CostTable,
  cell: tuple[int, float],
  found: Mapping[int, tuple[float, float]],
  plain: Mapping[int, tuple[float, float]],
  prefill_ms: Mapping[int | None, float],
  compiles: int,
) -> list[dict[str, Any]]:
  """A row a response: times, rounds, and the speedups that were measured and predicted.

  Args:
    found: milliseconds and rounds by response.
    plain: the same of plain decoding beside it.
    prefill_ms: by layers, None is plain.
    compiles: programs compiled meanwhile.
  """
  layers, acceptance = cell
  drafter = None if layers == FREE else plan.drafter(layers)
  alone = predicted_ms(table, None, 0.0, 0, plan.prompt, plan.responses)
  drafted = predicted_ms(table, drafter, acceptance, plan.window, plan.prompt, plan.responses)
  # One figure a draft: its cost hardly changes with the length.
  live = plan.prompt + plan.responses[-1] // 2
  rows = []
  for number, response in enumerate(plan.responses):
    ms, rounds = found[response]
    plain_ms, _ = plain[response]
    whole = (plain_ms + prefill_ms[None]) / (ms + prefill_ms[layers])
    rows.append(
      {
        "layers": layers,
        "acceptance": acceptance,
        "response": response,
        "window": plan.window,
        "c": table.draft_cost(drafter, live=live) if drafter else 0.0,
        "ms": ms,
        "rounds": rounds,
        "plain_ms": plain_ms,
        "prefill_ms": prefill_ms[layers],
        "plain_prefill_ms": prefill_ms[None],
        "speedup": plain_ms / ms,
        "speedup_with_prefill": whole,
        "predicted": alone[number] / drafted[number],
        "compiles": compiles,
      }
    )
  return rows


def points_of(plan: Plan, table: CostTable) -> list[dict[str, Any]]:
  """Drafters whose acceptance the calibration has: where they stand on the map."""
  live = plan.prompt + plan.responses[-1] // 2
  return [
    {
      "drafter": name,
      "acceptance": calibration_tables.mean_acceptance(found),
      "c": table.draft_cost(name, live=live),
    }
    for name, found in table.acceptance.items()
    if name in table.drafts
  ]


def measure_all(plan: Plan, directory: results.RunDirectory) -> None:
  """Measures the cells that are missing."""
  job = runtime.load_job([plan.drafter(layers) for layers in plan.layers if layers != FREE])
  gain = GainMap(plan, directory, job)
  key = dict(gain.table.key)
  calibration.check_key(directory.path, directory.info.get("key", key), key)
  directory.update(key=key, model=job.target.source, points=points_of(plan, gain.table))
  cells = plan.pending(directory.rows)
  compiled = gain.prepare(cells)
  print(
    f"{compiled} programs compiled before timing, {len(cells)} loops of cells among them", file=sys.stderr
  )
  done = len(plan.cells()) - len(cells)
  with tqdm.tqdm(total=len(plan.cells()), initial=done, unit="cell", file=sys.stderr) as bar:
    for rows in gain.measure(cells):
      for row in rows:
        directory.append(row)
      bar.update()
  directory.finish(rows=len(directory.rows))


def main(_: list[str]) -> None:
  if not shared.OUTPUT.value:
    raise ValueError("--output is empty; a run directory is needed, e.g. --output=runs/gain")
  plan = plan_from_flags()
  modules = [shared, sys.modules[__name__]]
  directory = results.RunDirectory(shared.OUTPUT.value, "gain_map", modules)
  if directory.info.get("rows") != len(directory.rows):
    measure_all(plan, directory)
  gain_figures.show(directory.rows)
  path = plots.PLOT.value or os.path.join(directory.path, "gain_map.png")
  if not plots.can_draw():
    print("no plot: it needs matplotlib (pip install 'specjax[plot]')", file=sys.stderr)
    return
  gain_figures.plot(directory.rows, directory.info["points"], path, directory.info["key"])
  print(f"plot: {path}", file=sys.stderr)


if __name__ == "__main__":
  shared.run(main)
