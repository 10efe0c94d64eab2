"""The GPU kernel in Pallas's interpreter: the shared suite, and edges that only it has.

The interpreter runs the cells of the grid in order and pads arrays, so it shows neither a race nor a load
outside an array; it does run every mask, range and partial result. What it accepts and Triton does not
(sizes that are no power of two) the lowering tests find, on machines without a GPU too.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kernels.tree_attention import pallas_gpu
from specjax.kernels.tree_attention.masks import make_mask
from specjax.kernels.tree_attention.pallas_gpu import Tile
from tests.kernels.suite import TreeAttentionSuite, oracle, random_tree, visible

# Query heads, kv heads, head size.
MODELS = {
  "SmolLM2-135M": (9, 3, 64),
  "Llama-3.1-8B": (32, 8, 128),
  "Qwen3-32B": (64, 8, 128),
  "70B, one of 8 shards": (8, 1, 128),
}
SLOTS, NODES, HEADS, KV_HEADS, SIZE = 512, 37, 2, 1, 64
# 74 rows in tiles of 16, so the last is ragged; blocks of 16 slots; up to 7 splits (which pad to 8), one
# more for each 16 live slots. The other tile has one split, and one query tile.
SPLIT = Tile(rows=16, slots=16, warps=4, stages=2, splits=7, share=10_000)
WHOLE = Tile(rows=128, slots=32, warps=4, stages=2, splits=1)
# Around a block, around 7 blocks (one for each split), where shares differ in length, and a full buffer.
LENGTHS = np.array((0, 1, 15, 16, 17, 31, 74, 75, 76, 91, 92, 128, 160, 250, SLOTS - NODES), np.int32)


class TestPallasGpu(TreeAttentionSuite):
  """The kernel as `tree_attention` calls it."""

  implementation = "pallas_gpu_interpreted"
  examples = 3


@functools.cache
def attend(tile, window=None):
  def run(q, k, v, lengths, ancestors):
    mask = make_mask(lengths, ancestors, q.shape[1], k.shape[2], window)
    return pallas_gpu.attend(q, k, v, mask, scale=q.shape[3] ** -0.5, softcap=None, interpret=True, tile=tile)

  return jax.jit(run)


def inputs(seed=0):
  rng = np.random.default_rng(seed)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  cache = (len(LENGTHS), KV_HEADS, SLOTS, SIZE)
  # Large queries: the maxima of the splits differ by far more than rounding.
  return 4 * draw(len(LENGTHS), NODES, HEADS, SIZE), draw(*cache), draw(*cache)


def check(tile, ancestors, window=None):
  """Against the oracle, with NaN wherever no node of a row sees a slot."""
  q, k, v = inputs()
  seen = visible(LENGTHS, ancestors, NODES, SLOTS, window)
  dead = ~seen.any(axis=1)[:, None, :, None]
  k, v = np.where(dead, np.float32(np.nan), k), np.where(dead, np.float32(np.nan), v)
  got = np.asarray(attend(tile, window)(q, k, v, LENGTHS, ancestors))
  np.testing.assert_allclose(got, oracle(q, np.nan_to_num(k), np.nan_to_num(v), seen), atol=3e-5)


def trees():
  """Another tree in each row, of two words of bits. Node 5 of the row without a prefix sees nothing."""
  rng = np.random.default_rng(1)
  words = np.stack([random_tree(rng, NODES).ancestors for _ in LENGTHS])
  words[0, 5] = 0
  return words


@pytest.mark.parametrize("tile", (SPLIT, WHOLE), ids=("split", "whole"))
def test_ragged_edges(tile):
  """Lengths around blocks and splits, a ragged query tile, fewer blocks than splits, idle splits, and a
  node to which several splits show nothing."""
  check(tile, trees())


def test_a_split_in_which_some_nodes_see_nothing():
  """Window 16, a causal chain of 37: the first split holds nothing for the last nodes, the last nothing
  for the first. Their partial results are empty, not NaN."""
  check(SPLIT, None, window=16)


def test_a_broken_slot_reaches_those_who_see_it_through_the_partial_results():
  """Slot 3 lies in the first of seven splits. A row with it is NaN, the others are as they were."""
  q, k, v = inputs()
  clean = np.asarray(attend(SPLIT)(q, k, v, LENGTHS, trees()))
  v[-1, :, 3, 5] = np.inf
  broken = np.asarray(attend(SPLIT)(q, k, v, LENGTHS, trees()))
  assert np.isfinite(clean).all()
  assert np.isnan(broken[-1]).all()
  np.testing.assert_array_equal(broken[:-1], clean[:-1])


def test_splits_share_the_blocks():
  """Every block in exactly one split, in order; shares differ by one block; unused splits have none."""
  for slots in (16, 32, 64):
    for begin, end in ((0, 0), (0, 1), (0, 16), (5, 200), (64, 64), (63, 129), (130, 2048), (0, 32_896)):
      for in_use in (1, 2, 3, 8, 13):
        ranges = [pallas_gpu._block_range(s, in_use, begin, end, slots, np) for s in range(16)]
        walked = [block for low, high in ranges for block in range(int(low), int(high))]
        assert walked == list(range(begin // slots, -(-end // slots)))
        sizes = [int(high - low) for low, high in ranges]
        assert max(sizes[:in_use]) - min(sizes[:in_use]) <= 1
        assert not any(sizes[in_use:])


def arrays(batch, nodes, heads, kv_heads, head_dim, slots=32_896, dtype=jnp.bfloat16):
  shape = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
  return shape((batch, nodes, heads, head_dim)), shape((batch, kv_heads, slots, head_dim))


def cost_of(prefixes, q, k, **options):
  """Of causal nodes behind prefixes."""
  mask = make_mask(jnp.array(prefixes, jnp.int32), None, q.shape[1], k.shape[2], None)
  return pallas_gpu.cost(q, k, mask, **options)


@pytest.mark.parametrize("model", MODELS)
def test_bytes_of_a_round(model):
  """Up to 16 nodes over 2048 slots or more: at most 5 % more is read than must be.

  K and V are read once, the live slots only. What the splits write and read back fits into L2.
  """
  heads, kv_heads, head_dim = MODELS[model]
  for nodes in (1, 8, 16):
    for batch in (1, 8, 64):
      q, k = arrays(batch, nodes, heads, kv_heads, head_dim)
      for prefix in (2048, 2049 - nodes, 4095, 32_768):
        cost = cost_of([prefix] * batch, q, k)
        assert cost.cache == batch * (prefix + nodes) * kv_heads * head_dim * 2 * 2
        assert cost.cache_again == 0
        assert 1 <= cost.moved / cost.least <= 1.05, (nodes, batch, prefix)
        # Half of an A100's L2 holds all partial results.
        assert cost.partials <= 20 * 2**20, (nodes, batch, prefix)


def test_bytes_by_hand():
  """130 live slots of one head of 64 bf16 numbers, 20 query rows in two tiles, two splits."""
  q, k = arrays(1, 20, 1, 1, 64, slots=256)
  cost = cost_of([110], q, k, tile=Tile(16, 16, 4, 2, splits=2, share=10_000))
  assert (cost.cache, cost.cache_again) == (130 * 2 * 64 * 2, 130 * 2 * 64 * 2)
  assert (cost.queries, cost.queries_again, cost.out) == (20 * 128, 20 * 128, 20 * 128)
  assert cost.partials == 2 * 20 * 66 * 4
  assert cost.least == cost.moved == 130 * 2 * 64 * 2 + 2 * 20 * 128


def test_splits_fill_the_chip_and_no_more():
  """A long row alone is split over the chip, a full batch is not; more nodes never split finer."""
  plan = lambda batch, nodes: pallas_gpu._plan(Tile(64, 64, 4, 3), *arrays(batch, nodes, 32, 8, 128), 132)
  assert plan(1, 1).splits * 8 > 132
  assert plan(64, 1).splits == 1
  assert plan(1, 16).least > plan(1, 1).least
  assert all(plan(1, nodes).splits * 8 >= 66 for nodes in (1, 8, 16))  # a cell for every other core at least
  in_use = pallas_gpu._splits_in_use(0, 2064, plan(1, 16), np)
  assert int(in_use) * 8 >= 40  # a short row alone does not sit on 8 cores


def test_refusals_say_what_is_taken():
  """By name a kernel runs or raises: the phrase completes "pallas_gpu …"."""
  for head_dim, dtype, slots, words in (
    (80, jnp.float32, 256, "takes head sizes 64, 96, 128 and 256, got 80"),
    (64, jnp.float16, 256, "takes bfloat16 and float32, got float16"),
    (64, jnp.float32, 200, "takes buffers of a multiple of 128 slots, got 200"),
    (96, jnp.bfloat16, 256, None),
  ):
    assert pallas_gpu.refusal(*arrays(1, 3, 6, 2, head_dim, slots, dtype)) == words


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float32))
@pytest.mark.parametrize("head_dim", pallas_gpu.HEAD_SIZES)
def test_tiles_are_legal(head_dim, dtype):
  """Powers of two that divide the cache; the default is among the candidates."""
  for rows in (1, 4, 20, 64, 1024):
    candidates = pallas_gpu.candidate_tiles(*arrays(1, rows, 2, 2, head_dim, dtype=dtype))
    assert pallas_gpu.default_tile(head_dim, dtype, rows) in candidates
    for tile in candidates:
      assert tile.rows >= 16 and tile.rows.bit_count() == tile.slots.bit_count() == 1
      assert pallas_gpu.SLOT_MULTIPLE % tile.slots == 0


@pytest.mark.parametrize(
  "head_dim, dtype, nodes, ancestors, softcap",
  (
    (96, jnp.bfloat16, 5, True, 30.0),
    (64, jnp.float32, 40, True, None),
    (256, jnp.bfloat16, 256, False, None),
  ),
)
def test_lowers_for_cuda(head_dim, dtype, nodes, ancestors, softcap):
  """Triton takes every operation and every size, up to code that only its own compiler sees."""
  q, k = arrays(1, nodes, 6, 2, head_dim, dtype=dtype)
  lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
  words = jax.ShapeDtypeStruct((1, nodes, -(-nodes // 32)), jnp.uint32) if ancestors else None

  def run(q, k, v, lengths, words):
    mask = make_mask(lengths, words, nodes, k.shape[2], None)
    return pallas_gpu.attend(q, k, v, mask, scale=0.1, softcap=softcap, interpret=False)

  lowered = jax.jit(run).trace(q, k, k, lengths, words).lower(lowering_platforms=("cuda",))
  assert "triton" in lowered.as_text()


def test_bf16_splits():
  """bf16 in, float32 partial results, bf16 out: one rounding of the weights, one of the output."""
  rows = slice(-3, None)
  q, k, v = (jnp.asarray(x[rows], jnp.bfloat16) for x in inputs())
  got = attend(SPLIT)(q, k, v, LENGTHS[rows], trees()[rows])
  want = oracle(q, k, v, visible(LENGTHS[rows], trees()[rows], NODES, SLOTS, None))
  assert got.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=0.03)
