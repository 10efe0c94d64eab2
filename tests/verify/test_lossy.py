"""Rules that change the law: it is the one they state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.base import Proposal
from specjax.sampling import Settings
from specjax.testing import round_law
from specjax.tree import DynamicTree, TokenTree
from specjax.verify import RULES, make_rule
from tests.verify.test_laws import LAWS, constant, first

LOSSY = {"lenient_speculative_sampling", "typical_acceptance", "synthetic"}


def test_rules_that_change_the_law_say_so():
  assert {name for name, rule in RULES.items() if not rule.lossless} == LOSSY


@pytest.mark.parametrize("lenience", (0.3, 0.7, 1.0))
def test_lenience_has_the_law_it_states(lenience):
  """min(q, p / l) and the rest by (p - q)+; no token above p / l. Fails for another ratio or residual."""
  rule = make_rule("lenient_speculative_sampling", lenience=lenience)
  for name, (law, draft) in LAWS.items():
    p, q = law(()), draft(())
    got = round_law(rule, law, draft, 3)
    share, residual = np.minimum(q, p / lenience), np.maximum(p - q, 0)
    want = share + (1 - share.sum()) * residual / max(residual.sum(), 1e-30)
    np.testing.assert_allclose(first(got), want, atol=1e-6, err_msg=name)
    assert (first(got) <= p / lenience + 1e-6).all()
    np.testing.assert_allclose(got.accepted[1:].sum(), share.sum(), atol=1e-6)


def test_lenience_with_deterministic_drafts():
  """Accepted with p / l: fails when the point mass is divided in the residual, too."""
  p, rule = np.array([0.2, 0.5, 0.3, 0, 0]), make_rule("lenient_speculative_sampling", lenience=0.5)
  np.testing.assert_allclose(
    first(round_law(rule, constant(p), (0, 0, 0), 3)), [0.4, 0.375, 0.225, 0, 0], atol=1e-6
  )


@pytest.mark.parametrize("value", (0.0, -1.0, 1.01, float("nan")))
def test_options_out_of_range_are_refused(value):
  """Named with their value and limit."""
  for rule, field in (
    ("lenient_speculative_sampling", "lenience"),
    ("typical_acceptance", "epsilon"),
    ("typical_acceptance", "delta"),
  ):
    with pytest.raises(ValueError, match=rf"{field} = {value}; it must be in \(0, 1\]"):
      make_rule(rule, **{field: value})


def typical(p, tokens, valid, parents, epsilon=0.09, delta=0.3):
  """The statement in plain words: nodes of the winning path, and the next token, of one row."""
  best = (0, 0.0, 0, [0])
  reach = {0: (1.0, [0])}
  for node in range(1, len(tokens)):
    above = parents[node]
    if above not in reach or not valid[node]:
      continue
    row = p[above].astype(float)
    entropy = -sum(x * np.log(x) for x in row if x > 0)
    if row[tokens[node]] > min(epsilon, delta * np.exp(-entropy)):
      likely, path = reach[above]
      reach[node] = likely * row[tokens[node]], [*path, node]
      best = max(best, (len(path), reach[node][0], -node, reach[node][1]))
  return best[3], int(np.argmax(p[best[3][-1]]))


def judge(rule, p, tokens, valid, tree):
  proposal = Proposal(
    jnp.asarray(tokens, jnp.int32), jnp.asarray(valid), None, tree=tree, kind="deterministic"
  )
  rows = len(tokens)
  return jax.jit(rule)(
    jnp.asarray(p, jnp.float32), proposal, Settings.create(rows), jnp.ones(rows, jnp.int32)
  )


@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("options", ({}, dict(epsilon=0.6, delta=0.9)))
def test_typical_acceptance_is_its_statement(options, dynamic):
  """Random trees. Fails for an entropy of another row, a path that is not the longest, or ties by order."""
  rows, nodes, random = 400, 8, np.random.default_rng(1)
  p = random.dirichlet(np.full(5, 0.5), (rows, nodes)).astype(np.float32)
  p = np.where(p < 0.02, 0, p)
  tokens, valid = random.integers(0, 5, (rows, nodes)), random.random((rows, nodes)) < 0.9
  if dynamic:
    parents = np.stack([np.full(rows, -1)] + [random.integers(0, n, rows) for n in range(1, nodes)], axis=1)
    tree = DynamicTree.from_parents(jnp.asarray(parents), nodes - 1)
  else:
    tree = TokenTree((-1, 0, 0, 1, 1, 2, 3, 4))
    parents = np.tile(tree.parents, (rows, 1))
  verdict = judge(make_rule("typical_acceptance", **options), p, tokens, valid, tree)
  lengths = set()
  for row in range(rows):
    path, token = typical(p[row], tokens[row], valid[row], parents[row], **options)
    assert np.asarray(verdict.path[row, : len(path)]).tolist() == path
    assert (int(verdict.accepted[row]), int(verdict.next_token[row])) == (len(path) - 1, token)
    lengths.add(len(path))
  assert len(lengths) >= 3


def test_typical_acceptance_by_hand():
  """Longest first, then likeliest, then first. Siblings 1 and 2 have p = .4 and .6, nodes 3, 4 are below."""
  tree = TokenTree((-1, 0, 0, 1, 2))
  p = np.array([[0.4, 0.6, 0], [0.5, 0.5, 0], [0.3, 0.4, 0.3], [0, 0, 1], [1, 0, 0]])
  rule = make_rule("typical_acceptance")

  def path(tokens, valid=(1, 1, 1, 1, 1), p=p):
    verdict = judge(rule, p[None], [tokens], np.array([valid], bool), tree)
    return np.asarray(verdict.path[0]).tolist(), int(verdict.next_token[0])

  assert path((0, 0, 1, 0, 0)) == ([0, 1, 3], 2)  # .4 · .5 = .2 is more than .6 · .3
  assert path((0, 0, 1, 0, 0), (1, 1, 1, 0, 1)) == ([0, 2, 4], 0)  # the longer one
  assert path((0, 0, 1, 0, 0), (1, 1, 1, 0, 0))[0] == [0, 2, 0]  # the likelier one
  assert path((0, 1, 1, 2, 2))[0] == [0, 2, 4]  # p = 0 is never accepted
  assert path((0, 2, 2, 0, 0)) == ([0, 0, 0], 1)  # nothing accepted: the target's first choice
  even = np.array([[0.5, 0.5, 0]] * 5)
  assert path((0, 0, 1, 0, 0), p=even)[0] == [0, 1, 3]  # equal: the lowest index


@pytest.mark.parametrize("dynamic", (False, True))
def test_typical_acceptance_at_temperature_zero_is_greedy(dynamic):
  """Point masses: the same path and token as greedy. Fails when 0 · log 0 is not 0."""
  rows, random = 200, np.random.default_rng(2)
  tree = TokenTree((-1, 0, 0, 1, 1, 2))
  said, tokens = random.integers(0, 3, (rows, 6)), random.integers(0, 3, (rows, 6))
  if dynamic:
    tree = DynamicTree.from_parents(jnp.tile(jnp.array(tree.parents), (rows, 1)), 2)
  valid = np.ones((rows, 6), bool)
  got = judge(make_rule("typical_acceptance"), np.eye(3)[said], tokens, valid, tree)
  proposal = Proposal(jnp.asarray(tokens), jnp.asarray(valid), None, tree=tree, kind="deterministic")
  want = make_rule("greedy")(
    jnp.asarray(said, jnp.int32), proposal, Settings.create(rows), jnp.ones(rows, jnp.int32)
  )
  for field in ("path", "accepted", "next_token"):
    np.testing.assert_array_equal(getattr(got, field), getattr(want, field))
  assert len(set(np.asarray(got.accepted).tolist())) == 3
