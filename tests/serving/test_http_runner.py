"""The thread that steps an engine, over a scripted one: times, failing listeners, an end that comes."""

import asyncio
import itertools
import json
import threading

import pytest

from specjax.serving.http import runner as runners
from specjax.serving.http.app import Limits, Service, make_app
from specjax.serving.http.runner import Runner, Unavailable
from specjax.serving.requests import Reason, Request
from tests.experiments.tiny import byte_tokenizer
from tests.serving import http_rig as rig


class Ends:
  """A listener that can be waited for."""

  def __init__(self):
    self.outputs, self._over = [], threading.Event()

  def __call__(self, output):
    self.outputs.append(output)
    if output.update.reason is not None:
      self._over.set()

  def reason(self) -> Reason:
    assert self._over.wait(rig.HANGS_S)
    return self.outputs[-1].update.reason


def request(id="a", tokens=3):
  return Request(id=id, prompt=(1, 2), max_new_tokens=tokens)


@pytest.fixture
def engine():
  return rig.ScriptedEngine()


def started(engine, **options) -> Runner:
  runner = Runner(engine, **options)
  runner.start()
  return runner


def test_times_are_those_of_the_listeners(engine):
  """By a clock that is read once an event: the first token at 1, then one a second."""
  runner, ends = started(engine, clock=itertools.count().__next__), Ends()
  runner.submit(request(tokens=4), ends)
  assert ends.reason() is Reason.LENGTH and runner.stop(rig.HANGS_S)
  lines = runner.metrics.render(up=True).splitlines()
  for name, value in (("time_to_first_token", 1), ("time_per_output_token", 1)):
    assert f"specjax_{name}_seconds_sum {value:.1f}" in lines
    assert f'specjax_{name}_seconds_bucket{{le="1.0"}} 1' in lines
    assert f'specjax_{name}_seconds_bucket{{le="0.5"}} 0' in lines


def test_a_listener_that_fails_costs_nobody_else_anything(engine):
  """Fails when an error of one client's reaches the engine, which would take it for its own end."""

  def fail(output):
    raise RuntimeError("its loop is closed")

  runner, ends = started(engine), Ends()
  runner.submit(request("bad"), fail)
  runner.submit(request("good"), ends)
  assert ends.reason() is Reason.LENGTH and runner.trouble is None
  assert runner.stop(rig.HANGS_S) and engine.ended["bad"] is Reason.LENGTH


def test_who_comes_when_it_has_ended_is_told_so(engine):
  """Fails when a request waits for a thread that is no more."""
  runner = started(engine)
  assert runner.stop(rig.HANGS_S) and runner.trouble == "the server shuts down"
  with pytest.raises(Unavailable, match="shuts down"):
    runner.submit(request(), Ends())


def test_while_it_ends_nothing_more_comes_in(engine):
  engine.free, runner = False, started(engine)
  first, second = Ends(), Ends()
  runner.submit(request("a"), first)
  runner.close(finish=True)
  runner.submit(request("b"), second)
  engine.free = True
  assert (first.reason(), second.reason()) == (Reason.LENGTH, Reason.SHUTDOWN)
  assert runner.stop(rig.HANGS_S)


def test_what_does_not_finish_in_time_is_cancelled(engine):
  engine.free, runner, ends = False, started(engine), Ends()
  runner.submit(request(), ends)
  assert runner.stop(0.01) and ends.reason() is Reason.SHUTDOWN


def test_a_step_that_does_not_return_is_not_waited_for(engine, monkeypatch):
  """Fails when the end of the server hangs with the device."""
  monkeypatch.setattr(runners, "_MOMENT_S", 0.01)
  hangs, step = threading.Event(), engine.step
  engine.step = lambda: (hangs.wait(rig.HANGS_S), step())[1]
  runner = started(engine)
  runner.submit(request(), Ends())
  assert not runner.stop(0.01)
  hangs.set()
  assert runner.stop(rig.HANGS_S)


def test_who_takes_no_piece_is_given_up(engine):
  """A stream whose client does not read: its row is free after its patience, not at its end."""
  engine.free, runner = False, started(engine)
  engine.steps.release()
  service = Service(runner, byte_tokenizer(), rig.MODEL, limits=Limits(patience_s=0.01))
  body = json.dumps({"model": rig.MODEL, "prompt": "x", "max_tokens": 90, "stream": True}).encode()
  sent = []

  async def ask():
    messages = [{"type": "http.request", "body": body}]

    async def receive():
      return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message):
      sent.append(message)
      if message["type"] == "http.response.body":
        await asyncio.Event().wait()

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    await make_app(service)({**scope, "query_string": b""}, receive, send)

  asyncio.run(ask())
  assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
  assert len(engine.cancelled) == 1 and runner.stop(0.01)
  assert list(engine.ended.values()) == [Reason.CANCELLED]
