"""The scheduler run against a table of costs instead of a device: what a load will meet. No jax.

Requests, scheduler and policies are the real ones. A step takes what a calibration file has for its chunks
and rounds, and how many drafts are accepted is drawn from measured acceptances by depth. What is left out:
stop ids (a request gets all the tokens it asks for), and that the longest prompts cost more to read.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Sequence
from typing import Literal, NamedTuple

from specjax.analysis import CostTable
from specjax.serving.arrivals import Workload
from specjax.serving.plans import Plan, PrefixLookup
from specjax.serving.requests import Request, Update
from specjax.serving.scheduler import Counts, Scheduler, SchedulerConfig, Width
from specjax.serving.summary import Timing


@dataclasses.dataclass(frozen=True)
class Acceptance:
  """How a drafter fares.

  Attributes:
    rates: chance that the draft at depth 1, 2, … is accepted where those before it were; deeper ones as the
      last.
    proposing: share of rounds in which it has something to propose.
  """

  rates: Sequence[float]
  proposing: float = 1.0

  def __post_init__(self):
    object.__setattr__(self, "rates", tuple(self.rates))
    for field, values in (("rates", self.rates), ("proposing", (self.proposing,))):
      if not values or not all(0 <= value <= 1 for value in values):
        raise ValueError(f"{field} = {getattr(self, field)}; they must be in [0, 1], and there must be one")

  @classmethod
  def measured(cls, table: CostTable, drafter: str) -> Acceptance:
    """What the calibration has measured of a drafter.

    Raises:
      ValueError: nothing, or no round in which it proposed something.
    """
    found = table.acceptance.get(drafter)
    if found is None or not len(found["rates"]):
      known = ", ".join(name for name, other in table.acceptance.items() if len(other["rates"])) or "none"
      raise ValueError(f"acceptance of {drafter!r} is not in the calibration; it has {known}")
    return cls(found["rates"].tolist(), found["proposing"])

  def at(self, depth: int) -> float:
    """The rate at a depth, from 1."""
    return self.rates[min(depth, len(self.rates)) - 1]

  def expected(self, depth: int) -> float:
    """Tokens of a round that drafts so deep, the bonus included."""
    total, reached = 1.0, self.proposing
    for level in range(1, depth + 1):
      reached *= self.at(level)
      total += reached
    return total

  def draw(self, depth: int, chance: random.Random) -> int | None:
    """How many drafts are accepted; None: nothing was proposed."""
    if not depth or chance.random() >= self.proposing:
      return None
    return next((level - 1 for level in range(1, depth + 1) if chance.random() >= self.at(level)), depth)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
  """What an engine's steps cost, by a calibration.

  Attributes:
    table: of the device and the target.
    drafters: the widths besides plain, keys of ``table.drafts``.
    batches: numbers of rows that rounds are compiled for, ascending: a round costs what the smallest that
      holds the decoding rows does. (An engine with one static batch: its slots alone.)
    step_ms: of a step besides the device's work.
    admit_ms: of giving a row to a request.
    copy_ms: of a row that is copied from a kept prefix.
  """

  table: CostTable
  drafters: Sequence[str] = ()
  batches: Sequence[int]
  step_ms: float = 0.0
  admit_ms: float = 0.0
  copy_ms: float = 0.0

  def __post_init__(self):
    put = lambda field, value: object.__setattr__(self, field, value)
    put("drafters", tuple(self.drafters))
    put("batches", tuple(self.batches))
    for name in self.drafters:
      if name not in self.table.drafts:
        known = ", ".join(self.table.drafts) or "none"
        raise ValueError(f"drafters has {name!r}, which is not in the calibration; it has {known}")
    if not self.batches or list(self.batches) != sorted(set(self.batches)) or self.batches[0] < 1:
      raise ValueError(f"batches = {self.batches}; they must ascend from 1 or more")
    for field in ("step_ms", "admit_ms", "copy_ms"):
      if not getattr(self, field) >= 0:
        raise ValueError(f"{field} = {getattr(self, field)}; it must be at least 0")

  @property
  def widths(self) -> tuple[Width, ...]:
    """For `SchedulerConfig.widths`."""
    return tuple(Width(cost["depth"], cost["nodes"]) for cost in map(self.table.drafts.get, self.drafters))

  def verify_ms(self, nodes: int, *, rows: int, live: int) -> float:
    """Of a round without its draft."""
    return self.table.round_ms_at(nodes, batch=self._batch(rows), live=live)

  def draft_ms(self, drafter: str, *, rows: int, live: int, unseen: int = 0) -> float:
    """Of a draft, by rows of which one has so many tokens that the drafter has not seen."""
    drafting = self.table.draft_ms_at(drafter, batch=self._batch(rows), live=live)
    return drafting + unseen * self.table.drafts[drafter]["catch_up_ms"]

  def _batch(self, rows: int) -> int:
    return next((batch for batch in self.batches if batch >= rows), self.batches[-1])


class Step(NamedTuple):
  """A step on the timeline, in milliseconds of work; it began at ``start_s``.

  Attributes:
    start_s: seconds from the start of the load.
    prefill_ms, draft_ms, verify_ms, host_ms: its parts, in that order.
    prompt_tokens: rows that were prefilled.
    decoding: rows that decoded.
    waiting: requests without a row.
    depth: of the plan.
    emitted: tokens.
  """

  start_s: float
  prefill_ms: float
  draft_ms: float
  verify_ms: float
  host_ms: float
  prompt_tokens: int
  decoding: int
  waiting: int
  depth: int
  emitted: int

  @property
  def seconds(self) -> float:
    return (self.prefill_ms + self.draft_ms + self.verify_ms + self.host_ms) / 1e3


@dataclasses.dataclass(frozen=True)
class Simulation:
  """A load that was simulated: `summary.summarize` takes its timings."""

  timings: tuple[Timing, ...]
  steps: tuple[Step, ...]
  counts: Counts


def simulate(
  workload: Workload,
  config: SchedulerConfig,
  costs: Costs,
  acceptance: Sequence[Acceptance] = (),
  *,
  choice: Literal["deepest", "best"] = "deepest",
  prefix: PrefixLookup = lambda request, text: None,
  seed: int = 0,
) -> Simulation:
  """Runs a load to its end.

  Args:
    workload: who comes.
    config: of the scheduler; its widths are ``costs.widths``.
    costs: of steps.
    acceptance: of each width.
    choice: which of the widths that a plan allows runs: the deepest, or what a controller that knows costs
      and acceptance takes, the most expected tokens for its cost, plain decoding among them.
    prefix: see `Scheduler`; prompts are zeros.
    seed: of what is accepted; a request's luck does not depend on the others.

  Raises:
    ValueError: widths or acceptances that do not fit the drafters, or an unknown choice.
  """
  if tuple(config.widths) != costs.widths:
    raise ValueError(f"widths = {tuple(map(tuple, config.widths))}; the drafters' are {costs.widths}")
  if len(acceptance) != len(costs.drafters):
    raise ValueError(f"acceptance has {len(acceptance)} entries for {len(costs.drafters)} drafters")
  if choice not in ("deepest", "best"):
    raise ValueError(f"choice = {choice!r}; it must be deepest or best")
  return _Run(workload, Scheduler(config, prefix), costs, tuple(acceptance), choice, seed).to_end()


@dataclasses.dataclass
class _Open:
  """A request that has not ended."""

  arrived_s: float
  number: int
  length: int
  left: int
  chance: random.Random
  prompt_tokens: int
  first_s: float | None = None
  new_tokens: int = 0
  rounds: int = 0
  unseen: int = 0  # tokens emitted since it last drafted


class _Run:
  def __init__(self, workload, scheduler, costs, acceptance, choice, seed):
    self._source, self._scheduler, self._costs = workload.start(), scheduler, costs
    # Interpolating takes longer than all the rest of a step, and most steps have been seen.
    self._verify_ms, self._draft_ms = functools.cache(costs.verify_ms), functools.cache(costs.draft_ms)
    self._chunk_ms = functools.cache(lambda width: costs.table.prefill_ms_of([width]))
    self._acceptance, self._choice, self._seed = acceptance, choice, seed
    self._open: dict[str, _Open] = {}
    self._timings: list[Timing] = []
    self._steps: list[Step] = []
    self._now_s = 0.0

  def to_end(self) -> Simulation:
    while True:
      for arrival in self._source.take(self._now_s):
        self._submit(arrival)
      if not self._scheduler.idle:
        self._step()
      elif self._source.next_s is None:
        break
      else:
        self._now_s = max(self._now_s, self._source.next_s)
    self._timings.sort(key=lambda timing: timing.number)
    return Simulation(tuple(self._timings), tuple(self._steps), self._scheduler.counts)

  def _submit(self, arrival) -> None:
    id = str(arrival.number)
    self._open[id] = _Open(
      arrived_s=arrival.time_s,
      number=arrival.number,
      length=arrival.prompt_tokens,
      left=arrival.new_tokens,
      chance=random.Random(f"{self._seed} {arrival.number}"),
      prompt_tokens=arrival.prompt_tokens,
    )
    request = Request(id=id, prompt=(0,) * arrival.prompt_tokens, max_new_tokens=arrival.new_tokens)
    for update in self._scheduler.submit(request):
      self._hear(update)

  def _step(self) -> None:
    plan = self._scheduler.plan()
    prefill_ms = math.fsum(self._chunk_ms(chunk.width) for chunk in plan.prefill)
    copied = sum(admission.cached for admission in plan.admit)
    host_ms = self._costs.step_ms + len(plan.admit) * self._costs.admit_ms + copied * self._costs.copy_ms
    updates, draft_ms, verify_ms = self._rounds(plan)
    host_ms += self._costs.table.call_ms * bool(plan.decode)
    step = Step(
      start_s=self._now_s,
      prefill_ms=prefill_ms,
      draft_ms=draft_ms,
      verify_ms=verify_ms,
      host_ms=host_ms,
      prompt_tokens=sum(chunk.count for chunk in plan.prefill),
      decoding=len(plan.decode),
      waiting=self._scheduler.waiting,
      depth=plan.depth,
      emitted=sum(len(update.tokens) for update in updates),
    )
    self._steps.append(step)
    self._now_s += step.seconds
    for update in self._scheduler.report(updates):
      self._hear(update)

  def _rounds(self, plan: Plan) -> tuple[list[Update], float, float]:
    """What the decoding rows emit, and what their drafts and verifications take."""
    draft_ms = verify_ms = 0.0
    emitted, drafted = {seat.id: 0 for seat in plan.decode}, set()
    for _ in range(plan.rounds):
      running = [id for id in emitted if self._open[id].left]
      if not running:
        break
      live = max(self._open[id].length for id in running)
      unseen = max(self._open[id].unseen for id in running)
      width = self._width(plan.depth, dict(rows=len(running), live=live), unseen)
      depth = self._costs.widths[width].depth if width is not None else 0
      accepted = {}
      for id in running:
        row = self._open[id]
        # The last token of the budget is the round's own.
        reach = min(depth, row.left - 1)
        accepted[id] = self._acceptance[width].draw(reach, row.chance) if reach else None
      proposed = [id for id in running if accepted[id] is not None]
      drafted.update(proposed)
      nodes = 1
      if width is not None:
        drafter = self._costs.drafters[width]
        draft_ms += self._draft_ms(drafter, rows=len(running), live=live, unseen=unseen)
        nodes = self._costs.widths[width].nodes if proposed else 1
      verify_ms += self._verify_ms(nodes, rows=len(running), live=live)
      for id in running:
        row, count = self._open[id], (accepted[id] or 0) + 1
        row.length, row.left, row.rounds = row.length + count, row.left - count, row.rounds + 1
        row.unseen = row.unseen + count if width is None else 0
        emitted[id] += count
    updates = [Update(id, (0,) * count, drafted=id in drafted) for id, count in emitted.items()]
    return updates, draft_ms, verify_ms

  def _width(self, depth: int, at: dict[str, int], unseen: int) -> int | None:
    """Index of the width that runs, None for plain."""
    costs = self._costs
    allowed = [index for index, width in enumerate(costs.widths) if width.depth <= depth]
    if self._choice == "deepest" or not allowed:
      return max(allowed, key=lambda index: costs.widths[index], default=None)
    plain = self._verify_ms(1, **at)

    def value(index: int | None) -> float:
      """Expected tokens of a row for a millisecond."""
      if index is None:
        return 1 / plain
      width, taken = costs.widths[index], self._acceptance[index]
      silent = (1 - taken.proposing) ** at["rows"]
      verify = (1 - silent) * self._verify_ms(width.nodes, **at) + silent * plain
      draft = self._draft_ms(costs.drafters[index], **at, unseen=unseen)
      return taken.expected(width.depth) / (verify + draft)

    return max([None, *allowed], key=value)

  def _hear(self, update: Update) -> None:
    row = self._open[update.id]
    row.new_tokens += len(update.tokens)
    if update.tokens and row.first_s is None:
      row.first_s = self._now_s
    if update.reason is not None:
      del self._open[update.id]
      self._source.ended(self._now_s)
      self._timings.append(
        Timing(
          number=row.number,
          arrived_s=row.arrived_s,
          first_s=row.first_s,
          ended_s=self._now_s,
          prompt_tokens=row.prompt_tokens,
          new_tokens=row.new_tokens,
          reason=update.reason,
          rounds=row.rounds,
        )
      )
