"""Speedups: the papers' formulas by hand, their condition, and a response predicted round by round."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax import analysis
from tests.analysis.test_costs import DRAFTER, FILE

QUICK = settings(max_examples=60, deadline=None)


def test_formulas_by_hand():
  """Theorems 3.8 and 3.11 at α = 1/2, γ = 2. Fails when a term is left out."""
  assert analysis.leviathan_speedup(0.5, 2, 0.25) == pytest.approx(1.75 / 1.5)
  assert analysis.operations_factor(0.5, 2, 0.25) == pytest.approx(0.5 * (0.5 + 3) / (1 - 0.125))
  assert analysis.operations_factor(0.9, 0, 0.1) == analysis.leviathan_speedup(0.9, 0, 0.1) == 1


@QUICK
@given(st.floats(0, 1), st.floats(0, 1))
def test_some_window_gains_exactly_when_alpha_exceeds_c(alpha, c):
  """Corollary 3.9, both ways, and its bound at γ = 1. Fails for another comparison."""
  gains = [analysis.leviathan_speedup(alpha, window, c) for window in range(1, 16)]
  assert gains[0] == pytest.approx((1 + alpha) / (1 + c))
  if abs(alpha - c) > 1e-9:
    assert analysis.leviathan_condition(alpha, c) == (max(gains) > 1)
  assert not analysis.leviathan_condition(c, c)


@QUICK
@given(st.floats(0, 1), st.integers(0, 12), st.floats(0, 1))
def test_general_costs_hold_leviathans(alpha, window, c):
  """Verify at 1 and draft at γ c is theorem 3.8. Fails when a cost is not divided by the tokens."""
  tokens = analysis.iid_tokens(alpha, window)
  assert analysis.speedup(tokens, verify=1, draft=window * c) == pytest.approx(
    analysis.leviathan_speedup(alpha, window, c)
  )


def test_a_response_shares_its_prefill():
  """100 tokens at 2 a round of 1.5, 50 for the prompt: 150 / (50 + 75). Fails when one of both pays it."""
  got = analysis.speedup(2, verify=1.2, draft=0.2, overhead=0.1, prefill=50, response=100)
  assert got == pytest.approx(150 / 125)
  assert analysis.speedup(2, verify=1.5, response=7) == pytest.approx(2 / 1.5)


def test_bytes_a_token():
  """One read of weights and live cache a round, the draft's a step.

  Fails when the cache is not live, or the draft is read once a round.
  """
  target = dict(parameter_bytes=1000, kv_bytes_a_token=2, live=50)
  plain = analysis.memory_bytes_a_token(**target)
  assert plain == 1100
  assert plain / analysis.memory_bytes_a_token(**target, tokens_a_round=2.5) == pytest.approx(2.5)
  draft = dict(draft_parameter_bytes=100, draft_kv_bytes_a_token=1, draft_steps=4)
  assert analysis.memory_bytes_a_token(**target, **draft, tokens_a_round=2) == (1100 + 4 * 150) / 2


def _by_rounds(table, prompt, widths, tokens_a_round, batch):
  """Milliseconds of rounds one after the other, each at the length that the ones before it left."""
  live, ms = float(prompt), 0.0
  for nodes in widths:
    ms += table.round_ms_at(nodes, batch=batch, live=live)
    live += tokens_a_round
  return ms


@pytest.mark.parametrize("batch", (1, 4))
def test_a_response_of_equal_rounds(batch):
  """30 rounds of 4 nodes that emit 3 tokens each, all drafted, against a walk over the rounds.

  Fails when lengths do not grow, the draft is charged a token, or plain decoding costs the wide round.
  """
  table = analysis.CostTable.from_json(FILE)
  got = analysis.predicted_seconds(
    table,
    prompt_tokens=100,
    new_tokens=90,
    node_counts={"4": 30},
    drafted={DRAFTER: 30},
    batch=batch,
    prefill_widths=(64, 16),
  )
  drafts = sum(table.draft_ms_at(DRAFTER, batch=batch, live=100 + 3 * i) for i in range(30))
  assert got.decode_s == pytest.approx((_by_rounds(table, 100, [4] * 30, 3, batch) + drafts + 0.4) / 1e3)
  assert got.plain_s == pytest.approx((_by_rounds(table, 100, [1] * 90, 1, batch) + 0.4) / 1e3)
  assert got.prefill_s == pytest.approx(0.12)
  assert got.speedup == pytest.approx(got.plain_s / got.decode_s)
  assert got.speedup_with_prefill == pytest.approx((got.plain_s + 0.12) / (got.decode_s + 0.12))


def test_a_response_of_mixed_rounds():
  """At a length where costs do not grow: each width and draft counted once, plain rounds caught up.

  Fails when rounds of a width, catching up or calls are left out.
  """
  table = analysis.CostTable.from_json(FILE | {"lives": [64, 256], "round_ms": np.ones((2, 2, 3)).tolist()})
  drafts = {"two": FILE["drafts"][DRAFTER] | {"draft_ms": [[2.0, 2.0], [2.0, 2.0]]}}
  table = analysis.CostTable.from_json(table.to_json() | {"drafts": drafts})
  asked = dict(prompt_tokens=70, new_tokens=20, node_counts={4: 6, 1: 5}, calls=3)
  got = analysis.predicted_seconds(table, **asked, drafted={"two": 6}, missed=5)
  assert got.decode_s * 1e3 == pytest.approx(11 + 6 * 2 + 5 * 1.5 + 3 * 0.4)
  assert got.plain_s * 1e3 == pytest.approx(20 + 3 * 0.4)
  assert analysis.predicted_seconds(table, **asked).decode_s * 1e3 == pytest.approx(11 + 3 * 0.4)


def test_plain_decoding_is_predicted_as_plain():
  """Rounds of one node, one a token: a speedup of exactly 1. Fails when the lengths of both differ."""
  table = analysis.CostTable.from_json(FILE)
  got = analysis.predicted_seconds(table, prompt_tokens=200, new_tokens=100, node_counts={1: 100})
  assert got.speedup == pytest.approx(1) and got.prefill_s == 0


RESPONSE = dict(prompt_tokens=9, new_tokens=9, node_counts={2: 5})


@pytest.mark.parametrize(
  ("call", "words"),
  [
    (lambda _: analysis.leviathan_speedup(0.5, 2, -0.1), "c = -0.1; it must be a finite number of at least"),
    (lambda _: analysis.operations_factor(0.5, 2, -0.1), "c_hat = -0.1"),
    (lambda _: analysis.leviathan_condition(2, 0.1), "alpha = 2"),
    (lambda _: analysis.speedup(2, verify=0), "verify = 0; it must be a finite number above 0"),
    (lambda _: analysis.speedup(0, verify=1), "tokens_a_round = 0"),
    (lambda _: analysis.speedup(2, verify=1, draft=-1), "draft = -1"),
    (lambda _: analysis.speedup(2, verify=1, prefill=9), "prefill = 9 needs response"),
    (lambda _: analysis.speedup(2, verify=1, response=0), "response = 0"),
    (
      lambda _: analysis.memory_bytes_a_token(parameter_bytes=-1, kv_bytes_a_token=0, live=0),
      "parameter_bytes = -1",
    ),
    (lambda table: analysis.predicted_seconds(table, **RESPONSE | {"new_tokens": 0}), "new_tokens = 0"),
    (lambda table: analysis.predicted_seconds(table, **RESPONSE | {"node_counts": {}}), "must have a round"),
    (lambda table: analysis.predicted_seconds(table, **RESPONSE, drafted={"two": 6}), "at most the 5 rounds"),
    (lambda table: analysis.predicted_seconds(table, **RESPONSE, drafted={"x": 5}), "drafter 'x'"),
  ],
)
def test_what_makes_no_sense_is_named(call, words):
  """Field, value and limit. Fails when a number comes back."""
  with pytest.raises(ValueError, match=words):
    call(analysis.CostTable.from_json(FILE))
