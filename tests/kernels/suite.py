"""What every implementation of tree attention must do, against a dense oracle in float64.

An implementation joins by inheriting `TreeAttentionSuite` and naming itself. Sizes are small enough for
Pallas's interpreters, and most tests share one shape, because there a compilation costs more than a run.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from specjax.kernels.tree_attention import tree_attention
from specjax.tree import TokenTree

NODES = 9
BAD = (np.nan, np.inf, -np.inf, 1e30)
# Nodes, query heads, kv heads: every number of nodes that pads differently, every ratio of heads.
SHAPES = ((1, 8, 1), (8, 6, 2), (33, 8, 2))
SHAPES += tuple(pytest.param(*shape, marks=pytest.mark.slow) for shape in ((3, 3, 3), (64, 2, 2)))

parents = st.lists(st.integers(0, 10**6), min_size=NODES - 1, max_size=NODES - 1).map(
  lambda picks: (-1, *(pick % (i + 1) for i, pick in enumerate(picks)))
)


def visible(lengths, ancestors, nodes, slots, window):
  """bool ``[B, N, S]`` by loops, from the words of `tree_attention`'s docstring."""
  seen = np.zeros((len(lengths), nodes, slots), bool)
  columns = nodes if ancestors is None else 32 * ancestors.shape[-1]
  for b, length in enumerate(lengths):
    for i in range(nodes):
      path = [j for j in range(columns) if _bit(ancestors, b, i, j)]
      depth = len(path) - 1
      seen[b, i, 0 if window is None else max(0, length + depth - window + 1) : length] = True
      for at, j in enumerate(path):
        if length + j < slots:
          seen[b, i, length + j] = window is None or at > depth - window
  return seen


def _bit(ancestors, b, i, j):
  if ancestors is None:
    return j <= i
  return (int(ancestors[b, i, j // 32]) >> (j % 32)) & 1


def oracle(q, k, v, seen, softcap=None):
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
          if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
          weights = np.exp(scores - scores.max())
          out[b, i, h] = weights / weights.sum() @ v[b, group, slots]
  assert np.isfinite(out).all()  # an oracle that is NaN would pass anything (case C2)
  return out


def random_tree(rng, nodes):
  return TokenTree((-1, *(int(rng.integers(0, i + 1)) for i in range(nodes - 1))))


@functools.cache
def jitted(implementation):
  """`tree_attention` under jit; window and soft-cap are static."""
  return jax.jit(
    lambda q, k, v, lengths, ancestors, window, softcap: tree_attention(
      q,
      k,
      v,
      lengths,
      ancestors,
      sliding_window=window,
      logit_softcap=softcap,
      implementation=implementation,
    )[0],
    static_argnums=(5, 6),
  )


class TreeAttentionSuite:
  """Inherit, set ``implementation``, and override the sizes or `call` where needed."""

  implementation: str
  heads, kv_heads, head_dim, slots = 4, 2, 64, 512
  examples = 12  # of hypothesis, for each window
  atol = 1e-5

  def call(self, q, k, v, lengths, ancestors, window, softcap):
    """One call of the implementation; overridden where an interpreter wants settings or checks."""
    return jitted(self.implementation)(q, k, v, lengths, ancestors, window, softcap)

  def attend(self, q, k, v, lengths, ancestors, *, window=None, softcap=None):
    lengths = np.asarray(lengths, np.int32)
    return np.asarray(self.call(q, k, v, lengths, ancestors, window, softcap))

  def lengths(self, nodes=NODES):
    """One row each: nothing, one slot, around the block size of 128, and a full buffer."""
    return np.array((0, 1, 7, 127, 128, 129, 192, self.slots - nodes), np.int32)

  def inputs(self, seed=0, nodes=NODES, heads=None, kv_heads=None, head_dim=None):
    rng = np.random.default_rng(seed)
    heads, kv_heads = heads or self.heads, kv_heads or self.kv_heads
    head_dim, batch = head_dim or self.head_dim, len(self.lengths())
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    cache = (batch, kv_heads, self.slots, head_dim)
    return draw(batch, nodes, heads, head_dim), draw(*cache), draw(*cache)

  def seen(self, lengths, ancestors, nodes=NODES, window=None):
    return visible(lengths, ancestors, nodes, self.slots, window)

  def every_row(self, tree):
    return np.broadcast_to(tree.ancestors, (len(self.lengths()), *tree.ancestors.shape))

  def check(self, q, k, v, lengths, ancestors, *, window=None, softcap=None):
    """Runs and compares with the oracle."""
    want = oracle(q, k, v, self.seen(lengths, ancestors, q.shape[1], window), softcap)
    got = self.attend(q, k, v, lengths, ancestors, window=window, softcap=softcap)
    np.testing.assert_allclose(got, want, atol=self.atol)

  # A window of 2 is narrower than the trees are deep: there slots and positions differ. One of 140 is
  # wider than a block of slots: long rows skip whole blocks.
  @pytest.mark.parametrize("window", (None, 5, *(pytest.param(w, marks=pytest.mark.slow) for w in (2, 140))))
  def test_d1_trees_and_lengths(self, window):
    """Random trees (another in each row), lengths at and around the block size.

    Fails when the last block is not masked, a length of 0 reads slot 0, or a window counts slots and
    not positions.
    """

    # No shrinking: in an interpreter it would take minutes to make a failure a little smaller.
    @settings(
      max_examples=self.examples, deadline=None, derandomize=True, database=None, phases=[Phase.generate]
    )
    @given(st.lists(parents, min_size=8, max_size=8), st.integers(0, 99))
    def check(topologies, seed):
      ancestors = np.stack([TokenTree(p).ancestors for p in topologies])
      self.check(*self.inputs(seed), np.roll(self.lengths(), seed), ancestors, window=window)

    check()

  @pytest.mark.parametrize("nodes, heads, kv_heads", SHAPES)
  def test_nodes_and_head_ratios(self, nodes, heads, kv_heads):
    """From 1 node to two full words of bits, from 1 query head a kv head to 8. Fails for wrong padding."""
    rng = np.random.default_rng(nodes)
    q, k, v = self.inputs(nodes, nodes, heads, kv_heads)
    ancestors = np.stack([random_tree(rng, nodes).ancestors for _ in range(len(q))])
    self.check(q, k, v, self.lengths(nodes), ancestors)

  @pytest.mark.parametrize(
    "head_dim", (96, *(pytest.param(h, marks=pytest.mark.slow) for h in (64, 128, 256)))
  )
  def test_head_sizes(self, head_dim):
    """Less, equal and more than the 128 lanes of a TPU register, and no power of two (case D7)."""
    q, k, v = self.inputs(head_dim, head_dim=head_dim)
    tree = random_tree(np.random.default_rng(head_dim), NODES)
    self.check(q, k, v, self.lengths(), self.every_row(tree))

  def test_causal_is_the_chain(self):
    """No bitmask means causal: the same as the bits of a chain (case D2). N = 1 is below (case C5)."""
    q, k, v = self.inputs(3)
    self.check(q, k, v, self.lengths(), None)
    self.check(q, k, v, self.lengths(), self.every_row(TokenTree.chain(NODES - 1)))

  def test_more_columns_than_queries(self):
    """A drafter grows a tree level by level: 3 queries over 40 scratch rows. Fails for bits beyond N."""
    q, k, v = self.inputs(4, 3)
    bits = np.random.default_rng(5).random((len(q), 3, 64)) < 0.4
    bits[:, :, 40:] = False
    words = (bits.reshape(len(q), 3, 2, 32) << np.arange(32)).sum(-1).astype(np.uint32)
    self.check(q, k, v, self.lengths(40), words)
    # Bits of columns behind the end of the buffer are nobody's, also where a last block starts late.
    self.check(q, k, v, self.lengths(5), words, window=140)

  def test_soft_cap(self):
    """Scores are capped before the mask, after the scale; a cap of 0.5 changes every output."""
    q, k, v = self.inputs(13)
    tree = self.every_row(TokenTree((-1, 0, 0, 1, 1, 2, 5, 5, 3)))
    self.check(q, k, v, self.lengths(), tree, softcap=0.5)

  @pytest.mark.parametrize("window", (None, 5))
  def test_c1_what_nobody_sees_changes_no_bit(self, window):
    """Slots no node can see hold NaN, inf or 1e30: bit-equal to zeros. Fails for masks on scores only."""
    q, k, v = self.inputs(6)
    ancestors, lengths = self.every_row(TokenTree((-1, 0, 0, 1, 1, 2, 5, 5, 3))), self.lengths()
    dead = ~self.seen(lengths, ancestors, window=window).any(axis=1)[:, None, :, None]
    fill = lambda x, value: np.where(dead, np.float32(value), x)
    want = self.attend(q, fill(k, 0), fill(v, 0), lengths, ancestors, window=window)
    assert np.isfinite(want).all()
    for bad in BAD:
      got = self.attend(q, fill(k, bad), fill(v, bad), lengths, ancestors, window=window)
      np.testing.assert_array_equal(got, want, err_msg=f"filled with {bad}")

  def test_c1_a_window_hides_a_broken_slot_from_the_deeper_nodes(self):
    """The prefix slot that only the root's window reaches is NaN: the root is NaN, the others unchanged."""
    q, k, v = self.inputs(14)
    ancestors, lengths = self.every_row(TokenTree((-1, 0, 0, 1, 1, 2, 5, 5, 3))), self.lengths()
    clean = self.attend(q, k, v, lengths, ancestors, window=5)
    rows = np.flatnonzero(lengths >= 4)
    for b in rows:
      k[b, :, lengths[b] - 4] = v[b, :, lengths[b] - 4] = np.nan
    broken = self.attend(q, k, v, lengths, ancestors, window=5)
    assert np.isfinite(clean).all()
    assert np.isnan(broken[rows, 0]).all()
    np.testing.assert_array_equal(broken[:, 1:], clean[:, 1:])

  def test_c2_a_node_that_sees_nothing_gives_zeros(self):
    """Length 0 and no bits: zeros, not NaN, for one node or all of a row; the rest is as it was."""
    q, k, v = self.inputs(7)
    lengths, ancestors = self.lengths(), self.every_row(TokenTree.chain(NODES - 1)).copy()
    before = self.attend(q, k, v, lengths, ancestors)
    ancestors[0, 3] = 0
    one = self.attend(q, k, v, lengths, ancestors)
    ancestors[0] = 0
    row = self.attend(q, k, v, lengths, ancestors)
    others = np.arange(NODES) != 3
    np.testing.assert_array_equal(one[0, 3], 0)
    np.testing.assert_array_equal(one[0, others], before[0, others])
    np.testing.assert_array_equal(row[0], 0)
    for got in (one, row):
      np.testing.assert_array_equal(got[1:], before[1:])

  def test_c4_a_batch_bucket_with_one_request(self):
    """Seven empty rows beside one of any length, and all eight empty: exactly 0, whatever memory held."""
    q, k, v = self.inputs(15)
    tree = self.every_row(TokenTree((-1, 0, 0, 1, 1, 2, 5, 5, 3)))
    lengths, ancestors = np.zeros(len(q), np.int32), np.zeros_like(tree)
    np.testing.assert_array_equal(self.attend(q, k, v, lengths, ancestors), 0)
    lengths[2], ancestors[2] = 300, tree[2]
    got = self.attend(q, k, v, lengths, ancestors)
    want = oracle(q, k, v, self.seen(lengths, ancestors))
    np.testing.assert_allclose(got[2], want[2], atol=self.atol)
    np.testing.assert_array_equal(np.delete(got, 2, axis=0), 0)

  def test_c5_lengths_are_used(self):
    """Key lengths [3, 8, …] equal an explicit mask; fails when a length is ignored."""
    q, k, v = self.inputs(8, 1)
    lengths = np.array((3, 8, 0, 0, 1, 2, 6, 200), np.int32)
    seen = np.arange(self.slots)[None, None, :] <= lengths[:, None, None]  # the prefix and the node itself
    got = self.attend(q, k, v, lengths, None)
    np.testing.assert_allclose(got, oracle(q, k, v, seen), atol=self.atol)

  def test_d8_heads_share_in_order(self):
    """4 query heads, 2 kv heads whose V is h + 1: outputs 1, 1, 2, 2. Tiling would give 1, 2, 1, 2."""
    q, k, v = self.inputs(9)
    kinds = np.arange(1, self.kv_heads + 1, dtype=np.float32)
    v = np.broadcast_to(kinds[None, :, None, None], v.shape)
    want = np.repeat(kinds, self.heads // self.kv_heads)[None, None, :, None]
    got = self.attend(q, k, v, self.lengths(), None)
    np.testing.assert_allclose(got, np.broadcast_to(want, got.shape), atol=1e-6)

  def test_j1_weights_sum_to_one_in_ragged_rows(self):
    """V all ones: exactly 1 in every row. Two real rows and one that is only zeroed would give 2/3."""
    q, k, v = self.inputs(10)
    dead = ~self.seen(self.lengths(), None).any(axis=1)[:, None, :, None]
    got = self.attend(q, np.where(dead, 0, k), np.where(dead, 0, np.ones_like(v)), self.lengths(), None)
    np.testing.assert_allclose(got, 1, atol=1e-6)

  def test_a5_a_window_wraps_within_one_call(self):
    """Window 8, several tokens in one call: each sees exactly the last 8 positions, itself included.

    Queries of 0 weigh all they see alike, and V is the slot's number: the output is the mean slot.
    """
    q, k, v = self.inputs(16)
    v = np.broadcast_to(np.arange(self.slots, dtype=np.float32)[:, None], v.shape)
    lengths = np.array((6, 0, 1, 7, 8, 9, 130, self.slots - NODES), np.int32)
    at = lengths[:, None] + np.arange(NODES)
    want = (at + np.maximum(at - 7, 0)) / 2
    got = self.attend(np.zeros_like(q), k, v, lengths, None, window=8)
    np.testing.assert_allclose(got, np.broadcast_to(want[:, :, None, None], got.shape), rtol=1e-6)

  def test_q5_siblings_do_not_see_each_other(self):
    """A sibling's V set to 1e6 leaves the other branch bit-equal."""
    q, k, v = self.inputs(11)
    tree = TokenTree((-1, 0, 0, 1, 2, 3, 4, 5, 6))
    ancestors, lengths = self.every_row(tree), self.lengths()
    loud = v.copy()
    for b, length in enumerate(lengths):
      loud[b, :, length + 2] = 1e6
    quiet_run = self.attend(q, k, v, lengths, ancestors)
    loud_run = self.attend(q, k, loud, lengths, ancestors)
    other = [i for i in range(NODES) if not tree.ancestor_mask[i, 2]]
    np.testing.assert_array_equal(loud_run[:, other], quiet_run[:, other])
    assert abs(loud_run[:, 2] - quiet_run[:, 2]).max() > 1e3

  def test_q5_a_broken_sibling_spoils_only_itself(self):
    """One number of node 2's value is not finite: who does not see it changes no bit, who sees it is NaN.

    Fails when masked values are only weighted with 0, or replaced for those who see them.
    """
    q, k, v = self.inputs(5)
    tree = TokenTree((-1, 0, 0, 1, 2, 3, 4, 5, 6))
    ancestors, lengths = self.every_row(tree), self.lengths()
    clean = self.attend(q, k, v, lengths, ancestors)
    assert np.isfinite(clean).all()
    sees = np.asarray(tree.ancestor_mask)[:, 2]
    for bad in (np.nan, np.inf):
      for b, length in enumerate(lengths):
        v[b, :, length + 2, b] = bad
      broken = self.attend(q, k, v, lengths, ancestors)
      np.testing.assert_array_equal(broken[:, ~sees], clean[:, ~sees])
      assert np.isnan(broken[:, sees]).all(), bad

  def test_a_broken_prefix_spoils_its_row_only(self):
    """One number of a committed value is not finite: every node of the row is NaN, other rows unchanged.

    Slot 3 of a full buffer lies in a block that every node sees whole: a path without masks must tell too.
    """
    q, k, v = self.inputs(17)
    ancestors, lengths = self.every_row(TokenTree((-1, 0, 0, 1, 1, 2, 5, 5, 3))), self.lengths()
    clean = self.attend(q, k, v, lengths, ancestors)
    assert np.isfinite(clean).all()
    for bad in (np.nan, np.inf, -np.inf):
      v[-1, :, 3, 1] = bad
      broken = self.attend(q, k, v, lengths, ancestors)
      assert np.isnan(broken[-1]).all(), bad
      np.testing.assert_array_equal(broken[:-1], clean[:-1])

  def test_half_precision_inputs_accumulate_in_float32(self):
    """bf16 in, bf16 out, within two bf16 steps of the oracle on the same rounded inputs."""
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in self.inputs(12))
    got = self.attend(q, k, v, self.lengths(), None)
    assert got.dtype == jnp.bfloat16
    want = oracle(q, k, v, self.seen(self.lengths(), None))
    np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=0.03)
