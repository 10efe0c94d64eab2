"""The bounds of a mask hold exactly what is visible: kernels read nothing else and leave nothing out."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from specjax.kernels.tree_attention.masks import make_mask, visible_slots
from specjax.tree import TokenTree

SLOTS, NODES = 128, 40
some_parents = st.lists(st.integers(0, 10**6), min_size=NODES - 1, max_size=NODES - 1)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("window", (None, 3, 20))
def test_bounds_are_tight(window, causal):
  """``end`` is one past the last visible slot, no visible slot lies before ``begin``, prefix ones exactly.

  Fails when the last column or word is not counted, or a window cuts a slot too many.
  """

  # No shrinking: each number of nodes compiles anew.
  @settings(max_examples=6, deadline=None, derandomize=True, phases=[Phase.generate])
  @given(some_parents, st.integers(1, NODES), st.integers(0, 80))
  def check(picks, nodes, prefix):
    tree = TokenTree((-1, *(pick % (i + 1) for i, pick in enumerate(picks[: nodes - 1]))))
    lengths = jnp.array([prefix, 0, SLOTS - nodes])
    words = None if causal else jnp.broadcast_to(tree.ancestors, (3, *tree.ancestors.shape))
    mask = make_mask(lengths, words, nodes, SLOTS, window)
    seen = np.asarray(visible_slots(jnp.arange(SLOTS), mask))
    depth = np.arange(nodes) if causal else tree.depths
    for row, length in enumerate(np.asarray(lengths)):
      visible = np.flatnonzero(seen[row].any(axis=0))
      assert int(mask.end[row]) == visible[-1] + 1
      assert int(mask.begin[row]) == min(length, max(0, length + depth.min() - (window or 999) + 1))
      assert int(mask.begin[row]) <= visible[0]
      # Each node sees as many positions as its window holds, or all there are.
      want = np.minimum(length + depth + 1, window or 999)
      np.testing.assert_array_equal(seen[row].sum(axis=-1), want)

  check()
