"""Topologies: parents, depths, paths and bitmasks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.tree import TokenTree

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
