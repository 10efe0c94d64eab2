"""Thousands of random request mixes on a scripted engine: nothing is lost, doubled, starved or leaked."""

import collections
import random

import pytest

from specjax.serving.policies import make_policies
from specjax.serving.requests import Phase, Reason, Request, Sampling
from specjax.serving.scheduler import Scheduler, SchedulerConfig
from tests.serving.scripted import Prefixes, ScriptedEngine, solo, token_at

DRAFTERS = {
  "rejected": lambda chance: 0,
  "accepted": lambda chance: 99,
  "mixed": lambda chance: chance.randrange(5),
}
WIDTHS = ((), ((3, 4),), ((2, 3), (5, 6)), ((3, 9), (2, 7)))
SPECULATION = ("always", "never", "below[rows=2]", "windows[table=((1,5),(2,3),(4,0))]")


def random_config(chance):
  slots = chance.randint(1, 5)
  widths = chance.choice(((4,), (4, 8), (4, 8, 24)))
  rounds = chance.choice((1, 1, 1, 3))
  limit = chance.choice((chance.randint(8, 40), 50, 62, 62))
  tokens = slots * rounds + widths[0] + chance.choice((0, 1, 7, 30, 500))
  prefill = chance.choice(("prefill_first", "interleave"))
  return SchedulerConfig(
    slots=slots,
    length_limit=limit,
    kv_budget=chance.choice((None, chance.randint(8, 60), chance.randint(50, 120), chance.randint(62, 90))),
    queue_limit=chance.choice((0, 2, 100)),
    prefill_widths=widths,
    widths=chance.choice(WIDTHS),
    rounds_per_step=rounds,
    reserved_share=chance.choice((0.0, 0.0, 0.3, 1.0)),
    policies=make_policies(f"{prefill}[tokens={tokens}]+{chance.choice(SPECULATION)}"),
  )


def random_request(chance, number):
  # Prompts begin alike, so that prefixes are found.
  prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12][: chance.randint(0, 12)]
  prompt += [chance.randrange(50) for _ in range(chance.randint(not prompt, 20))]
  new, seed = chance.randint(1, 30), chance.randrange(1000)
  stop = token_at(seed, len(prompt) + chance.randrange(30))
  return Request(
    id=f"r{number}",
    prompt=prompt,
    max_new_tokens=new,
    stop_ids=[stop] if chance.random() < 0.3 else [],
    sampling=Sampling(seed=seed),
    logprobs=chance.random() < 0.3,
  )


class Run:
  """One mix from its first request to the last end, with a look at every invariant on the way."""

  def __init__(self, seed, *, cancels=0.02):
    self.chance = chance = random.Random(seed)
    self.config = random_config(chance)
    self.prefixes = Prefixes()
    self.scheduler = Scheduler(self.config, self.prefixes if chance.random() < 0.5 else lambda *of: None)
    drafter = DRAFTERS[chance.choice(list(DRAFTERS))]
    self.engine = ScriptedEngine(self.config, lambda: drafter(chance))
    self.requests, self.tokens, self.logprobs, self.reasons = {}, collections.defaultdict(list), {}, {}
    self.arrived, self.admitted = [], []
    self.cancels, self.cancelled, self.refused = cancels, set(), {}
    self.report_length = chance.random() < 0.5

  def hear(self, updates):
    """What a client would see: nothing after the end, one end."""
    for update in updates:
      assert update.id in self.requests and update.id not in self.reasons, f"{update} after the end"
      self.tokens[update.id] += update.tokens
      assert (update.logprobs is None) or update.logprobs == tuple(map(float, update.tokens))
      if update.reason is not None:
        self.reasons[update.id] = update.reason
        assert self.scheduler.phase(update.id) is Phase.FINISHED

  def submit(self, request):
    self.requests[request.id] = request
    scheduler, config = self.scheduler, self.config
    waiting, free = scheduler.waiting, config.slots - scheduler.running
    updates = scheduler.submit(request)
    if updates:
      (update,) = updates
      limit = min(config.length_limit, config.kv_budget)
      why = {
        Reason.TOO_LARGE: request.most_tokens > limit,
        Reason.QUEUE_FULL: waiting >= config.queue_limit + free,
        Reason.SHUTDOWN: scheduler.closed,
      }
      assert why[update.reason] and update.detail
    else:
      self.arrived.append(request.id)
      assert scheduler.phase(request.id) is Phase.WAITING
    self.hear(updates)

  def cancel(self):
    if self.requests and self.chance.random() < self.cancels:
      id = self.chance.choice(list(self.requests))
      live = id not in self.reasons
      updates = self.scheduler.cancel(id)
      assert [update.reason for update in updates] == [Reason.CANCELLED] * live
      self.hear(updates)

  def step(self):
    scheduler = self.scheduler
    plan = scheduler.plan()
    entries = scheduler.entries
    oldest = entries[0] if entries else None
    before = (oldest.cached, len(oldest.emitted)) if oldest else None
    has_row = [entry.row is not None for entry in entries]
    assert has_row == sorted(has_row, reverse=True), "someone overtook"
    assert [entry.number for entry in entries] == sorted(entry.number for entry in entries)
    rows = [entry.row for entry in entries if entry.row is not None]
    assert len(set(rows)) == len(rows) <= self.config.slots
    assert not oldest or oldest.row is not None, "the oldest waits"
    self.admitted += [admission.request.id for admission in plan.admit if not admission.emitted]
    for seat in plan.decode:
      assert scheduler.phase(seat.id) is (Phase.SPECULATING if plan.depth else Phase.FALLBACK)
    updates = self.engine.step(plan, self.report_length)
    self.cancel()  # while the step runs
    self.hear(scheduler.report(updates))
    for entry in entries:
      if entry.request.id not in self.reasons and entry.row is not None and not entry.to_read:
        self.prefixes.kept = [*self.prefixes.kept[-3:], (*entry.request.prompt, *entry.emitted)]
    if oldest and oldest.phase is not Phase.FINISHED and self.config.policies.prefill.name == "interleave":
      assert (oldest.cached, len(oldest.emitted)) > before or len(oldest.emitted) > before[1], "no progress"
    assert plan.works == bool(entries), "a step without work"
    return plan

  def run(self, requests=12):
    steps = 0
    for number in range(requests):
      self.submit(random_request(self.chance, number))
      for _ in range(self.chance.choice((0, 0, 1, 3))):
        self.step()
        self.cancel()
    while not self.scheduler.idle:
      self.step()
      steps += 1
      assert steps < 5000, "it does not come to an end"
    self.check_end()

  def check_end(self):
    scheduler, engine, counts = self.scheduler, self.engine, self.scheduler.counts
    last = scheduler.plan()
    engine.step(last)
    scheduler.report([])
    assert not last.works and scheduler.idle and scheduler.waiting == scheduler.running == scheduler.live == 0
    assert engine.rows == [None] * self.config.slots, "a row was not given back"
    assert not scheduler.plan().evict
    assert self.reasons.keys() == self.requests.keys()
    assert counts.submitted == len(self.requests)
    assert counts.ended == collections.Counter(self.reasons.values())
    assert counts.emitted == sum(map(len, self.tokens.values()))
    assert (counts.prompt_tokens, counts.prefix_tokens) == (engine.read, engine.copied)
    assert counts.admissions == engine.given
    assert not (self.config.reserved_share == 1 and counts.preemptions), "all was reserved"
    # Who has been admitted came in the order of arrival; who was not has been cancelled.
    kept = set(self.admitted)
    assert list(dict.fromkeys(self.admitted)) == [id for id in self.arrived if id in kept]
    for id, request in self.requests.items():
      tokens, reason = solo(request)
      found = self.reasons[id]
      if found in (Reason.STOP, Reason.LENGTH, Reason.FAILED):
        assert (tuple(self.tokens[id]), found) == (tokens, reason), id
      else:
        assert tuple(self.tokens[id]) == tokens[: len(self.tokens[id])]
      if found.refused:
        assert not self.tokens[id]


def run_mixes(seeds):
  """Every invariant of `Run` and `ScriptedEngine`; a failing seed names itself."""
  for seed in seeds:
    try:
      Run(seed).run()
    except Exception as error:
      raise AssertionError(f"mix {seed}: {error!r}") from error


@pytest.mark.parametrize("block", range(5))
def test_random_mixes(block):
  run_mixes(range(100 * block, 100 * block + 100))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_many_random_mixes(block):
  run_mixes(range(1000 * (block + 1), 1000 * (block + 2)))


def test_the_mixes_have_everything_in_them():
  """Fails when the mixes no longer reach what they are to test."""
  reasons, preemptions, prefixes = collections.Counter(), 0, 0
  for seed in range(60):
    run = Run(seed)
    run.run()
    reasons.update(run.reasons.values())
    preemptions += run.scheduler.counts.preemptions
    prefixes += run.scheduler.counts.prefix_tokens
  assert reasons.keys() == set(Reason) - {Reason.SHUTDOWN} and min(reasons.values()) >= 5
  assert preemptions >= 20 and prefixes >= 100
