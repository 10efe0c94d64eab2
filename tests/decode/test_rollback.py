"""Group A: caches of target and draft after rounds that accept all, some and none."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import cache as kv
from specjax import decode
from specjax.drafters import make_drafter
from specjax.testing import TableTarget, assert_cache_rows, perturbed, tiny_model
from specjax.verify import make_rule
from tests import contract

MODEL = tiny_model(2, num_layers=1)


def two_model(window, vocab, **options):
  return make_drafter(
    "two_model", window=window, vocab_size=vocab, num_real_tokens=vocab, **{"max_length": 512, **options}
  )


def config_of(drafter, **changes):
  fields = dict(rule=make_rule("greedy"), num_real_tokens=61, length_limit=90, prefill_widths=(16,))
  return decode.DecodeConfig(drafter=drafter, **{**fields, **changes})


@pytest.mark.parametrize("window", (4, *(pytest.param(w, marks=pytest.mark.slow) for w in (1, 2, 7))))
def test_a1_self_draft_accepts_everything(window):
  """64 tokens: each round but the last accepts all K; the draft's valid rows equal a fresh prefill.

  Fails when the row of the last accepted draft is missing: acceptance falls as soon as K > 1.
  """
  drafter = two_model(window, 61)
  config, weights = config_of(drafter), decode.Weights(MODEL, MODEL)
  state = decode.prefill(weights, config, [[5, 6, 7]], max_new_tokens=64)
  while np.asarray(state.active).any():
    n = np.asarray(state.length)
    np.testing.assert_array_equal(state.cache.length, n - 1)
    # Valid or pending: the last draft of a fully accepted round is fed with the next root.
    assert ((state.drafter.cache.length == n - 1) | (state.drafter.cache.length == n - 2)).all()
    assert_cache_rows(MODEL, state.cache, state, width=90)
    assert_cache_rows(MODEL, state.drafter.cache, state, width=90)
    state = decode.generate(weights, state, config, 2)
  (row,) = decode.results(state)
  assert len(row.tokens) == 64 and set(row.accepted[:-1]) == {window}


def test_a2_draft_cache_follows_what_was_accepted():
  """K = 4, a = 0 … 4 drafts accepted: the draft keeps n_new - 1 rows (a = 4: one is pending).

  Rows say which token at which position. Fails when too many are trimmed, or the count drifts.
  """
  vocab, prompt = 11, [1, 2, 3]
  right = np.arange(40) * 3 % vocab
  target = TableTarget(jax.nn.one_hot(right, vocab), by="position")
  drafter = two_model(4, vocab, policy="top_k")
  config = config_of(drafter, num_real_tokens=vocab, length_limit=30)
  for accepted in range(5):
    wrong = right.copy()
    wrong[len(prompt) - 1 + accepted] += 1  # the draft's prediction for the token after a right ones
    draft = TableTarget(jax.nn.one_hot(wrong % vocab, vocab), by="position")
    weights = decode.Weights(target, draft)
    state = decode.prefill(weights, config, [prompt], max_new_tokens=20)
    for rounds in (1, 2):
      state = decode.generate(weights, state, config, 1)
      n, rows = int(state.length[0]), int(state.drafter.cache.length[0])
      if rounds == 1:
        assert n == len(prompt) + accepted + 1
        assert rows == (n - 2 if accepted == 4 else n - 1)
      stored = np.asarray(state.drafter.cache.k[0])[0, 0, :rows]
      np.testing.assert_array_equal(stored[:, 0], np.asarray(state.tokens)[0, :rows])
      np.testing.assert_array_equal(stored[:, 1], np.arange(rows))


def test_a3_all_rejected_is_a_rollback_not_a_reset():
  """10 rows, 4 drafts, none accepted: the cache has 10 rows and one more, and logits equal plain's.

  Fails when rejection empties the cache.
  """
  drafter, weights = contract.built("always_wrong")
  config = contract.config(drafter, "greedy")
  prompt = [*range(11)]
  weights = decode.Weights(contract.target(), {**weights.drafter, "texts": weights.drafter["texts"] * 0 + 60})
  state = decode.prefill(weights, config, [prompt] * 4, max_new_tokens=9)
  np.testing.assert_array_equal(state.cache.length, 10)
  plain_next = contract.target()(jnp.asarray([prompt]), contract.target().init_cache(1, 32)).logits[0, -1]
  state = decode.generate(weights, state, config, 1)
  assert [row.accepted for row in decode.results(state)] == [[0]] * 4
  np.testing.assert_array_equal(state.cache.length, 11)
  assert int(state.tokens[0, 11]) == int(jnp.argmax(plain_next))
  rolled = kv.rollback(state.cache, jnp.full((4,), 10))
  again = contract.target()(jnp.full((4, 1), prompt[-1]), rolled).logits
  np.testing.assert_allclose(again[:, 0], np.broadcast_to(plain_next, (4, 61)), atol=1e-5)


def test_a4_sliding_windows_roll_back():
  """Window 8, prompt 6, K = 4, 40 tokens: equals plain windowed greedy (masked, so nothing wraps).

  Fails when a window is kept in a ring that rejected rows have overwritten.
  """
  model = tiny_model(3, sliding_window=8)
  draft = perturbed(model, 0.05)
  prompts = [[1, 2, 3, 4, 5, 6]] * 2
  texts = []
  for drafter, weights in ((contract.built("none")[0], None), (two_model(4, 61), draft)):
    config = config_of(drafter)
    state = decode.prefill(decode.Weights(model, weights), config, prompts, max_new_tokens=40)
    rows = decode.results(decode.generate(decode.Weights(model, weights), state, config, decode.ALL_ROUNDS))
    texts.append(rows[0].tokens)
  assert texts[0] == texts[1] and len(set(texts[0])) > 5
  assert 0 < sum(rows[0].accepted) < sum(rows[0].proposed)
  # By the host: every token is the argmax behind the whole text under the window.
  text = np.array([*prompts[0], *texts[0]])
  logits = model(jnp.asarray(text[None]), model.init_cache(1, 64)).logits[0]
  np.testing.assert_array_equal(jnp.argmax(logits, -1)[5:-1], text[6:])


def test_plain_rounds_leave_nothing_missing():
  """A draft that sat out rounds (they ran without it) catches up in one block before it drafts again.

  Fails when rows of the skipped rounds are missing in the draft's cache.
  """
  drafter = two_model(4, 61)
  none = dataclasses.replace(config_of(contract.built("none")[0]), length_limit=90)
  config, weights = config_of(drafter), decode.Weights(MODEL, MODEL)
  state = decode.prefill(weights, config, [[5, 6, 7], [9, 8]], max_new_tokens=40)
  for skipped in (1, 6, 11):
    draft_state = state.drafter
    state = decode.generate(weights, state.replace(drafter=()), none, skipped)
    state = decode.generate(weights, state.replace(drafter=draft_state), config, 1)
    assert_cache_rows(MODEL, state.drafter.cache, state, width=90)
  for row in decode.results(state):
    assert [a for a, p in zip(row.accepted, row.proposed) if p] == [4, 4, 4]
