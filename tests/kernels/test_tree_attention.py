"""Every implementation of tree attention against a dense oracle in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.kernels.tree_attention import IMPLEMENTATIONS, tree_attention
from specjax.tree import TokenTree

# A new implementation joins by being in `IMPLEMENTATIONS`.
BATCH, HEADS, KV_HEADS, SLOTS, SIZE = 7, 4, 2, 256, 8
LENGTHS = (0, 1, 7, 127, 128, 129, 192)
NODES = 9


def inputs(seed=0, nodes=NODES):
  rng = np.random.default_rng(seed)
  shape = (BATCH, KV_HEADS, SLOTS, SIZE)
  draw = lambda *s: rng.normal(size=s).astype(np.float32)
  return draw(BATCH, nodes, HEADS, SIZE), draw(*shape), draw(*shape)


def visible(lengths, ancestors, nodes, window):
  """bool ``[B, N, S]`` by loops, from the words of the docstring."""
  seen = np.zeros((len(lengths), nodes, SLOTS), bool)
  for b, length in enumerate(lengths):
    columns = [[j for j in range(SLOTS - length) if _bit(ancestors, b, i, j)] for i in range(nodes)]
    for i in range(nodes):
      depth = len(columns[i]) - 1
      for slot in range(length):
        seen[b, i, slot] = window is None or slot > length + depth - window
      for at, j in enumerate(columns[i]):  # its path from the root: the row's depth
        seen[b, i, length + j] = window is None or at > depth - window
  return seen


def _bit(ancestors, b, i, j):
  if ancestors is None:
    return j <= i
  return j < ancestors.shape[-1] * 32 and (int(ancestors[b, i, j // 32]) >> (j % 32)) & 1


def oracle(q, k, v, seen):
  """Dense softmax attention in float64; a node that sees nothing gives 0."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  out = np.zeros(q.shape)
  for b in range(q.shape[0]):
    for i in range(q.shape[1]):
      slots = np.flatnonzero(seen[b, i])
      for h in range(q.shape[2]):
        group = h // (q.shape[2] // k.shape[1])
        if len(slots):
          scores = k[b, group, slots] @ q[b, i, h] / np.sqrt(q.shape[3])
          weights = np.exp(scores - scores.max())
          out[b, i, h] = weights / weights.sum() @ v[b, group, slots]
  return out


@pytest.fixture(scope="module", params=("auto", "reference"))
def attend(request):
  return jax.jit(
    lambda q, k, v, length, ancestors, window=None: tree_attention(
      q, k, v, length, ancestors, sliding_window=window, implementation=request.param
    )[0],
    static_argnames="window",
  )


def broadcast(tree):
  return np.broadcast_to(tree.ancestors, (BATCH, *tree.ancestors.shape))


parents = st.lists(st.integers(0, 10**6), min_size=NODES - 1, max_size=NODES - 1).map(
  lambda picks: (-1, *(pick % (i + 1) for i, pick in enumerate(picks)))
)


# A window of 2 is narrower than the trees are deep: there slots and positions differ.
@pytest.mark.parametrize("window", (None, 2, 5))
def test_d1_trees_and_lengths(attend, window):
  """Random trees (another in each row), lengths at and around the block size of 128.

  Fails when the last block is not masked, a length of 0 reads slot 0, or a window counts slots and
  not positions.
  """

  @settings(max_examples=12, deadline=None, derandomize=True)
  @given(st.lists(parents, min_size=BATCH, max_size=BATCH), st.integers(0, 99))
  def check(topologies, seed):
    q, k, v = inputs(seed)
    ancestors = np.stack([TokenTree(p).ancestors for p in topologies])
    lengths = np.roll(LENGTHS, seed)
    want = oracle(q, k, v, visible(lengths, ancestors, NODES, window))
    assert np.isfinite(want).all()
    got = attend(q, k, v, lengths.astype(np.int32), ancestors, window=window)
    np.testing.assert_allclose(got, want, atol=1e-5)

  check()


@pytest.mark.parametrize("nodes", (1, 4, 40))
def test_causal_is_the_chain(attend, nodes):
  """No bitmask means causal; N = 40 needs a second word of bits (case D2: q 4 / kv 20, q 1 / kv 7)."""
  q, k, v = inputs(3, nodes)
  lengths = np.array((0, 1, 6, 16, 127, 128, 192), np.int32)
  want = oracle(q, k, v, visible(lengths, None, nodes, None))
  np.testing.assert_allclose(attend(q, k, v, lengths, None), want, atol=1e-5)
  chain = broadcast(TokenTree.chain(nodes - 1))
  np.testing.assert_allclose(attend(q, k, v, lengths, chain), want, atol=1e-5)


def test_more_columns_than_queries(attend):
  """A drafter grows a tree level by level: 3 queries over 40 scratch rows. Fails for bits beyond N."""
  q, k, v = inputs(4, 3)
  rng = np.random.default_rng(5)
  bits = rng.random((BATCH, 3, 64)) < 0.4
  bits[:, :, 40:] = False
  words = (bits.reshape(BATCH, 3, 2, 32) << np.arange(32)).sum(-1).astype(np.uint32)
  lengths = np.array(LENGTHS, np.int32)
  got = attend(q, k, v, lengths, words)
  np.testing.assert_allclose(got, oracle(q, k, v, visible(lengths, words, 3, None)), atol=1e-5)


@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf, 1e30))
@pytest.mark.parametrize("window", (None, 5))
def test_c1_what_nobody_sees_changes_no_bit(attend, bad, window):
  """Slots no node can see hold NaN, inf or 1e30: bit-equal to zeros there. Fails for masks on scores only."""
  q, k, v = inputs(6)
  tree = TokenTree((-1, 0, 0, 1, 1, 2, 5, 5, 3))
  ancestors, lengths = broadcast(tree), np.array(LENGTHS, np.int32)
  dead = ~visible(lengths, ancestors, NODES, window).any(axis=1)[:, None, :, None]
  runs = [
    np.asarray(attend(q, np.where(dead, fill, k), np.where(dead, fill, v), lengths, ancestors, window=window))
    for fill in (np.float32(0), np.float32(bad))
  ]
  assert np.isfinite(runs[0]).all()
  np.testing.assert_array_equal(runs[0], runs[1])


def test_c2_a_node_that_sees_nothing_gives_zeros(attend):
  """Length 0 and no bits: zeros, not NaN; the other rows are as they were. The oracle itself is finite."""
  q, k, v = inputs(7)
  lengths = np.array(LENGTHS, np.int32)
  ancestors = broadcast(TokenTree.chain(NODES - 1)).copy()
  before = np.asarray(attend(q, k, v, lengths, ancestors))
  ancestors[0] = 0
  got = np.asarray(attend(q, k, v, lengths, ancestors))
  np.testing.assert_array_equal(got[0], 0)
  np.testing.assert_array_equal(got[1:], before[1:])


def test_c5_lengths_are_used(attend):
  """Key lengths [3, 8, …] equal an explicit mask; fails when a length is ignored."""
  q, k, v = inputs(8, 1)
  lengths = np.array((3, 8, 0, 0, 1, 2, 5), np.int32)
  seen = np.arange(SLOTS)[None, None, :] <= lengths[:, None, None]  # the prefix and the node itself
  np.testing.assert_allclose(attend(q, k, v, lengths, None), oracle(q, k, v, seen), atol=1e-5)


def test_d8_heads_share_in_order(attend):
  """4 query heads, 2 kv heads whose V is h + 1: outputs 1, 1, 2, 2. Tiling would give 1, 2, 1, 2."""
  q, k, v = inputs(9)
  v = np.broadcast_to(np.arange(1, 3, dtype=np.float32)[None, :, None, None], v.shape)
  got = np.asarray(attend(q, k, v, np.array(LENGTHS, np.int32), None))
  np.testing.assert_allclose(got, np.broadcast_to(np.array([1, 1, 2, 2.0])[:, None], got.shape), atol=1e-6)


def test_j1_weights_sum_to_one_in_ragged_rows(attend):
  """V all ones: exactly 1 in every row. Two real rows and one that is only zeroed would give 2/3."""
  q, k, v = inputs(10)
  v = np.ones_like(v)
  dead = ~visible(LENGTHS, None, NODES, None).any(axis=1)[:, None, :, None]
  got = attend(q, np.where(dead, 0, k), np.where(dead, 0, v), np.array(LENGTHS, np.int32), None)
  np.testing.assert_allclose(got, 1, atol=1e-6)


def test_q5_siblings_do_not_see_each_other(attend):
  """A sibling's V set to 1e6 leaves the other branch bit-equal."""
  q, k, v = inputs(11)
  tree = TokenTree((-1, 0, 0, 1, 2, 3, 4, 5, 6))
  ancestors, lengths = broadcast(tree), np.array(LENGTHS, np.int32)
  loud = v.copy()
  for b, length in enumerate(LENGTHS):
    loud[b, :, length + 2] = 1e6
  quiet_run = np.asarray(attend(q, k, v, lengths, ancestors))
  loud_run = np.asarray(attend(q, k, loud, lengths, ancestors))
  other = [i for i in range(NODES) if not tree.ancestor_mask[i, 2]]
  np.testing.assert_array_equal(loud_run[:, other], quiet_run[:, other])
  assert abs(loud_run[:, 2] - quiet_run[:, 2]).max() > 1e3


@pytest.mark.parametrize("bad", (np.nan, np.inf))
def test_q5_a_broken_sibling_spoils_only_itself(attend, bad):
  """Values of node 2 are not finite: who does not see it changes no bit, who sees it is NaN.

  Fails when masked values are only weighted with 0, or replaced for those who see them.
  """
  q, k, v = inputs(5)
  tree = TokenTree((-1, 0, 0, 1, 2, 3, 4, 5, 6))
  ancestors, lengths = broadcast(tree), np.array(LENGTHS, np.int32)
  clean = np.asarray(attend(q, k, v, lengths, ancestors))
  for b, length in enumerate(LENGTHS):
    v[b, :, length + 2] = bad
  broken = np.asarray(attend(q, k, v, lengths, ancestors))
  sees = np.asarray(tree.ancestor_mask)[:, 2]
  assert np.isfinite(clean).all()
  np.testing.assert_array_equal(broken[:, ~sees], clean[:, ~sees])
  assert np.isnan(broken[:, sees]).all()


def test_bad_shapes_are_refused():
  """Each error names what does not fit; nothing is broadcast by accident."""
  q, k, v = inputs()
  lengths = np.array(LENGTHS, np.int32)
  for args, kwargs, match in (
    ((q, k[:, :, :8], v, lengths), {}, "do not fit"),
    ((q[:, :, :3], k, v, lengths), {}, "multiple"),
    ((q, k, v, lengths[:2]), {}, "prefix_length"),
    ((q, k, v, lengths, np.zeros((4, 1), np.uint32)), {}, "ancestors"),
    ((q, k, v, lengths), {"implementation": "fast"}, "fast"),
  ):
    with pytest.raises(ValueError, match=match):
      tree_attention(*args, **kwargs)


def test_half_precision_inputs_accumulate_in_float32(attend):
  """bf16 in, bf16 out, within two bf16 steps of the oracle on the same rounded inputs."""
  q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in inputs(12))
  lengths = np.array(LENGTHS, np.int32)
  got = attend(q, k, v, lengths, None)
  assert got.dtype == jnp.bfloat16
  want = oracle(q, k, v, visible(lengths, None, NODES, None))
  np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=0.03)
