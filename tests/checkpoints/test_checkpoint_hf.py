"""Hugging Face folders: every tensor lands where it belongs, and logits equal transformers'."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from specjax.checkpoints import CheckpointError, load_model, save_hf
from specjax.checkpoints.hf import hf_config
from specjax.checkpoints.names import hf_names

from .conftest import LLAMA3, logits_differ_by, params, state_of, torch_model

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@pytest.fixture
def folder(tmp_path):
  """A tied llama in one file, to be damaged."""
  path = tmp_path / "model"
  torch_model("llama", tie_word_embeddings=True).save_pretrained(path)
  return path


def edit_config(folder, **changes):
  path = folder / "config.json"
  values = {**json.loads(path.read_text()), **changes}
  path.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


def edit_tensors(folder, change):
  path = str(folder / "model.safetensors")
  tensors = safetensors.numpy.load_file(path)
  change(tensors)
  safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parity
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_m2_every_family_equals_transformers(tmp_path, family, tied):
  model = torch_model(family, tie_word_embeddings=tied)
  model.save_pretrained(tmp_path / "m")
  loaded = load_model(str(tmp_path / "m"))
  assert loaded.tokenizer is None and loaded.config.family == family
  state, names, found = state_of(model), hf_names(2), params(loaded.model)
  assert ("head.weight" in found) is not tied
  for path, value in found.items():
    np.testing.assert_array_equal(value, state[names[path]], err_msg=path)
  assert len(found) == len(state) - tied
  if not tied:  # compiling is what takes the time
    assert logits_differ_by(loaded, model) < 1e-4


@pytest.mark.parity
def test_m2_llama3_rope_scaling_in_both_layouts(tmp_path):
  model = torch_model("llama", rope_parameters={**LLAMA3, "rope_theta": 500000.0})
  model.save_pretrained(tmp_path / "m")
  loaded = load_model(str(tmp_path / "m"))
  assert loaded.config.rope_scaling.original_max_length == 32 and loaded.config.rope_base == 500000.0
  assert logits_differ_by(loaded, model) < 1e-4
  edit_config(tmp_path / "m", rope_parameters=..., rope_scaling=LLAMA3, rope_theta=500000.0)
  assert hf_config(str(tmp_path / "m")) == loaded.config


@pytest.mark.parity
def test_m2_sliding_window_of_mistral_and_qwen(tmp_path):
  model = torch_model("mistral", sliding_window=8)
  model.save_pretrained(tmp_path / "m")
  loaded = load_model(str(tmp_path / "m"))
  assert loaded.config.sliding_window == 8
  assert logits_differ_by(loaded, model) < 1e-4
  edit_config(tmp_path / "m", sliding_window=None)
  assert hf_config(str(tmp_path / "m")).sliding_window is None
  edit_config(tmp_path / "m", model_type="qwen2", sliding_window=8, use_sliding_window=False)
  assert hf_config(str(tmp_path / "m")).sliding_window is None
  edit_config(tmp_path / "m", use_sliding_window=True, max_window_layers=0)
  assert hf_config(str(tmp_path / "m")).sliding_window == 8
  edit_config(tmp_path / "m", max_window_layers=1)
  with pytest.raises(CheckpointError, match="layer_types"):
    hf_config(str(tmp_path / "m"))


@pytest.mark.parity
def test_m2_sharded_index(tmp_path):
  model = torch_model("qwen2", tie_word_embeddings=False)
  model.save_pretrained(tmp_path / "m", max_shard_size="20KB")
  assert len(list((tmp_path / "m").glob("model-*.safetensors"))) > 1
  found, state = params(load_model(str(tmp_path / "m")).model), state_of(model)
  for path, name in hf_names(2).items():
    if path in found:
      np.testing.assert_array_equal(found[path], state[name])
  shard = sorted((tmp_path / "m").glob("model-*.safetensors"))[0]
  shard.unlink()
  with pytest.raises(CheckpointError, match=f"{shard.name}: no such file"):
    load_model(str(tmp_path / "m"))


def test_m2_types_are_converted(tmp_path):
  import torch

  model = torch_model("llama").to(torch.bfloat16)
  model.save_pretrained(tmp_path / "m")
  wide, same = (load_model(str(tmp_path / "m"), dtype=d) for d in (jnp.float32, jnp.bfloat16))
  for path, value in params(same.model).items():
    assert value.dtype == jnp.bfloat16
    np.testing.assert_array_equal(value.astype(np.float32), params(wide.model)[path])


def test_m3_head_of_a_tied_and_of_an_untied_model(folder):
  assert load_model(str(folder)).model.head is None
  edit_config(folder, tie_word_embeddings=False)
  with pytest.raises(CheckpointError, match=r"lm_head.weight is missing.*not tied.*\[64, 32\]"):
    load_model(str(folder))


def test_m3_tied_file_with_a_head(folder):
  edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
  assert load_model(str(folder)).model.head is None
  edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))
  with pytest.raises(CheckpointError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
    load_model(str(folder))


def test_m3_missing_extra_and_misshaped_tensors(folder):
  edit_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4)}))
  load_model(str(folder))
  edit_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.ones(32)}))
  with pytest.raises(CheckpointError, match=r"1 tensor with no place.*layers.0.self_attn.q_proj.bias"):
    load_model(str(folder))
  edit_tensors(folder, lambda t: t.pop("model.layers.0.self_attn.q_proj.bias"))
  edit_tensors(folder, lambda t: t.update({"model.norm.weight": np.ones(31, np.float32)}))
  with pytest.raises(CheckpointError, match=r"model.norm.weight has shape \[31\].*asks for \[32\]"):
    load_model(str(folder))
  edit_tensors(folder, lambda t: [t.pop(n) for n in list(t) if ".layers.1." in n])
  with pytest.raises(CheckpointError, match=r"9 tensors missing: .*layers\.1.*\(1 more\)"):
    load_model(str(folder))
  edit_config(folder, num_hidden_layers=10**9)
  with pytest.raises(CheckpointError, match="1000000000 layers"):
    load_model(str(folder))


def test_m3_integer_weights_are_refused(folder):
  edit_tensors(folder, lambda t: t.update({"model.norm.weight": np.ones(32, np.int8)}))
  with pytest.raises(CheckpointError, match=r"model.norm.weight has type I8; supported: F64"):
    load_model(str(folder))


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"model_type": "gemma"}, "model_type = 'gemma'.*supported: llama, mistral"),
    ({"attention_bias": True}, "attention_bias = True.*false"),
    ({"mlp_bias": True}, "mlp_bias = True"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu'.*silu"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_parameters.rope_type = 'yarn'"),
    ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope_scaling.rope_type = 'linear'"),
    ({"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters: field factor is missing"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ({"hidden_size": ...}, "field hidden_size is missing"),
    ({"hidden_size": "32"}, "hidden_size = '32'; it must be of type int"),
    ({"num_key_value_heads": 3}, "num_kv_heads = 3"),
  ],
)
def test_m2_unsupported_configs_name_field_and_value(folder, changes, message):
  edit_config(folder, **changes)
  with pytest.raises(CheckpointError, match=message):
    load_model(str(folder))


def test_damaged_files_give_one_error(folder):
  whole = (folder / "model.safetensors").read_bytes()
  for size in (0, 4, 100, len(whole) // 2, len(whole) - 1):
    (folder / "model.safetensors").write_bytes(whole[:size])
    with pytest.raises(CheckpointError, match=r"model.safetensors: not a whole safetensors file"):
      load_model(str(folder))
  (folder / "model.safetensors").unlink()
  (folder / "pytorch_model.bin").write_bytes(b"x")
  with pytest.raises(CheckpointError, match=r"only pickled weights .pytorch_model.bin.*never read"):
    load_model(str(folder))
  (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b.safetensors"}}')
  with pytest.raises(CheckpointError, match="outside the folder"):
    load_model(str(folder))
  (folder / "config.json").write_text('{"model_type": "lla')
  with pytest.raises(CheckpointError, match=r"config.json: not valid JSON, perhaps truncated"):
    load_model(str(folder))
  (folder / "config.json").unlink()
  with pytest.raises(CheckpointError, match=r"config.json: no such file"):
    load_model(str(folder))


def test_max_length_limits_but_never_stretches(folder):
  assert load_model(str(folder), max_length=16).config.max_length == 16
  with pytest.raises(CheckpointError, match=re.escape("max_length = 129; it must be in [1, 128]")):
    load_model(str(folder), max_length=129)


@pytest.mark.parity
@pytest.mark.parametrize("family", FAMILIES)
def test_save_hf_is_read_by_transformers(tmp_path, family):
  import torch
  import transformers

  window = {"sliding_window": 8} if family == "mistral" else {}
  if family == "llama":
    window = {"rope_parameters": {**LLAMA3, "rope_theta": 10000.0}}
  model = torch_model(family, **window)
  model.save_pretrained(tmp_path / "a")
  loaded = load_model(str(tmp_path / "a"))
  save_hf(str(tmp_path / "b"), loaded.model)
  assert hf_config(str(tmp_path / "b")) == loaded.config
  again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b")
  tokens = torch.arange(24)[None]
  with torch.no_grad():
    torch.testing.assert_close(again(tokens).logits, model(tokens).logits)
