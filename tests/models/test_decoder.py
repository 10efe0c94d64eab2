"""The decoder by itself: precision, trees, taps, layer ranges, config."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import DecoderConfig, Llama3RopeScaling, truncated
from specjax.testing import tiny_config, tiny_model
from specjax.tree import TokenTree

TEXT = np.random.default_rng(0).integers(0, 61, (1, 20))


@pytest.fixture(scope="module")
def model():
  return tiny_model(0)


@jax.jit
def forward(model, tokens, cache, depths=None, ancestors=None):
  return model(jnp.asarray(tokens), cache, depths=depths, ancestors=ancestors)


def prefixed(model, n, batch=1):
  """The first n tokens of the text in the cache of each row."""
  cache = forward(model, np.repeat(TEXT[:, :n], batch, 0), model.init_cache(batch, 64)).cache
  return cache.replace(length=jnp.full((batch,), n, jnp.int32))


def test_n4_rows_at_once_equal_one_by_one(model):
  """K + 1 rows in one forward and each alone, float32, highest precision: 1e-5 of the logits.

  Fails when a product is left at the default precision on a device that rounds it.
  """
  cache = prefixed(model, 10)
  at_once = forward(model, TEXT[:, 10:15], cache).logits[0]
  for i in range(5):
    output = forward(model, TEXT[:, 10 + i : 11 + i], cache)
    cache = output.cache.replace(length=cache.length + 1)
    np.testing.assert_allclose(output.logits[0, 0], at_once[i], atol=1e-5, rtol=1e-5)


def test_n4_precision_is_named():
  """Every product of the float32 forward asks for the highest precision; bf16 products do not."""
  for dtype, highest in ((jnp.float32, True), (jnp.bfloat16, False)):
    model = tiny_model(0, dtype=dtype)
    jaxpr = str(jax.make_jaxpr(lambda m: m(jnp.zeros((1, 2), int), m.init_cache(1, 8)).logits)(model))
    products = jaxpr.count("= dot_general")
    assert products > 10
    assert (jaxpr.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == products) == highest


@pytest.mark.parametrize("window", (None, 2))
def test_q2_each_branch_of_a_tree_is_a_chain(window):
  """Every root-to-leaf path of a verified tree has the logits of that text alone; so do its cache rows.

  Fails when a sibling is seen or positions go by node number; with a sliding window, when the window
  counts scratch rows instead of depth.
  """
  model = tiny_model(1, sliding_window=window)
  tree = TokenTree((-1, 0, 0, 1, 2, 2, 5, 4))
  tokens = np.random.default_rng(1).integers(0, 61, tree.num_nodes)
  output = forward(model, tokens[None], prefixed(model, 9), depths=tree.depths, ancestors=tree.ancestors)
  # Each node's path as a row of its own; what stands behind it there is invisible to it.
  alone = forward(model, tokens[tree.paths], prefixed(model, 9, tree.num_nodes))
  for node, depth in enumerate(tree.depths):
    np.testing.assert_allclose(output.logits[0, node], alone.logits[node, depth], atol=1e-5)
    for mine, its in zip(output.cache.k, alone.cache.k):
      np.testing.assert_allclose(mine[0, :, 9 + node], its[node, :, 9 + depth], atol=1e-5)


@pytest.mark.parametrize("window", (None, 2))
def test_a_tree_grown_level_by_level_is_the_tree_at_once(window):
  """Fewer queries than columns: each level is written behind the scratch rows of those before it.

  Fails when a level overwrites another, or sees rows by number instead of by bit.
  """
  model = tiny_model(1, sliding_window=window)
  tree = TokenTree.of_widths((2, 3, 2))
  tokens = np.random.default_rng(1).integers(0, 61, tree.num_nodes)
  whole = forward(model, tokens[None], prefixed(model, 9), tree.depths, tree.ancestors)
  cache = prefixed(model, 9)
  for level in map(list, tree.levels):
    where = dict(depths=tree.depths[level], ancestors=tree.ancestors[level], scratch=level[0])
    output = model(jnp.asarray(tokens[level][None]), cache, **where)
    np.testing.assert_allclose(output.logits[0], whole.logits[0, level], atol=1e-5)
    cache = output.cache
  for mine, its in zip((*cache.k, *cache.v), (*whole.cache.k, *whole.cache.v)):
    np.testing.assert_allclose(mine[:, :, : 9 + tree.num_nodes], its[:, :, : 9 + tree.num_nodes], atol=1e-5)
  with pytest.raises(ValueError, match="ancestors"):
    model(jnp.asarray(tokens[None, :1]), cache, scratch=3)


def test_taps_and_layer_ranges(model):
  """Two halves of the layers with a hidden state between them are the whole; taps are layer inputs."""
  tokens = jnp.asarray(TEXT[:, :6])
  whole = model(tokens, model.init_cache(1, 16), taps=(0, 1, 2))
  np.testing.assert_allclose(whole.taps[:, :, 0], model.embed[...][tokens], atol=1e-6)
  np.testing.assert_allclose(whole.taps[:, :, 2], whole.hidden, atol=0)
  first = model(tokens, model.init_cache(1, 16), layer_range=(0, 1), logits=False)
  assert first.logits is None
  np.testing.assert_allclose(first.hidden, whole.taps[:, :, 1], atol=1e-6)
  second = model(tokens, first.cache, layer_range=(1, None), hidden=first.hidden)
  np.testing.assert_allclose(second.logits, whole.logits, atol=1e-5)
  for mine, its in zip((*second.cache.k, *second.cache.v), (*whole.cache.k, *whole.cache.v)):
    np.testing.assert_allclose(mine, its, atol=1e-6)


@pytest.mark.parametrize("tied", (True, False))
def test_a_truncated_model_is_an_early_exit(tied):
  """Its logits are the target's layers up to there, then norm and head; the arrays are the target's own.

  Fails when a layer more or less runs, when the norm or the head is left out, or when weights are copied.
  """
  model = tiny_model(3, num_layers=3, tie_embeddings=tied)
  short = truncated(model, 2)
  tokens = jnp.asarray(TEXT[:, :6])
  early = model(tokens, model.init_cache(1, 16), layer_range=(0, 2), logits=False).hidden
  cache = short.init_cache(1, 16)
  assert (
    cache.num_layers == short.config.num_layers == 2 and model.config.num_layers == len(model.layers) == 3
  )
  np.testing.assert_allclose(short(tokens, cache).logits, model.unembed(model.norm(early)), atol=1e-5)
  theirs = {id(leaf) for leaf in jax.tree.leaves(model)}
  assert {id(leaf) for leaf in jax.tree.leaves(short)} < theirs
  for layers in (0, 3):
    with pytest.raises(ValueError, match=r"num_layers = \d; it must be in \[1, 2\]"):
      truncated(model, layers)


def test_forward_leaves_the_length_alone(model):
  """Moving it is `commit`'s business. Fails when a forward commits what may be rejected (case A3)."""
  cache = prefixed(model, 4)
  np.testing.assert_array_equal(forward(model, TEXT[:, :3], cache).cache.length, [4])


def test_configs_are_checked_and_hashable():
  assert hash(tiny_config()) == hash(tiny_config())
  tiny_config(rope_scaling=Llama3RopeScaling(4.0, 1.0, 4.0, 16))
  for bad, name in (
    (dict(num_heads=3), "num_heads"),
    (dict(head_dim=7), "head_dim"),
    (dict(d_model=0), "d_model"),
    (dict(num_layers=1.5), "num_layers"),
    (dict(sliding_window=0), "sliding_window"),
    (dict(real_vocab_size=62), "real_vocab_size"),
  ):
    with pytest.raises(ValueError, match=name):
      tiny_config(**bad)
  assert isinstance(tiny_config(), DecoderConfig)
