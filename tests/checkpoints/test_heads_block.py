"""A block head in our own layout: its numbers, round trips, what is refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from specjax.checkpoints import CheckpointError, LoadedModel, load_head, save_block, save_draft
from specjax.models import BlockConfig, BlockHead, DraftConfig, DraftDecoder, output_rows
from specjax.testing import tiny_config, tiny_model
from tests import block_reference, heads

from .conftest import params

IDS = np.array([0, 3, 17, 60], np.int32)


@pytest.fixture(scope="module")
def target():
  return LoadedModel(tiny_model(0, num_layers=1), None, "tiny")


def head_of(target, ids=None, dtype=jnp.float32, *, family="llama", **options):
  like = dict(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=6, d_ff=20, max_length=256)
  biased = dict(qkv_bias=family == "qwen2", qk_norm=family == "qwen3")
  layers = tiny_config(family=family, **like, **biased)
  size = None if ids is None else len(ids)
  config = BlockConfig(layers, (0, 1), 3, draft_vocab_size=size, **options)
  rows = output_rows(target.model, ids) if config.output == "target" else None
  return BlockHead(config, ids=ids, rows=rows, dtype=dtype, rngs=nnx.Rngs(2))


@pytest.fixture
def folder(tmp_path, target):
  """A saved head, to be damaged."""
  save_block(str(tmp_path / "block"), head_of(target, IDS, markov_rank=2))
  return tmp_path / "block"


def edit_config(folder, **changes):
  path = folder / "config.json"
  path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_ours(folder, **changes):
  ours = json.loads((folder / "config.json").read_text())["specjax_block"]
  edit_config(folder, specjax_block={**ours, **changes})


def edit_tensors(folder, change):
  path = str(folder / "model.safetensors")
  tensors = safetensors.numpy.load_file(path)
  change(tensors)
  safetensors.numpy.save_file(tensors, path)


def test_names_and_shapes(folder):
  """What the head of `block_files` says. Fails when a tensor is called otherwise or lies transposed."""
  shapes = {k: v.shape for k, v in safetensors.numpy.load_file(folder / "model.safetensors").items()}
  layer = "model.layers.0"
  assert shapes == {
    "fc.weight": (32, 64),
    "mask_embeddings": (2, 32),
    "markov.before": (61, 2),
    "markov.after": (4, 2),
    f"{layer}.input_layernorm.weight": (32,),
    f"{layer}.self_attn.q_proj.weight": (12, 32),
    f"{layer}.self_attn.k_proj.weight": (6, 32),
    f"{layer}.self_attn.v_proj.weight": (6, 32),
    f"{layer}.self_attn.o_proj.weight": (32, 12),
    f"{layer}.post_attention_layernorm.weight": (32,),
    f"{layer}.mlp.gate_proj.weight": (20, 32),
    f"{layer}.mlp.up_proj.weight": (20, 32),
    f"{layer}.mlp.down_proj.weight": (32, 20),
    "model.norm.weight": (32,),
    "lm_head.weight": (4, 32),
    "d2t": (4,),
    "t2d": (61,),
  }
  values = json.loads((folder / "config.json").read_text())
  assert values["draft_vocab_size"] == 4 and values["hidden_size"] == 32
  assert values["specjax_block"] == {
    "format": 1,
    "block_size": 3,
    "tap_layers": [0, 1],
    "output": "own",
    "output_rank": None,
    "markov_rank": 2,
  }


def test_a_loaded_head_says_what_the_file_does(folder, target):
  """Its pass against numpy over the head that was written. Fails when a tensor goes to another place."""
  written = head_of(target, IDS, markov_rank=2)
  loaded = load_head(str(folder), target)
  assert loaded.kind == "block" and loaded.config == written.config
  np.testing.assert_array_equal(loaded.module.ids, IDS)
  noise = np.random.default_rng(0)
  taps, root = noise.standard_normal((1, 5, 2, 32)).astype(np.float32), noise.standard_normal((1, 32))

  @jax.jit
  def passed(head, taps, root):
    cache = head.remember(head.fuse(taps), head.init_cache(1, 16))
    return head(root, cache.replace(length=jnp.array([5], jnp.int32))).logits

  said = passed(loaded.module, taps, root.astype(np.float32))
  np.testing.assert_allclose(said[0], block_reference.base_logits(written, taps[0], root[0]), atol=1e-4)


@pytest.mark.parametrize(
  "ids, options",
  [
    (None, dict(family="qwen2")),
    (IDS, dict(markov_rank=2, family="qwen3")),
    (None, dict(output_rank=3)),
    (IDS, dict(output="target", dtype=jnp.bfloat16)),
  ],
)
def test_round_trips_keep_every_bit(tmp_path, target, ids, options):
  head = head_of(target, ids, **options)
  save_block(str(tmp_path / "b"), head, target="tiny")
  loaded = load_head(str(tmp_path / "b"), target, dtype=options.get("dtype", jnp.float32))
  assert loaded.config == head.config
  mine, its = params(head), params(loaded.module)
  assert mine.keys() == its.keys()
  for name, value in mine.items():
    assert its[name].dtype == value.dtype
    np.testing.assert_array_equal(its[name], value, err_msg=name)
  if head.config.output == "target":  # and what is bound is the target's
    stored = safetensors.numpy.load_file(tmp_path / "b" / "model.safetensors")
    assert "lm_head.weight" not in stored and "lm_head.readout.weight" in stored
    np.testing.assert_array_equal(loaded.module.output.weight[...], head.output.weight[...])


def test_bf16_on_request(tmp_path, target):
  head = head_of(target)
  save_block(str(tmp_path / "b"), head, dtype=jnp.bfloat16)
  stored = safetensors.numpy.load_file(tmp_path / "b" / "model.safetensors")
  assert all(value.dtype == jnp.bfloat16 for value in stored.values())
  with pytest.raises(CheckpointError, match="exists already"):
    save_block(str(tmp_path / "b"), head)


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(format=2), "specjax_block: format = 2 is not supported; supported: 1"),
    (dict(block_size=None), "specjax_block: field block_size is missing"),
    (dict(block_size="3"), "specjax_block: block_size = '3'; it must be of type int"),
    (dict(block_size=1), r"block_size = 1; it must be an integer in \[2, 127\]"),
    (dict(block_size=4), r"mask_embeddings has shape \[2, 32\]; the config asks for \[3, 32\]"),
    (dict(tap_layers=[0, 2]), r"tap_layers = \(0, 2\); the target has 1 layers"),
    (dict(tap_layers=["0"]), r"tap_layers = \('0',\); it must be ascending layers"),
    (dict(tap_layers=3), "specjax_block: tap_layers = 3; it must be of type list"),
    (dict(output="none"), "output = 'none'; it must be one of target, own"),
    (dict(markov_rank=None), r"2 tensors with no place in a block head of this config: markov\.after"),
    (dict(markov_rank=3), r"markov\.after has shape \[4, 2\]; the config asks for \[4, 3\]"),
    (dict(output_rank=2), r"2 tensors missing: lm_head\.down\.weight, lm_head\.up\.weight"),
  ],
)
def test_wrong_fields_of_ours(folder, target, changes, message):
  edit_ours(folder, **changes)
  with pytest.raises(CheckpointError, match=message):
    load_head(str(folder), target)


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(hidden_size=24), "d_model = 24; the target's is 32"),
    (dict(vocab_size=64), "vocab_size = 64; the target's is 61"),
    (dict(draft_vocab_size=5), r"tensor d2t has shape \[4\]; expected \[5\]"),
    (dict(num_hidden_layers=10**9), "1000000000 layers, the file"),
    (dict(sliding_window=8, model_type="mistral"), "sliding_window = 8; it must be None"),
    (dict(specjax_block=1), "specjax_block = 1; it must be of type dict"),
  ],
)
def test_wrong_configs(folder, target, changes, message):
  edit_config(folder, **changes)
  with pytest.raises(CheckpointError, match=message):
    load_head(str(folder), target)


def test_m3_wrong_tensors(folder, target):
  edit_tensors(folder, lambda t: t.update(extra=np.ones(3, np.float32)))
  with pytest.raises(CheckpointError, match="1 tensor with no place in a block head of this config: extra"):
    load_head(str(folder), target)
  edit_tensors(folder, lambda t: (t.pop("extra"), t.pop("mask_embeddings")))
  with pytest.raises(CheckpointError, match="1 tensor missing: mask_embeddings"):
    load_head(str(folder), target)
  edit_tensors(folder, lambda t: t.pop("d2t"))
  with pytest.raises(CheckpointError, match=r"tensor d2t is missing.*the 4 of the draft vocabulary"):
    load_head(str(folder), target)


def test_kinds_are_told_apart(folder, tmp_path, target):
  """By the field, though both have the layers of a small model. Fails when one is read as the other."""
  config = DraftConfig(tiny_config(num_layers=1))
  draft = DraftDecoder(config, target.model, dtype=jnp.float32, rngs=heads.nnx.Rngs(0))
  save_draft(str(tmp_path / "draft"), draft)
  assert load_head(str(tmp_path / "draft"), target).kind == "draft"
  assert load_head(str(folder), target).kind == "block"
