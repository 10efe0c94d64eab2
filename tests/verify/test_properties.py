"""What every verdict is, whatever was drafted: random trees, validity and distributions, few shapes.

Distributions have zeros, drafts may be such that their drafter never makes them, and what a rule may not
read is NaN or a number that is no token.
"""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from specjax.base import Proposal, Verdict
from specjax.sampling import Settings
from specjax.tree import DynamicTree, TokenTree
from specjax.verify import RULES, make_rule

ROWS, NODES, VOCAB, DEPTH = 4, 7, 5, 3
STATIC = TokenTree((-1, 0, 0, 1, 1, 2, 3))
CHAIN = TokenTree.chain(NODES - 1)
W, S, D = "sampled_without_replacement", "sampled", "deterministic"
# Rule, shape (None: another tree in every row) and kind of each program.
PROGRAMS = (
  *[(rule, None, kind) for rule in ("recursive_rejection", "traversal_verification") for kind in (W, S, D)],
  ("recursive_rejection", STATIC, W),
  ("traversal_verification", STATIC, S),
  *[(rule, CHAIN, kind) for rule in ("speculative_sampling", "block_verification") for kind in (S, D)],
  ("lenient_speculative_sampling", CHAIN, S),
  ("typical_acceptance", None, D),
  ("draw_and_follow", None, S),
)
programs = st.sampled_from(PROGRAMS)
seeds = st.integers(0, 2**32 - 1)
profile = lambda count: hypothesis.settings(max_examples=count, derandomize=True, deadline=None)


def test_every_rule_with_probabilities_is_here():
  """A new rule must join the programs above."""
  assert {name for name, *_ in PROGRAMS} == {name for name, rule in RULES.items() if rule.needs == "probs"}


@functools.cache
def program(name, shape, kind):
  options = dict(lenience=0.6) if name == "lenient_speculative_sampling" else {}

  @jax.jit
  def judge(p, q, tokens, valid, parents, seed, length):
    tree = shape or DynamicTree.from_parents(parents, DEPTH)
    proposal = Proposal(tokens, valid, None if kind == D else q, tree=tree, kind=kind)
    settings = Settings.create(ROWS, temperature=1.0).replace(seed=seed)
    return make_rule(name, **options)(p, proposal, settings, length)

  return judge


def case(shape, seed):
  """Arguments of a program, nothing poisoned yet."""
  random = np.random.default_rng(seed)
  sharp = random.choice([0.1, 0.5, 2.0])
  p, q = random.dirichlet(np.full(VOCAB, sharp), (2, ROWS, NODES)).astype(np.float32)
  low = random.choice([0, 0.1], 2)
  p, q = (
    np.where(x < np.minimum(limit, x.max(axis=-1, keepdims=True)), 0, x) for x, limit in zip((p, q), low)
  )
  p, q = (x / x.sum(axis=-1, keepdims=True) for x in (p, q))
  q = p if random.random() < 0.15 else q
  if shape is None:
    parents = np.full((ROWS, NODES), -1)
    for row in parents:
      depths = [0]
      for node in range(1, NODES):
        row[node] = random.choice([i for i in range(node) if depths[i] < DEPTH])
        depths.append(depths[row[node]] + 1)
  else:
    parents = np.tile(shape.parents, (ROWS, 1))
  tokens = random.integers(0, VOCAB, (ROWS, NODES))
  for row, node in np.ndindex(ROWS, NODES):  # mostly drawn from q
    if node and random.random() < 0.8:
      weights = q[row, parents[row, node]].astype(float)
      tokens[row, node] = random.choice(VOCAB, p=weights / weights.sum())
  valid = (random.random((ROWS, NODES)) < random.choice([0.6, 1.0])) | (np.arange(NODES) == 0)
  uint = lambda high: random.integers(0, high, ROWS)
  return [
    p.astype(np.float32),
    q.astype(np.float32),
    tokens.astype(np.int32),
    valid,
    parents.astype(np.int32),
    uint(2**32).astype(np.uint32),
    uint(1000).astype(np.int32),
  ]


def reached(valid, parents):
  """Nodes that are proposed: valid with all above."""
  good = valid.copy()
  for node in range(1, NODES):
    good[:, node] &= good[np.arange(ROWS), parents[:, node]]
  return good


def poisoned(args):
  """The same with what is behind no proposed node made unusable."""
  p, q, tokens, valid, parents, *rest = args
  good = reached(valid, parents)
  asked = np.zeros_like(good)
  for row, node in zip(*np.nonzero(good)):
    if node:
      asked[row, parents[row, node]] = True
  p, q = np.where(good[..., None], p, np.nan), np.where(asked[..., None], q, np.nan)
  return [
    p,
    q,
    np.where(good, tokens, np.where(tokens % 2, 10**6, -3)).astype(np.int32),
    valid,
    parents,
    *rest,
  ]


def equal(got: Verdict, want: Verdict, rows=slice(None)):
  for field in ("path", "accepted", "next_token", "judged"):
    np.testing.assert_array_equal(getattr(got, field), np.asarray(getattr(want, field))[rows], err_msg=field)
  np.testing.assert_allclose(got.overlap, np.asarray(want.overlap)[rows], atol=1e-6)


@hypothesis.given(programs, seeds)
@profile(200)
def test_a_verdict_is_a_path_the_target_can_say(which, seed):
  """Root first along parents, only proposed nodes, zeros behind; every token has target mass.

  Fails when a token is accepted or drawn that p excludes, and when a path is not one.
  """
  args = poisoned(case(which[1], seed))
  p, _, tokens, valid, parents, *_ = args
  verdict = jax.device_get(program(*which)(*args))
  good = reached(valid, parents)
  for row in range(ROWS):
    a, path = int(verdict.accepted[row]), verdict.path[row]
    assert 0 <= a < len(path) and path[0] == 0 and not path[a + 1 :].any()
    assert good[row, path[: a + 1]].all()
    for above, node in itertools.pairwise(path[: a + 1]):
      assert parents[row, node] == above and p[row, above, tokens[row, node]] > 0
    assert p[row, path[a], verdict.next_token[row]] > 0
    assert 0 <= verdict.overlap[row] <= verdict.judged[row] + 1e-5 <= NODES


@hypothesis.given(programs, seeds)
@profile(100)
def test_what_no_one_may_read_changes_nothing(which, seed):
  """Fails when a row behind an invalid node, a leaf's q, or an invalid token leaks, NaN · 0 included."""
  args = case(which[1], seed)
  equal(program(*which)(*poisoned(args)), jax.device_get(program(*which)(*args)))


@hypothesis.given(programs, seeds)
@profile(100)
def test_rows_stand_for_themselves(which, seed):
  """Permuted rows give permuted verdicts, and another neighbour changes nothing.

  Fails when a row that is done goes on while its neighbours are being judged, or noise goes by slot.
  """
  args, order = case(which[1], seed), np.random.default_rng(seed).permutation(ROWS)
  want = jax.device_get(program(*which)(*args))
  equal(program(*which)(*[x[order] for x in args]), want, order)
  others = case(which[1], seed + 1)
  mixed = [np.concatenate([x[:1], y[1:]]) for x, y in zip(args, others)]
  got = jax.device_get(program(*which)(*mixed))
  equal(jax.tree.map(lambda x: x[:1], got), want, slice(0, 1))


@hypothesis.given(programs, seeds)
@profile(100)
def test_at_temperature_zero_every_rule_says_what_greedy_says(which, seed):
  """Target point masses, any q. Fails when a rule needs p and q to be processed alike to be right."""
  p, q, tokens, valid, parents, *rest = case(which[1], seed)
  said = p.argmax(axis=-1)
  point = np.eye(VOCAB, dtype=np.float32)[said]
  verdict = jax.device_get(program(*which)(point, q, tokens, valid, parents, *rest))
  for row in range(ROWS):
    text = [*tokens[row, verdict.path[row, 1 : verdict.accepted[row] + 1]], verdict.next_token[row]]
    assert text == [said[row, node] for node in verdict.path[row, : verdict.accepted[row] + 1]]


def test_a_draft_of_nothing_is_plain():
  """N = 1, with q of no rows or none at all. Fails when a rule reads a row that is not there."""
  tokens = jnp.zeros((1, 1), jnp.int32)

  def judge(target, said):
    settings, length = Settings.create(1, temperature=1.0), jnp.array([1])
    for name, rule in RULES.items():
      for kind, q in ((D, None), (S, jnp.zeros((1, 0, 2)))):
        proposal = Proposal(tokens, tokens == 0, q, tree=TokenTree.chain(0), kind=kind)
        verdict = make_rule(name)(said if rule.needs == "argmax" else target, proposal, settings, length)
        yield verdict.accepted, verdict.next_token

  for accepted, token in jax.jit(lambda *args: list(judge(*args)))(
    jnp.array([[[0.0, 1.0]]]), jnp.array([[1]])
  ):
    assert (int(accepted[0]), int(token[0])) == (0, 1)
