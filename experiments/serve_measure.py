"""A load on an engine, measured: each request's times from outside, and what each step did.

The core of the load bench. Requests come when the `Workload` says, whether or not the engine is ready for
them; the engine is stepped in between by the same thread, so what is measured is the engine's own.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from experiments.measure import compile_count
from specjax.serving.arrivals import Arrival, Workload
from specjax.serving.engine import Engine, Step
from specjax.serving.requests import Request
from specjax.serving.sampler import Output
from specjax.serving.summary import Timing


@dataclasses.dataclass(frozen=True)
class Measured:
  """A load that was served: `summary.summarize` takes its timings.

  Attributes:
    timings: of all requests, in order of arrival; seconds from the start of the load.
    steps: in order; seconds likewise.
    compiles: programs compiled meanwhile; anything but 0 spoils the times.
  """

  timings: tuple[Timing, ...]
  steps: tuple[Step, ...]
  compiles: int

  @property
  def host_ms(self) -> tuple[float, ...]:
    """Of each step, milliseconds in which the device was not waited for: what serving adds to its work."""
    return tuple(1e3 * (step.ended - step.begun - step.waited) for step in self.steps)


def run_load(
  engine: Engine,
  workload: Workload,
  make_request: Callable[[Arrival], Request],
  *,
  clock: Callable[[], float] = time.perf_counter,
  sleep: Callable[[float], None] = time.sleep,
) -> Measured:
  """Serves a load to its end.

  Args:
    engine: warmed up, without requests; its clock is ``clock``.
    workload: who comes when.
    make_request: the request of an arrival; its id must be the arrival's number.
    clock: seconds.
    sleep: waits so many seconds; it is asked when there is nothing to do before the next arrival.
  """
  source, start, compiles = workload.start(), clock(), compile_count()
  arrivals: dict[str, Arrival] = {}
  first: dict[str, float] = {}
  timings: list[Timing] = []
  steps: list[Step] = []

  def listen(output: Output) -> None:
    update, now = output.update, clock() - start
    if update.tokens:
      first.setdefault(update.id, now)
    if update.reason is not None:
      arrival, result = arrivals[update.id], output.result
      timings.append(
        Timing(
          number=arrival.number,
          arrived_s=arrival.time_s,
          first_s=first.get(update.id),
          ended_s=now,
          prompt_tokens=result.prompt_tokens,
          new_tokens=len(result.tokens),
          reason=update.reason,
          rounds=result.rounds,
        )
      )
      source.ended(now)

  while True:
    for arrival in source.take(clock() - start):
      request = make_request(arrival)
      arrivals[request.id] = arrival
      engine.submit(request, listen)
    step = engine.step()
    if step is not None:
      steps.append(step._replace(begun=step.begun - start, ended=step.ended - start))
    elif source.next_s is None:
      break
    else:
      sleep(max(0.0, source.next_s - (clock() - start)))
  timings.sort(key=lambda timing: timing.number)
  return Measured(tuple(timings), tuple(steps), compile_count() - compiles)


def timeline(steps: Sequence[Step]) -> list[dict[str, float | int]]:
  """Each step as a row for a plot: when, how long it waited for the device, and what it did."""
  return [
    dict(
      begun_s=step.begun,
      ended_s=step.ended,
      waited_s=step.waited,
      prompt_tokens=sum(chunk.count for chunk in step.plan.prefill),
      admitted=len(step.plan.admit),
      copied=sum(admission.cached for admission in step.plan.admit),
      preempted=sum(eviction.preempted for eviction in step.plan.evict),
      decoding=len(step.plan.decode),
      depth=step.plan.depth,
      emitted=sum(len(output.update.tokens) for output in step.outputs),
      live=len(step.phases),
    )
    for step in steps
  ]
