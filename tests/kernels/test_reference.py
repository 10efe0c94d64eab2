"""The reference against the shared suite, and the choice between implementations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kernels.tree_attention import IMPLEMENTATIONS, choose, reference, tree_attention
from specjax.tree import TokenTree
from tests.kernels.suite import TreeAttentionSuite, oracle, visible


class TestReference(TreeAttentionSuite):
  """XLA, which is what ``auto`` runs on a CPU."""

  implementation = "auto"
  head_dim = 8


class TestLargeReference(TreeAttentionSuite):
  """The same as for keys that no core's cache holds: one block, looked at once, few rows summed."""

  implementation = "reference"
  head_dim = 16

  @pytest.fixture(autouse=True)
  def all_is_large(self, monkeypatch):
    jax.clear_caches()
    monkeypatch.setattr(reference, "LARGE", 0)
    yield
    jax.clear_caches()


LENGTHS = np.array((0, 7), np.int32)


def arrays(heads=4, kv_heads=2, head_dim=64, dtype=np.float32):
  cache = np.zeros((2, kv_heads, 128, head_dim), dtype)
  return np.zeros((2, 3, heads, head_dim), dtype), cache, cache


def test_a_buffer_that_ends_inside_a_block():
  """600 slots, blocks of 128: the last block overlaps the one before. Fails when slots count twice there."""
  rng = np.random.default_rng(3)
  lengths, tree = np.array((590, 100, 0), np.int32), TokenTree((-1, 0, 0, 1, 2))
  q = rng.normal(size=(3, 5, 4, 8)).astype(np.float32)
  k, v = (rng.normal(size=(3, 2, 600, 8)).astype(np.float32) for _ in "kv")
  words = np.broadcast_to(tree.ancestors, (3, *tree.ancestors.shape))
  got = tree_attention(q, k, v, lengths, words, implementation="reference")[0]
  np.testing.assert_allclose(got, oracle(q, k, v, visible(lengths, words, 5, 600, None)), atol=1e-5)


@pytest.mark.parametrize(("nodes", "slots"), ((4, 20), (1, 7)))
def test_d2_queries_and_keys_of_other_lengths(nodes, slots):
  """4 queries of 20 keys, 1 of 7: all see all, or query i the keys up to 20 - 4 + i.

  Fails when a mask of nodes × nodes is laid over the first keys.
  """
  rng = np.random.default_rng(4)
  q = rng.normal(size=(1, nodes, 2, 8)).astype(np.float32)
  k, v = (rng.normal(size=(1, 1, slots, 8)).astype(np.float32) for _ in "kv")
  lengths = np.array([slots - nodes], np.int32)
  query, key = np.arange(nodes)[:, None], np.arange(slots)[None]
  every = np.full((1, nodes, 1), 2**nodes - 1, np.uint32)
  for ancestors, seen in ((every, key >= 0 * query), (None, key <= slots - nodes + query)):
    got = tree_attention(q, k, v, lengths, ancestors, implementation="reference")[0]
    np.testing.assert_allclose(got, oracle(q, k, v, seen[None]), atol=1e-5)


def test_bad_shapes_are_refused():
  """Each error names what does not fit; nothing is broadcast by accident."""
  q, k, v = arrays()
  for args, kwargs, match in (
    ((q, k[:, :, :8], v, LENGTHS), {}, "do not fit"),
    ((q[:, :, :3], k, v, LENGTHS), {}, "multiple"),
    ((q, k.astype(jnp.bfloat16), v, LENGTHS), {}, "types"),
    ((q, k, v, LENGTHS[:1]), {}, "prefix_length"),
    ((q, k, v, LENGTHS, np.zeros((4, 1), np.uint32)), {}, "ancestors"),
    ((q, k, v, LENGTHS), {"sliding_window": 0}, "sliding_window = 0"),
    ((q, k, v, LENGTHS), {"logit_softcap": 0.0}, "logit_softcap = 0"),
    ((q, k, v, LENGTHS), {"implementation": "fast"}, "fast"),
  ):
    with pytest.raises(ValueError, match=match):
      tree_attention(*args, **kwargs)


def test_auto_takes_the_reference_where_no_run_is_recorded():
  """A kernel that compiled but never ran on a device kind is not chosen; the reason says so."""
  q, k, _ = arrays()
  choice = choose("auto", q, k)
  assert choice.implementation == "reference"
  assert jax.devices()[0].device_kind in choice.reason
  assert choose("auto", q, k, "no such device").implementation == "reference"


@pytest.mark.parametrize("name", IMPLEMENTATIONS[2:])
def test_d7_a_kernel_asked_for_by_name_is_taken_or_refused(name):
  """No silent fallback: what the kernel does not take raises, and says what it takes (case D7)."""
  q, k, v = arrays()
  assert choose(name, q, k).implementation == name
  for kwargs, match in (
    ({"head_dim": 80}, "64, 96, 128.* got 80"),
    ({"dtype": np.float16}, "float16"),
  ):
    q, k, v = arrays(**kwargs)
    with pytest.raises(ValueError, match=f"{name} .*{match}"):
      tree_attention(q, k, v, LENGTHS, implementation=name)
  q, k, v = (x[:, :, :100] for x in arrays())
  with pytest.raises(ValueError, match=f"{name} .*100"):
    tree_attention(q, k, v, LENGTHS, implementation=name)


def test_memory_does_not_grow_with_nodes_times_slots():
  """Compiled, 64 nodes need the same memory beside their arrays over 512 slots and over 8192.

  Fails for a mask or scores of nodes × slots.
  """

  def temporary(slots):
    like = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
    attend = jax.jit(lambda *args: tree_attention(*args, implementation="reference"), donate_argnums=(1, 2))
    cache = like(2, 2, slots, 16)
    lowered = attend.lower(
      like(2, 64, 4, 16), cache, cache, like(2, dtype=jnp.int32), like(2, 64, 2, dtype=jnp.uint32)
    )
    return lowered.compile().memory_analysis().temp_size_in_bytes

  assert 0 < temporary(512) == temporary(8192)
