"""The scheduler, step by step: who gets what, by hand. `test_scheduler_mixes` has the laws."""

import pytest

from specjax.serving.plans import Prefix
from specjax.serving.policies import make_policies
from specjax.serving.requests import Phase, Reason, Request, Update
from specjax.serving.scheduler import Scheduler, SchedulerConfig


def config(policies="interleave[tokens=64]", **fields):
  fixed = dict(slots=3, length_limit=100, prefill_widths=(4, 16), widths=((3, 4),), reserved_share=0.0)
  return SchedulerConfig(policies=make_policies(policies), **fixed | fields)


def scheduler(policies="interleave[tokens=64]", prefix=lambda request, text: None, **fields):
  return Scheduler(config(policies, **fields), prefix)


def ask(server, id, prompt=5, new=20):
  return server.submit(Request(id=id, prompt=[7] * prompt, max_new_tokens=new))


def go(server, tokens=1, **reasons):
  """One step in which every row emits so many tokens, and some end."""
  plan = server.plan()
  updates = [Update(seat.id, (0,) * tokens, reasons.get(seat.id)) for seat in plan.decode]
  return plan, server.report(updates)


def rows(seats):
  return [(seat.row, seat.id) for seat in seats]


# --- prompts and rounds ------------------------------------------------------------------------------


def test_a_prompt_is_read_up_to_its_last_token_and_decodes_in_the_same_step():
  server = scheduler()
  assert ask(server, "a", prompt=20) == [] and server.phase("a") is Phase.WAITING
  plan = server.plan()
  (admission,) = plan.admit
  assert (admission.row, admission.text, admission.emitted, admission.cached) == (0, (7,) * 20, 0, 0)
  assert [(c.start, c.count, c.width, c.last) for c in plan.prefill] == [(0, 16, 16, False), (16, 3, 4, True)]
  assert rows(plan.decode) == [(0, "a")] and plan.tokens == 20 + 4 and plan.depth == 3
  assert server.phase("a") is Phase.SPECULATING
  (update,) = server.report([Update("a", (1, 2), drafted=False)])
  assert update.tokens == (1, 2) and update.reason is None and server.phase("a") is Phase.FALLBACK


def test_a_prompt_of_one_token_needs_no_chunk():
  server = scheduler("prefill_first[tokens=64]")
  ask(server, "a", prompt=1)
  plan = server.plan()
  assert not plan.prefill and rows(plan.decode) == [(0, "a")]


def test_interleaving_keeps_to_the_budget():
  """A long prompt is read 16 tokens a step, beside rows that decode; who is not read does not decode."""
  server = scheduler("interleave[tokens=24]+never")
  ask(server, "a", prompt=2)
  go(server)
  ask(server, "b", prompt=60)
  seen = [go(server)[0] for _ in range(4)]
  assert [[chunk.width for chunk in plan.prefill] for plan in seen] == [[16, 4]] * 3 + [[]]
  assert [rows(plan.decode) for plan in seen] == [[(0, "a")]] * 2 + [[(0, "a"), (1, "b")]] * 2
  assert all(plan.tokens <= 24 for plan in seen)


def test_who_is_read_last_decodes_when_there_is_room():
  """Tokens for the chunk, but not for the round behind it: the row decodes a step later."""
  server = scheduler("interleave[tokens=16]+never", slots=2, prefill_widths=(4, 12))
  ask(server, "a", prompt=13)
  plan, _ = go(server)
  assert plan.prefill[-1].last and rows(plan.decode) == [(0, "a")] and plan.tokens == 13
  ask(server, "b", prompt=13)
  ask(server, "c", prompt=13)
  server.cancel("a")
  plan, _ = go(server)
  assert rows(plan.decode) == [(0, "b")]
  plan, _ = go(server)
  assert rows(plan.decode) == [(0, "b"), (1, "c")]


def test_prefill_first_lets_rows_wait_while_prompts_are_read():
  server = scheduler("prefill_first[tokens=20]")
  ask(server, "a", prompt=2)
  assert not go(server)[0].decode and rows(go(server)[0].decode) == [(0, "a")]
  ask(server, "b", prompt=37)
  plans = [go(server)[0] for _ in range(3)]
  assert [[chunk.count for chunk in plan.prefill] for plan in plans] == [[16, 4], [16], []]
  assert [len(plan.decode) for plan in plans] == [0, 0, 2]


def test_drafts_get_shorter_before_prompts_have_to_wait():
  """3 rows of 8 nodes leave no room for a chunk: they draft 3 deep, then not at all."""
  widths = ((3, 4), (7, 8))
  for tokens, depth in ((28, 7), (27, 3), (16, 3), (15, 0)):
    server = scheduler(f"interleave[tokens={tokens}]", widths=widths, slots=4)
    for id in "abc":
      ask(server, id, prompt=1)
    go(server)
    ask(server, "d", prompt=50)
    plan, _ = go(server)
    assert plan.depth == depth and plan.prefill and plan.tokens <= tokens


def test_speculation_follows_the_rows_that_decode():
  server = scheduler("interleave[tokens=64]+windows[table=((1,7),(2,3),(3,0))]", widths=((3, 4), (7, 8)))
  depths = []
  for id in "abc":
    ask(server, id, prompt=1)
    depths.append(go(server)[0].depth)
  assert depths == [7, 3, 0] and server.phase("a") is Phase.FALLBACK
  server.cancel("a")
  assert go(server)[0].depth == 3


def test_who_joins_counts_for_the_depth():
  """Three prompts that are read in one step decode in it at the depth for three rows."""
  server = scheduler("interleave[tokens=64]+windows[table=((1,3),(3,0))]")
  for id in "abc":
    ask(server, id, prompt=4)
  plan = server.plan()
  assert len(plan.decode) == 3 and plan.depth == 0 and plan.tokens == 3 * 4 + 3


def test_chunks_fit_the_buffer():
  """Near its end a wide chunk would not fit: narrow ones do."""
  server = scheduler(length_limit=30, capacity=32, slots=1)
  ask(server, "a", prompt=29, new=1)
  plan = server.plan()
  assert [(chunk.start, chunk.width) for chunk in plan.prefill] == [(0, 16), (16, 16)]
  server = scheduler(length_limit=30, capacity=32, slots=1, prefill_widths=(4, 20))
  ask(server, "a", prompt=29, new=1)
  assert [(c.start, c.width) for c in server.plan().prefill] == [(0, 20), (20, 4), (24, 4)]


# --- the KV budget -----------------------------------------------------------------------------------


def test_admission_asks_for_the_text_and_a_step():
  """Budget 30: texts of 10 that may grow by 4 in a step; the third does not fit."""
  for budget, admitted in ((41, 2), (42, 3)):
    server = scheduler(kv_budget=budget)
    for id in "abc":
      ask(server, id, prompt=10, new=20)
    assert len(server.plan().admit) == admitted and server.live == 10 * admitted


def test_what_is_reserved_is_not_given_away():
  """A share of 1 sets the whole answer aside: two requests of 30 tokens fit 60, three of 10 + 10."""
  for share, admitted in ((1.0, 2), (0.55, 2), (0.5, 3)):
    server = scheduler(kv_budget=60, reserved_share=share)
    for id in "abc":
      ask(server, id, prompt=10, new=20)
    assert len(server.plan().admit) == admitted


def test_drafts_get_shorter_before_a_row_goes_and_the_youngest_goes_first():
  """Two texts of 10 in a budget of 30: 3 deep while both may grow by 4, then plain, then b waits."""
  server = scheduler("interleave[tokens=64]", kv_budget=30)
  ask(server, "a", prompt=10)
  ask(server, "b", prompt=10)
  seen = []
  while server.counts.preemptions == 0:
    plan, _ = go(server)
    seen.append((plan.depth, rows(plan.decode), server.live))
  assert [depth for depth, *_ in seen] == [3, 3, 0, 0, 0, 3]
  assert [live for *_, live in seen] == [22, 24, 26, 28, 30, 16]
  assert rows(plan.evict) == [(1, "b")] and plan.evict[0].preempted and plan.decode[0].id == "a"
  assert server.phase("b") is Phase.WAITING and server.waiting == 1


def test_a_preempted_request_comes_back_with_its_text():
  server = scheduler("interleave[tokens=64]+never", kv_budget=30)
  ask(server, "a", prompt=10, new=12)
  ask(server, "b", prompt=10, new=12)
  for _ in range(6):
    plan, updates = go(server)
  assert rows(plan.evict) == [(1, "b")]
  ask(server, "c", prompt=1, new=2)
  assert not plan.admit, "c overtook b"
  while not plan.admit:
    plan, updates = go(server)
  again, last = plan.admit
  assert rows(plan.evict) == [(0, "a")] and (again.request.id, last.request.id) == ("b", "c")
  assert again.row == 0 and again.text == (7,) * 10 + (0,) * 5 and again.emitted == 5
  assert sum(chunk.count for chunk in plan.prefill if chunk.id == "b") == 14
  tokens = 6
  while not server.idle:
    _, updates = go(server)
    tokens += sum(len(update.tokens) for update in updates if update.id == "b")
  assert tokens == 12 and server.counts.preemptions == 1
  assert server.counts.ended == {Reason.LENGTH: 3}


def test_nobody_overtakes_who_does_not_fit():
  server = scheduler("interleave[tokens=64]+never", kv_budget=40)
  ask(server, "a", prompt=20)
  ask(server, "b", prompt=30, new=5)
  ask(server, "c", prompt=1, new=1)
  assert [admission.request.id for admission in server.plan().admit] == ["a"]


# --- prefixes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("kept", "copied", "read"),
  [(0, 0, 19), (3, 0, 19), (4, 4, 15), (15, 12, 7), (18, 16, 3), (19, 19, 0), (20, 19, 0), (99, 19, 0)],
)
def test_a_kept_prefix_is_not_read(kept, copied, read):
  """Whole narrow chunks, or everything but the root: rows, not prompt tokens, and no budget."""
  asked = []
  server = scheduler(prefix=lambda request, text: asked.append(text) or Prefix(kept, "there"))
  ask(server, "a", prompt=20)
  plan = server.plan()
  (admission,) = plan.admit
  assert asked == [(7,) * 20]
  assert admission.cached == copied and admission.prefix == (Prefix(kept, "there") if copied else None)
  assert sum(chunk.count for chunk in plan.prefill) == read
  assert plan.tokens == sum(chunk.width for chunk in plan.prefill) + 4
  assert [chunk.start for chunk in plan.prefill][:1] == ([copied] if read else [])
  server.report([Update("a", (1,))])
  assert (server.counts.prefix_tokens, server.counts.prompt_tokens) == (copied, read)


def test_a_copied_prefix_counts_in_the_kv_budget():
  server = scheduler(prefix=lambda request, text: Prefix(99), kv_budget=41)
  for id in "abc":
    ask(server, id, prompt=10)
  assert len(server.plan().admit) == 2 and server.live == 20


# --- coming and going --------------------------------------------------------------------------------


def test_a_full_queue_refuses_and_says_so():
  server = scheduler(slots=1, queue_limit=2)
  assert [ask(server, id) for id in "abc"] == [[]] * 3
  (refused,) = ask(server, "d")
  assert (refused.id, refused.reason) == ("d", Reason.QUEUE_FULL)
  assert refused.detail == "3 requests wait; the limit is 2"
  go(server)
  assert server.waiting == 2 and ask(server, "e")[0].reason is Reason.QUEUE_FULL
  assert server.phase("d") is Phase.FINISHED and server.counts.submitted == 5


@pytest.mark.parametrize(
  ("fields", "limit"), [({"length_limit": 30}, 30), ({"kv_budget": 25}, 25), ({"length_limit": 26}, 26)]
)
def test_what_never_fits_is_refused(fields, limit):
  server = scheduler(**fields)
  assert ask(server, "a", prompt=limit - 20, new=20) == []
  (refused,) = ask(server, "b", prompt=limit - 19, new=20)
  assert refused.reason is Reason.TOO_LARGE and f"make {limit + 1}; the limit is {limit}" in refused.detail
  while not server.idle:
    go(server)


def test_cancelling_in_every_phase():
  """Waiting, prefill, decoding, between plan and report, finished, and never there."""
  server = scheduler("interleave[tokens=20]+never", slots=1, prefill_widths=(16,))
  for id in "abcd":
    ask(server, id, prompt=40)
  assert server.cancel("b") == [Update("b", reason=Reason.CANCELLED)]
  go(server)
  assert server.phase("a") is Phase.PREFILL and server.cancel("a")[0].reason is Reason.CANCELLED
  plan, _ = go(server)
  assert rows(plan.evict) == [(0, "a")] and not plan.evict[0].preempted
  assert [admission.request.id for admission in plan.admit] == ["c"]
  while server.phase("c") is Phase.PREFILL:
    go(server)
  plan = server.plan()
  assert server.cancel("c")[0].reason is Reason.CANCELLED
  assert server.report([Update("c", (1,))]) == [], "tokens behind the end"
  assert rows(server.plan().evict) == [(0, "c")]
  server.report([])
  assert server.cancel("c") == server.cancel("nobody") == []
  assert server.counts.ended == {Reason.CANCELLED: 3} and server.phase("d") is Phase.PREFILL


def test_a_plan_whose_requests_all_ended_needs_no_report():
  server = scheduler()
  ask(server, "a")
  server.plan()
  server.shutdown(finish=False)
  assert server.report([]) == [] and server.idle


@pytest.mark.parametrize("finish", [True, False])
def test_shutdown(finish):
  server = scheduler(slots=1)
  for id in "abc":
    ask(server, id, new=3)
  go(server)
  ended = server.shutdown(finish=finish)
  assert [(update.id, update.reason) for update in ended] == [
    (id, Reason.SHUTDOWN) for id in "abc" if not finish
  ]
  (refused,) = ask(server, "d")
  assert refused.reason is Reason.SHUTDOWN and server.closed
  while not server.idle:
    go(server)
  assert rows(server.plan().evict) == [(0, "a" if not finish else "c")]
  assert server.counts.ended == {Reason.SHUTDOWN: 1 if finish else 4} | ({Reason.LENGTH: 3} if finish else {})


def test_a_second_shutdown_ends_what_the_first_let_finish():
  server = scheduler()
  ask(server, "a")
  server.shutdown(finish=True)
  go(server)
  assert [update.reason for update in server.shutdown(finish=False)] == [Reason.SHUTDOWN] and server.idle


def test_a_name_is_free_again_when_its_request_has_ended():
  server = scheduler()
  ask(server, "a", new=1)
  with pytest.raises(ValueError, match="id = 'a'; a request of that name has not ended"):
    ask(server, "a")
  assert go(server)[1] == [Update("a", (0,), Reason.LENGTH)]
  assert ask(server, "a") == []


def test_a_report_is_not_taken_for_another_request_of_that_name():
  """Cancelled during a step, and asked for again before the step's report."""
  server = scheduler()
  ask(server, "a", prompt=9)
  server.plan()
  server.cancel("a")
  ask(server, "a", prompt=30)
  assert server.report([Update("a", (1,))]) == [] and server.phase("a") is Phase.WAITING
  plan = server.plan()
  assert rows(plan.evict) == [(0, "a")] and plan.admit[0].text == (7,) * 30
  assert [chunk.count for chunk in plan.prefill] == [16, 13]


def test_a_failed_prefill_ends_the_request():
  server = scheduler("interleave[tokens=20]+never", prefill_widths=(16,))
  ask(server, "a", prompt=40)
  server.plan()
  assert server.report([Update("a", reason=Reason.FAILED)]) == [Update("a", reason=Reason.FAILED)]
  assert rows(server.plan().evict) == [(0, "a")]


# --- reports that do not fit ---------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("updates", "message"),
  [
    ([], "no report on a, which"),
    ([Update("a", (1,))] * 2, "the plan has it once"),
    ([Update("a", (1,)), Update("z", (1,))], "'z'; the plan has it not"),
    ([Update("a")], "neither emits a token nor ends"),
    ([Update("a", (1, 2, 3, 4, 5))], "5 tokens; it may emit 4"),
    ([Update("a", (1,), Reason.CANCELLED)], "reason = cancelled; it must be one of stop, length, failed"),
    ([Update("a", (1,), Reason.LENGTH)], "reason = length with 9 tokens left"),
    ([Update("a", (1,)), Update("b", (1,))], "'b': 1 tokens, but the plan does not have it decode"),
    ([Update("a", (1,)), Update("b", reason=Reason.STOP)], "reason = stop; it must be one of failed"),
  ],
)
def test_reports_that_do_not_fit_the_plan(updates, message):
  """Each is refused whole: the right one can follow."""
  server = scheduler("interleave[tokens=20]", slots=2)
  ask(server, "a", prompt=1, new=10)
  ask(server, "b", prompt=60)
  plan = server.plan()
  assert rows(plan.decode) == [(0, "a")] and {chunk.id for chunk in plan.prefill} == {"b"}
  with pytest.raises(ValueError, match=message):
    server.report(updates)
  assert server.counts.emitted == server.counts.prompt_tokens == 0
  assert server.report([Update("a", (1, 2))]) == [Update("a", (1, 2))]
  assert server.counts.emitted == 2


def test_plan_and_report_take_turns():
  server = scheduler()
  with pytest.raises(RuntimeError, match="no plan to report on"):
    server.report([])
  server.plan()
  with pytest.raises(RuntimeError, match="plan 0 was not reported"):
    server.plan()


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"slots": 0}, "slots = 0"),
    ({"slots": True}, "slots = True"),
    ({"length_limit": 1}, "length_limit = 1"),
    ({"kv_budget": 1}, "kv_budget = 1"),
    ({"queue_limit": -1}, "queue_limit = -1"),
    ({"rounds_per_step": 0}, "rounds_per_step = 0"),
    ({"reserved_share": 1.5}, "reserved_share = 1.5"),
    ({"prefill_widths": ()}, "prefill_widths = ()"),
    ({"prefill_widths": (16, 4)}, "must ascend"),
    ({"prefill_widths": (4, 6)}, "multiple of the first"),
    ({"capacity": 99}, "capacity = 99"),
    ({"capacity": 102}, "capacity = 102"),
    ({"widths": ((3, 3),)}, "widths has (3, 3)"),
    ({"slots": 61}, "tokens = 64; 61 slots of 1 plain rounds and a chunk of 4 need at least 65"),
    ({"rounds_per_step": 21}, "need at least 67"),
  ],
)
def test_wrong_configurations(fields, message):
  with pytest.raises(ValueError) as raised:
    config(**fields)
  assert message in str(raised.value)
