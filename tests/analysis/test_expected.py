"""Expected tokens: closed forms, inverses, counts, and the loop's own rules drawn many times."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax import analysis
from specjax.analysis.expected import positional
from specjax.base import Proposal
from specjax.sampling import Settings
from specjax.tree import TokenTree
from specjax.verify import make_rule

QUICK = settings(max_examples=60, deadline=None)
RATES = st.lists(st.floats(0, 1), min_size=1, max_size=8)


@QUICK
@given(st.floats(0, 0.999), st.integers(0, 12))
def test_a_chain_of_independent_drafts(alpha, window):
  """Equation 1 as printed, and the chain of equal rates. Fails for another power or a term too many."""
  want = (1 - alpha ** (window + 1)) / (1 - alpha)
  assert analysis.iid_tokens(alpha, window) == pytest.approx(want, rel=1e-9)
  assert analysis.chain_tokens([alpha] * window) == pytest.approx(want, rel=1e-9)


def test_the_ends_of_equation_1():
  """α = 1 gives γ + 1, α = 0 and γ = 0 give 1. Fails on a division by 1 - α."""
  assert analysis.iid_tokens(1, 5) == 6
  assert analysis.iid_tokens(0, 5) == analysis.iid_tokens(0.7, 0) == 1


@QUICK
@given(RATES)
def test_the_law_of_accepted_drafts(rates):
  """It sums to 1, its mean is the chain's tokens less 1, and reaching a draft multiplies the rates."""
  law = analysis.accepted_law(rates)
  assert law.shape == (len(rates) + 1,) and (law >= -1e-15).all()
  assert law.sum() == pytest.approx(1)
  assert law @ np.arange(len(law)) + 1 == pytest.approx(analysis.chain_tokens(rates))
  for d in range(len(rates)):
    assert law[d] == pytest.approx(np.prod(rates[:d]) * (1 - rates[d]))


@QUICK
@given(st.floats(0.01, 0.99), st.integers(1, 12))
def test_alpha_from_tokens_inverts(alpha, window):
  """Both ways round. Fails when the bisection ends early or looks on the wrong side."""
  tokens = analysis.iid_tokens(alpha, window)
  assert analysis.alpha_from_tokens(tokens, window) == pytest.approx(alpha, abs=1e-6)
  assert analysis.alpha_from_tokens(1, window) == pytest.approx(0, abs=1e-12)
  assert analysis.alpha_from_tokens(window + 1, window) == pytest.approx(1)


@QUICK
@given(RATES)
def test_a_chain_is_a_tree_of_one_rank(rates):
  """By depth and rank; by rank when the rates are equal; independent nodes too."""
  chain = TokenTree.chain(len(rates)).parents
  assert analysis.tree_tokens(chain, np.array(rates)[:, None]) == pytest.approx(analysis.chain_tokens(rates))
  assert analysis.tree_tokens(chain, rates[:1]) == pytest.approx(analysis.iid_tokens(rates[0], len(rates)))
  assert analysis.deepest_tokens(chain, rates) == pytest.approx(analysis.chain_tokens(rates))


def test_a_tree_by_hand():
  """Root, children of ranks 0, 1, 2, and two below the second; not numbered level by level.

  Fails when rank or depth is counted wrongly, or the last row does not hold for what is deeper.
  """
  parents = (-1, 0, 0, 2, 0, 2, 3)
  acceptance = [[0.5, 0.2], [0.4, 0.3]]
  want = 1 + 0.5 + 0.2 + 0.2 * 0.4 + 0 + 0.2 * 0.3 + 0.2 * 0.4 * 0.4
  assert analysis.tree_tokens(parents, acceptance) == pytest.approx(want)


def test_siblings_tried_in_turn():
  """Ranks of independent siblings sum to one minus all being turned down. Fails for another power."""
  np.testing.assert_allclose(analysis.rank_acceptance(0.3, 3), [0.3, 0.3 * 0.7, 0.3 * 0.49])
  assert analysis.rank_acceptance(0.3, 5).sum() == pytest.approx(1 - 0.7**5)


def test_trees_of_independent_nodes():
  """Siblings with and without children of their own, by enumeration of what is accepted.

  Fails when paths of siblings count as exclusive.
  """
  parents, rates = (-1, 0, 0, 1, 2, 2), (0.6, 0.3)
  want = 0.0
  for bits in range(32):
    accepted = [True, *(bool(bits >> i & 1) for i in range(5))]
    chance = np.prod([rates[0 if i < 3 else 1] if accepted[i] else 1 - rates[i > 2] for i in range(1, 6)])
    deep = any(accepted[i] and accepted[parents[i]] for i in (3, 4, 5))
    want += chance * (1 + max(accepted[1], accepted[2], 2 * deep))
  assert analysis.deepest_tokens(parents, rates) == pytest.approx(want)
  ranks = [analysis.rank_acceptance(rate, 2) for rate in rates]
  assert analysis.deepest_tokens(parents, rates) > analysis.tree_tokens(parents, ranks)
  caterpillar = (-1, 0, 0, 1, 1)  # only first children have children: then both agree
  assert analysis.deepest_tokens(caterpillar, rates) == pytest.approx(
    analysis.tree_tokens(caterpillar, ranks)
  )


def test_rates_from_counts():
  """Ten rounds: nine proposed something, seven of them accepted it, five of six what came behind.

  Fails when rounds count that proposed nothing there, or accepted counts are not summed from above.
  """
  rates = analysis.rates_from_counts([3, 2, 1, 4], [9, 6, 4])
  np.testing.assert_allclose(rates, [7 / 9, 5 / 6, 1.0])
  np.testing.assert_allclose(analysis.rates_from_counts([5], [4, 0]), [0, 0])
  assert analysis.rates_from_counts([3], []).shape == (0,)


@pytest.mark.parametrize(
  ("call", "words"),
  [
    (lambda: analysis.iid_tokens(1.1, 3), "alpha = 1.1; it must be in"),
    (lambda: analysis.iid_tokens(float("nan"), 3), "alpha = nan"),
    (lambda: analysis.iid_tokens(0.5, -1), "window = -1; it must be a whole number of at least 0"),
    (lambda: analysis.iid_tokens(0.5, 2.0), "window = 2.0"),
    (lambda: analysis.alpha_from_tokens(4.2, 3), r"tokens = 4.2; it must be in \[1, window . 1 = 4\]"),
    (lambda: analysis.alpha_from_tokens(0.9, 3), "tokens = 0.9"),
    (lambda: analysis.chain_tokens([0.5, -0.1]), "rates = .*each must be in"),
    (lambda: analysis.chain_tokens([[0.5]]), "rates has 2 axes; it must have 1"),
    (lambda: analysis.deepest_tokens((-1, 0), []), "rates is empty"),
    (lambda: analysis.tree_tokens((0, 0), [0.5]), "parents must start with -1"),
    (lambda: analysis.tree_tokens((-1, 1), [0.5]), r"parents\[1\] = 1; it must be in \[0, 1\)"),
    (lambda: analysis.tree_tokens((-1, 0), [[0.1], [0.2, 0.3]]), "acceptance is ragged"),
    (lambda: analysis.tree_tokens((-1, 0), []), "acceptance is empty"),
    (lambda: positional([0.6, 0.5]), "acceptance of the ranks of a depth sums to 1.1"),
    (lambda: analysis.rank_acceptance(0.5, 0), "ranks = 0"),
    (lambda: analysis.rates_from_counts([0, 5], [4]), "5 rounds accepted at depth 1, which 4 reached"),
    (lambda: analysis.rates_from_counts([1, -5], [4]), "accept_counts = .* at least 0"),
  ],
)
def test_what_makes_no_sense_is_named(call, words):
  """Field, value and limit. Fails when a number comes back."""
  with pytest.raises(ValueError, match=words):
    call()


# --- the loop's own rules --------------------------------------------------------------------------

ROWS, VOCAB = 20_000, 5
P = np.array([0.5, 0.05, 0.25, 0.0, 0.2])
Q = np.array([0.1, 0.4, 0.3, 0.15, 0.05])
ALPHA = float(np.minimum(P, Q).sum())  # 0.45
CHAIN = TokenTree.chain(4)
TREE = TokenTree((-1, 0, 0, 1, 1, 2, 2, 3))
# Of each node's children the ranks propose these tokens.
SAYS = (0, 2)
EQUAL, BY_DEPTH = (0.7,), (0.8, 0.5, 0.3)


def _proposal(tree, tokens, q=None):
  kind = "deterministic" if q is None else "sampled"
  return Proposal(tokens, jnp.ones(tokens.shape, bool), q, tree, kind)


@jax.jit
def _accepted(chain_tokens, tree_tokens):
  """Drafts accepted a row, by case: every rule under seeds of its own rows, one program."""
  settings = Settings.create(ROWS, temperature=1.0, seed=np.arange(ROWS))
  length = jnp.full((ROWS,), 9)
  p, q = (jnp.asarray(row, jnp.float32) for row in (P, Q))
  rows = lambda tree, row: jnp.broadcast_to(row, (ROWS, tree.num_nodes, VOCAB))
  sampled = _proposal(CHAIN, chain_tokens, rows(CHAIN, q))
  said = _proposal(TREE, tree_tokens)
  found = {
    "speculative sampling": make_rule("speculative_sampling")(rows(CHAIN, p), sampled, settings, length),
    "draw and follow": make_rule("draw_and_follow")(rows(TREE, p), said, settings, length),
  }
  for name, rates in (("equal", EQUAL), ("by depth", BY_DEPTH)):
    rule = make_rule("synthetic", rates=rates)
    for proposal, shape in ((sampled, "chain"), (said, "tree")):
      argmax = jnp.zeros(proposal.tokens.shape, jnp.int32)
      found[f"{name}, {shape}"] = rule(argmax, proposal, settings, length)
  return {name: verdict.accepted for name, verdict in found.items()}


@pytest.fixture(scope="module")
def accepted():
  drawn = np.random.default_rng(5).choice(VOCAB, p=Q, size=(ROWS, CHAIN.num_nodes))
  ranks = [0, *(TREE.children[parent].index(node) for node, parent in enumerate(TREE.parents) if node)]
  said = np.broadcast_to(np.array(SAYS)[ranks], (ROWS, TREE.num_nodes))
  found = _accepted(jnp.asarray(drawn, jnp.int32), jnp.asarray(said, jnp.int32))
  return {name: np.asarray(value) for name, value in found.items()}


def test_rules_accept_what_is_expected(accepted):
  """Mean accepted + 1 of 20,000 rows of each rule, within four standard errors of its formula.

  Fails when a rule accepts at other rates, or a formula is not that of the rule.
  """
  last = BY_DEPTH[-1]
  want = {
    "speculative sampling": analysis.iid_tokens(ALPHA, 4),
    # Sibling k is accepted where the target itself draws its token.
    "draw and follow": analysis.tree_tokens(TREE.parents, P[list(SAYS)]),
    "equal, chain": analysis.iid_tokens(EQUAL[0], 4),
    "by depth, chain": analysis.chain_tokens([*BY_DEPTH, last]),
    "equal, tree": analysis.deepest_tokens(TREE.parents, EQUAL),
    "by depth, tree": analysis.deepest_tokens(TREE.parents, BY_DEPTH),
  }
  assert want.keys() == accepted.keys()
  for name, tokens in want.items():
    error = accepted[name].std(ddof=1) / ROWS**0.5
    assert abs(accepted[name].mean() + 1 - tokens) < 4 * error, name


def test_rules_accept_with_the_law_expected(accepted):
  """Shares of rows by accepted drafts, on the chain. Fails when only the mean is right."""
  for name, rates in (("speculative sampling", [ALPHA] * 4), ("by depth, chain", [*BY_DEPTH, BY_DEPTH[-1]])):
    law = analysis.accepted_law(rates)
    shares = np.bincount(accepted[name], minlength=5) / ROWS
    assert (abs(shares - law) < 4 * np.sqrt(law * (1 - law) / ROWS)).all(), name
