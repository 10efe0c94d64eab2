"""Static trees over a draft step whose state recurs from parent to child."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters.growing import Growth
from specjax.drafters.step import Start
from specjax.sampling import Settings
from specjax.testing import draft_context, process
from tests.drafters.test_two_model import TREES, texts

VOCAB, STATES = 7, 31
TABLE = np.random.default_rng(8).standard_normal((STATES, VOCAB)).astype(np.float32) * 2
ROOTS = ([3], [6], [0])
FIRST = (4, 11, 30)  # what recurs from the roots


def after(state: int, token: int) -> int:
  """What recurs from a node: a number that says the whole way to it."""
  return (state * 5 + token * 3 + 1) % STATES


@functools.partial(jax.jit, static_argnums=0)
def _grown(growth, table, context, ready):
  def step(tokens, hidden, cache, *, depths, ancestors, scratch):
    """Logits are the table's row of the new state; the cache counts the forwards."""
    hidden = (hidden[..., 0] * 5 + tokens * 3 + 1) % STATES
    return table[hidden], hidden[..., None], cache + 1

  state = jnp.asarray(FIRST)[:, None]
  return tuple(growth(step, Start(table[state], state[..., None], jnp.int32(0), ready), context))


def grow(growth, settings, ready=(True,) * 3, table=TABLE):
  """Proposal, number of forwards, and scratch rows."""
  context = draft_context(ROOTS, 16, settings=settings)
  return jax.device_get(_grown(growth, jnp.asarray(table), context, jnp.asarray(ready)))


def state_of(row: int, path) -> int:
  """What recurs from the end of a path."""
  state = FIRST[row]
  for token in path:
    state = after(state, token)
  return state


DEFAULT = ("cartesian", "numbered depth first")


@pytest.mark.parametrize(
  "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in TREES]
)
def test_children_see_what_recurs_from_their_own_parent(name):
  """Each node's children are the likeliest behind the state that its own path leads to.

  Fails when a child is given its sibling's state, its own level's, or one that skips the parent.
  """
  tree = TREES[name]
  proposal, forwards, _ = grow(Growth(tree, "top_k"), Settings.create(3))
  assert proposal.valid.all() and forwards == tree.max_depth - 1
  for row, nodes in enumerate(texts(proposal, tree, ROOTS)):
    for node, children in enumerate(tree.children):
      best = np.argsort(-TABLE[state_of(row, nodes[node][1:])], kind="stable")
      assert [int(proposal.tokens[row, child]) for child in children] == best[: len(children)].tolist()


@pytest.mark.parametrize(
  "policy", ("sample", pytest.param("sample_without_replacement", marks=pytest.mark.slow))
)
def test_q_follows_what_recurs(policy):
  """Fails when q is that of another node's state. Depth first numbering: q is put in the nodes' order."""
  tree = TREES["numbered depth first"]
  settings = Settings.create(3, temperature=[1.0, 0.6, 1.4], seed=[5, 6, 7])
  proposal, _, _ = grow(Growth(tree, policy), settings)
  assert proposal.valid.all()
  for row, nodes in enumerate(texts(proposal, tree, ROOTS)):
    for node, children in enumerate(tree.children):
      if children:
        want = process(TABLE[state_of(row, nodes[node][1:])], temperature=(1.0, 0.6, 1.4)[row])
        np.testing.assert_allclose(proposal.q[row, node], want, atol=1e-6)


def test_rows_that_are_not_ready_draft_nothing():
  """And where none is, no forward is made. Fails when the step is run for nobody."""
  growth = Growth(TREES["cartesian"], "top_k")
  proposal, forwards, _ = grow(growth, Settings.create(3), ready=[False, True, False])
  assert proposal.valid.sum(axis=1).tolist() == [1, TREES["cartesian"].num_nodes, 1] and forwards == 3
  proposal, forwards, _ = grow(growth, Settings.create(3), ready=[False] * 3)
  assert proposal.valid.sum() == 3 and forwards == 0
