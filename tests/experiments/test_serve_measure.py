"""Times of a load on a clock that a scripted engine moves."""

from types import SimpleNamespace

import pytest

from experiments.serve_measure import run_load, timeline
from specjax.serving.arrivals import Closed, Fixed, Paced, Workload
from specjax.serving.engine import Step
from specjax.serving.plans import Plan
from specjax.serving.requests import Reason, Request, Update
from specjax.serving.sampler import Output

TOKENS = 3


class World:
  """A clock, and an engine whose steps take a second and give the oldest request one token."""

  def __init__(self):
    self.now, self.slept, self.live = 100.0, [], []

  def clock(self):
    return self.now

  def sleep(self, seconds):
    self.slept.append(seconds)
    self.now += seconds

  def submit(self, request, listener):
    self.live.append([request, listener, 0])

  def step(self):
    if not self.live:
      return None
    begun, (request, listener, said) = self.now, self.live[0]
    self.now, said = self.now + 1.0, said + 1
    self.live[0][2] = said
    ended = said == TOKENS
    result = SimpleNamespace(prompt_tokens=len(request.prompt), tokens=[7] * said, rounds=said)
    output = Output(Update(request.id, (7,), Reason.LENGTH if ended else None), "", result if ended else None)
    listener(output)
    if ended:
      self.live.pop(0)
    plan = Plan(0, (), (), (), (), 0, 1, 0)
    return Step(plan, (output,), begun, self.now, 0.75, {})


def run(arrivals, requests):
  world = World()
  load = Workload(arrivals=arrivals, prompt=Fixed(4), new=Fixed(TOKENS), requests=requests)
  make = lambda arrival: Request(id=str(arrival.number), prompt=(1,) * arrival.prompt_tokens)
  return world, run_load(world, load, make, clock=world.clock, sleep=world.sleep)


def test_an_open_loop_waits_for_nobody():
  """Arrivals every 2 s, three steps of 1 s each: the queue grows, and times count from the arrival.

  Fails when a request is timed from when the engine took it, or the clock is not the load's.
  """
  _, measured = run(Paced(rate=0.5), 3)
  times = [(t.number, t.arrived_s, t.first_s, t.ended_s, t.new_tokens, t.rounds) for t in measured.timings]
  of_each = [(0, 0.0, 1.0, 3.0), (1, 2.0, 4.0, 6.0), (2, 4.0, 7.0, 9.0)]
  assert times == [(*one, TOKENS, TOKENS) for one in of_each]
  assert measured.host_ms == (250.0,) * 9 and measured.compiles == 0
  assert [row["emitted"] for row in timeline(measured.steps)] == [1] * 9


def test_a_closed_loop_asks_again_when_it_was_answered():
  """One client: a request comes when the one before has ended. Fails when the source hears of no end."""
  world, measured = run(Closed(clients=1), 3)
  assert [t.arrived_s for t in measured.timings] == [0.0, 3.0, 6.0]
  assert [t.ttft_s for t in measured.timings] == [1.0] * 3 and not sum(world.slept)


def test_a_gap_is_slept_through():
  world, measured = run(Paced(rate=0.1), 2)
  assert sum(world.slept) == pytest.approx(7.0) and measured.timings[1].ttft_s == pytest.approx(1.0)
