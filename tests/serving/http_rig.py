"""A server on a loopback port, over an engine that says letters in turn as far as it is let."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator

import httpx
from prometheus_client.parser import text_string_to_metric_families

from specjax.serving.config import SchedulerConfig
from specjax.serving.engine import Step
from specjax.serving.http.app import Limits, Service
from specjax.serving.http.runner import Runner
from specjax.serving.http.server import Server, bind
from specjax.serving.requests import Reason, Request, Update
from specjax.serving.sampler import Output
from specjax.serving.scheduler import Scheduler
from specjax.text import TextResult
from tests.experiments.tiny import byte_tokenizer

# Nothing is asserted about time: this is where a test that hangs ends.
HANGS_S = 30.0
MODEL = "tiny"


class ScriptedEngine:
  """An `Engine` for its callers: the real scheduler, and "abc…" for an answer, a letter a step.

  Attributes:
    submitted, cancelled: by id.
    steps: lets steps happen, one each; `free` is as many as there are.
    fault: raised by the next step, if it is set.
  """

  def __init__(self, *, slots: int = 2, queue_limit: int = 2, length_limit: int = 96, free: bool = True):
    widths = dict(prefill_widths=(16,), capacity=112)
    self.scheduler = Scheduler(
      SchedulerConfig(slots=slots, length_limit=length_limit, queue_limit=queue_limit, **widths)
    )
    self.submitted: dict[str, Request] = {}
    self.cancelled: list[str] = []
    self.ended: dict[str, Reason] = {}
    self.steps = threading.Semaphore(0)
    self.free = free
    self.fault: Exception | None = None
    self._listeners, self._said, self._commands = {}, {}, []
    self._changed = threading.Condition()
    self._broken = False

  def submit(self, request, listener):
    with self._changed:
      if self._broken:
        raise RuntimeError("the engine broke: lost")
      if request.sampling.temperature == 3:
        raise ValueError("temperature = 3.0; the rule greedy needs 0")
      self.submitted[request.id] = request
      self._listeners[request.id], self._said[request.id] = listener, []
      self._command(lambda: self.scheduler.submit(request))

  def cancel(self, id):
    with self._changed:
      self.cancelled.append(id)
      self._command(lambda: self.scheduler.cancel(id))

  def shutdown(self, *, finish):
    with self._changed:
      self._command(lambda: self.scheduler.shutdown(finish=finish))

  def _command(self, command):
    self._commands.append(command)
    self._changed.notify_all()

  @property
  def busy(self):
    return not self._broken and bool(self._listeners or self._commands)

  def wait(self, timeout=None):
    with self._changed:
      return self._changed.wait_for(lambda: self.busy, timeout)

  def until(self, holds) -> None:
    """Waits for something that `submit` or `cancel` brings about."""
    with self._changed:
      assert self._changed.wait_for(lambda: holds(self), HANGS_S)

  def step(self):
    with self._changed:
      commands, self._commands = self._commands, []
    for command in commands:
      self._tell(command())
    if self._listeners and not self.free and not self.steps.acquire(timeout=0.01):
      return None
    if self.fault is not None:
      self._broken = True
      live = [Update(id, reason=Reason.FAILED, detail="the engine broke: lost") for id in self._listeners]
      self._tell(live)
      raise self.fault
    plan = self.scheduler.plan()
    self._tell(self.scheduler.report([Update(id, (self._letter(id),)) for _, id in plan.decode]))
    phases = {entry.request.id: entry.phase for entry in self.scheduler.entries}
    return Step(plan, (), 0.0, 0.0, 0.0, phases)

  def _letter(self, id):
    return ord("a") + len(self._said[id]) % 26

  def _tell(self, updates):
    for update in updates:
      said = self._said[update.id]
      said += update.tokens
      output = Output(update, "".join(map(chr, update.tokens)))
      listener = self._listeners[update.id]
      if update.reason is not None:
        self.ended[update.id] = update.reason
        del self._listeners[update.id]
        output = Output(update, output.text, self._result(update), 0)
      listener(output)

  def _result(self, update):
    said, ones = self._said[update.id], [1] * len(self._said[update.id])
    prompt = len(self.submitted[update.id].prompt)
    counts = dict(proposed=ones, depth=ones, reached=ones, accepted=[0] * len(ones), emitted=ones)
    rest = dict(nodes=ones, width=ones, overlap=None, logprobs=None, text="".join(map(chr, said)))
    return TextResult(tokens=said, prompt_tokens=prompt, finish=None, **counts, **rest)


class Serving:
  """A server in a thread.

  Attributes:
    server: that runs.
    client: of it.
  """

  def __init__(self, service: Service, **options):
    ready = threading.Event()
    self.server = Server(service, bind("127.0.0.1", 0), ready=lambda url: ready.set(), **options)
    self.client = httpx.Client(base_url=self.server.url, timeout=HANGS_S, trust_env=False)
    self._thread = threading.Thread(target=self.server.run, daemon=True)
    self._thread.start()
    assert ready.wait(HANGS_S)

  def end(self) -> None:
    """Ends it as a signal does; it must end by itself then."""
    self.server.should_exit = True
    self._thread.join(HANGS_S)
    assert not self._thread.is_alive()

  def __enter__(self) -> Serving:
    return self

  def __exit__(self, *error) -> None:
    self.end()
    self.client.close()


def scripted(engine: ScriptedEngine, *, key: str = "", drain_s: float = 0.0, **limits) -> Serving:
  """A server over a scripted engine."""
  service = Service(Runner(engine), byte_tokenizer(), MODEL, limits=Limits(**limits), key=key)
  return Serving(service, drain_s=drain_s)


def completion(client: httpx.Client, **fields) -> httpx.Response:
  """A completion; without fields a good one of 3 tokens."""
  return client.post("/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 3} | fields)


def events(response: httpx.Response, behind: Callable[[], None] = lambda: None) -> Iterator[dict | str]:
  """Server-sent events as they come; ``behind`` each one something is done."""
  for line in response.iter_lines():
    if line:
      assert line.startswith("data: ")
      data = line.removeprefix("data: ")
      yield data if data == "[DONE]" else json.loads(data)
      behind()


def metrics(client: httpx.Client) -> dict[tuple[str, str], float]:
  """Samples by name and label."""
  families = text_string_to_metric_families(client.get("/metrics").text)
  label = lambda labels: ",".join(f"{name}={value}" for name, value in labels.items())
  return {(s.name, label(s.labels)): s.value for family in families for s in family.samples}


def error_of(response: httpx.Response) -> dict:
  """OpenAI's error object."""
  error = response.json()["error"]
  assert error.keys() == {"message", "type", "param", "code"} and error["message"]
  return error
