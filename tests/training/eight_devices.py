"""Run by `test_mesh.py` on 8 host devices: prints the heads whose step over a mesh is that of one device."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from specjax.models.sharding import make_mesh
from specjax.testing import tiny_model
from specjax.training.batches import Packed
from specjax.training.recipes import TextStats, make_recipe
from specjax.training.step import Parts, TrainConfig, TrainState, make_gradients, make_optimizer, make_step
from tests.training.texts import random_texts


def main(*heads: str):
  assert jax.device_count() == 8
  mesh = make_mesh("data:8")
  target = tiny_model(0)
  packed = Packed(random_texts(0, [13, 20, 9, 24] * 8), range(32), row_length=32)
  batch = packed.read(range(16))
  over, everywhere = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
  for text in heads:
    recipe = make_recipe(text)
    parts = Parts(recipe.init(target, TextStats(np.ones(61)), nnx.Rngs(0)))
    arguments = parts.params, parts.rest, target
    key = jax.random.key(0)
    one = jax.jit(make_gradients(recipe, parts))(*arguments, jax.tree.map(jnp.asarray, batch), key)
    placed = *jax.device_put(arguments, everywhere), jax.device_put(batch, over)
    assert len(placed[-1].tokens.sharding.device_set) == 8
    for accumulate in (1, 2):
      gradients = jax.jit(make_gradients(recipe, parts, accumulate))
      many = gradients(*placed, key)
      assert jax.tree.structure(one) == jax.tree.structure(many)
      for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5, rtol=1e-5, err_msg=text)
    print(recipe.name, flush=True)
  # The last one takes a whole step, too: its state stays on every device.
  config = TrainConfig(steps=2, batch_rows=16)
  optimizer, _ = make_optimizer(config)
  state = TrainState(parts.params, optimizer.init(parts.params), jnp.int32(0))
  state, metrics = make_step(recipe, parts, config, mesh)(jax.device_put(state, everywhere), *placed[1:])
  assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state)) and int(state.step) == 1
  np.testing.assert_allclose(metrics["total"], one[1], rtol=1e-5)
  print("step")


if __name__ == "__main__":
  main(*sys.argv[1:])
