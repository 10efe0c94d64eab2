"""How methods are written, what a calibration makes of them, and what it predicts of their rows."""

import numpy as np
import pytest

from experiments import calibration, predictions, results
from experiments.methods import parse_method
from specjax.analysis import CostTable
from specjax.decode import RowResult
from specjax.tree import TokenTree
from tests.experiments.test_calibrate import KEY

LOOKUP = ("prompt_lookup[window=3]", "prompt_lookup[window=7]", "prompt_lookup[matches=4,nodes=8,window=5]")


@pytest.mark.parametrize(
  ("text", "control", "options", "widths"),
  [
    ("prompt_lookup", None, {}, ("prompt_lookup",)),
    ("auto", "adaptive", {}, LOOKUP),
    ("adaptive[of=prompt_lookup]", "adaptive", {}, LOOKUP),
    (
      "adaptive[of=prompt_lookup[min_ngram=1],memory=0.9]",
      "adaptive",
      {"memory": 0.9},
      tuple(width.replace("[", "[min_ngram=1,") for width in LOOKUP),
    ),
    ("adaptive[of=prompt_lookup[window=3]]", "adaptive", {}, ("prompt_lookup[window=3]",)),
    (
      "fixed[of=self_speculation[layers=2,window=2]|self_speculation[layers=2,branching=(3,2)],width=1]",
      "fixed",
      {"width": 1},
      ("self_speculation[layers=2,window=2]", "self_speculation[layers=2,branching=(3,2)]"),
    ),
    ("plus2_minus1[of=prompt_lookup]", "plus2_minus1", {}, LOOKUP[:2]),
  ],
)
def test_methods_are_taken_apart(text, control, options, widths):
  method = parse_method(text)
  assert (method.control, method.options, method.widths) == (control, options, widths)
  assert method.drafter == widths[0].partition("[")[0]


def table(**changes):
  """Rounds of 1, 4 and 8 nodes take 10, 12 and 20 ms, twice that in batches of 4; drafts take 3, 4 and 5."""
  rounds = np.array([[[10.0, 12.0, 20.0]] * 2, [[20.0, 24.0, 40.0]] * 2])
  rounds[:, 1] *= 1.5  # at 1000 live tokens
  drafts = {
    name: {"nodes": nodes, "depth": 3, "draft_ms": [[ms, ms], [2 * ms, 2 * ms]], "catch_up_ms": catch_up}
    for name, nodes, ms, catch_up in zip(LOOKUP, (4, 8, 8), (3.0, 4.0, 5.0), (0.1, 0.5, 0.2), strict=True)
  }
  fields = dict(
    made="today",
    key=KEY,
    batches=[1, 4],
    lives=[10, 1000],
    nodes=[1, 4, 8],
    round_ms=rounds,
    accept_ms=[0.1] * 3,
    prefill_ms={16: 30.0},
    call_ms=0.0,
    drafts=drafts,
    acceptance={LOOKUP[0]: {"temperature": 0.0, "proposing": 0.5, "rates": [0.8, 0.4], "rounds": 50}},
  )
  return CostTable(**{**fields, **changes})


TREES = (TokenTree.chain(3), TokenTree.chain(7))


def test_beliefs_are_the_tables():
  """Costs of the batch at every live length, acceptance that was measured, deeper as at its end.

  Fails when widths, batches or lengths are mixed up, or a guess counts as a measurement.
  """
  asked = dict(temperature=0.0, length_limit=1990)
  found = calibration.beliefs(table(), LOOKUP[:2], TREES, batch=4, **asked)
  np.testing.assert_allclose(found.live, [10, 1000, 1990])  # and what the costs grow to at the longest
  np.testing.assert_allclose(found.verify, [[20, 30, 40], [24, 36, 48], [40, 60, 80]], rtol=1e-6)
  np.testing.assert_allclose(found.draft, [[0] * 3, [6] * 3, [8] * 3])
  np.testing.assert_allclose(found.proposing, [1, 0.5, 0.5])
  np.testing.assert_allclose(found.acceptance[1], [0.8, *[0.4] * 6], rtol=1e-6)
  np.testing.assert_allclose(found.acceptance[2], found.acceptance[1])  # not measured: as the others
  np.testing.assert_allclose(found.catch_up, 1.0)  # the dearest, twice as dear as at the first batch
  measured = calibration.beliefs(table(), LOOKUP[:1], TREES[:1], batch=1, **asked)
  other = calibration.beliefs(table(), LOOKUP[:1], TREES[:1], batch=1, **{**asked, "temperature": 1.0})
  guess = calibration.beliefs(table(acceptance={}), LOOKUP[:1], TREES[:1], batch=1, **asked)
  assert found.strength == measured.strength > other.strength == guess.strength
  np.testing.assert_allclose(guess.acceptance, 0.5)


@pytest.mark.parametrize(
  ("widths", "trees", "batch", "words"),
  [
    (LOOKUP[:2], TREES, 4, None),
    (("prompt_lookup",), TREES[:1], 1, "lacks prompt_lookup"),
    (LOOKUP[:1], TREES[1:], 1, "with 4 nodes, here it has 8"),
    (LOOKUP[:2], TREES, 5, "ends at batch 4, here it is 5"),
  ],
)
def test_what_a_calibration_does_not_say_is_not_made_up(widths, trees, batch, words):
  """Fails when costs of another width, or of a smaller batch, are believed."""
  why = calibration.lacking(table(), widths, trees, batch)
  assert why is None if words is None else words in why


def row(drafter, tokens, nodes, widths, *, category="qa", question=1, seconds=1.0):
  result = RowResult(
    tokens=[0] * sum(tokens),
    prompt_tokens=10,
    finish="length",
    proposed=[n - 1 for n in nodes],
    depth=[n - 1 for n in nodes],
    reached=[1] * len(nodes),
    accepted=[t - 1 for t in tokens],
    emitted=tokens,
    nodes=nodes,
    width=widths,
    overlap=None,
    logprobs=None,
  )
  return results.make_row(
    result,
    question_id=question,
    turn=0,
    category=category,
    drafter=drafter,
    rule="greedy",
    settings={"batch_size": 1, "widths": list(parse_method(drafter).widths), "nodes": 8},
    prefill_s=0.0,
    decode_s=seconds,
    text="",
  )


def test_missed_tokens_are_those_before_a_later_draft():
  """Fails when rounds at the end, which no draft followed, count, or drafted rounds do."""
  made = row("auto", [1, 2, 1, 3, 1, 1], [1, 4, 1, 4, 1, 1], [0, 1, 0, 2, 0, 0])
  assert made["missed"] == 2
  assert made["node_counts"] == {"1": 4, "4": 2} and made["width_counts"] == {"0": 4, "1": 1, "2": 1}


def test_predictions_by_hand():
  """Two rounds of 4 nodes, one of them drafted in vain, and two plain ones, at one live length.

  Fails when a round is priced at another width, drafts or catching up are left out, or the plain time is
  that of another text.
  """
  flat = table(round_ms=np.array([[[10.0, 12.0, 20.0]] * 2, [[20.0, 24.0, 40.0]] * 2]))
  plain = [row("none", [1] * 6, [1] * 6, [1] * 6, seconds=0.06)]
  mine = [row("adaptive[of=prompt_lookup]", [3, 1, 1, 1], [4, 1, 1, 4], [1, 0, 1, 2], seconds=0.05)]
  (line, overall) = predictions.lines(flat, plain + mine)
  ms = 2 * 12 + 2 * 10 + 2 * 3 + 4 + 1 * 0.5
  assert line.predicted == pytest.approx(60 / ms) and line.measured == pytest.approx(0.06 / 0.05)
  assert line.draft == pytest.approx(10.5 / 4 / 10) and line.verify == pytest.approx(44 / 4 / 10)
  assert line.tau == 1.5 and (line.predicted > 1) == (line.tau > line.draft + line.verify)
  assert overall.category == "overall" and predictions.mean_error([line, overall]) == abs(line.error)


def test_p8_a_loss_is_called_slower_with_its_split():
  """τ = 2.53 at K = 4, rounds that cost 3 plain ones: the line says slower, and what draft and verify took.

  Fails when an acceptance that sounds good hides that it does not pay.
  """
  costs = table(
    nodes=[1, 5],
    round_ms=np.full((2, 2, 2), 10.0) * np.array([1, 1.8]),
    accept_ms=[0.1] * 2,
    drafts={
      "two_model[window=4]": {"nodes": 5, "depth": 4, "draft_ms": [[12.0] * 2] * 2, "catch_up_ms": 0.0}
    },
    acceptance={},
  )
  tokens = [3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3]  # 2.53 a round
  plain = [row("none", [1] * 38, [1] * 38, [1] * 38, seconds=0.38)]
  mine = [row("two_model[window=4]", tokens, [5] * 15, [1] * 15, seconds=0.45)]
  mine[0]["settings"]["nodes"] = 5
  cells = predictions.cells(predictions.lines(costs, plain + mine))[0]
  assert dict(zip(predictions.HEADER, cells, strict=True)) == {
    "method": "two_model[window=4]",
    "category": "qa",
    "draft": "1.20",
    "verify": "1.80",
    "needs τ": "> 3.00",
    "τ": "2.53",
    "predicted": "0.84 x slower",
    "measured": "0.84 x slower",
    "error": "+0 %",
  }


def test_a_method_that_was_not_calibrated_is_named():
  """Fails when costs of a draft with other nodes are taken, or a method is left out in silence."""
  rows = [
    row("none", [1], [1], [1]),
    row("two_model[window=9]", [1], [4], [1]),
    row(LOOKUP[0], [1], [4], [1]),
  ]
  assert predictions.unknown(table(), rows) == ["two_model[window=9]", LOOKUP[0]]
  assert predictions.lines(table(), rows) == []
