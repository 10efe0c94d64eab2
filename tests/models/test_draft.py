"""A draft decoder on its target's embedding: a decoder like any other, and nothing of the target's is its."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax.models import Decoder, DraftConfig, DraftDecoder, OutputLayer
from specjax.models.layers import Linear
from specjax.models.output import Bound
from specjax.testing import tiny_config, tiny_model
from specjax.tree import TokenTree

TEXT = np.random.default_rng(0).integers(0, 61, (1, 16))
IDS = np.array([2, 3, 17, 60], np.int32)
LAYERS = tiny_config(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=6, d_ff=20, rope_base=300.0)


@pytest.fixture(scope="module", params=(True, False))
def target(request):
  return tiny_model(0, tie_embeddings=request.param)


def draft_of(target, ids=None, dtype=jnp.float32, **options):
  size = None if ids is None else len(ids)
  config = DraftConfig(LAYERS, **{"draft_vocab_size": size, **options})
  return DraftDecoder(config, target, ids=ids, dtype=dtype, rngs=nnx.Rngs(5))


def plain(draft, target):
  """The same layers as a `Decoder` with an embedding and a head of its own."""
  model = Decoder(LAYERS.replace(tie_embeddings=False), dtype=jnp.float32, rngs=nnx.Rngs(0))
  model.embed = nnx.Param(target.embed[...])
  model.layers, model.norm = draft.layers, draft.norm
  weight = draft.output.weight if draft.output is not None else draft.rows
  model.head = Linear(32, weight.shape[0], dtype=jnp.float32, rngs=nnx.Rngs(0))
  model.head.weight = nnx.Param(weight[...])
  return model


@pytest.mark.parametrize("output", ("target", "own"))
@pytest.mark.parametrize("ids", (None, IDS), ids=("all", "some"))
def test_it_is_a_decoder(target, output, ids):
  """A prefix, then a tree: the logits of a plain decoder with these arrays, over the draft vocabulary."""
  draft = draft_of(target, ids, output=output)
  its = plain(draft, target)
  tree = TokenTree((-1, 0, 0, 1, 2))
  run = lambda model: _two_blocks(model, TEXT, tree.depths, tree.ancestors)
  for mine, theirs in zip(run(draft), run(its)):
    assert mine.shape[-1] == (61 if ids is None else 4)
    np.testing.assert_allclose(mine, theirs, atol=1e-5)
  if output == "target":  # the rows are those of the target's own head
    x = jax.random.normal(jax.random.key(0), (3, 32))
    said = np.asarray(target.unembed(x))
    np.testing.assert_allclose(draft.unembed(x), said if ids is None else said[:, ids], atol=1e-4)
  cache = draft.init_cache(2, 8)
  assert cache.num_layers == 1 and cache.k[0].shape == (2, 1, 128, 6)


@jax.jit
def _two_blocks(model, text, depths, ancestors):
  first = model(text[:, :10], model.init_cache(1, 32))
  cache = first.cache.replace(length=jnp.full((1,), 10, jnp.int32))
  return first.logits, model(text[:, 10:15], cache, depths=depths, ancestors=ancestors).logits


def test_the_targets_arrays_are_bound_and_not_its_own(target):
  """No copy in the same type; `nnx.Param` is what is trained and stored. Fails when an embedding is kept."""
  draft = draft_of(target)
  own, bound = (nnx.to_flat_state(nnx.state(draft, kind)) for kind in (nnx.Param, Bound))
  assert not any("embed" in path for path, _ in own) and len(own) == 10
  assert [path for path, _ in bound] == [("embed",), ("rows",)]
  head = target.embed if target.head is None else target.head.weight
  for mine, its in ((draft.embed, target.embed), (draft.rows, head)):
    assert mine[...].unsafe_buffer_pointer() == its[...].unsafe_buffer_pointer()
  half = draft_of(target, IDS, dtype=jnp.bfloat16)
  assert half.dtype == half.embed.dtype == half.rows.dtype == jnp.bfloat16 and half.rows.shape == (4, 32)
  np.testing.assert_array_equal(half.ids, IDS)
  assert draft.ids is None and half(jnp.asarray(TEXT), half.init_cache(1, 32)).logits.dtype == jnp.float32


def test_gradients_reach_the_draft_alone(target):
  """Split by kind, the loss is differentiated in the draft's own parameters; the rest is an argument."""
  draft = draft_of(target, IDS, output="own", output_rank=2)
  graph, params, rest = nnx.split(draft, nnx.Param, ...)

  @jax.jit
  @jax.grad
  def gradient(params, rest):
    model = nnx.merge(graph, params, copy.copy(rest))
    # The loop over the cache's blocks has no gradient: training attends in a way of its own.
    return jnp.square(model.unembed(model.norm(jnp.ones((1, model.config.d_model))))).mean()

  found = dict(nnx.to_flat_state(gradient(params, rest)))
  assert ("embed",) not in found and ("layers", 0, "attention", "q", "weight") in found
  for path in (("output", "up"), ("output", "down"), ("norm", "weight")):
    assert float(jnp.abs(found[path].get_value()).max()) > 0, path
  assert isinstance(draft.output, OutputLayer) and draft.rows is None


@pytest.mark.parametrize(
  "options, message",
  [
    (dict(output="shared"), "output = 'shared'; it must be one of target, own"),
    (dict(output_rank=3), "output_rank = 3; the target's own head"),
    (dict(draft_vocab_size=100), "draft_vocab_size = 100"),
    (dict(ids=[60, 3]), r"ids\[1\] = 3 follows 60"),
    (dict(ids=[3], draft_vocab_size=2), "2 integers are expected"),
  ],
)
def test_configs_are_checked(options, message):
  with pytest.raises(ValueError, match=message):
    draft_of(tiny_model(0, num_layers=1), **options)


def test_configs_against_targets():
  for bad, message in (
    (dict(d_model=24), "d_model = 32.*has 24"),
    (dict(vocab_size=64), "vocab_size = 61.*has 64"),
  ):
    with pytest.raises(ValueError, match=message):
      draft_of(tiny_model(0, num_layers=1, **bad))
