"""Cases and edges that belong to no single module's tests; named after the case where there is one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decode, sampling
from specjax.base import Proposal
from specjax.drafters import DRAFTERS, make_drafter
from specjax.sampling import Settings
from specjax.testing import (
  NOTHING,
  ScriptedDrafter,
  TableTarget,
  TruthDrafter,
  assert_cache_rows,
  process,
  teacher_forced,
  tiny_model,
)
from specjax.tree import TokenTree
from specjax.verify import RULES, make_rule
from tests import contract, heads

V = contract.VOCAB
SMALL = tiny_model(2, num_layers=1)


def greedy_text(target, prompt, count):
  """By the host, without a cache."""
  text = list(prompt)
  for _ in range(count):
    text.append(int(np.argmax(target.logits_after(tuple(text)))))
  return text[len(prompt) :]


def decoded(target, drafter, prompt, budget, weights=None, **changes):
  config = contract.config(drafter, "greedy", **changes)
  weights = decode.Weights(target, weights)
  state = decode.prefill(weights, config, [prompt], max_new_tokens=budget)
  return decode.results(decode.generate(weights, state, config))[0]


def test_a7_a_draft_now_and_none_next():
  """4, 0, 4, 0, 1, 0 drafts, all right, on a target that reads every row of its cache: plain's text.

  Fails when where a round's rows go depends on how many the round before accepted: committing one row
  too many or too few after a round without drafts changes the checksum.
  """
  target, prompt = TableTarget.random(21, V), [3, 1, 4]
  said = greedy_text(target, prompt, 24)
  script, at = [], 0
  for count in (4, 0, 4, 0, 1, 0):
    script.append((*said[at : at + count], *[NOTHING] * (4 - count)))
    at += count + 1
  row = decoded(target, ScriptedDrafter(tuple(script)), prompt, at)
  assert row.tokens == said[:at]
  assert row.proposed == row.accepted == [4, 0, 4, 0, 1, 0]


def test_c7_a_buffer_without_a_spare_slot():
  """Limit 124 and rounds of 4 nodes fill 128 slots to the last, in a batch of one request and three empty
  rows: all finite, and what the request says alone.

  Fails when an empty row is written into a slot that another use has: at -1, or at the end of the buffer.
  """
  drafter = ScriptedDrafter(((5, 6, 7),))
  config = contract.config(drafter, "greedy", length_limit=124)
  assert config.slots == 128 == config.length_limit + drafter.tree.num_nodes
  weights = decode.Weights(SMALL)
  prompt = [[(7 * i) % V for i in range(104)]]
  alone = decode.generate(weights, decode.prefill(weights, config, prompt), config)
  state = decode.init_state(weights, config, contract.BATCH)
  state = decode.insert(state, 3, decode.prefill(weights, config, prompt))
  state = decode.generate(weights, state, config)
  rows = decode.results(state)
  assert rows[3] == decode.results(alone)[0] and len(rows[3].tokens) == 20
  assert_cache_rows(SMALL, state.cache, state, width=128)
  for leaf in (*state.cache.k, *state.cache.v):
    assert np.isfinite(leaf).all()
    np.testing.assert_array_equal(np.asarray(leaf)[:3, :, 4:], 0)  # an empty row's block stands at 0


def test_q1_the_second_branch_is_made_contiguous():
  """Root with a and b, a1 below a, b1 below b; b and b1 are accepted: their rows are n and n + 1.

  The root's row is n - 1, and the next logits equal a fresh prefill's. Fails when rows stay where they
  were drafted (2 and 4 behind the root's), or are gathered by depth.
  """
  model, prompt = contract.target(), list(contract.PROMPTS[0])
  drafter = TruthDrafter((-1, 0, 0, 1, 2), V)
  weights = decode.Weights(model, drafter.plan(contract.plain_texts(), (4,)))
  config = contract.config(drafter, "greedy")
  state = decode.prefill(weights, config, [prompt], max_new_tokens=9)
  n = len(prompt)
  before = np.asarray(state.cache.length)
  assert before.tolist() == [n - 1]
  state = decode.generate(weights, state, config, 1)
  assert decode.results(state)[0].accepted == [2]
  assert np.asarray(state.cache.length).tolist() == [n + 2]
  assert_cache_rows(model, state.cache, state, width=32)
  text = np.asarray(state.tokens)[0, : n + 3].tolist()
  fresh = teacher_forced(model, prompt, [*text[n:], 0])[-1]
  logits = jax.jit(model)(jnp.array([[text[-1]]]), state.cache).logits[0, 0]
  np.testing.assert_allclose(logits, fresh, atol=1e-5)


def test_o4_debugging_changes_nothing():
  """Under NaN debugging the loop says the same; donation may be off there, so it is not asked for.

  Results are read without the cache, which is never converted. Fails when a result needs a leaf of it.
  """
  _, weights = contract.built("prompt_lookup")
  config = contract.static("prompt_lookup", "greedy")
  with jax.debug_nans(True):
    state = decode.generate(weights, contract.start("prompt_lookup"), config)
    rows = decode.results(state.replace(cache=None, drafter=None))
  assert [row.tokens for row in rows] == [row.tokens for row in contract.plain()]
  assert not state.cache.k[0].is_deleted()


def test_limits_of_top_p_and_min_p_are_kept():
  """A set with exactly the mass asked for is enough, and a token at exactly the share asked for stays.

  Fails when either limit is strict.
  """
  weights = np.array([1.0, 0.5, 0.25, 0.25], np.float32)
  logits = np.log(weights)
  assert np.array_equal(np.exp(jnp.asarray(logits)), weights)  # else the test says nothing
  cases = [dict(top_p=0.5), dict(top_p=0.75), dict(min_p=0.5), dict(min_p=1.0)]
  settings = Settings.create(
    4,
    temperature=1.0,
    top_p=[case.get("top_p", 1.0) for case in cases],
    min_p=[case.get("min_p", 0.0) for case in cases],
  )
  rows = jnp.broadcast_to(logits, (4, 1, 4))
  probs = np.asarray(sampling.processed_probs(rows, sampling.peak(rows)[0], settings))[:, 0]
  assert (probs > 0).sum(axis=-1).tolist() == [1, 2, 2, 1]


def test_searches_find_what_a_sort_does():
  """Nearly flat weights over 2000 ids: top-k and top-p reach far behind the tokens that a partial sort finds.

  Fails when the searches that take over there stop a token early or late.
  """
  logits = np.random.default_rng(4).normal(size=(3, 1, 2000)).astype(np.float32) * 0.5
  cases = [dict(top_k=1500), dict(top_p=0.9), dict(top_k=1200, top_p=0.8)]
  settings = Settings.create(
    3,
    temperature=1.0,
    top_k=[case.get("top_k", 0) for case in cases],
    top_p=[case.get("top_p", 1.0) for case in cases],
  )
  rows = jnp.asarray(logits)
  probs = np.asarray(jax.jit(sampling.processed_probs)(rows, sampling.peak(rows)[0], settings))[:, 0]
  for got, row, case in zip(probs, logits[:, 0], cases):
    want = process(row, **case)
    assert (got > 0).sum() == (want > 0).sum() > 500
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_insert_takes_the_row_that_is_named():
  """Row 2 of one state goes into row 1 of another, whose other rows stay. Fails for any other pair."""
  source, state = contract.start("none"), contract.start("none")
  before, wanted = jax.device_get((state.tokens, source.tokens[2]))
  state = decode.insert(state, 1, source, 2)
  after = np.asarray(state.tokens)
  np.testing.assert_array_equal(after[1], wanted)
  np.testing.assert_array_equal(after[[0, 2, 3]], before[[0, 2, 3]])
  assert int(state.length[1]) == len(contract.PROMPTS[2])


def test_reached_counts_the_rejected_depth():
  """A tree whose deepest node has depth 4, accepted down to depth 2 where more was proposed, then to its end.

  Depth is not a count of nodes, and a depth at which everything was rejected was reached. Fails when
  only accepted depths count, or one is added where nothing was proposed.
  """
  drafter = TruthDrafter(contract.TREE, V)  # node 5 has depth 2 and a child, node 4 depth 2 and none
  said = contract.plain()[0].tokens
  row = decoded(
    contract.target(),
    drafter,
    contract.PROMPTS[0],
    13,
    drafter.plan(contract.plain_texts(), (5, 4, 7)),
  )
  assert row.tokens == said[:13]
  assert row.accepted[:3] == [2, 2, 4] and row.reached[:3] == [3, 2, 4]
  assert row.depth[:3] == [4, 4, 4] and row.proposed[:3] == [7, 7, 7]


@pytest.mark.parametrize("name", RULES)
def test_q6_every_rule_runs_as_it_comes(name):
  """By its name and without options: a greedy row and a sampled one give a token each.

  Fails when a default is out of range, or needs what nobody gave.
  """
  rule, tokens = make_rule(name), jnp.array([[5, 1, 2], [5, 1, 2]])
  target = jnp.array([[1, 2, 0], [0, 0, 2]])
  target = target if rule.needs == "argmax" else jax.nn.one_hot(target, 3)
  tree = TokenTree.chain(2)
  proposal = Proposal(tokens, jnp.ones_like(tokens, bool), None, tree=tree, kind="deterministic")
  settings = Settings.create(2, temperature=[0.0, 1.0])
  verdict = jax.jit(lambda *args: rule(*args))(target, proposal, settings, jnp.array([4, 4]))
  if name != "synthetic":
    assert verdict.accepted.tolist() == [2, 0] and verdict.next_token.tolist() == [0, 0]
  assert 0 <= int(verdict.accepted.min()) and 0 <= int(verdict.next_token.min()) < 3


@pytest.mark.parametrize("name", RULES)
def test_invalid_drafts_are_never_accepted(name):
  """Right drafts with finite rows behind them, of which none and one count. Fails if validity is ignored."""
  rule, tokens = make_rule(name), jnp.array([[5, 1, 2], [5, 1, 2]])
  said = jnp.array([[1, 2, 0], [1, 2, 0]])
  target = said if rule.needs == "argmax" else jax.nn.one_hot(said, 3)
  valid = jnp.array([[True, False, False], [True, True, False]])
  proposal = Proposal(tokens, valid, None, tree=TokenTree.chain(2), kind="deterministic")
  settings = Settings.create(2, temperature=1.0, seed=[3, 4])
  verdict = jax.jit(lambda *args: rule(*args))(target, proposal, settings, jnp.array([4, 4]))
  if name == "synthetic":
    assert (verdict.accepted <= jnp.array([0, 1])).all()
  else:
    assert verdict.accepted.tolist() == [0, 1] and verdict.next_token.tolist() == [1, 2]


@pytest.mark.parametrize(
  "name",
  [name if name == "prompt_lookup" else pytest.param(name, marks=pytest.mark.slow) for name in DRAFTERS],
)
def test_q6_every_drafter_runs_as_it_comes(name):
  """With no option but what models must say about themselves."""
  target, prompt = contract.target(), [1, 2, 1, 2]
  sizes = dict(vocab_size=V, num_real_tokens=V)
  options, draft = {
    "two_model": (dict(window=4, max_length=99, **sizes), contract.draft()),
    "eagle": (dict(window=4, max_length=99, taps=(2,), **sizes), contract.eagle1_weights()),
    "eagle3": (dict(window=4, max_length=99, taps=heads.TAPS, **sizes), contract.eagle3_weights()),
    "medusa": (dict(window=3, num_heads=3, taps=(2,), **sizes), contract.medusa(window=1)[1]),
    "block": (
      dict(window=4, max_length=99, taps=heads.TAPS, block_size=5, **sizes),
      contract.block_weights(),
    ),
    "self_speculation": (dict(window=4, max_length=99, exit=1, **sizes), contract.prefix()[1]),
    "early_exit": (dict(window=4, max_length=99, exit=1, **sizes), contract.early_exit_weights()),
  }.get(name, ({}, None))
  row = decoded(target, make_drafter(name, **options), prompt, 12, draft)
  assert row.tokens == decoded(target, make_drafter("none"), prompt, 12).tokens
  assert (sum(row.proposed) > 0) == (name != "none")
