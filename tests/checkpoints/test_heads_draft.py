"""A distilled draft in our own layout: against transformers, round trips, what is refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from specjax.checkpoints import CheckpointError, LoadedModel, load_head, load_model, save_draft, save_hf
from specjax.models import DraftConfig, DraftDecoder
from specjax.models.output import Bound
from specjax.testing import tiny_config, tiny_model

from .conftest import params, torch_model

IDS = np.array([0, 3, 17, 60], np.int32)


@pytest.fixture(scope="module")
def target():
  return LoadedModel(tiny_model(0, num_layers=1), None, "tiny")


def draft_of(target, ids=None, dtype=jnp.float32, **options):
  layers = tiny_config(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=6, d_ff=20, max_length=256)
  config = DraftConfig(layers, draft_vocab_size=None if ids is None else len(ids), **options)
  return DraftDecoder(config, target.model, ids=ids, dtype=dtype, rngs=nnx.Rngs(2))


@pytest.fixture
def folder(tmp_path, target):
  """A saved draft, to be damaged."""
  save_draft(str(tmp_path / "draft"), draft_of(target, IDS))
  return tmp_path / "draft"


def edit_config(folder, **changes):
  path = folder / "config.json"
  path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder, change):
  path = str(folder / "model.safetensors")
  tensors = safetensors.numpy.load_file(path)
  change(tensors)
  safetensors.numpy.save_file(tensors, path)


@pytest.mark.parity
@pytest.mark.parametrize("tied", (True, False))
def test_m2_a_model_without_its_embedding_equals_transformers(tmp_path, tied):
  """A transformers model's layers as the draft of that model: its logits at the ids of the draft vocabulary.

  Fails when the embedding or the head is not the target's, or a row means another token.
  """
  import torch

  theirs = torch_model("llama", tie_word_embeddings=tied)
  theirs.save_pretrained(tmp_path / "target")
  theirs.save_pretrained(tmp_path / "draft")
  edit_config(
    tmp_path / "draft",
    draft_vocab_size=4,
    specjax_draft={"format": 1, "output": "target", "output_rank": None},
  )

  def strip(tensors):
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
      tensors.pop(name, None)
    tensors["d2t"] = IDS - np.arange(4)

  edit_tensors(tmp_path / "draft", strip)
  loaded = load_head(str(tmp_path / "draft"), load_model(str(tmp_path / "target")))
  assert loaded.kind == "draft" and loaded.config.decoder.num_layers == 2
  text = np.random.default_rng(0).integers(0, 64, (1, 12))
  draft = loaded.module
  said = jax.jit(lambda draft, text: draft(text, draft.init_cache(1, 16)).logits)(draft, text)
  with torch.no_grad():
    expected = theirs(torch.tensor(text)).logits.numpy()
  np.testing.assert_allclose(said, expected[..., IDS], atol=1e-4)


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
@pytest.mark.parametrize(
  "ids, options",
  [
    (None, {}),
    (IDS, {}),
    (None, dict(output="own")),
    (IDS, dict(output="own", output_rank=3)),
  ],
)
def test_round_trips_keep_every_bit(tmp_path, target, dtype, ids, options):
  draft = draft_of(target, ids, dtype, **options)
  save_draft(str(tmp_path / "d"), draft, target="tiny")
  stored = safetensors.numpy.load_file(tmp_path / "d" / "model.safetensors")
  assert not any("embed" in name for name in stored)
  assert ("lm_head.weight" in stored) is (options == dict(output="own"))
  loaded = load_head(str(tmp_path / "d"), target, dtype=dtype)
  assert loaded.config == loaded.module.draft_config == draft.draft_config
  mine, its = params(draft), params(loaded.module)
  assert mine.keys() == its.keys()
  for name, value in mine.items():
    assert its[name].dtype == value.dtype
    np.testing.assert_array_equal(its[name], value, err_msg=name)
  if dtype == jnp.float32:  # and what is bound is the target's own
    embed = dict(nnx.to_flat_state(nnx.state(loaded.module, Bound)))[("embed",)].get_value()
    assert embed.unsafe_buffer_pointer() == target.model.embed[...].unsafe_buffer_pointer()


def test_bf16_on_request(tmp_path, target):
  draft = draft_of(target)
  save_draft(str(tmp_path / "d"), draft, dtype=jnp.bfloat16)
  stored = safetensors.numpy.load_file(tmp_path / "d" / "model.safetensors")
  assert all(value.dtype == jnp.bfloat16 for value in stored.values())
  with pytest.raises(CheckpointError, match="exists already"):
    save_draft(str(tmp_path / "d"), draft)


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"hidden_size": 24}, "d_model = 24; the target, whose embedding it reads, has 32"),
    ({"vocab_size": 64}, "vocab_size = 64; the target, whose"),
    ({"draft_vocab_size": 5}, r"tensor d2t has shape \[4\]; expected \[5\]"),
    ({"num_hidden_layers": 2}, r"9 tensors missing: model.layers.1"),
    ({"num_hidden_layers": 10**9}, "1000000000 layers, the file"),
    ({"specjax_draft": {"format": 2}}, "format = 2 is not supported; supported: 1"),
    ({"specjax_draft": {"format": 1}}, "specjax_draft: field output is missing"),
    ({"specjax_draft": {"format": 1, "output": "none"}}, "output = 'none'; it must be one of target, own"),
    ({"specjax_draft": {"format": 1, "output": "own"}}, "1 tensor missing: lm_head.weight"),
    ({"specjax_draft": 1}, "specjax_draft = 1; it must be of type dict"),
    ({"model_type": "gpt2"}, "model_type = 'gpt2'"),
  ],
)
def test_wrong_configs(folder, target, changes, message):
  edit_config(folder, **changes)
  with pytest.raises(CheckpointError, match=message):
    load_head(str(folder), target)


def test_m3_wrong_tensors(folder, target):
  edit_tensors(folder, lambda t: t.update({"model.embed_tokens.weight": np.ones((61, 32), np.float32)}))
  with pytest.raises(CheckpointError, match=r"1 tensor with no place in a draft decoder.*embed_tokens"):
    load_head(str(folder), target)
  edit_tensors(folder, lambda t: t.pop("model.embed_tokens.weight"))
  edit_tensors(folder, lambda t: t.update({"model.norm.weight": np.ones(31, np.float32)}))
  with pytest.raises(CheckpointError, match=r"model.norm.weight has shape \[31\]"):
    load_head(str(folder), target)
  edit_tensors(folder, lambda t: t.pop("d2t"))
  with pytest.raises(CheckpointError, match=r"tensor d2t is missing.*which of the target's 61 tokens"):
    load_head(str(folder), target)


def test_a_whole_model_is_no_draft(tmp_path, target):
  save_hf(str(tmp_path / "m"), target.model)
  with pytest.raises(CheckpointError, match="not a known draft head; known: Medusa"):
    load_head(str(tmp_path / "m"), target)
