"""Every drafter with every rule, greedy, in float32, on one ragged batch."""

import jax
import numpy as np
import pytest

from specjax import decode
from specjax.testing import accepted_differs, assert_cache_rows, poison
from specjax.testing.scripted import Record
from tests import contract

WIDTH = contract.LENGTH_LIMIT


# Of a kind of drafter, and of a kind of draft, one pair each; the others are the longer suite.
ORDINARY = {
  *(("none", rule) for rule in contract.ANY_CHAIN),
  ("prompt_lookup", "greedy"),
  ("prompt_lookup_tree", "greedy"),
  ("prompt_lookup_widths", "greedy"),
  ("two_model_top_k", "greedy"),
  ("two_model_sample", "block_verification"),
  ("two_model_tree_top_k", "greedy"),
  ("self_draft", "greedy"),
  ("always_wrong", "greedy"),
  ("scripted_ragged", "greedy"),
  ("scripted_tree", "greedy"),
  ("eagle3_chain_sample", "block_verification"),
  ("medusa_tree", "greedy"),
  ("block_chain_sample", "block_verification"),
  ("early_exit", "block_verification"),
  ("from_outside", "greedy"),
}


@pytest.mark.parametrize(
  ("name", "rule"),
  [pair if pair in ORDINARY else pytest.param(*pair, marks=pytest.mark.slow) for pair in contract.PAIRS],
)
def test_pair(name, rule):
  """One compiled program a pair, used three ways: at once, round by round on poisoned memory, again.

  Fails when: a rejected row counts as committed, the bonus row is skipped, positions go by node and
  not by depth, masked slots are read, the log counts something else than what was emitted.
  """
  case = contract.DRAFTERS[name]
  _, weights = contract.built(name)
  config = contract.static(name, rule)
  plain = contract.plain()

  rows = decode.results(decode.generate(weights, contract.start(name), config))
  assert [row.tokens for row in rows] == [row.tokens for row in plain]
  assert [row.finish for row in rows] == [row.finish for row in plain] == ["length"] * contract.BATCH
  for row in rows:
    assert sum(row.emitted) == len(row.tokens)
    assert all(e <= a + 1 and a <= p for e, a, p in zip(row.emitted, row.accepted, row.proposed))
  if case.ragged:
    assert accepted_differs(rows), [row.accepted for row in rows]
  if case.deep:
    assert sum(accepted >= 2 for row in rows for accepted in row.accepted) >= 8, [
      row.accepted for row in rows
    ]
  if case.accepts is not None:
    assert all(set(row.accepted[:-2]) == {case.accepts} for row in rows), [row.accepted for row in rows]

  # The same program a round at a time; before each, every slot that is not committed becomes NaN.
  traces = decode.run_rounds._cache_size()
  state = contract.start(name)
  rounds = 0
  while np.asarray(state.active).any():
    state = decode.generate(weights, poison(state), config, 1)
    rounds += 1
    # Caches hold n - 1 rows; an error or stop would leave them as they are.
    np.testing.assert_array_equal(state.cache.length, np.asarray(state.length) - 1)
    if rounds % 4 == 1 or not np.asarray(state.active).any():
      assert_cache_rows(contract.target(), state.cache, state, width=WIDTH)
      for model, cache in case.caches(state.drafter).values():
        assert_cache_rows(model, cache, state, width=WIDTH)
    if isinstance(state.drafter, Record):
      assert_record(state)
  assert [row.tokens for row in decode.results(state)] == [row.tokens for row in plain]
  assert decode.results(state) == rows  # streaming equals one call, statistics included
  assert rounds == max(row.rounds for row in rows)
  assert decode.run_rounds._cache_size() == traces


def assert_record(state):
  """A drafter is fed each committed token but the last, once, in order."""
  record, tokens = jax.device_get((state.drafter, state.tokens))
  np.testing.assert_array_equal(record.length, np.asarray(state.length) - 1)
  for row, length in enumerate(record.length):
    np.testing.assert_array_equal(record.tokens[row, :length], tokens[row, :length])


def test_scripted_plans_are_followed():
  """The acceptance of a scripted drafter is its plan (case A7's 4, 0, 4, 0, 1, 0 is one of them).

  Fails when accepted counts are logged from another row or round.
  """
  for name, nodes in (("scripted_ragged", contract.RAGGED), ("scripted_tree", contract.RAGGED_TREE)):
    drafter, _ = contract.built(name)
    for seed, row in enumerate(contract.run(name, "greedy")):
      plan = [drafter.tree.depths[node] for node in nodes]
      wanted = [plan[(seed + i) % len(plan)] for i in range(row.rounds)]
      assert row.accepted[:-2] == wanted[:-2]  # the budget may cut the last proposals


@pytest.mark.slow
def test_p9_every_pair_accepts_something():
  """Token identity also holds for a drafter that never proposes: then it shows nothing (case P9)."""
  for name in ("prompt_lookup", "two_model_top_k", "two_model_sample", "self_draft"):
    rows = contract.run(name, "speculative_sampling")
    assert sum(map(sum, (row.accepted for row in rows))) > 10, name
