"""Medusa heads by themselves: fresh ones, each head's own blocks, output layers, config."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax.models import MedusaConfig, MedusaHeads, output_rows
from specjax.models.layers import matmul
from specjax.testing import tiny_config, tiny_model

HIDDEN = np.random.default_rng(0).standard_normal((2, 3, 32)).astype(np.float32)


def heads_of(ids=None, dtype=jnp.float32, seed=0, **options):
  """Heads with blocks away from 0."""
  config = MedusaConfig(**{"d_model": 32, "vocab_size": 61, "num_heads": 3, **options})
  heads = MedusaHeads(config, ids=ids, dtype=dtype, rngs=nnx.Rngs(seed))
  noise = np.random.default_rng(seed)
  for block in heads.blocks:
    for name in ("weight", "bias"):
      shape = getattr(block, name).shape
      setattr(block, name, nnx.Param(jnp.asarray(noise.standard_normal(shape) * 0.3, dtype)))
  return heads


def by_hand(heads, hidden, weights):
  """Each head in a loop: ``x + SiLU(W x + b)`` block by block, then its matrix ``weights[i]``."""
  said = []
  for i, weight in enumerate(weights):
    x = hidden.astype(np.float64)
    for block in heads.blocks:
      y = x @ np.asarray(block.weight[...][i], np.float64).T + np.asarray(block.bias[...][i], np.float64)
      x = x + y / (1 + np.exp(-y))
    said.append(x @ np.asarray(weight, np.float64).T)
  return np.stack(said, axis=-2)


@pytest.mark.parametrize("tied", (True, False))
def test_fresh_heads_say_what_the_target_says(tied):
  """W and b start at 0. Fails when a head starts as noise, or without the residual."""
  target = tiny_model(0, num_layers=1, tie_embeddings=tied)
  heads = MedusaHeads(MedusaConfig(32, 61, 3, num_layers=2), dtype=jnp.float32, rngs=nnx.Rngs(0))
  said = heads(jnp.asarray(HIDDEN), target.unembed)
  assert said.shape == (2, 3, 3, 61) and said.dtype == jnp.float32
  for i in range(3):
    np.testing.assert_allclose(said[..., i, :], target.unembed(jnp.asarray(HIDDEN)), atol=1e-5)


@pytest.mark.parametrize("num_layers", (1, 2))
@pytest.mark.parametrize("output", ("target", "own", "shared"))
def test_each_head_is_its_own(num_layers, output):
  """All heads at once equal each in a loop, in float64, with its own blocks and output layer.

  Fails when heads see each other, share a block, or use another's output layer.
  """
  ids = np.array([0, 7, 30, 60], np.int32)
  heads = heads_of(ids, num_layers=num_layers, output=output, draft_vocab_size=4)
  target = tiny_model(0, num_layers=1)
  rows = output_rows(target, ids)
  weights = {
    "target": [rows] * 3,
    "own": [layer.weight[...] for layer in heads.outputs],
    "shared": [layer.weight[...] for layer in heads.outputs] * 3,
  }[output]
  said = heads(jnp.asarray(HIDDEN), lambda x: matmul(x, rows))
  assert said.shape == (2, 3, 3, 4)
  np.testing.assert_allclose(said, by_hand(heads, HIDDEN, weights), atol=1e-4)
  np.testing.assert_array_equal(heads.ids, ids)
  # One vector as well as a block.
  np.testing.assert_allclose(
    heads(jnp.asarray(HIDDEN[0, 0]), lambda x: matmul(x, rows)), said[0, 0], atol=1e-5
  )


def test_types_and_the_targets_head():
  """bf16 heads hand the target's head what it takes; without that head there is nothing to say."""
  heads = heads_of(dtype=jnp.bfloat16)
  seen = []
  heads(jnp.asarray(HIDDEN), lambda x: seen.append(x.dtype) or x)
  assert seen == [jnp.float32] and heads.dtype == jnp.bfloat16 and heads.ids is None
  with pytest.raises(ValueError, match="needs unembed"):
    heads(jnp.asarray(HIDDEN))


@pytest.mark.parametrize(
  "options, message",
  [
    (dict(num_heads=0), "num_heads = 0"),
    (dict(num_layers=1.0), "num_layers = 1.0"),
    (dict(output="mine"), "output = 'mine'; it must be one of target, own, shared"),
    (dict(draft_vocab_size=0), "draft_vocab_size = 0"),
    (dict(output="own", output_rank=-1), "output_rank = -1"),
    (dict(output_rank=4), "output_rank = 4; the target's own head"),
    (dict(draft_vocab_size=2), "ids: none given, but draft_vocab_size = 2"),
    (dict(draft_vocab_size=2, ids=[1, 2, 3]), r"ids has shape \[3\].*2 integers"),
  ],
)
def test_configs_are_checked(options, message):
  with pytest.raises(ValueError, match=message):
    heads_of(**options)


def test_configs_against_targets():
  config = MedusaConfig(32, 61, 2)
  config.check_target(tiny_config())
  for bad, message in ((dict(d_model=24), "d_model = 32.*24"), (dict(vocab_size=64), "vocab_size = 61.*64")):
    with pytest.raises(ValueError, match=message):
      config.check_target(tiny_config(**bad))
