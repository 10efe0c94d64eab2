"""EAGLE-3 heads in the public layouts, against a forward in PyTorch that knows the file alone."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from specjax.checkpoints import CheckpointError, LoadedModel, load_head, save_eagle3
from specjax.models import Eagle3, Eagle3Config, output_rows
from specjax.testing import tiny_config, tiny_model

from .conftest import params
from .eagle3_folders import DRAFT, IDS, VOCAB, WIDTH, Oracle, tensors_of, torch, write


@pytest.fixture(scope="module")
def target():
  """Its rope base is not the head's."""
  return LoadedModel(tiny_model(0, num_layers=8, rope_base=300.0), None, "tiny")


@jax.jit
def forward(head, embeddings, features, cache):
  return head(embeddings, features, cache)


@pytest.mark.parametrize(
  "layout, file, residual, reduced",
  [
    ("eagle", "model.safetensors", False, True),
    ("eagle", "pytorch_model.bin", False, False),
    ("speculators", "model.safetensors", False, True),
    ("speculators", "model.safetensors", True, True),
  ],
)
def test_m2_states_and_logits_equal_pytorch(tmp_path, target, layout, file, residual, reduced):
  """A prefix of six rows from target features, then two steps on the head's own states: 1e-5.

  Fails when what recurs is normed or fused again, the residual is another one, positions or the rope base
  are the target's, or a token of the draft vocabulary means another one.
  """
  layer = {"eagle": "midlayer", "speculators": "layers.0"}[layout]
  fields = {"norm_before_residual": residual} if layout == "speculators" else {}
  path, tensors = write(tmp_path / "head", layout, file, reduced, **fields)
  loaded = load_head(path, target)
  head = loaded.module
  assert (loaded.kind, loaded.config, loaded.source) == ("eagle3", head.config, path)
  assert head.config.tap_layers == (2, 4, 5) and head.config.decoder.rope_base == 10000.0

  oracle = Oracle(tensors, layer, residual)
  noise = np.random.default_rng(1)
  taps = noise.standard_normal((6, 3, WIDTH)).astype(np.float32)
  embed = np.asarray(target.model.embed[...])
  tokens = list(noise.integers(0, VOCAB, 6))
  features = oracle.fuse(*torch.from_numpy(taps).unbind(1))
  ours, cache, block = head.fuse(jnp.asarray(taps[None])), head.init_cache(1, 32), tokens
  for _ in range(3):
    states, logits = oracle(torch.from_numpy(embed[tokens]), features)
    output = forward(head, jnp.asarray(embed[None, block]), ours, cache)
    np.testing.assert_allclose(output.hidden[0], states[-len(block) :], atol=1e-5)
    np.testing.assert_allclose(output.logits[0], logits[-len(block) :], atol=1e-5)
    # The next row: the token that was drafted, as the target names it, and the state behind it.
    drafted = int(logits[-1].argmax())
    drafted = drafted + int(tensors["d2t"][drafted]) if reduced else drafted
    mine = int(output.logits[0, -1].argmax())
    assert (mine if head.ids is None else int(head.ids[mine])) == drafted
    tokens, features = [*tokens, drafted], torch.cat([features, states[-1:]])
    cache = output.cache.replace(length=cache.length + len(block))
    ours, block = output.hidden[:, -1:], [drafted]
  assert (head.ids is None) is not reduced
  if reduced:
    np.testing.assert_array_equal(head.ids, IDS)


def test_m3_every_tensor_lands_where_it_belongs(tmp_path, target):
  """No parameter keeps an initial value. Fails when two tensors are swapped."""
  path, tensors = write(tmp_path / "head")
  found = params(load_head(path, target).module)
  places = {
    "layer.embedding_norm.weight": "midlayer.input_layernorm.weight",
    "layer.feature_norm.weight": "midlayer.hidden_norm.weight",
    "layer.ff_norm.weight": "midlayer.post_attention_layernorm.weight",
    "layer.ff.down.weight": "midlayer.mlp.down_proj.weight",
    "output.weight": "lm_head.weight",
    "norm.weight": "norm.weight",
  }
  for parameter, name in places.items():
    np.testing.assert_array_equal(found[parameter], tensors[name])
  assert len(found) == len(tensors) - 1  # t2d says nothing that d2t does not
  half = params(load_head(path, target, dtype=jnp.bfloat16).module)
  assert half["norm.weight"].dtype == jnp.bfloat16 and half["output.token_map"].dtype == jnp.int32


def random_head(dtype=jnp.float32, rows=None, **changes):
  layer = tiny_config(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=6, d_ff=20, rope_base=5e3)
  values = dict(decoder=layer, target_width=WIDTH, tap_layers=(1, 3, 8), **changes)
  config = Eagle3Config(**values)
  ids = IDS if config.draft_vocab_size else None
  head = Eagle3(config, ids=ids, rows=rows, dtype=dtype, rngs=nnx.Rngs(3))
  head.norm.weight = nnx.Param(jnp.linspace(0.5, 1.5, WIDTH).astype(dtype))
  return head


@pytest.mark.parametrize("layout", ("eagle", "speculators"))
@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
@pytest.mark.parametrize(
  "changes",
  [
    {},
    dict(draft_vocab_size=DRAFT, output_rank=5, norm_before_residual=True),
  ],
  ids=("whole", "reduced"),
)
def test_round_trips_keep_every_bit(tmp_path, target, layout, dtype, changes):
  head = random_head(dtype, **changes)
  save_eagle3(str(tmp_path / "head"), head, layout=layout, target="tiny")
  loaded = load_head(str(tmp_path / "head"), target, dtype=dtype).module
  assert loaded.config == head.config
  mine, its = params(head), params(loaded)
  assert mine.keys() == its.keys()
  for name, value in mine.items():
    assert its[name].dtype == value.dtype
    np.testing.assert_array_equal(its[name], value, err_msg=name)


def test_what_is_written_is_what_other_projects_read(tmp_path, target):
  """Names, shapes, types and fields of the public layouts; a factored output layer multiplied out."""
  head = random_head(draft_vocab_size=DRAFT, output_rank=5)
  for layout, layer in (("eagle", "midlayer"), ("speculators", "layers.0")):
    path = tmp_path / layout
    save_eagle3(str(path), head, layout=layout, target="org/tiny", dtype=jnp.bfloat16, for_others=True)
    tensors = safetensors.numpy.load_file(path / "model.safetensors")
    expected = tensors_of(layer)
    assert tensors.keys() == expected.keys()
    assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == bool
    np.testing.assert_array_equal(tensors["d2t"], expected["d2t"])
    np.testing.assert_array_equal(tensors["t2d"], expected["t2d"])
    assert tensors["lm_head.weight"].dtype == jnp.bfloat16
    product = np.asarray(head.output.up[...]) @ np.asarray(head.output.down[...])
    np.testing.assert_allclose(tensors["lm_head.weight"].astype(np.float32), product, atol=0.03)
    config = json.loads((path / "config.json").read_text())
    assert config["draft_vocab_size"] == DRAFT
    if layout == "speculators":
      assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "eagle3"
      assert config["speculators_config"]["verifier"]["name_or_path"] == "org/tiny"
      assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 8]
      assert config["norm_before_residual"] is False
      config = config["transformer_layer_config"]
    assert (config["num_hidden_layers"], config["vocab_size"], config["rope_theta"]) == (1, VOCAB, 5e3)
    merged = load_head(str(path), target).module
    assert merged.config.output_rank is None and merged.output.weight.shape == (DRAFT, WIDTH)
  with pytest.raises(CheckpointError, match="layout = 'hf'; it must be one of eagle, speculators"):
    save_eagle3(str(tmp_path / "x"), head, layout="hf")
  with pytest.raises(CheckpointError, match="dtype = float16"):
    save_eagle3(str(tmp_path / "x"), head, dtype=jnp.float16)
  with pytest.raises(CheckpointError, match="exists already"):
    save_eagle3(str(tmp_path / "eagle"), head)


def test_the_targets_own_rows_are_not_stored(tmp_path, target):
  """They are bound when it is loaded. For other projects they are written, as any head's, with the readout.

  Fails when the rows of other ids are bound, a head with rows of its own is read as one without, or the
  readout is lost or transposed.
  """
  rows = output_rows(target.model, IDS)
  head = random_head(draft_vocab_size=DRAFT, output="target", rows=rows)
  x = np.random.default_rng(0).normal(size=(3, WIDTH)).astype(np.float32)
  np.testing.assert_allclose(head.output(x), x @ np.asarray(rows).T, rtol=1e-5, atol=1e-5)  # at the start
  head.output.readout[...] = jnp.asarray(np.random.default_rng(1).normal(size=(WIDTH, WIDTH)), jnp.float32)
  said = np.asarray(rows) @ (np.asarray(head.output.readout[...]) @ x.T)
  for name, for_others in (("small", False), ("whole", True)):
    path = tmp_path / name
    save_eagle3(str(path), head, for_others=for_others)
    tensors = safetensors.numpy.load_file(path / "model.safetensors")
    assert ("lm_head.weight" in tensors) == for_others
    loaded = load_head(str(path), target).module
    assert loaded.config.output == ("own" if for_others else "target")
    np.testing.assert_allclose(loaded.output(x), said.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(loaded.fc.weight[...], head.fc.weight[...])
  with pytest.raises(ValueError, match=r"rows \[16, 32\], rank = None; rows \[17, 32\]"):
    random_head(draft_vocab_size=DRAFT, output="target", rows=rows[1:])
  with pytest.raises(ValueError, match="no rows of the target are given"):
    random_head(draft_vocab_size=DRAFT, output="target")


@pytest.mark.parametrize(
  "layout, fields, expected",
  [
    ("eagle", {}, (2, 4, 5)),
    ("eagle", {"tap_layers": [0, 1, 8]}, (0, 1, 8)),
    # Outputs of layers, as SGLang counts; then inputs, as vLLM and speculators do.
    ("eagle", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, (2, 4, 5)),
    ("speculators", {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, (1, 3, 4)),
    ("speculators", {"eagle_aux_hidden_state_layer_ids": None}, (2, 4, 5)),
  ],
)
def test_which_layers_are_tapped(tmp_path, target, layout, fields, expected):
  path, _ = write(tmp_path / "head", layout, **fields)
  assert load_head(path, target).config.tap_layers == expected


def test_the_targets_embedding_may_be_stored_with_it(tmp_path, target):
  """As some exporters do; another embedding would make another head."""
  embed = np.asarray(target.model.embed[...])
  for i, stored in enumerate((embed, embed.astype(jnp.bfloat16), embed.astype(np.float16))):
    path, _ = write(tmp_path / f"{i}", change=lambda t, x=stored: t.update({"embed_tokens.weight": x}))
    load_head(path, target)
  for name, stored in (("other", embed + 1), ("short", embed[:-1])):
    path, _ = write(tmp_path / name, change=lambda t, x=stored: t.update({"embed_tokens.weight": x}))
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight differs from the embedding of tiny"):
      load_head(path, target)
