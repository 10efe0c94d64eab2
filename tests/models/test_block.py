"""The block head by itself: its pass against numpy, rows in pieces, its config."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import cache as kv
from specjax.models import BlockConfig, BlockHead, output_rows
from specjax.testing import tiny_config, tiny_model
from tests import block_reference, heads

IDS = np.arange(1, 61, 2)
NOISE = np.random.default_rng(0)
EMBEDDINGS = NOISE.standard_normal((2, 32)).astype(np.float32)
TAPS = NOISE.standard_normal((2, 11, 3, 32)).astype(np.float32)
LENGTHS = np.array([11, 4], np.int32)


@jax.jit
def remembered(head, taps, cache):
  return head.remember(head.fuse(taps), cache)


@jax.jit
def passed(head, embeddings, cache):
  return head(embeddings, cache)


@pytest.fixture(scope="module")
def head():
  return heads.block_head(tiny_config(), IDS)


def prefixed(head):
  """Ragged: so many rows of features a sequence."""
  return remembered(head, TAPS, head.init_cache(2, 32)).replace(length=jnp.asarray(LENGTHS))


def test_a_pass_is_that_of_numpy(head):
  """Fails when a mask token does not see those behind it or another row's prefix, stands at another position,
  when features go through another norm than a layer's input, or the Markov head reads another token."""
  output = passed(head, EMBEDDINGS, prefixed(head))
  assert output.logits.shape == (2, 5, len(IDS)) and output.logits.dtype == jnp.float32
  tokens = np.array([[3, 9, 60, 0, 7], [5, 5, 1, 2, 44]])
  said = head.conditioned(output.logits, jnp.asarray(tokens))
  for row, length in enumerate(LENGTHS):
    expected = block_reference.base_logits(head, TAPS[row, :length], EMBEDDINGS[row])
    np.testing.assert_allclose(output.logits[row], expected, atol=1e-4)
    for d, token in enumerate(tokens[row]):
      np.testing.assert_allclose(
        said[row, d], block_reference.conditioned(head, expected[d], token), atol=1e-4
      )
  # Nothing of the block counts, and no row before it was touched.
  np.testing.assert_array_equal(output.cache.length, LENGTHS)
  for mine, before in zip((*output.cache.k, *output.cache.v), (*prefixed(head).k, *prefixed(head).v)):
    for row, length in enumerate(LENGTHS):
      np.testing.assert_array_equal(mine[row, :, :length], before[row, :, :length])


def test_rows_in_pieces_are_the_same_rows(head):
  """Features at once or a few at a time. Fails when a row's rotary position depends on how it came."""
  whole, cache, at = prefixed(head), head.init_cache(2, 32), 0
  for width in (4, 1, 6):
    cache = kv.commit(remembered(head, TAPS[:, at : at + width], cache), None, jnp.full((2,), width))
    at += width
  for mine, its in zip((*cache.k, *cache.v), (*whole.k, *whole.v)):
    np.testing.assert_allclose(mine[0, :, :11], its[0, :, :11], atol=1e-5)


def test_without_a_markov_head_the_token_before_does_not_matter():
  plain = heads.block_head(tiny_config(), IDS, markov_rank=None)
  logits = jnp.asarray(NOISE.standard_normal((2, 1, len(IDS))), jnp.float32)
  said = plain.conditioned(logits, jnp.asarray([[1, 2, 3], [4, 5, 6]]))
  np.testing.assert_array_equal(said, np.repeat(logits, 3, axis=1))


def test_a_fresh_markov_head_adds_nothing():
  """Training starts from the block alone."""
  fresh = BlockHead(heads.block_config(tiny_config()), dtype=jnp.float32, rngs=heads.nnx.Rngs(0))
  assert not np.asarray(fresh.markov(jnp.arange(61))).any()


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    (dict(block_size=1), r"block_size = 1; it must be an integer in \[2, 127\]"),
    (dict(block_size=True), "block_size = True"),
    (dict(tap_layers=()), r"tap_layers = \(\)"),
    (dict(tap_layers=(2, 1)), r"tap_layers = \(2, 1\)"),
    (dict(markov_rank=0), "markov_rank = 0"),
    (dict(draft_vocab_size=62), "draft_vocab_size = 62"),
    (dict(output="theirs"), "output = 'theirs'"),
    (dict(output="target", output_rank=3), "output_rank = 3"),
    (dict(decoder=tiny_config(sliding_window=8)), "sliding_window = 8; it must be None"),
  ],
)
def test_bad_configs_name_themselves(changes, words):
  with pytest.raises(ValueError, match=words):
    BlockConfig(**{"decoder": tiny_config(), "tap_layers": (0, 1), "block_size": 4, **changes})


def test_what_does_not_fit_is_refused():
  rngs, target = heads.nnx.Rngs(0), tiny_model(0)
  config = BlockConfig(tiny_config(), (0, 3), 4, output="target")
  with pytest.raises(ValueError, match=r"tap_layers = \(0, 3\); the target has 2 layers"):
    config.check_target(target.config)
  with pytest.raises(ValueError, match="d_model = 32; the target's is 16"):
    config.check_target(tiny_config(d_model=16))
  with pytest.raises(ValueError, match=r"no rows of the target are given, config\.output = 'target'"):
    BlockHead(config, dtype=jnp.float32, rngs=rngs)
  with pytest.raises(ValueError, match=r"30 ids are given, config\.draft_vocab_size = None"):
    BlockHead(config, ids=IDS, rows=output_rows(target, IDS), dtype=jnp.float32, rngs=rngs)
