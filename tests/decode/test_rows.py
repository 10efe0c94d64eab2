"""Rows know nothing of each other: order, slot, batch size, padding, neighbours that come and go."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decode
from specjax.testing import TableTarget, assert_cache_rows, poison, tiny_model
from tests import contract

SAMPLED = ("none", "prompt_lookup", "two_model_sample", "prompt_lookup_tree", "two_model_tree_sample")


def rule_of(name):
  return "speculative_sampling" if contract.built(name)[0].tree.is_chain else "draw_and_follow"


def rows_of(name, rule, **kwargs):
  return contract.comparable(contract.run(name, rule, sampling=contract.SAMPLING, **kwargs))


# Medusa: case J6.
HEADS = ("eagle3_chain_sample", "eagle3_dynamic", "medusa_tree")
LONGER = ("two_model_sample", "prompt_lookup_tree", "two_model_tree_sample", *HEADS)
SOME = [pytest.param(name, marks=pytest.mark.slow) if name in LONGER else name for name in (*SAMPLED, *HEADS)]


@pytest.mark.parametrize("name", SOME)
def test_f3_rows_do_not_depend_on_order_batch_or_padding(name):
  """Fails when noise is keyed by slot, or a row's settings, length or drafts come from a neighbour."""
  rule = rule_of(name)
  together = rows_of(name, rule)
  order = (2, 0, 3, 1)
  assert rows_of(name, rule, rows=order) == [together[i] for i in order]
  # Alone, in a longer buffer, prefilled in other chunks.
  for i in (1, 3):
    assert rows_of(name, rule, rows=(i,), length_limit=200, prefill_widths=(8, 16)) == [together[i]]


@pytest.mark.parametrize(
  "names",
  (
    ("prompt_lookup", "two_model_sample"),
    pytest.param(("two_model_top_k", "self_draft", "prompt_lookup_tree"), marks=pytest.mark.slow),
  ),
)
def test_f3_seed_7_with_other_windows_and_in_other_slots(names):
  """Deterministic drafts and draw_and_follow: the text does not depend on the drafter at all.

  Fails when a target draw is keyed by anything but (seed, absolute position), by the round for one.
  """
  texts = [row.tokens for row in contract.plain_sampled()]
  for name in names:
    assert [row.tokens for row in rows_of(name, "draw_and_follow")] == texts, name


@pytest.mark.slow
@pytest.mark.parametrize("name", ("two_model_tree_sample", "two_model_tree_distinct"))
def test_distinct_siblings_leave_the_right_rows(name):
  """Sampled siblings that differ, rows accepting different branches: the draft's rows equal a fresh prefill.

  Fails when the draft compacts by another numbering than the target.
  """
  _, weights = contract.built(name)
  config = contract.static(name, "draw_and_follow")
  state = contract.start(name, sampling=contract.SAMPLING)
  while np.asarray(state.active).any():
    state = decode.generate(weights, poison(state), config, 3)
    for model, cache in contract.DRAFTERS[name].caches(state.drafter).values():
      assert_cache_rows(model, cache, state, width=contract.LENGTH_LIMIT)
  rows = decode.results(state)
  assert sum(map(sum, (row.accepted for row in rows))) > 10
  assert [row.tokens for row in rows] == [row.tokens for row in contract.plain_sampled()]


@pytest.mark.parametrize(
  "name",
  (
    "prompt_lookup",
    "two_model_sample",
    "prompt_lookup_tree",
    *(pytest.param(name, marks=pytest.mark.slow) for name in HEADS),
  ),
)
def test_insert_into_a_running_state(name):
  """A row may enter at any round: it and the others say what they say alone, and nothing compiles.

  Fails when a leaf of the state is shared between rows, or left over from the slot's last tenant.
  """
  rule = rule_of(name)
  _, weights = contract.built(name)
  config = contract.static(name, rule)
  together = rows_of(name, rule)
  single = lambda i: contract.start(name, rows=(i,), sampling=contract.SAMPLING)
  state = contract.start(name, rows=(0, 3, 3, 1), sampling=contract.SAMPLING)
  state = decode.generate(weights, state, config, 3)
  state = decode.insert(state, 2, single(2))
  sizes = decode.run_rounds._cache_size(), decode.insert_row._cache_size()
  state = decode.generate(weights, poison(state), config, 2)
  state = decode.insert(state, 0, single(0))  # over a row that is still running
  rows = contract.comparable(contract.finish(name, rule, state))
  assert rows == [together[0], together[3], together[2], together[1]]
  assert (decode.run_rounds._cache_size(), decode.insert_row._cache_size()) == sizes


@pytest.mark.parametrize("name", SOME)
def test_c4_empty_rows_stay_empty(name):
  """One row in a bucket of four, memory poisoned. Fails when an empty row is written at -1 or counted."""
  rule = rule_of(name)
  _, weights = contract.built(name)
  config = contract.static(name, rule)
  state = decode.init_state(weights, config, contract.BATCH)
  state = decode.insert(state, 2, contract.start(name, rows=(3,), sampling=contract.SAMPLING))
  state = decode.generate(weights, poison(state), config, decode.ALL_ROUNDS)
  rows = contract.comparable(decode.results(state))
  assert rows[2] == rows_of(name, rule)[3]
  for row in (0, 1, 3):
    assert rows[row] == decode.RowResult([], 0, None, *([] for _ in range(7)), None, None)
    assert rows[row].tau == rows[row].acceptance_rate == 0.0
  np.testing.assert_array_equal(state.cache.length, np.maximum(np.asarray(state.length) - 1, 0))


def test_j3_next_positions_are_per_row():
  """Two rows accept 0 and 4: next positions n0 + 1 and n1 + 5, and the cache says so.

  Fails when one offset is used for all rows.
  """
  drafter, weights = contract.built("scripted_ragged")
  config = contract.config(drafter, "greedy")
  # Plan (0, 4, 1, 3, 2): row 0 starts with 0 accepted, row 1 with 4.
  state = contract.start("scripted_ragged")
  before = np.asarray(state.length)
  state = decode.generate(weights, state, config, 1)
  np.testing.assert_array_equal(state.length - before, (1, 5, 2, 4))
  np.testing.assert_array_equal(state.cache.length, state.length - 1)


def test_j3_history_target_sees_each_rows_own_positions():
  """A target whose output is a checksum of (token, position) over the cache, through ragged rounds.

  Fails when a stored position is off by one anywhere.
  """
  target = TableTarget.random(3, contract.VOCAB)
  plain_drafter, _ = contract.built("none")
  drafter, _ = contract.built("prompt_lookup")
  prompts = [list(p) for p in contract.PROMPTS]
  texts = []
  for d in (plain_drafter, drafter):
    config = contract.config(d, "greedy")
    state = decode.prefill(decode.Weights(target), config, prompts, max_new_tokens=30)
    state = decode.generate(decode.Weights(target), state, config, decode.ALL_ROUNDS)
    texts.append([row.tokens for row in decode.results(state)])
    stored, length, tokens = jax.device_get((state.cache.k[0], state.cache.length, state.tokens))
    for row, n in enumerate(length):
      np.testing.assert_array_equal(stored[row, 0, :n, 0], tokens[row, :n])
      np.testing.assert_array_equal(stored[row, 0, :n, 1], np.arange(n))
  assert texts[0] == texts[1]
  # The same by the host, without any cache.
  for prompt, new in zip(prompts, texts[0]):
    for i in range(len(new)):
      assert np.argmax(target.logits_after(tuple(prompt + new[:i]))) == new[i]


def test_j4_short_and_long_prompts_together():
  """Prompts of 2 and 7 tokens, right-padded: logits of prefill and of each later step equal the solo runs.

  Fails when padding enters attention or positions.
  """
  model = tiny_model(0)
  prompts = [[5, 6], [1, 2, 3, 4, 5, 6, 7]]
  later = [[8, 9, 10], [11, 12, 13]]
  forward = jax.jit(lambda tokens, cache: model(tokens, cache))

  def logits(rows, width):
    tokens = np.zeros((len(rows), width), np.int32)
    for row, i in enumerate(rows):
      tokens[row, : len(prompts[i])] = prompts[i]
    lengths = jnp.array([len(prompts[i]) for i in rows])
    output = forward(jnp.asarray(tokens), model.init_cache(len(rows), 64))
    out = [np.asarray(output.logits)[row, : len(prompts[i])] for row, i in enumerate(rows)]
    cache = output.cache.replace(length=lengths)
    for step in range(3):
      output = forward(jnp.asarray([[later[i][step]] for i in rows]), cache)
      cache = output.cache.replace(length=cache.length + 1)
      out = [np.concatenate([o, np.asarray(output.logits)[row]]) for row, o in enumerate(out)]
    return out

  together = logits([0, 1], 7)
  for i in (0, 1):
    np.testing.assert_allclose(together[i], logits([i], len(prompts[i]))[0], atol=1e-4)
