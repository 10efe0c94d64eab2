"""Simulated loads against closed forms: queueing theory, expected tokens, and sums of costs."""

import math

import pytest

from specjax.analysis import CostTable, chain_tokens
from specjax.analysis.costs import KEY_FIELDS
from specjax.serving.arrivals import Closed, Fixed, Paced, Poisson, Uniform, Workload
from specjax.serving.plans import Prefix
from specjax.serving.policies import make_policies
from specjax.serving.requests import Reason
from specjax.serving.scheduler import SchedulerConfig
from specjax.serving.simulate import Acceptance, Costs, simulate
from specjax.serving.summary import summarize

PLAIN_MS, NODES_4_MS, DRAFT_MS, CHUNK_MS = 10.0, 16.0, 2.0, {4: 5.0, 16: 12.0}
DRAFTER = "two_model[window=3]"


def table(**changes):
  """A round costs the same for any batch and length."""
  fields = dict(
    made="2026-11-30T00:00:00+00:00",
    key=dict.fromkeys(KEY_FIELDS, "x"),
    batches=[1],
    lives=[64],
    nodes=[1, 4],
    round_ms=[[[PLAIN_MS, NODES_4_MS]]],
    accept_ms=[0.0, 0.0],
    prefill_ms=CHUNK_MS,
    call_ms=0.0,
    drafts={DRAFTER: {"nodes": 4, "depth": 3, "draft_ms": [[DRAFT_MS]], "catch_up_ms": 0.0}},
  )
  return CostTable(**fields | changes)


def run(
  workload, *, slots=1, policies="interleave", acceptance=None, costs=None, choice="deepest", seed=0, **config
):
  costs = costs or Costs(table=table(), drafters=(DRAFTER,) if acceptance else (), batches=(slots,))
  config = SchedulerConfig(
    slots=slots,
    length_limit=config.pop("length_limit", 256),
    queue_limit=config.pop("queue_limit", 10**6),
    prefill_widths=(4, 16),
    widths=costs.widths,
    policies=make_policies(policies),
    **config,
  )
  return simulate(workload, config, costs, acceptance or (), choice=choice, seed=seed)


def load(arrivals, prompt=5, new=6, requests=20, seed=0):
  number = lambda value: Fixed(value) if isinstance(value, int) else value
  return Workload(arrivals=arrivals, prompt=number(prompt), new=number(new), requests=requests, seed=seed)


def test_one_request_at_a_time():
  """TTFT is the prompt's chunks and one round, then a round a token; nobody waits."""
  found = run(load(Paced(rate=1.0), prompt=20, new=6))
  # 19 rows: a chunk of 16 holds most of them, one of 4 the others.
  ttft = (CHUNK_MS[16] + CHUNK_MS[4] + PLAIN_MS) / 1e3
  for timing in found.timings:
    assert timing.reason is Reason.LENGTH and timing.new_tokens == timing.rounds == 6
    assert timing.ttft_s == pytest.approx(ttft) and timing.tpot_s == pytest.approx(PLAIN_MS / 1e3)
    assert timing.arrived_s == timing.number
  assert sum(step.prefill_ms for step in found.steps) == pytest.approx(20 * (ttft * 1e3 - PLAIN_MS))
  summary = summarize(found.timings)
  assert summary.ttft_s == pytest.approx(dict.fromkeys((50, 95, 99), ttft))
  assert summary.tau == 1 and summary.within == 1


@pytest.mark.parametrize("policy", ["prefill_first", "interleave"])
def test_a_closed_loop_of_b_rows_emits_b_tokens_a_step(policy):
  """Plain, prompts of one token, which need no prefill: throughput is B / step time."""
  rows = 4
  found = run(load(Closed(clients=rows), prompt=1, new=50, requests=40), slots=rows, policies=policy)
  assert summarize(found.timings).tokens_a_second == pytest.approx(rows / (PLAIN_MS / 1e3))
  assert {step.decoding for step in found.steps} == {rows}


def test_more_clients_than_rows_change_nothing_but_the_wait():
  """Little's law: clients = throughput in requests × time in the system, at a full house."""
  rows, clients, requests = 2, 6, 300
  found = run(load(Closed(clients=clients), prompt=1, new=10, requests=requests), slots=rows)
  summary = summarize(found.timings)
  assert summary.tokens_a_second == pytest.approx(rows / (PLAIN_MS / 1e3))
  inside = [t for t in found.timings if clients <= t.number < requests - clients]
  latency = sum(t.ended_s - t.arrived_s for t in inside) / len(inside)
  assert summary.requests_a_second * latency == pytest.approx(clients, rel=0.02)


@pytest.mark.parametrize(("rate", "tau"), [(1.0, 4.0), (0.0, 1.0)])
def test_all_accepted_and_none(rate, tau):
  """A window of 3 emits 4 tokens a round, or 1; a round costs draft and verify."""
  found = run(load(Paced(rate=0.5), new=24), acceptance=[Acceptance((rate,))])
  assert summarize(found.timings).tau == tau
  a_round = DRAFT_MS + NODES_4_MS
  decode_s = (24 / tau) * a_round / 1e3
  if rate == 0:
    decode_s -= (NODES_4_MS - PLAIN_MS) / 1e3  # there is no room for a draft before the last token
  for timing in found.timings:
    assert timing.ended_s - timing.arrived_s == pytest.approx(CHUNK_MS[4] / 1e3 + decode_s)


def test_tokens_a_round_follow_the_rates():
  """τ of a long run is that of `chain_tokens`, silent rounds as plain ones."""
  rates, proposing = (0.8, 0.5, 0.25), 0.7
  found = run(
    load(Closed(clients=3), new=200, requests=60),
    slots=3,
    acceptance=[Acceptance(rates, proposing)],
  )
  expected = 1 + proposing * (chain_tokens(rates) - 1)
  assert Acceptance(rates, proposing).expected(3) == pytest.approx(expected)
  assert summarize(found.timings).tau == pytest.approx(expected, rel=0.02)


def test_a_queue_of_one_server_waits_as_theory_says():
  """M/D/1: the mean wait is ρ S / 2 (1 - ρ) (Pollaczek and Khinchine)."""
  service = PLAIN_MS / 1e3  # a prompt of one token and one new one
  for busy in (0.3, 0.6):
    found = run(load(Poisson(rate=busy / service), prompt=1, new=1, requests=4_000))
    waits = [timing.ttft_s - service for timing in found.timings]
    assert min(waits) >= -1e-9
    assert sum(waits) / len(waits) == pytest.approx(busy * service / (2 * (1 - busy)), rel=0.1)


def test_policies_trade_first_tokens_against_pauses():
  """Prefill first reads a prompt at once and lets streams pause; interleaving bounds the pause."""
  workload = load(Poisson(rate=8.0), prompt=Uniform(64, 128), new=20, requests=60)
  pause = {}
  for policy in ("prefill_first[tokens=512]", "interleave[tokens=20]"):
    found = run(workload, slots=4, policies=policy)
    pause[policy] = max(step.seconds for step in found.steps if step.decoding or step.prefill_ms)
  first, chunked = pause.values()
  # 20 tokens are at most five chunks of 4, which are the dearest.
  assert chunked <= (5 * CHUNK_MS[4] + PLAIN_MS + 1e-9) / 1e3 < first


def test_windows_by_load_are_kept():
  """Where many rows decode no deep round runs; where one does, all of them are."""
  policies = "interleave+windows[table=((1,3),(2,0))]"
  found = run(load(Closed(clients=2), new=16), slots=2, policies=policies, acceptance=[Acceptance((1.0,))])
  assert {(step.decoding, step.depth) for step in found.steps if step.decoding} <= {(1, 3), (2, 0)}
  assert {step.draft_ms > 0 for step in found.steps if step.decoding == 2} == {False}


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.9, 1.0])
def test_the_best_choice_is_never_slower_than_plain(rate):
  """A controller that knows: with drafts that fail it decodes plainly, with good ones as the deepest does."""
  workload = load(Closed(clients=2), new=40)
  options = dict(slots=2, acceptance=[Acceptance((rate,))])
  at = lambda **how: summarize(run(workload, **options, **how).timings).tokens_a_second
  best, plain, deepest = at(choice="best"), at(policies="interleave+never"), at()
  assert best >= 0.99 * max(plain, deepest)
  if rate in (0.0, 1.0):
    assert best == pytest.approx(max(plain, deepest), rel=1e-6)


def test_several_rounds_a_step_take_as_long_and_come_together():
  """3 rounds a step: the same throughput, the first token with the third."""
  workload = load(Closed(clients=2), prompt=1, new=12, requests=8)
  one, three = (run(workload, slots=2, rounds_per_step=rounds) for rounds in (1, 3))
  assert len(one.steps) == 3 * len(three.steps)
  found = [summarize(simulation.timings) for simulation in (one, three)]
  assert found[0].tokens_a_second == pytest.approx(found[1].tokens_a_second)
  assert three.timings[0].ttft_s == pytest.approx(3 * one.timings[0].ttft_s)


def test_preemption_costs_time_and_no_tokens():
  """A tight budget: every answer is whole, what is read again shows in the counts and in the throughput."""
  workload = load(Closed(clients=4), prompt=20, new=Uniform(20, 60), requests=40)
  roomy, tight = (run(workload, slots=4, kv_budget=budget, reserved_share=0.0) for budget in (None, 110))
  assert tight.counts.preemptions > 5 and not roomy.counts.preemptions
  for found in (roomy, tight):
    asked = [timing.new_tokens for timing in found.timings]
    assert asked == [arrival.new_tokens for arrival in _numbered(workload)]
    assert found.counts.emitted == sum(asked) == sum(step.emitted for step in found.steps)
    assert found.counts.prompt_tokens == sum(step.prompt_tokens for step in found.steps)
  assert roomy.counts.prompt_tokens == 40 * 19 < tight.counts.prompt_tokens
  assert summarize(tight.timings).tokens_a_second < summarize(roomy.timings).tokens_a_second


def _numbered(workload):
  """Its arrivals by number, whenever they come."""
  source, taken = workload.start(), []
  while source.next_s is not None:
    taken += source.take(math.inf)
    for _ in range(workload.requests):
      source.ended(0.0)
  return sorted(taken, key=lambda arrival: arrival.number)


def test_measured_acceptance_is_the_calibrations():
  rates = {"temperature": 0.0, "proposing": 0.4, "rates": [0.6, 0.5], "rounds": 9}
  found = table(acceptance={DRAFTER: rates, "silent": rates | {"rates": []}})
  assert Acceptance.measured(found, DRAFTER) == Acceptance((0.6, 0.5), 0.4)
  for name in ("silent", "unknown"):
    with pytest.raises(
      ValueError, match=f"acceptance of '{name}' is not in the calibration; it has two_model"
    ):
      Acceptance.measured(found, name)


def test_costs_are_those_of_the_compiled_batch_and_the_longest_row():
  """A round of 2 rows in a program of 4 costs what 4 do, at the length of the longest."""
  round_ms = [[[10, 20], [20, 40]], [[30, 60], [60, 120]]]
  grid = table(batches=[1, 4], lives=[1, 101], round_ms=round_ms, drafts={})
  grid = dict(table=grid, step_ms=1.5, admit_ms=0.25)
  for batches, plain in (((4,), 30), ((1, 4), 30), ((2, 4), 50 / 3)):
    costs = Costs(**grid, batches=batches)
    assert costs.verify_ms(1, rows=2, live=1) == pytest.approx(plain)
  found = run(
    load(Closed(clients=1), prompt=51, new=1, requests=1), slots=4, costs=Costs(**grid, batches=(4,))
  )
  (step,) = found.steps
  assert step.verify_ms == pytest.approx(45) and step.host_ms == pytest.approx(1.75)


def test_what_is_copied_is_not_read():
  """A kept prefix of 8 rows: chunks for the other 4 alone, and the copies' cost."""
  costs = Costs(table=table(), batches=(1,), copy_ms=0.5)
  config = SchedulerConfig(slots=1, length_limit=64, prefill_widths=(4, 16))
  kept = lambda request, text: Prefix(9)  # 8 in whole chunks
  found = simulate(load(Closed(clients=1), prompt=13, new=1, requests=1), config, costs, prefix=kept)
  (step,) = found.steps
  assert (step.prefill_ms, step.host_ms, step.prompt_tokens) == (CHUNK_MS[4], 4.0, 4)
  assert found.counts.prefix_tokens == 8


def test_tokens_a_drafter_missed_cost_when_it_drafts_again():
  """Plain rounds at two rows, then one row drafts: it catches up on what it emitted meanwhile."""
  drafts = {DRAFTER: {"nodes": 4, "depth": 3, "draft_ms": [[DRAFT_MS]], "catch_up_ms": 1.0}}
  costs = Costs(table=table(drafts=drafts), drafters=(DRAFTER,), batches=(2,))
  workload = Workload(arrivals=Closed(clients=2), prompt=Fixed(1), new=Uniform(4, 30), requests=2, seed=1)
  policies = "interleave+windows[table=((1,3),(2,0))]"
  found = run(workload, slots=2, policies=policies, acceptance=[Acceptance((0.0,))], costs=costs)
  short, long = sorted(timing.new_tokens for timing in found.timings)
  assert long - short > 2
  drafting = [step.draft_ms for step in found.steps if step.draft_ms]
  assert drafting[0] == pytest.approx(DRAFT_MS + short) and set(drafting[1:]) == {DRAFT_MS}


def test_refused_requests_are_timings_too():
  found = run(load(Closed(clients=5), prompt=300, requests=5))
  assert [timing.reason for timing in found.timings] == [Reason.TOO_LARGE] * 5
  assert summarize(found.timings).within == 0 and not found.steps
  found = run(load(Paced(rate=1e6), requests=5), queue_limit=1)
  assert sum(timing.reason is Reason.QUEUE_FULL for timing in found.timings) == 3


def test_a_request_is_lucky_by_itself():
  """What is accepted depends on the seed and the request, not on policy or neighbours."""
  workload = load(Closed(clients=3), new=Uniform(5, 40), requests=30)
  taken = [
    [
      timing.rounds
      for timing in run(workload, slots=slots, acceptance=[Acceptance((0.5,))], seed=seed).timings
    ]
    for slots, seed in ((1, 0), (3, 0), (3, 1))
  ]
  assert taken[0] == taken[1] != taken[2]


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: Acceptance((1.5,)), "rates = .*1.5"),
    (lambda: Acceptance(()), "rates"),
    (lambda: Acceptance((0.5,), math.nan), "proposing = nan"),
    (lambda: Costs(table=table(), batches=(2, 1)), "batches"),
    (lambda: Costs(table=table(), batches=()), "batches"),
    (lambda: Costs(table=table(), batches=(1,), step_ms=-1), "step_ms = -1"),
    (lambda: Costs(table=table(), batches=(1,), drafters=("eagle",)), "'eagle', which is not in the calib"),
    (lambda: run(load(Closed()), acceptance=[Acceptance((0.5,))] * 2), "acceptance has 2 entries for 1"),
    (lambda: run(load(Closed()), choice="worst"), "choice = 'worst'"),
    (
      lambda: simulate(
        load(Closed()),
        SchedulerConfig(slots=1, length_limit=64),
        Costs(table=table(), batches=(1,), drafters=(DRAFTER,)),
        [Acceptance((0.5,))],
      ),
      "widths = ",
    ),
  ],
)
def test_wrong_arguments(make, message):
  with pytest.raises(ValueError, match=message):
    make()
