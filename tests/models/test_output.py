"""Output layers over a draft vocabulary, and their logits over the target's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax.models import OutputLayer, TokenMap, output_rows, over_target
from specjax.testing import tiny_model

X = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)


def layer(vocab=12, dtype=jnp.float32, **options):
  return OutputLayer(8, vocab, dtype=dtype, rngs=nnx.Rngs(0), **options)


def test_l3_draft_ids_mean_target_ids():
  """Draft ids 0 and 1 mean 5 and 9: q over the target's vocabulary sums to 1 and is 0 elsewhere.

  Fails when logits are written at draft ids, or when absent tokens get 0 instead of -inf.
  """
  logits = jnp.asarray([[[0.0, 1.0], [2.0, -3.0]]])
  over = over_target(logits, np.array([5, 9], np.int32), 12)
  assert over.shape == (1, 2, 12)
  np.testing.assert_array_equal(over[..., [5, 9]], logits)
  q = np.asarray(jax.nn.softmax(over, axis=-1))
  np.testing.assert_allclose(q.sum(axis=-1), 1, atol=1e-6)
  assert (np.delete(q, [5, 9], axis=-1) == 0).all() and (q[..., [5, 9]] > 0).all()


def test_without_a_map_the_rest_is_padding():
  logits = jnp.asarray(X)
  wide = over_target(logits, None, 10)
  np.testing.assert_array_equal(wide[..., :8], X)
  assert (np.asarray(wide[..., 8:]) == -np.inf).all()
  np.testing.assert_array_equal(over_target(logits, None, 5), X[..., :5])
  np.testing.assert_array_equal(over_target(logits, None, 8), X)


def test_layers_are_products():
  """A layer is one matrix or two; the map changes which tokens its rows mean, not the numbers."""
  one, two = layer(), layer(rank=3)
  assert one.ids is None and one.weight.shape == (12, 8)
  np.testing.assert_allclose(one(X), X @ np.asarray(one.weight[...]).T, atol=1e-5)
  assert two.weight is None and (two.up.shape, two.down.shape) == ((12, 3), (3, 8))
  np.testing.assert_allclose(two(X), X @ (np.asarray(two.up[...]) @ np.asarray(two.down[...])).T, atol=1e-5)
  some = layer(ids=[1, 4, 11])
  assert some(X).shape == (2, 3, 3) and some.ids.dtype == jnp.int32
  np.testing.assert_array_equal(some.ids, [1, 4, 11])
  half = layer(dtype=jnp.bfloat16)
  assert half(jnp.asarray(X, jnp.bfloat16)).dtype == jnp.float32


def test_the_map_is_not_trained():
  """Gradients and optimizers see `nnx.Param`; the map is another kind and a leaf of its own."""
  module = layer(ids=[1, 4, 11], rank=2)
  kinds = {type(leaf) for _, leaf in nnx.to_flat_state(nnx.state(module))}
  assert kinds == {nnx.Param, TokenMap}
  assert len(nnx.to_flat_state(nnx.state(module, nnx.Param))) == 2


@pytest.mark.parametrize("tied", (True, False))
def test_rows_of_the_targets_head(tied):
  model = tiny_model(0, num_layers=1, tie_embeddings=tied)
  x = jax.random.normal(jax.random.key(0), (2, 32))
  ids = np.array([3, 5, 60], np.int32)
  logits = x @ output_rows(model, ids).T
  np.testing.assert_allclose(logits, np.asarray(model.unembed(x))[:, ids], atol=1e-4)
  whole = model.embed if tied else model.head.weight
  assert output_rows(model, None) is whole[...]


@pytest.mark.parametrize(
  "options, message",
  [
    (dict(ids=[1, 12]), r"ids\[1\] = 12; it must be in \[0, vocab_size = 12\)"),
    (dict(ids=[-1, 2]), r"ids\[0\] = -1"),
    (dict(ids=[1, 1]), r"ids\[1\] = 1 follows 1; the ids must ascend"),
    (dict(ids=[4, 1]), r"ids\[1\] = 1 follows 4"),
    (dict(ids=[1.0, 2.0]), "type float"),
    (dict(rank=0), "output_rank = 0"),
  ],
)
def test_bad_options_name_the_field(options, message):
  with pytest.raises(ValueError, match=message):
    layer(**options)
