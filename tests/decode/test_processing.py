"""Groups H6, I1, I3, I4: penalties, bias, least lengths, grammars and log-probabilities, in the loop."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decode
from specjax.processors import TokenAutomaton
from specjax.sampling import Settings
from specjax.testing import (
  NOTHING,
  SampledDrafter,
  ScriptedDrafter,
  TableTarget,
  chi_square,
  joint_law,
  process,
  teacher_forced,
)
from specjax.verify import make_rule
from tests import contract

# Greedy rows, each with something else on. Row numbers as in `contract.PROMPTS`.
ADJUSTED = dict(
  repetition_penalty=(1.3, 1.0, 1.0, 0.8),
  presence_penalty=(0.0, 1.5, 0.0, -0.5),
  frequency_penalty=(0.5, 0.0, 0.0, 0.7),
  min_new_tokens=(0, 5, 30, 0),
  logit_bias=({}, {3: -100.0}, {}, {5: 2.0, 7: 3.0}),
)
SLOW = pytest.mark.slow
DRAFTERS = (
  pytest.param("prompt_lookup", marks=SLOW),
  "prompt_lookup_tree",
  pytest.param("two_model_top_k", marks=SLOW),
  "two_model_tree_top_k",
)


def run(name, rule, **kwargs):
  return contract.run(name, rule, sampling=ADJUSTED, **kwargs)


@pytest.fixture(scope="module")
def plain():
  return run("none", "greedy")


def test_i3_every_setting_changes_plain_decoding(plain):
  """Each row's text differs from the raw one's: none of the settings is ignored. A bias of -100 bans."""
  raw = contract.plain()
  assert all(a.tokens != b.tokens for a, b in zip((plain[i] for i in (0, 1, 3)), (raw[i] for i in (0, 1, 3))))
  assert 3 not in plain[1].tokens
  stop = raw[2].tokens[0]
  early = run("none", "greedy", rows=(2,), stop_ids=[stop])[0]
  assert early.finish == "length" or (early.tokens[-1] == stop and len(early.tokens) > 30)


@pytest.mark.parametrize("name", DRAFTERS)
def test_i1_processed_greedy_equals_plain(plain, name):
  """Token for token, with every setting on in some row. Fails when a draft's tokens are counted twice,
  not at all, or another branch's are.
  """
  rows = run(name, "greedy")
  assert [row.tokens for row in rows] == [row.tokens for row in plain]
  assert sum(sum(row.accepted) for row in rows) > 10


def test_i1_a_draft_like_the_target_is_always_right():
  """The target as its own draft, with every setting on: all drafts of every round are accepted.

  Fails when the draft is processed without the tokens drafted before it.
  """
  rows = run("self_draft", "greedy")
  for row in rows:
    assert all(accepted == depth for accepted, depth in zip(row.accepted, row.depth))


@pytest.mark.parametrize(
  "setting",
  [
    dict(repetition_penalty=3.0),
    dict(presence_penalty=9.0),
    dict(frequency_penalty=9.0),
    dict(logit_bias={0: -9.0}),
    dict(min_new_tokens=3),
  ],
)
def test_i3_each_setting_counts_alone(setting):
  """Token 0 is best by far, said before, and a stop id: any one setting keeps it from being said again."""
  stops = [0] if "min_new_tokens" in setting else []
  state = table_run(
    [[3.0, 2.0, 1.0]] * 3, script(()), settings=Settings.create(1, **setting), stop_ids=stops, budget=4
  )
  (row,) = decode.results(state)
  assert row.tokens != [0] * 4 and row.tokens != [0]


@pytest.mark.parametrize(
  "name", [pytest.param(name, marks=SLOW) for name in ("two_model_sample", "two_model_tree_distinct")]
)
def test_i1_processed_sampling_equals_plain(name):
  """Seed by seed with draw and follow; the draft processes as the target does, so that much is accepted."""
  both = {**ADJUSTED, **contract.SAMPLING, "temperature": (0.7, 0.7, 0.0, 0.7)}
  plain = contract.run("none", "draw_and_follow", sampling=both)
  rows = contract.run(name, "draw_and_follow", sampling=both)
  assert [row.tokens for row in rows] == [row.tokens for row in plain]
  assert sum(sum(row.accepted) for row in rows) > 10


def script(*rounds):
  """A `ScriptedDrafter` whose rounds may differ in length."""
  width = max(map(len, rounds))
  return ScriptedDrafter(tuple((*drafts, *[NOTHING] * (width - len(drafts))) for drafts in rounds))


def table_run(table, drafter, *, rule="greedy", prompt=(0,), settings=None, budget=8, by="token", **options):
  vocab = len(table[0])
  config = decode.DecodeConfig(
    drafter, make_rule(rule), num_real_tokens=vocab, length_limit=40, prefill_widths=(16,)
  )
  weights = decode.Weights(
    TableTarget(jnp.asarray(table, jnp.float32), by=by), None, options.pop("processor", None)
  )
  rows = 1 if settings is None else settings.seed.shape[0]
  state = decode.prefill(
    weights, config, [prompt] * rows, settings=settings, max_new_tokens=budget, **options
  )
  return decode.generate(weights, state, config)


@pytest.mark.parametrize("drafts", ((), (0, 1), (0, 1, 0), (1, 1)))
def test_i1_a_drafted_token_is_counted_once(drafts):
  """Logits A 3, B 2.5, C 1.2 at every step, frequency penalty .4, A said once: then A, B, A.

  Counting the draft twice, or the block's first token not at all, gives A, B, B or A, A, B.
  """
  drafter = script((), drafts)
  settings = Settings.create(1, frequency_penalty=0.4)
  state = table_run([[3, 2.5, 1.2]] * 3, drafter, prompt=(2,), settings=settings, budget=4)
  (row,) = decode.results(state)
  assert row.tokens == [0, 0, 1, 0]


@pytest.mark.parametrize("drafts", ((1, 1, 1, 1), (3, 1, 1, 1), ()))
def test_h6_least_length_is_counted_by_node(drafts):
  """EOS (3) best, A (1) second, at least 3 tokens: A, A, A, EOS, whatever is drafted.

  Fails when the rows of a block share one count, or are off by one.
  """
  drafter = script(drafts)
  state = table_run([[0, 2, 0, 3]] * 4, drafter, settings=Settings.create(1, min_new_tokens=3), stop_ids=[3])
  (row,) = decode.results(state)
  assert (row.tokens, row.finish) == ([1, 1, 1, 3], "stop")


A, B, EOS = 1, 2, 3
# (ab)*: state 0 wants a or the end, state 1 wants b.
AB = [[-1, 1, -1, 2], [-1, -1, 0, -1], [-1] * 4]


@pytest.mark.parametrize("rule", ("greedy", "draw_and_follow", "speculative_sampling"))
def test_i4_a_grammar_holds_through_rejected_drafts(rule):
  """(ab)*, drafts a, a, b: only legal text, and the state behind a round is that of what was emitted.

  Fails when the state advances through rejected drafts, or the mask of the root serves the block.
  """
  drafter = script((A, A, B), (B, A, B), (A, B))
  config = decode.DecodeConfig(
    drafter, make_rule(rule), num_real_tokens=4, length_limit=40, prefill_widths=(16,)
  )
  weights = decode.Weights(
    TableTarget(jnp.asarray([[9.0, 1, 1, 0.5]] * 4), by="token"), None, TokenAutomaton.create(AB)
  )
  temperature = 0.0 if rule == "greedy" else 1.0
  settings = Settings.create(8, temperature=temperature, seed=range(8))
  state = decode.prefill(weights, config, [[0]] * 8, settings=settings, max_new_tokens=9, stop_ids=[EOS])
  for _ in range(9):
    state = decode.generate(weights, state, config, 1)
    for row, here in zip(decode.results(state), np.asarray(state.processor)):
      at = 0
      for token in row.tokens:
        assert AB[at][token] >= 0, row.tokens
        at = AB[at][token]
      assert here == at
  rows = decode.results(state)
  assert sum(sum(row.accepted) for row in rows) > 0
  assert rule == "greedy" or "stop" in {row.finish for row in rows}


@pytest.mark.parametrize("drafts", ((), (A, B, A), (A, A), (B,)))
@pytest.mark.parametrize("budget", (2, 8))
def test_i4_the_end_of_a_grammar_stops_inside_a_block(drafts, budget):
  """The grammar ends behind "ab", and no stop id is known: "ab", then "stop", wherever the block is cut.

  Its end at the root gives no token at all. A neighbour that is free goes on. No round is spent on finding
  the end: with the budget at the end, too, it is "stop" whatever was drafted.
  """
  table = [[9, 1, 1, 0.5]] * 4
  ends = TokenAutomaton.create([[-1, 1, -1, -1], [-1, -1, 2, -1], [-1] * 4])
  state = table_run(
    table,
    script(drafts, ()),
    settings=Settings.create(3),
    processor=ends,
    processor_state=np.array([0, TokenAutomaton.FREE, 2], np.int32),
    budget=budget,
  )
  rows = decode.results(state)
  assert (rows[0].tokens, rows[0].finish) == ([A, B], "stop")
  assert (rows[1].tokens, rows[1].finish) == ([0] * budget, "length")
  assert (rows[2].tokens, rows[2].finish) == ([], "stop")
  assert sum(rows[0].emitted) == 2 and min(rows[0].emitted) > 0


def test_the_processed_law_of_a_text():
  """χ² over 100000 texts of four tokens, penalties and a grammar on draft and target, T = .8, top-k 2.

  The exact law is by loops. p > 2e-4, fixed seeds. Fails when draft and target process differently in a
  way that the rule is not told of, or the residual forgets the mask.
  """
  vocab, steps, rows = 4, 4, 100_000
  target = TableTarget.random(3, vocab, by="token", spread=1.0)
  draft = TableTarget.random(4, vocab, by="token", spread=1.0)
  table = np.array([[0, 1, 2, 0], [1, -1, 0, 2], [2, 0, -1, -1]])
  options = dict(repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.4, logit_bias={2: 0.7})
  settings = Settings.create(rows, temperature=0.8, top_k=2, seed=range(rows), **options)
  config = decode.DecodeConfig(
    SampledDrafter(2),
    make_rule("speculative_sampling"),
    num_real_tokens=vocab,
    length_limit=9,
    prefill_widths=(2,),
  )
  weights = decode.Weights(target, draft.table, TokenAutomaton.create(table))
  state = decode.prefill(weights, config, [(0, 2)] * rows, settings=settings, max_new_tokens=steps)
  state = decode.generate(weights, state, config)

  def law(text):
    new = text[2:]
    logits = target.logits_after(text).astype(float)
    for token in set(text):
      logits[token] = logits[token] / 1.4 if logits[token] > 0 else logits[token] * 1.4
    for token, count in collections.Counter(new).items():
      logits[token] -= 0.3 + 0.4 * count
    logits[2] += 0.7
    at = 0
    for token in new:
      at = table[at, token] if at >= 0 else at
    if at < 0:  # never reached; any law will do
      return np.full(vocab, 0.25)
    logits[table[at] < 0] = -np.inf
    return process(logits, temperature=0.8, top_k=2)

  tokens = np.asarray(state.tokens[:, 2 : 2 + steps])
  counts = np.bincount(np.ravel_multi_index(tuple(tokens.T), (vocab,) * steps), minlength=vocab**steps)
  assert chi_square(counts, joint_law(law, (0, 2), steps)) > 2e-4
  accepted, proposed = (np.asarray(x, int).sum() for x in (state.log.accepted, state.log.proposed))
  assert 0.2 * proposed < accepted < 0.95 * proposed


# --- log-probabilities -------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("name", "which"),
  [
    ("none", "processed"),
    ("two_model_sample", "raw"),
    pytest.param("two_model_tree_distinct", "processed", marks=SLOW),
    pytest.param("two_model_tree_distinct", "raw", marks=SLOW),
  ],
)
def test_log_probabilities_are_those_of_one_forward(name, which):
  """Of every emitted token, drafted or not: log softmax of the logits that plain decoding saw, raw or as
  they were drawn from. Fails when they are read at the token's own node instead of its parent's.
  """
  sampling = {**contract.SAMPLING, "temperature": (0.9, 1.2, 0.7, 0.8)}
  rows = contract.finish(
    name,
    "draw_and_follow",
    contract.start(name, sampling=sampling, logprobs=which),
    logprobs=which,
  )
  for i, (prompt, row) in enumerate(zip(contract.PROMPTS, rows)):
    logits = teacher_forced(contract.target(), prompt, row.tokens).astype(np.float64)
    keep = {} if which == "raw" else {key: sampling[key][i] for key in ("temperature", "top_k", "top_p")}
    want = [np.log(process(line, **keep)[token]) for line, token in zip(logits, row.tokens)]
    assert len(row.logprobs) == len(row.tokens)
    np.testing.assert_allclose(row.logprobs, want, atol=2e-4)


def test_log_probabilities_of_greedy_rows():
  """A point mass: 0; raw ones are the model's; switched off there are none."""
  for which in ("processed", "raw", "off"):
    state = contract.start("prompt_lookup", rows=(1,), logprobs=which)
    (row,) = contract.finish("prompt_lookup", "greedy", state, logprobs=which)
    assert row.tokens == contract.plain()[1].tokens
    if which == "off":
      assert row.logprobs is None
    elif which == "processed":
      assert row.logprobs == [0.0] * len(row.tokens)
    else:
      logits = teacher_forced(contract.target(), contract.PROMPTS[1], row.tokens)
      want = jax.nn.log_softmax(logits)[np.arange(len(row.tokens)), np.array(row.tokens)]
      np.testing.assert_allclose(row.logprobs, want, atol=2e-4)


# --- what is refused ---------------------------------------------------------------------------------


def test_settings_that_cannot_be_kept_are_refused():
  _, weights = contract.built("none")
  config = contract.static("none", "greedy")
  start = lambda prompts=((1, 2),), **kwargs: decode.prefill(weights, config, prompts, **kwargs)
  with pytest.raises(ValueError, match="min_new_tokens = 9 in row 0; it has room for 8"):
    start(settings=Settings.create(1, min_new_tokens=9), max_new_tokens=8)
  with pytest.raises(ValueError, match="logit_bias holds id 61; the vocabulary has 61"):
    start(settings=Settings.create(1, logit_bias={61: 1.0}))
  with pytest.raises(ValueError, match="the weights hold no processor"):
    start(processor_state=jnp.zeros(1))
  with pytest.raises(ValueError, match="logprobs"):
    contract.static("none", "greedy", logprobs="all")
  held = decode.Weights(weights.target, None, TokenAutomaton.create([[0] * 61]))
  with pytest.raises(ValueError, match="processor_state = 7; the automaton has states 0 to 0"):
    decode.prefill(held, config, [(1, 2)], processor_state=jnp.full((1,), 7, jnp.int32))
  mine = jnp.zeros((1,), jnp.int32)
  state = decode.prefill(held, config, [(1, 2)], max_new_tokens=2, processor_state=mine)
  decode.generate(held, state, config)
  assert not mine.is_deleted()  # what the caller gave is not donated
  with pytest.raises(ValueError, match="processor_state"):
    decode.prefill(held, config, [(1, 2)], processor_state=jnp.zeros((2,), jnp.int32))
