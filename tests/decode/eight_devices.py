"""Run by `test_mesh.py` on 8 host devices: prints the drafters whose sharded text equals one device's.

Drafters are named by arguments.
"""

import sys

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from specjax import decode
from specjax.drafters import BlockWeights, make_drafter
from specjax.models import BlockConfig
from specjax.models.sharding import make_mesh, shard_model
from specjax.processors import TokenAutomaton
from specjax.sampling import Settings
from specjax.testing import perturbed, tiny_model
from specjax.verify import make_rule
from tests.heads import random_block

SIZES = dict(num_layers=1, num_heads=8, num_kv_heads=4, head_dim=8, d_model=32, d_ff=64, vocab_size=64)
PROMPTS = [[3, 14, 15, 9, 26, 5], [1, 2, 3, 1, 2, 3, 1, 2], [7], list(range(20, 39))]


def placed(model, mesh):
  """A decoder cut over the mesh; a head, which is small, on every device."""
  if model is None or mesh is None:
    return model
  if not isinstance(model, BlockWeights):
    return shard_model(model, mesh)
  model = jax.device_put(model, NamedSharding(mesh, PartitionSpec()))
  model.head.mesh = mesh
  return model


def main(names):
  assert jax.device_count() == 8
  mesh = make_mesh("data:2,model:4")
  target = tiny_model(0, **SIZES)
  draft = perturbed(target, 0.05)
  drafters = {
    "none": (make_drafter("none"), None),
    "prompt_lookup": (make_drafter("prompt_lookup", window=4, min_ngram=1), None),
    "prompt_lookup_tree": (make_drafter("prompt_lookup[matches=4,min_ngram=1]", window=4), None),
    "two_model_tree": (
      make_drafter(
        "two_model[branching=(2,),policy=sample_without_replacement]",
        window=3,
        vocab_size=64,
        num_real_tokens=64,
        max_length=512,
      ),
      draft,
    ),
    "block": (
      make_drafter(
        "block[branching=(2,),policy=top_k]",
        window=3,
        vocab_size=64,
        num_real_tokens=64,
        max_length=512,
        taps=(0, 1),
        block_size=4,
      ),
      BlockWeights(random_block(BlockConfig(target.config, (0, 1), 4, markov_rank=8)), target.embed[...]),
    ),
  }
  # The last one samples, with everything that shapes the distribution on.
  odd = TokenAutomaton.create([[(token % 3) - 1 for token in range(64)], [token % 2 for token in range(64)]])
  shaped = Settings.create(
    4,
    temperature=[0.8, 0.0, 1.0, 0.7],
    top_k=[0, 0, 8, 0],
    top_p=[0.9, 1.0, 1.0, 0.95],
    seed=[7, 8, 9, 4_000_000_000],
    repetition_penalty=1.2,
    logit_bias={5: 2.0},
  )
  for name in names:
    drafter, model = drafters[name]
    sampled = name == "two_model_tree"
    config = decode.DecodeConfig(
      drafter,
      make_rule("traversal_verification" if sampled else "greedy"),
      num_real_tokens=64,
      length_limit=60,
      prefill_widths=(32,),
      logprobs="raw" if sampled else "processed",
    )
    texts = []
    for where in (None, mesh):
      models = [placed(m, where) for m in (target, model)]
      weights = decode.Weights(*models, odd if sampled else None)
      settings = shaped if sampled else None
      state = decode.prefill(weights, config, PROMPTS, settings=settings, max_new_tokens=30, mesh=where)
      if where is not None:
        assert len(state.cache.k[0].sharding.device_set) == 8
        shard = state.cache.k[0].sharding.shard_shape(state.cache.k[0].shape)
        assert shard[:2] == (2, 1), shard  # 4 rows over 2, 4 kv heads over 4
        assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(weights.target))
      state = decode.generate(weights, state, config, decode.ALL_ROUNDS)
      texts.append(decode.results(state))
    assert [row.tokens for row in texts[0]] == [row.tokens for row in texts[1]], name
    assert [row.accepted for row in texts[0]] == [row.accepted for row in texts[1]], name
    for one, many in zip(*texts):
      np.testing.assert_allclose(one.logprobs, many.logprobs, atol=1e-3)
    assert np.isfinite(np.asarray(state.cache.k[0])).all()
    print(name, flush=True)


if __name__ == "__main__":
  main(sys.argv[1:])
