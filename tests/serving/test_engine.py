"""Requests in company say what they say alone, whatever happens to the rows around them."""

import dataclasses
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.measure import compile_count
from specjax import decode
from specjax.control import Fixed
from specjax.serving import programs
from specjax.serving.engine import Engine
from specjax.serving.policies import Always, Below, Interleave, Never, Policies
from specjax.serving.requests import Phase, Reason, Request, Sampling
from specjax.testing import poison
from tests import contract
from tests.serving import rig

COUNT = 30
LONGER = [
  pytest.param(name, marks=pytest.mark.slow) for name in ("none", "two_model_tree_top_k", "eagle3_dynamic")
]
DRAFTER = "prompt_lookup"


def tight(requests):
  """Options under which rows are preempted: the longest request barely fits, and nothing is set aside."""
  most = max(request.most_tokens for request in requests)
  return dict(kv_budget=most + 4, reserved_share=0.0, kept_prefixes=2)


def assert_alike(result, expected):
  """Tokens, text and reason are those of a run alone; log-probabilities as far as they were asked for."""
  assert result.tokens == expected.tokens
  assert (result.text, result.finish) == (expected.text, expected.finish)
  if result.logprobs is not None:
    np.testing.assert_allclose(result.logprobs, expected.logprobs, atol=2e-4)


def poisoned(engine):
  """NaN in every slot that no length counts: what rows and lanes left behind them, and rejected drafts."""
  engine._kv.state = poison(engine._kv.state)
  engine._kv._spare = [poison(lane) for lane in engine._kv._spare]


@pytest.mark.parametrize("name", (DRAFTER, *LONGER))
def test_mixed_requests_say_what_they_say_alone(name):
  """30 requests of all lengths and settings, kept prefixes, preemptions, cancellations, memory full of NaN.

  Fails when anything of a row is left to the next, comes from a neighbour, or is lost when a row is taken
  away or its prefix copied; and when something compiles behind the warm-up.
  """
  requests = rig.mixed(COUNT, 0)
  cancelled = [request.id for request in requests if request.max_new_tokens > 20][::3]
  cancels = set(cancelled)
  engine = rig.engine(name, batches=(2,), **tight(requests))
  engine.warm_up()
  heard, left, compiled, steps = rig.Heard(), list(requests), compile_count(), 0
  while left or engine.busy:
    if left:
      engine.submit(left.pop(0), heard)
    engine.step()
    steps += 1
    for id in cancels & heard.outputs.keys():  # once it has said something
      engine.cancel(id)
      cancels.remove(id)
    if steps % 7 == 0:
      before = compile_count()
      poisoned(engine)
      compiled += compile_count() - before
  assert compile_count() == compiled
  for request in requests:
    result, expected = heard.check(request.id), rig.solos(COUNT, 0)[request.id]
    if heard.end(request.id).update.reason is Reason.CANCELLED:
      assert request.id in cancelled and expected.tokens[: len(result.tokens)] == result.tokens
    else:
      assert_alike(result, expected)
  counts = engine.scheduler.counts
  assert counts.preemptions > 0 and counts.prefix_tokens > 0 and counts.ended[Reason.CANCELLED] > 0
  assert sum(counts.ended.values()) == COUNT and engine.scheduler.idle
  if name != "none":
    assert sum(sum(heard.end(request.id).result.accepted) for request in requests) > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", ("two_model_sample", "eagle3_chain_sample"))
def test_sampled_drafts_are_those_of_a_run_alone(name):
  """Drafts that are drawn: the same tokens as alone, with the same drafter, preempted or not.

  Fails when noise depends on the slot, the step or the company, or starts anew behind a preemption.
  """
  requests = rig.mixed(16, 3)
  engine = rig.engine(name, rule="speculative_sampling", **tight(requests))
  heard = rig.serve(engine, requests)
  assert engine.scheduler.counts.preemptions > 0
  for request in requests:
    assert_alike(heard.check(request.id), rig.solo(request, name, "speculative_sampling", control=Fixed()))


def test_rounds_draft_no_deeper_than_the_policy_says():
  """Plain rounds under `never`, and under `below` while rows are many. The text is the same.

  Fails when the limit does not reach the loop, or is compiled into it.
  """
  requests = [dataclasses.replace(request, stop_strings=()) for request in rig.mixed(8, 4)]
  for speculation, least, most in ((Never(), 0, 0), (Below(2), 0, 3), (Below(9), 1, 99)):
    engine = rig.engine(DRAFTER, policies=Policies(Interleave(), speculation))
    heard = rig.serve(engine, requests)
    rounds = [(width, nodes) for r in requests for width, nodes in zip(*_of(heard.check(r.id)))]
    drafted = sum(width > 0 for width, _ in rounds)
    assert all(nodes == 1 for width, nodes in rounds if not drafted)
    assert least <= drafted and (most or not drafted), (speculation, drafted)


def _of(result):
  return result.width, result.nodes


def test_phases_can_be_seen():
  """A request waits, is read, speculates or falls back, and is gone. Fails when a step shows another."""
  for speculation, decoding in ((Always(), Phase.SPECULATING), (Never(), Phase.FALLBACK)):
    policies = Policies(Interleave(32), speculation)
    engine = rig.engine(DRAFTER, kv_budget=56, policies=policies)  # one at a time
    heard, seen = rig.Heard(), {"a": [], "b": []}
    for id in seen:
      engine.submit(Request(id=id, prompt=(1, 2, 3) * 14, max_new_tokens=12), heard)
    while engine.busy:
      step = engine.step()
      for id, phases in seen.items():
        phases.append(step.phases.get(id, Phase.FINISHED))
    assert seen["a"][0] == Phase.PREFILL and seen["b"][0] == Phase.WAITING
    for phases in seen.values():
      assert decoding in phases and phases[-1] == Phase.FINISHED
    assert speculation == Always() or Phase.SPECULATING not in seen["a"]


def test_a_row_that_fails_leaves_the_others_alone():
  """The target's embedding of one token is NaN: who says it or is told it fails, and nobody else.

  Fails when an error ends the engine, or is taken for an end as it should be.
  """
  _, weights = contract.built(DRAFTER)
  broken = nnx.clone(weights.target)
  broken.embed = nnx.Param(broken.embed[...].at[60].set(jnp.nan))
  engine = rig.engine(DRAFTER, weights=decode.Weights(broken))
  prompts = {"bad": (3, 60, 5, 7), "good": contract.PROMPTS[0], "worse": (60,)}
  heard = rig.serve(engine, [Request(id=id, prompt=p, max_new_tokens=9) for id, p in prompts.items()])
  ends = {id: heard.end(id).update for id in prompts}
  assert [ends[id].reason for id in prompts] == [Reason.FAILED, Reason.LENGTH, Reason.FAILED]
  assert "NaN" in ends["bad"].detail and heard.end("bad").result.finish == "error"
  good = Request(id="good", prompt=prompts["good"], max_new_tokens=9)
  assert heard.check("good").tokens == rig.solo(good, "none", "draw_and_follow").tokens


def test_an_engine_that_breaks_ends_every_request_once(monkeypatch):
  """A device error: all that live end with ``failed``, the error is raised, and a new engine is clean.

  Fails when a request hears nothing of it, or something of the broken engine is used again.
  """
  requests = rig.mixed(6, 4)
  engine, heard = rig.engine(DRAFTER), rig.Heard()
  for request in requests:
    engine.submit(request, heard)
  engine.step()

  def break_down(*args):
    raise RuntimeError("device lost")

  with monkeypatch.context() as patched:
    patched.setattr(programs, "run", break_down)
    with pytest.raises(RuntimeError, match="device lost"):
      for _ in requests:
        engine.step()
  live = [id for id, told in heard.outputs.items() if told[-1].update.reason is Reason.FAILED]
  assert live and all("device lost" in heard.end(id).update.detail for id in live)
  assert {request.id for request in requests} == set(heard.outputs)
  assert not engine.busy and engine.step() is None
  with pytest.raises(RuntimeError, match="engine broke: RuntimeError: device lost"):
    engine.submit(requests[0], heard)
  again = rig.serve(rig.engine(DRAFTER), requests)
  for request in requests:
    assert_alike(again.check(request.id), rig.solo(request, "none", "draw_and_follow"))


def test_requests_from_many_threads():
  """Submitted, cancelled and waited for while another thread steps: each is told its end, once."""
  engine, heard = rig.engine(DRAFTER), rig.Heard()
  requests, over = rig.mixed(24, 4), threading.Event()

  def work():
    while not (over.is_set() and not engine.busy):
      if engine.wait(0.05):
        engine.step()

  def ask(mine):
    for request in mine:
      engine.submit(request, heard)
      if request.id.endswith("7"):
        engine.cancel(request.id)

  worker = threading.Thread(target=work)
  askers = [threading.Thread(target=ask, args=(requests[i::4],)) for i in range(4)]
  for thread in (worker, *askers):
    thread.start()
  for thread in askers:
    thread.join()
  over.set()
  worker.join()
  for request in requests:
    heard.check(request.id)
    if not request.id.endswith("7"):
      assert heard.end(request.id).update.reason in (Reason.STOP, Reason.LENGTH)


@pytest.mark.parametrize("finish", (True, False))
def test_shutdown(finish):
  """What is live goes on to its end, or ends; nothing more comes in. Fails when anything hangs or is lost."""
  engine, heard = rig.engine(DRAFTER), rig.Heard()
  requests = [Request(id=f"r{i}", prompt=(i + 1, 2, 3), max_new_tokens=20) for i in range(7)]
  for request in requests[:6]:
    engine.submit(request, heard)
  engine.step()
  engine.shutdown(finish=finish)
  engine.submit(requests[6], heard)
  while engine.busy:
    engine.step()
  reasons = [heard.end(request.id).update.reason for request in requests]
  assert reasons == [Reason.LENGTH if finish else Reason.SHUTDOWN] * 6 + [Reason.SHUTDOWN]


def test_queue_limit_and_size_are_told_not_raised():
  engine, heard = rig.engine(DRAFTER, queue_limit=1), rig.Heard()
  for i in range(rig.SLOTS + 2):
    engine.submit(Request(id=f"r{i}", prompt=(1,), max_new_tokens=2), heard)
  engine.submit(Request(id="long", prompt=(1,) * 90, max_new_tokens=20), heard)
  while engine.busy:
    engine.step()
  reasons = [heard.end(id).update.reason for id in ("r0", "r4", "r5", "long")]
  assert reasons == [Reason.LENGTH, Reason.LENGTH, Reason.QUEUE_FULL, Reason.TOO_LARGE]


def test_bad_requests_raise_where_they_are_made():
  """One clear error each; nothing of them is taken in."""
  config = contract.static("none", "greedy", logprobs="off")
  engine = Engine(contract.built("none")[1], config, slots=1)
  for changes, words in (
    (dict(prompt=(61,)), r"prompt holds the id 61; it must be below 61"),
    (dict(logprobs=True), "logprobs = True; the engine's DecodeConfig has logprobs = 'off'"),
    (dict(stop_strings=("a",)), "stop_strings = .*the engine has no tokenizer"),
    (dict(sampling=Sampling(temperature=0.5)), "temperature = 0.5; the rule greedy needs 0"),
  ):
    with pytest.raises(ValueError, match=words):
      engine.submit(Request(**{"id": "x", "prompt": (1,), **changes}), print)
  assert not engine.busy
  engine.submit(Request(id="x", prompt=(1,)), print)
  with pytest.raises(ValueError, match="id = 'x'; a request of that name has not ended"):
    engine.submit(Request(id="x", prompt=(1,)), print)
  with pytest.raises(RuntimeError, match="1 requests are live"):
    engine.warm_up()
  with pytest.raises(ValueError, match="kept_prefixes = -1; it must be at least 0"):
    rig.engine("none", kept_prefixes=-1)
