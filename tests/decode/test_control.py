"""Controllers in the loop: what they are told, what they decide, and that the text does not change."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from specjax import decode
from specjax.control import Adaptive, Beliefs
from specjax.drafters import make_drafter
from specjax.verify import make_rule
from tests import contract

CONTROL = Adaptive(memory=1.0, look_around=7)
LOOKUP = dict(min_ngram=1, max_ngram=2)
DRAFTERS = (
  make_drafter("prompt_lookup", window=4, **LOOKUP),
  make_drafter("prompt_lookup", window=1, **LOOKUP),
  make_drafter("prompt_lookup", window=2, matches=3, nodes=6, **LOOKUP),
)
CONFIG = contract.config(DRAFTERS[0], "greedy", control=CONTROL, alternatives=DRAFTERS[1:])
CHEAP = dict(verify=(1.0, 1.01, 1.02, 1.01), draft=(0.0,) * 4)
DEAR = dict(verify=(1.0, 1.3, 1.5, 1.8), draft=(0.0, 0.1, 0.1, 0.1))


def run(beliefs):
  """Final state of the ragged batch of the contract; costs and beliefs are traced."""
  weights = decode.Weights(contract.target(), beliefs=Beliefs.create(CONFIG.trees, **beliefs))
  state = decode.prefill(weights, CONFIG, contract.PROMPTS, max_new_tokens=contract.BUDGETS)
  return decode.generate(weights, state, CONFIG)


@functools.cache
def cheap():
  return run({**CHEAP, "acceptance": 0.9})


def test_the_text_is_plains_whatever_it_costs():
  """Cheap, dear and hopeless drafts in one program: other widths, the same tokens.

  Fails when a width changes the text, when widths do not follow the costs, or a cost compiles anew.
  """
  states = [cheap()]
  traces = decode.run_rounds._cache_size()
  states += [run({**DEAR, "acceptance": 0.5}), run({**DEAR, "acceptance": 0.0, "strength": 1e6})]
  assert decode.run_rounds._cache_size() == traces
  results = [decode.results(state) for state in states]
  for rows in results:
    assert [row.tokens for row in rows] == [row.tokens for row in contract.plain()]
  drafted = [sum(width > 0 for row in rows for width in row.width) for rows in results]
  assert drafted[0] > drafted[1] > drafted[2] == 0
  assert len({width for row in results[0] for width in row.width}) > 1


def test_evidence_is_what_the_log_says():
  """With memory 1 the counts of a row are sums over its log, and its account what it earned and paid.

  Fails when a round is booked for another row, width or depth, or a plain round as a draft.
  """
  state = cheap()
  seen = jax.device_get(state.control)
  costs = np.array(CHEAP["verify"])
  trees = [None, *CONFIG.trees]
  assert [tree.is_chain for tree in CONFIG.trees] == [True, False, True]
  groups = [0, 0, 1, 0]
  for b, row in enumerate(decode.results(state)):
    judged, kept = np.zeros(seen.judged.shape[1:]), np.zeros(seen.judged.shape[1:])
    length, account = row.prompt_tokens, CONTROL.allowance
    for width, depth, accepted, emitted, nodes in zip(
      row.width, row.depth, row.accepted, row.emitted, row.nodes, strict=True
    ):
      if depth:  # of this row; others may have drafted in the same round
        reach = min(trees[width].max_depth, row.prompt_tokens + contract.BUDGETS[b] - length - 1)
        for d in range(min(reach, accepted + 1)):
          judged[groups[width], d] += 1
          kept[groups[width], d] += d < accepted
      verified = [1, *(tree.num_nodes for tree in CONFIG.trees)].index(nodes)
      account = min(account + (1 + CONTROL.refill) * emitted - costs[verified], CONTROL.ceiling)
      length += emitted
    np.testing.assert_allclose(seen.judged[b], judged)
    np.testing.assert_allclose(seen.kept[b], kept)
    np.testing.assert_allclose(seen.account[b], account, rtol=1e-5)


def test_a_chain_is_verified_at_the_narrowest_width_that_holds_it():
  """Near their budgets rows draft one token: 2 nodes are verified, and 1 where nothing is proposed.

  Fails when the planned width is paid for in any case.
  """
  # The short chain looks dear, so the long one is planned to the end.
  state = run({**CHEAP, "verify": (1.0, 1.5, 1.5, 1.02), "acceptance": 0.9})
  rows, seen = decode.results(state), set()
  for i in range(max(row.rounds for row in rows)):
    width = max(row.width[i] for row in rows if i < row.rounds)  # 0 of rows that sat out
    (ran,) = {row.nodes[i] for row in rows if i < row.rounds}
    deepest = max(row.depth[i] for row in rows if i < row.rounds)
    if deepest == 0:
      assert ran == 1
    elif CONFIG.trees[width - 1].is_chain:
      assert ran == (2 if deepest == 1 else 5)
      seen.add((width, ran))
  assert (3, 2) in seen and (3, 5) in seen  # the long chain, planned and cut


@pytest.mark.parametrize(
  ("make", "words"),
  [
    (lambda: dataclasses.replace(CONFIG, control=None), "alternatives needs a control"),
    (lambda: dataclasses.replace(CONFIG, drafter=contract.built("none")[0]), "at other widths"),
    (
      lambda: contract.config(make_drafter("none"), "greedy", control=CONTROL),
      "proposes nothing; control = adaptive needs drafts",
    ),
    (
      lambda: dataclasses.replace(CONFIG, rule=make_rule("speculative_sampling")),
      "takes chains; drafter prompt_lookup proposes a tree",
    ),
    (
      lambda: decode.init_state(decode.Weights(contract.target()), CONFIG, 1),
      "adaptive needs beliefs about 4 widths and 4 depths, got None",
    ),
  ],
)
def test_configs_are_checked(make, words):
  """Before anything compiles. Fails when widths of unlike drafters are put into one loop."""
  with pytest.raises(ValueError, match=words):
    make()
