"""The TPU kernel against the shared suite in Pallas's TPU interpreter, and what it reads."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter  # only it knows of races
from jax.experimental.pallas import tpu as pltpu

from specjax.kernels.tree_attention import pallas_tpu, tiles, tree_attention
from specjax.kernels.tree_attention.masks import make_mask
from specjax.tree import TokenTree
from tests.kernels.suite import TreeAttentionSuite

# Query heads, kv heads, head size: SmolLM2-135M, Llama-3.1-8B, Qwen3-32B, an eighth of a 70B, Gemma-2-9B.
MODELS = ((9, 3, 64), (32, 8, 128), (64, 8, 128), (8, 1, 128), (16, 8, 256))


class TestPallasTpu(TreeAttentionSuite):
  """Blocks of 256 slots and products of 128: long rows have several blocks, and windows skip some."""

  implementation = "pallas_tpu_interpreted"
  examples = 2

  @pytest.fixture(autouse=True)
  def small_tiles(self, monkeypatch):
    monkeypatch.setattr(tiles, "tile", lambda *_: {"heads": 2, "slots": 256, "rows": 128, "chunk": 128})

  def call(self, q, k, v, lengths, ancestors, window, softcap):
    """The interpreter prints what races it finds and goes on: here they are errors."""
    settings = {"sliding_window": window, "logit_softcap": softcap, "implementation": self.implementation}
    try:
      out = jax.block_until_ready(tree_attention(q, k, v, lengths, ancestors, **settings)[0])
      assert not interpreter.races.races_found
    except BaseException:
      pltpu.reset_tpu_interpret_mode_state()
      raise
    return out

  def test_long_prompts_take_turns(self, monkeypatch):
    """More query rows than one call takes: the nodes are split. Fails when a part counts its nodes from 0."""
    monkeypatch.setattr(pallas_tpu, "MAX_ROWS", 8)
    q, k, v = self.inputs(18, 8)
    self.check(q, k, v, self.lengths(8), None)


def shapes(nodes, heads, kv_heads, head_dim, slots, dtype, batch=1):
  cache = jax.ShapeDtypeStruct((batch, kv_heads, slots, head_dim), dtype)
  return jax.ShapeDtypeStruct((batch, nodes, heads, head_dim), dtype), cache


@pytest.mark.parametrize("model", MODELS)
def test_bytes_read_are_the_live_ones(model):
  """At most 1.05 times the bytes that must be moved, from prefixes of 2048 on; few steps."""
  for nodes, prefix in itertools.product((1, 8, 16, 64), (2048, 2049, 4000, 32768)):
    q, k = shapes(nodes, *model, (prefix + nodes + 127) // 128 * 128, jnp.bfloat16)
    ancestors = np.asarray(TokenTree.chain(nodes - 1).ancestors)[None]
    mask = make_mask(jnp.array([prefix], jnp.int32), jnp.asarray(ancestors), nodes, k.shape[2], None)
    cost = pallas_tpu.cost(q, k, mask)
    assert 1 <= (cost.read + cost.written) / cost.least <= 1.05, (nodes, prefix, cost)
    # What a step costs by itself, about a third of a microsecond, needs half a MiB to hide behind.
    assert prefix < 32768 or cost.read * cost.lanes / cost.steps > 2**19


def test_bytes_read_follow_lengths_and_windows():
  """Rows without a slot cost nothing, and a window of 512 costs the same at any length."""
  q, k = shapes(8, 32, 8, 128, 32896, jnp.bfloat16, batch=4)
  tree = jnp.broadcast_to(jnp.asarray(TokenTree.chain(7).ancestors), (4, 8, 1))
  cost = lambda lengths, bits, window=None: pallas_tpu.cost(
    q, k, make_mask(jnp.array(lengths, jnp.int32), bits, 8, 32896, window)
  )
  one = cost((2048, 0, 0, 0), tree.at[1:].set(0))
  four = cost((2048,) * 4, tree)
  assert (four.read, four.written, four.steps) == (4 * one.read, 4 * one.written, 4 * one.steps)
  windows = [cost((length,) * 4, tree, 512) for length in (2048, 32768)]
  assert windows[0] == windows[1]
  assert windows[0].read < four.read / 2


def test_d7_every_class_has_a_tile():
  """Every head size, type and number of rows, one kv head or many: some tile fits a v5e's VMEM."""
  for head_dim, dtype, rows, kv_heads in itertools.product(
    pallas_tpu.HEAD_SIZES,
    (jnp.bfloat16, jnp.float32),
    (1, 8, 100, 512, pallas_tpu.MAX_ROWS),
    (1, 3, 8, 32),
  ):
    tiles = pallas_tpu.candidate_tiles(*shapes(rows, kv_heads, kv_heads, head_dim, 4096, dtype))
    assert tiles, (head_dim, dtype, rows, kv_heads)
    assert all(kv_heads % tile.heads == 0 and tile.slots % tile.chunk == 0 for tile in tiles)
