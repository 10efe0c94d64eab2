"""Tiny models and tokenizers in every format, written by the libraries that define the formats."""

from __future__ import annotations

import os

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from tokenizers import decoders, models, pre_tokenizers, trainers

from specjax.checkpoints.fill import path_of

os.environ.setdefault("HF_HUB_OFFLINE", "1")

SIZES = dict(
  vocab_size=64,
  hidden_size=32,
  intermediate_size=64,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=8,
  max_position_embeddings=128,
)
LLAMA3 = dict(
  rope_type="llama3",
  factor=8.0,
  low_freq_factor=1.0,
  high_freq_factor=4.0,
  original_max_position_embeddings=32,
)
TEMPLATE = (
  "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
  "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def torch_model(family: str, **changes):
  """A random transformers model of a family, float32, with norms and biases away from 1 and 0."""
  torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))
  name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
  config = getattr(transformers, f"{name}Config")(**{**SIZES, "rms_norm_eps": 1e-5, **changes})
  config.head_dim = SIZES["head_dim"]
  torch.manual_seed(0)
  model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.add_(torch.randn_like(parameter) * 0.1)
  return model


def state_of(model) -> dict[str, np.ndarray]:
  return {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
  """Row order of q and k in ``llama`` GGUF files, as the public converter makes it."""
  split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
  return split.swapaxes(1, 2).reshape(weight.shape)


def train_bpe(vocab_size: int = 290) -> tokenizers.Tokenizer:
  """A small byte-level BPE with SmolLM2's way of cutting and its special tokens."""
  inner = tokenizers.Tokenizer(models.BPE())
  inner.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ]
  )
  inner.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  text = ["the cat sat on the mat, it's the cat's mat", "héllo wörld 123 4567", "def f(x):\n    return x"]
  inner.train_from_iterator(text * 5, trainer)
  return inner


def tokenizer_metadata(inner: tokenizers.Tokenizer, pre: str = "smollm", padding: int = 0) -> dict:
  """GGUF metadata of a tokenizer; ``padding`` unused entries at the end."""
  import json

  vocabulary = inner.get_vocab()
  tokens = sorted(vocabulary, key=vocabulary.get)
  special = {t.content for t in inner.get_added_tokens_decoder().values()}
  types = [3 if t in special else 1 for t in tokens] + [5] * padding
  merges = json.loads(inner.to_str())["model"]["merges"]
  return {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": pre,
    "tokenizer.ggml.tokens": tokens + [f"[PAD{i}]" for i in range(padding)],
    "tokenizer.ggml.token_type": types,
    "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": TEMPLATE,
  }


def model_metadata(arch: str, model) -> dict:
  c = model.config
  return {
    f"{arch}.block_count": c.num_hidden_layers,
    f"{arch}.context_length": c.max_position_embeddings,
    f"{arch}.embedding_length": c.hidden_size,
    f"{arch}.feed_forward_length": c.intermediate_size,
    f"{arch}.attention.head_count": c.num_attention_heads,
    f"{arch}.attention.head_count_kv": c.num_key_value_heads,
    f"{arch}.attention.key_length": SIZES["head_dim"],
    f"{arch}.attention.value_length": SIZES["head_dim"],
    f"{arch}.rope.dimension_count": SIZES["head_dim"],
    f"{arch}.rope.freq_base": float(c.rope_parameters["rope_theta"]),
    f"{arch}.attention.layer_norm_rms_epsilon": float(c.rms_norm_eps),
  }


def gguf_tensors(arch: str, model) -> dict[str, np.ndarray]:
  """A transformers model's tensors under GGUF names, q and k re-ordered for ``llama``."""
  parts = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
  }
  top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
  tensors = {}
  for name, value in state_of(model).items():
    stem, kind = name.rsplit(".", 1)
    if stem == "lm_head" and model.config.tie_word_embeddings:
      continue
    if stem in top:
      tensors[f"{top[stem]}.{kind}"] = value
      continue
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    heads = {
      "self_attn.q_proj": SIZES["num_attention_heads"],
      "self_attn.k_proj": SIZES["num_key_value_heads"],
    }
    if arch == "llama" and part in heads:
      value = permute(value, heads[part])
    tensors[f"blk.{layer}.{parts[part]}.{kind}"] = value
  return tensors


def write_gguf(path, arch: str, metadata: dict, tensors: dict[str, np.ndarray], quantize: dict | None = None):
  """Writes a file with `gguf.GGUFWriter`; ``quantize`` maps tensor names to quantization types."""
  writer = gguf.GGUFWriter(str(path), arch)
  for key, value in metadata.items():
    if isinstance(value, bool):
      writer.add_bool(key, value)
    elif isinstance(value, int):
      writer.add_uint32(key, value)
    elif isinstance(value, float):
      writer.add_float32(key, value)
    elif isinstance(value, str):
      writer.add_string(key, value)
    else:
      writer.add_array(key, value)
  for name, value in tensors.items():
    kind = (quantize or {}).get(name)
    if kind is None:
      writer.add_tensor(name, np.ascontiguousarray(value))
    else:
      writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(value), kind), raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return str(path)


def params(model) -> dict[str, np.ndarray]:
  """A decoder's parameters by path."""
  return {path_of(p): np.asarray(v.get_value()) for p, v in nnx.to_flat_state(nnx.state(model))}


def logits_differ_by(loaded, model) -> float:
  """Largest difference of the logits of whole prompts between a loaded model and a transformers one."""
  import torch

  tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, 24))
  with torch.no_grad():
    expected = model(torch.tensor(tokens)).logits.numpy()
  cache = loaded.model.init_cache(2, 32)
  found = jax.jit(lambda m, t, c: m(t, c).logits)(loaded.model, jnp.asarray(tokens, jnp.int32), cache)
  return float(np.max(np.abs(np.asarray(found) - expected)))


@pytest.fixture(scope="session")
def bpe() -> tokenizers.Tokenizer:
  return train_bpe()
