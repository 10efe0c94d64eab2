"""Random targets, drafts, prompts, budgets, stops and settings, for every kind of drafter and rule.

The shapes are few, so that few programs compile; what varies is traced.
"""

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax import decode
from specjax.drafters import make_drafter
from specjax.sampling import Settings
from specjax.testing import TableTarget, process
from specjax.tree import TokenTree
from specjax.verify import make_rule

VOCAB, LIMIT, ROWS, LONGEST = 7, 40, 4, 9
EXAMPLES = 12


def two_model(**options):
  sizes = dict(vocab_size=VOCAB, num_real_tokens=VOCAB, max_length=25)  # less than the rows may have
  return make_drafter("two_model", window=3, **sizes, **options)


METHODS = {
  "lookup-follow": (lambda: make_drafter("prompt_lookup", window=3, min_ngram=1), "draw_and_follow"),
  "lookup-recursive": (
    lambda: make_drafter("prompt_lookup", window=3, min_ngram=1, matches=3, nodes=6),
    "recursive_rejection",
  ),
  "chain-block": (lambda: two_model(), "block_verification"),
  "chain-token": (lambda: two_model(), "speculative_sampling"),
  "tree-traversal": (lambda: two_model(branching=(2, 2)), "traversal_verification"),
  "distinct-recursive": (
    lambda: two_model(branching=(3,), policy="sample_without_replacement"),
    "recursive_rejection",
  ),
  "top_k-follow": (
    lambda: dataclasses.replace(two_model(policy="top_k"), tree=TokenTree((-1, 0, 0, 1, 2, 2, 4))),
    "draw_and_follow",
  ),
}


@functools.cache
def config(method):
  drafter, rule = (make_drafter("none"), "draw_and_follow") if method == "plain" else METHODS[method]
  drafter = drafter() if callable(drafter) else drafter
  return decode.DecodeConfig(
    drafter, make_rule(rule), num_real_tokens=VOCAB - 1, length_limit=LIMIT, prefill_widths=(8,)
  )


def run(method, case, order=range(ROWS)):
  """Results of the rows, in the order given and handed back in the case's own."""
  draft = case["draft"] if method != "plain" and "lookup" not in method else None
  pick = lambda values: [values[i] for i in order]
  state = decode.prefill(
    decode.Weights(case["target"], draft),
    config(method),
    pick(case["prompts"]),
    max_new_tokens=pick(case["budgets"]),
    stop_ids=pick(case["stops"]),
    settings=Settings.create(ROWS, **{name: pick(values) for name, values in case["settings"].items()}),
  )
  rows = decode.results(decode.generate(decode.Weights(case["target"], draft), state, config(method)))
  return [rows[list(order).index(i)] for i in range(ROWS)]


def each(strategy):
  return st.lists(strategy, min_size=ROWS, max_size=ROWS)


tokens = st.integers(0, VOCAB - 2)
cases = st.fixed_dictionaries(
  dict(
    target=st.integers(0, 10**6).map(lambda seed: TableTarget.random(seed, VOCAB, spread=2.0)),
    # Drafts like the target with noise, so that they are right now and then: made below.
    noise=st.floats(0.0, 2.0),
    prompts=each(st.lists(tokens, min_size=1, max_size=LONGEST)),
    budgets=each(st.integers(1, 25)),
    stops=each(st.lists(tokens, max_size=2)),
    settings=st.fixed_dictionaries(
      dict(
        temperature=each(st.sampled_from([0.0, 0.0, 0.6, 1.0, 1.5])),
        top_k=each(st.sampled_from([0, 0, 2, 4])),
        top_p=each(st.sampled_from([1.0, 1.0, 0.9, 0.5])),
        min_p=each(st.sampled_from([0.0, 0.0, 0.2])),
        seed=each(st.integers(0, 2**32 - 1)),
        repetition_penalty=each(st.sampled_from([1.0, 1.0, 1.3])),
        frequency_penalty=each(st.sampled_from([0.0, 0.0, 0.5])),
        logit_bias=each(st.dictionaries(tokens, st.floats(-3, 3, width=32), max_size=2)),
      )
    ),
  )
)


def with_draft(case):
  shift = np.random.default_rng(0).standard_normal(case["target"].table.shape).astype(np.float32)
  return {
    **case,
    "draft": dataclasses.replace(case["target"], table=case["target"].table + case["noise"] * shift),
  }


ORDINARY = ("tree-traversal",)


@pytest.mark.parametrize(
  "method",
  [method if method in ORDINARY else pytest.param(method, marks=pytest.mark.slow) for method in METHODS],
)
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
@given(case=cases, order=st.permutations(range(ROWS)))
def test_a_run_keeps_what_plain_says(method, case, order):
  """Greedy rows equal plain's token for token under every lossless rule, sampled ones where the rule
  follows; stops, budgets and counts hold; log-probabilities are those of the text; a row's result does not
  depend on its place or its neighbours.

  Fails for nearly any fault of the loop; which one, the tests by name tell.
  """
  case = with_draft(case)
  plain, rows = run("plain", case), run(method, case)
  for i, (row, reference) in enumerate(zip(rows, plain)):
    greedy = case["settings"]["temperature"][i] == 0
    if greedy or "follow" in method:
      assert (row.tokens, row.finish) == (reference.tokens, reference.finish)
    budget, stops = case["budgets"][i], case["stops"][i]
    assert 1 <= len(row.tokens) <= budget
    assert not set(row.tokens[:-1]) & set(stops) and max(row.tokens) < VOCAB - 1
    assert row.finish == ("stop" if row.tokens[-1] in stops else "length")
    assert row.finish == "stop" or len(row.tokens) == min(budget, LIMIT - len(case["prompts"][i]))
    assert sum(row.emitted) == len(row.tokens) == len(row.logprobs) and min(row.emitted) >= 1
    tree = config(method).drafter.tree
    for proposed, depth, reached, accepted, emitted in zip(
      row.proposed, row.depth, row.reached, row.accepted, row.emitted
    ):
      assert accepted <= reached <= depth <= min(proposed, tree.max_depth) and proposed < tree.num_nodes
      assert reached <= accepted + 1 and emitted <= accepted + 1
    check_logprobs(case, i, row)
  again = run(method, case, order)
  assert [row.tokens for row in again] == [row.tokens for row in rows]
  assert [row.accepted for row in again] == [row.accepted for row in rows]


def check_logprobs(case, i, row):
  chosen = {name: values[i] for name, values in case["settings"].items()}
  text = list(case["prompts"][i])
  begin = len(text)
  keep = {name: chosen[name] for name in ("temperature", "top_k", "top_p", "min_p")}
  for token, value in zip(row.tokens, row.logprobs):
    logits = case["target"].logits_after(tuple(text)).astype(np.float64)[: VOCAB - 1]
    for said in set(text):
      r = chosen["repetition_penalty"]
      logits[said] = logits[said] / r if logits[said] > 0 else logits[said] * r
      logits[said] -= chosen["frequency_penalty"] * text[begin:].count(said)
    for biased, change in chosen["logit_bias"].items():
      logits[biased] += change
    p = process(logits.astype(np.float32), **keep)
    # A cut-off that float32 and float64 put on either side of a token is not a fault.
    if p[token] > 0:
      assert abs(np.log(p[token]) - value) < 1e-3 or _at_a_cut(logits, keep)
    else:
      assert _at_a_cut(logits, keep)
    text.append(token)


def _at_a_cut(logits, keep):
  """Whether a cut-off moved by rounding keeps other tokens."""
  sets = set()
  for shift in (-1e-5, 1e-5):
    moved = {
      **keep,
      "top_p": min(max(keep["top_p"] + shift, 0), 1),
      "min_p": min(max(keep["min_p"] + shift, 0), 1),
    }
    sets.add(tuple(process(logits, **moved) > 0))
  return len(sets) > 1
