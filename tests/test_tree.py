"""Topologies: parents, depths, paths and bitmasks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.tree import DynamicTree, TokenTree, TreeBudget, pack_bits

parents = st.lists(st.integers(0, 10**6), max_size=70).map(
  lambda picks: (-1, *(pick % (i + 1) for i, pick in enumerate(picks)))
)


@given(parents)
def test_q2_positions_follow_parents(parents):
  """A child is one deeper than its parent, whatever the order; paths and bitmasks say the same.

  Fails when depth is taken from the node's number, or a bit lands in the wrong word (N > 32).
  """
  tree = TokenTree(parents)
  for node in range(tree.num_nodes):
    chain = [node]
    while tree.parents[chain[-1]] != -1:
      chain.append(tree.parents[chain[-1]])
    chain = chain[::-1]
    assert tree.depths[node] == len(chain) - 1
    assert tree.paths[node, : len(chain)].tolist() == chain and not tree.paths[node, len(chain) :].any()
    bits = sum(int(word) << (32 * i) for i, word in enumerate(tree.ancestors[node]))
    assert bits == sum(1 << n for n in chain)
    assert np.flatnonzero(tree.ancestor_mask[node]).tolist() == sorted(chain)
  assert hash(tree) == hash(TokenTree(parents))


def test_chains():
  assert TokenTree.chain(3).parents == (-1, 0, 1, 2) and TokenTree.chain(3).is_chain
  assert TokenTree.chain(0).num_nodes == 1 and not TokenTree((-1, 0, 0)).is_chain


@pytest.mark.parametrize("bad", ((), (0,), (-1, 1), (-1, -1), (-1, 0, 2), (-1, *[0] * 128)))
def test_bad_topologies_are_refused(bad):
  with pytest.raises(ValueError, match="TokenTree"):
    TokenTree(bad)
  for window in (-1, 128):
    with pytest.raises(ValueError, match="window"):
      TokenTree.chain(window)


def test_constructors():
  """Lists of paths in any order, a product, and widths: all number their nodes level by level."""
  paths = TokenTree.from_paths([(1,), (0,), (0, 1), (0, 0), (0, 0, 0), (1, 0)])
  assert paths.parents == (-1, 0, 0, 1, 1, 2, 3)
  assert paths.children == ((1, 2), (3, 4), (5,), (6,), (), (), ())
  assert TokenTree.cartesian((2, 3)).parents == (-1, 0, 0, 1, 1, 1, 2, 2, 2)
  assert TokenTree.cartesian((1, 1, 1)) == TokenTree.chain(3)
  assert TokenTree.of_widths((1, 1, 1)) == TokenTree.chain(3)
  # Places by the sum of ranks: the root's first child has the most children, its fourth none.
  eagle = TokenTree.of_widths((4, 8, 8, 3, 2))
  assert list(map(len, eagle.levels)) == [1, 4, 8, 8, 3, 2]
  assert [len(eagle.children[node]) for node in range(1, 5)] == [4, 3, 1, 0]
  assert eagle.num_nodes == 26 and eagle.max_depth == 5


@pytest.mark.parametrize(
  ("make", "bad", "match"),
  [
    (TokenTree.from_paths, [(0,), (0,)], "twice"),
    (TokenTree.from_paths, [(0, 0)], r"needs \(0,\), which is missing"),
    (TokenTree.from_paths, [(0,), (2,)], r"needs \(1,\), which is missing"),
    (TokenTree.from_paths, [()], "ranks"),
    (TokenTree.from_paths, [(-1,)], "ranks"),
    (TokenTree.cartesian, (2, 0), "branching"),
    (TokenTree.cartesian, (8, 8, 8), "128 nodes"),
    (TokenTree.of_widths, (), "widths"),
    (TokenTree.of_widths, (100, 100), "128"),
    (lambda nodes: TreeBudget(nodes, 3), 3, "max_depth"),
    (lambda nodes: TreeBudget(nodes, 3), 129, "num_nodes"),
  ],
)
def test_malformed_topologies_raise(make, bad, match):
  with pytest.raises(ValueError, match=match):
    make(bad)


@pytest.mark.parametrize("nodes", (9, 40))
def test_dynamic_trees_answer_as_static_ones(nodes):
  """Three random topologies in one batch, N within and beyond one word of bits.

  Fails when pointer doubling stops a step early, or rows are mixed.
  """
  some = st.lists(st.integers(0, 10**6), min_size=nodes - 1, max_size=nodes - 1)
  # Small picks make deep trees, large ones shallow ones.
  deep = some.map(lambda picks: (-1, *(max(i - pick % 3, 0) for i, pick in enumerate(picks))))
  wide = some.map(lambda picks: (-1, *(pick % (i + 1) for i, pick in enumerate(picks))))
  ask = jax.jit(
    lambda parents, node: (
      (tree := DynamicTree.from_parents(parents, nodes - 1)).depths,
      tree.ancestors,
      tree.ancestor_mask,
      tree.path_to(node),
      tree.of_parent(parents),
    )
  )

  @settings(max_examples=15, deadline=None, derandomize=True)
  @given(st.tuples(deep, wide, deep), st.integers(0, nodes - 1))
  def check(topologies, node):
    got = ask(jnp.array(topologies, jnp.int32), jnp.full(3, node))
    for row, parents in enumerate(topologies):
      tree = TokenTree(parents)
      of_parent = tree.of_parent(np.array([parents]))[0]
      path = np.pad(tree.paths[node], (0, nodes - 1 - tree.max_depth))
      for mine, theirs in zip(got, (tree.depths, tree.ancestors, tree.ancestor_mask, path, of_parent)):
        np.testing.assert_array_equal(mine[row], theirs)

  check()


def test_pack_bits_fills_words_in_order():
  mask = np.zeros((1, 70), bool)
  mask[0, [0, 31, 32, 69]] = True
  want = [[1 | 1 << 31, 1, 1 << 5]]
  np.testing.assert_array_equal(pack_bits(mask), want)
  np.testing.assert_array_equal(pack_bits(jnp.asarray(mask)), want)
