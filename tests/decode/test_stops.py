"""Groups H, P, E9, K1: where a block ends, and what is counted."""

import jax
import numpy as np
import pytest

from specjax import decode
from specjax.sampling import Settings
from specjax.testing import NOTHING, ScriptedDrafter, TableTarget
from specjax.verify import make_rule
from tests import contract

VOCAB = 32
STOP = 31


def scripted(said, drafts, *, rule="greedy", budgets=(20,), stop_ids=(), prompt=(1, 2)):
  """A target that says ``said`` behind the prompt whatever stands there, with given drafts a round."""
  table = np.zeros((len(prompt) + len(said), VOCAB), np.float32)
  table[np.arange(len(said)) + len(prompt) - 1, said] = 50
  drafter = ScriptedDrafter(tuple(map(tuple, drafts)))
  config = decode.DecodeConfig(
    drafter, make_rule(rule), num_real_tokens=VOCAB, length_limit=40, prefill_widths=(16,)
  )
  weights = decode.Weights(TableTarget(jax.numpy.asarray(table), by="position"))
  state = decode.prefill(
    weights, config, [prompt] * len(budgets), max_new_tokens=list(budgets), stop_ids=stop_ids
  )
  return decode.results(decode.generate(weights, state, config, decode.ALL_ROUNDS))


@pytest.mark.parametrize("rule", ("greedy", "speculative_sampling"))
def test_h1_stop_before_budget_inside_a_block(rule):
  """Block [10, 11, STOP, 20, 21, 22]: budget 5 → [10, 11, STOP] "stop"; budget 2 → [10, 11] "length".

  Budget 3 ends both at once: the stop was said, so "stop". Fails for another order of the checks.
  """
  said = [10, 11, STOP, 20, 21, 22]
  rows = scripted(said, [said[:5]], rule=rule, budgets=(5, 2, 3), stop_ids=[STOP])
  assert [(row.tokens, row.finish) for row in rows] == [
    ([10, 11, STOP], "stop"),
    ([10, 11], "length"),
    ([10, 11, STOP], "stop"),
  ]
  assert [row.emitted for row in rows] == [[3], [2], [3]]


def test_h2_text_ends_at_each_place_of_a_block():
  """Plain's 3rd … 6th new token declared EOS in turn, self-draft K = 4: the output ends exactly there.

  The four rows cover every draft index and the bonus. Fails when only the last token of a block, or
  only drafts and not the bonus, are compared with the stop ids.
  """
  row = 2
  text = contract.plain()[row].tokens
  assert len(set(text[:6])) == 6, "the test needs distinct tokens"
  for stops in ([[t] for t in text[2:6]], [[t, 60] for t in text[:4]]):
    got = contract.run("self_draft", "greedy", rows=(row,) * 4, stop_ids=stops)
    assert [r.tokens for r in got] == [text[: text.index(s[0]) + 1] for s in stops]
    assert {r.finish for r in got} == {"stop"}


def test_p1_counts_what_was_emitted():
  """K = 5: round one accepts 2 (emits 3); round two accepts 5, its third token is EOS (emits 3): τ = 3.

  Fails when tokens cut away by the stop are counted (4.5).
  """
  said = [3, 4, 5, 6, 7, STOP, 8, 9, 10]
  (row,) = scripted(said, [(3, 4, 9, 9, 9), (6, 7, STOP, 8, 9)], stop_ids=[STOP])
  assert row.tokens == said[:6] and row.finish == "stop"
  assert (row.emitted, row.accepted, row.tau) == ([3, 3], [2, 5], 3.0)
  assert sum(row.emitted) == len(row.tokens)


def test_p3_all_rejected_is_one_token_a_round():
  """The bonus is included in τ: plain decoding and a draft that is never right both have 1.0."""
  said = list(range(3, 13))
  (row,) = scripted(said, [(30, 30, 30)], budgets=(10,))
  assert (row.tokens, row.tau, row.acceptance_rate) == (said, 1.0, 0.0)
  assert {r.tau for r in contract.plain()} == {1.0}


def test_p4_acceptance_is_over_what_was_proposed():
  """Two of K drafts right: K = 3 gives .667, K = 7 gives .286, 3.0 tokens a round in both."""
  said = [3 + i for i in range(9)]
  for window, rate in ((3, 2 / 3), (7, 2 / 7)):
    drafts = [(*said[3 * r : 3 * r + 2], *[30] * (window - 2)) for r in range(3)]
    (row,) = scripted([*said, 0, 0, 0, 0, 0, 0], drafts, budgets=(15,))
    assert row.accepted[:2] == [2, 2] and row.emitted[:2] == [3, 3]
    assert sum(row.accepted[:2]) / sum(row.proposed[:2]) == pytest.approx(rate)


def test_e9_a_wrong_draft_is_replaced_at_its_place():
  """The target says 10 + j; draft [10, 99 → 29, 12] emits exactly [10, 11]. Fails for the next row's word."""
  (row,) = scripted([10, 11, 12, 13], [(10, 29, 12), (NOTHING,) * 3], budgets=(4,))
  assert (row.tokens, row.emitted[0], row.accepted[0]) == ([10, 11, 12, 13], 2, 1)


def test_k1_the_first_token_is_the_targets():
  """Prompt [1, 1, 1], the target always says 2, draft [1]: the first emitted token is 2."""
  (row,) = scripted([2] * 6, [(1,)], prompt=(1, 1, 1), budgets=(6,))
  assert row.tokens == [2] * 6 and row.accepted == [0] * 6


def test_unusable_logits_end_their_row_only():
  """NaN, +inf or all -inf at a visited node: that row ends with "error" and what came before it.

  A round that ends in error counts with what it emitted. Fails when a neighbour ends, too, or a token
  drawn from NaN is emitted.
  """
  for bad in (np.nan, np.inf, -np.inf):
    table = np.zeros((9, VOCAB), np.float32)
    said = [3, 4, 5, 6, 7, 8, 9]
    table[np.arange(7) + 1, said] = 50
    table[4] = bad  # what stands behind the third new token
    drafter = ScriptedDrafter(((3, 4, 5, 6, 7),))
    config = decode.DecodeConfig(
      drafter, make_rule("speculative_sampling"), num_real_tokens=VOCAB, length_limit=40, prefill_widths=(16,)
    )
    weights = decode.Weights(TableTarget(jax.numpy.asarray(table), by="position"))
    state = decode.prefill(
      weights,
      config,
      [[1, 2], [1, 2]],
      max_new_tokens=[6, 2],
      settings=Settings.create(2, temperature=[0, 1]),
    )
    rows = decode.results(decode.generate(weights, state, config, decode.ALL_ROUNDS))
    assert (rows[0].tokens, rows[0].finish) == ([3, 4, 5], "error")
    assert (rows[1].tokens, rows[1].finish) == ([3, 4], "length")
    assert rows[0].emitted == [3]


@pytest.mark.parametrize("drafts", ((3, 4, 5, 6, 7), (3, 4, 5), ()))
def test_an_error_behind_the_budget_is_not_seen(drafts):
  """Unusable logits right behind the last token of the budget: "length", whatever was drafted.

  Fails when the block is cut at the error first, so that the reason depends on the drafter.
  """
  table = np.zeros((9, VOCAB), np.float32)
  table[np.arange(7) + 1, [3, 4, 5, 6, 7, 8, 9]] = 50
  table[4] = np.nan
  config = decode.DecodeConfig(
    ScriptedDrafter(((*drafts, *[NOTHING] * (5 - len(drafts))),)),
    make_rule("speculative_sampling"),
    num_real_tokens=VOCAB,
    length_limit=40,
    prefill_widths=(16,),
  )
  weights = decode.Weights(TableTarget(jax.numpy.asarray(table), by="position"))
  state = decode.prefill(weights, config, [[1, 2]], max_new_tokens=3)
  (row,) = decode.results(decode.generate(weights, state, config))
  assert (row.tokens, row.finish) == ([3, 4, 5], "length")
