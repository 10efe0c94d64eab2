"""The engine: requests in flight over the rows of one static batch, a step at a time.

A step asks the scheduler for a plan and carries it out with four parts: the *KV manager* gives rows away,
the *verify executor* reads prompts and runs rounds over what the *draft executor* lets be drafted, and the
*sampler* makes requests into rows and tokens into answers. The compiled programs are those of `decode`, the
loop over rounds and its controller among them; the host speaks to the device once for the rounds of all rows.

What a row emits does not depend on its neighbours: greedy decoding and deterministic drafts that are followed
give the tokens of a run alone, in float32, preempted or not, with a copied prefix or without. Sampled drafts
keep the law, keyed by the request's seed; a controller that adapts may choose other widths in company.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from specjax.base import Weights
from specjax.checkpoints import Tokenizer
from specjax.decode import DecodeConfig
from specjax.serving.config import SchedulerConfig
from specjax.serving.executors import DraftExecutor, VerifyExecutor
from specjax.serving.kv_manager import KVManager
from specjax.serving.plans import Plan
from specjax.serving.requests import Phase, Reason, Request, Update
from specjax.serving.sampler import Answer, Listener, Output, Sampler
from specjax.serving.scheduler import Scheduler


class Step(NamedTuple):
  """What a step did.

  Attributes:
    plan: that was carried out.
    outputs: that listeners were told.
    begun, ended: by the engine's clock, seconds.
    waited: seconds of these in which the host did nothing but wait for the device.
    phases: of all requests that live, behind it.
  """

  plan: Plan
  outputs: tuple[Output, ...]
  begun: float
  ended: float
  waited: float
  phases: dict[str, Phase]


class Engine:
  """Serves requests.

  One thread calls `step`; `submit`, `cancel`, `shutdown` and `wait` may be called from any. Listeners are
  called by the thread that steps, and should be quick.

  Attributes:
    config: of decoding; with a controller, where there are drafts.
    scheduler: to be read, by the thread that steps.
    last: the step before, None before the first.
  """

  def __init__(
    self,
    weights: Weights,
    config: DecodeConfig,
    *,
    slots: int,
    batches: Sequence[int] = (),
    beliefs: Mapping[int, Any] | None = None,
    tokenizer: Tokenizer | None = None,
    kept_prefixes: int = 8,
    clock: Callable[[], float] = time.perf_counter,
    **scheduling: Any,
  ):
    """
    Args:
      weights: of target and drafter.
      config: of decoding. Where there are drafts and no controller, `control.Fixed` becomes it: rounds that
        may not draft are then plain ones.
      slots: most rows of the batch.
      batches: smaller sizes that it may have, ascending: a round costs what the smallest does that holds the
        decoding rows. Each is a program more to compile.
      beliefs: of the controller, by size of the batch; None: those of the weights for all.
      tokenizer: makes text; without one there are tokens alone, and no stop strings.
      kept_prefixes: texts whose rows are kept to be copied, see `KVManager`.
      clock: seconds, for `Step`.
      **scheduling: further fields of `SchedulerConfig`: policies, budgets, limits.

    Raises:
      ValueError: naming the field, the value and the limit.
    """
    self._draft = DraftExecutor(config)
    self.config = config = self._draft.config
    settings = SchedulerConfig(
      slots=slots,
      length_limit=config.length_limit,
      capacity=config.slots,
      prefill_widths=config.prefill_widths,
      widths=self._draft.widths,
      **scheduling,
    )
    self._verify = VerifyExecutor(weights, config, settings.rounds_per_step, beliefs)
    self._kv = KVManager(weights, config, sizes=(*batches, slots), kept=kept_prefixes)
    self._sampler = Sampler(config, tokenizer)
    self.scheduler = Scheduler(settings, self._kv.lookup)
    self.last: Step | None = None
    self._clock, self._waited = clock, 0.0
    self._answers: dict[str, Answer] = {}
    self._commands: collections.deque[Callable[[], list[Update]]] = collections.deque()
    self._changed = threading.Condition()
    self._broken: str | None = None

  # --- from any thread -------------------------------------------------------------------------------

  def submit(self, request: Request, listener: Listener) -> None:
    """Takes a request in at the next step. Its end, a refusal too, is told to the listener, once.

    Raises:
      ValueError: it asks for what is not to be had, or a request of its name has not ended.
      RuntimeError: the engine broke.
    """
    answer = self._sampler.answer(request, listener)
    with self._changed:
      if self._broken is not None:
        raise RuntimeError(f"the engine broke: {self._broken}")
      if request.id in self._answers:
        raise ValueError(f"id = {request.id!r}; a request of that name has not ended")
      self._answers[request.id] = answer
      self._command(lambda: self.scheduler.submit(request))

  def cancel(self, id: str) -> None:
    """Ends a request at the next step; one that has ended, or never was, is left alone."""
    with self._changed:
      if id in self._answers:
        self._command(lambda: self.scheduler.cancel(id))

  def shutdown(self, *, finish: bool) -> None:
    """From the next step on nothing more is taken in. What is live goes on to its end, or ends there."""
    with self._changed:
      self._command(lambda: self.scheduler.shutdown(finish=finish))

  def wait(self, timeout: float | None = None) -> bool:
    """Waits until there is something to do, at most ``timeout`` seconds; whether there is."""
    with self._changed:
      return self._changed.wait_for(lambda: self.busy, timeout)

  @property
  def busy(self) -> bool:
    """Whether a step would do anything."""
    return self._broken is None and bool(self._answers or self._commands)

  def _command(self, command: Callable[[], list[Update]]) -> None:
    self._commands.append(command)
    self._changed.notify_all()

  # --- from the thread that steps --------------------------------------------------------------------

  def warm_up(self) -> None:
    """Compiles every program there is. Nothing compiles afterwards.

    Raises:
      RuntimeError: requests are being served.
    """
    if self._answers:
      raise RuntimeError(f"warm_up: {len(self._answers)} requests are live; it must come before the first")
    two = Request(id="warm up", prompt=(0, 0))
    self._verify.warm_up(self._kv, self._sampler.inputs(two, two.prompt))

  def step(self) -> Step | None:
    """Carries out one plan, and tells listeners. None if there was nothing to do.

    Raises:
      Exception: what went wrong on the device. Every live request has ended with ``failed``; the engine is
        of no more use.
    """
    if not self.busy:
      return None
    begun, self._waited = self._clock(), 0.0
    try:
      outputs = self._take_commands()
      plan = self.scheduler.plan()
      outputs += [self._tell(update) for update in self.scheduler.report(self._carry_out(plan))]
    except Exception as error:
      self._break(error)
      raise
    phases = {entry.request.id: entry.phase for entry in self.scheduler.entries}
    self.last = Step(plan, tuple(outputs), begun, self._clock(), self._waited, phases)
    return self.last

  def _take_commands(self) -> list[Output]:
    outputs = []
    while self._commands:
      outputs += [self._tell(update) for update in self._commands.popleft()()]
    return outputs

  def _carry_out(self, plan: Plan) -> list[Update]:
    for row, id, preempted in plan.evict:
      if preempted:
        answer = self._answers[id]
        answer.carried = self._kv.carry(row) or answer.carried
      self._kv.evict(row)
    for row, request, text, cached, prefix in plan.admit:
      answer = self._answers[request.id]
      if answer.cached_tokens is None:
        answer.cached_tokens = cached
      self._kv.admit(row, text, self._sampler.inputs(request, text), answer.carried, prefix, cached)
    for chunk in plan.prefill:
      self._verify.read(self._kv.lane(chunk.row), chunk.start, chunk.count, chunk.width)
    if not plan.decode:
      return []
    for seat in plan.decode:
      self._kv.place(seat.row)
    packed = self._verify.run(self._kv, plan.rounds, plan.depth)
    waiting = self._clock()
    report = self._verify.report(packed)
    self._waited = self._clock() - waiting
    updates, drafted = [], self._draft.drafted(report)
    for row, id in plan.decode:
      at = self._kv.at(row)
      updates.append(self._sampler.take(self._answers[id], report, at, drafted[at]))
    return updates

  def _tell(self, update: Update) -> Output:
    answer = self._answers[update.id]
    output = self._sampler.output(answer, update)
    if update.reason is not None:
      with self._changed:
        del self._answers[update.id]
    answer.listener(output)
    return output

  def _break(self, error: Exception) -> None:
    with self._changed:
      self._broken = f"{type(error).__name__}: {error}"
      self._commands.clear()
      self._changed.notify_all()
    for id in list(self._answers):
      self._tell(Update(id, reason=Reason.FAILED, detail=f"the engine broke: {self._broken}"))
