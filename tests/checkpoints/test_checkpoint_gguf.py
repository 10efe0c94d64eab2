"""GGUF files: row order by family, quantized tensors, rope divisors, and damaged files."""

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints import CheckpointError, load_model
from specjax.checkpoints.gguf_file import read_gguf
from specjax.checkpoints.gguf_model import gguf_config, llama3_divisors, unpermute
from specjax.checkpoints.names import gguf_names
from specjax.models import Llama3RopeScaling
from specjax.models.layers import rope_frequencies

from .conftest import (
  LLAMA3,
  SIZES,
  gguf_tensors,
  logits_differ_by,
  model_metadata,
  params,
  permute,
  state_of,
  tokenizer_metadata,
  torch_model,
  train_bpe,
  write_gguf,
)


@pytest.fixture(scope="session")
def small_bpe():
  # As many ids as the tiny models have rows is impossible with 256 bytes: the alphabet is cut.
  import json

  import tokenizers

  description = json.loads(train_bpe(260).to_str())
  vocabulary = description["model"]["vocab"]
  description["model"]["vocab"] = {t: i for t, i in vocabulary.items() if i < 59} | {"!!": 59}
  description["model"]["merges"] = [["!", "!"]]
  return tokenizers.Tokenizer.from_str(json.dumps(description))


@pytest.fixture
def write(tmp_path, small_bpe):
  def write(arch, model, *, metadata=None, tensors=None, quantize=None, padding=4):
    values = {
      **tokenizer_metadata(small_bpe, padding=padding),
      **model_metadata(arch, model),
      **(metadata or {}),
    }
    values = {k: v for k, v in values.items() if v is not None}
    found = {**gguf_tensors(arch, model), **(tensors or {})}
    found = {k: v for k, v in found.items() if v is not None}
    return write_gguf(tmp_path / "m.gguf", arch, values, found, quantize)

  return write


def test_m1_unpermute_undoes_permute():
  for heads in (4, 2):
    rows = np.arange(heads * 4, dtype=np.float32)[:, None].repeat(3, axis=1)
    np.testing.assert_array_equal(unpermute(permute(rows, heads), heads, 4), rows)
  keys = np.arange(8, dtype=np.float32)[:, None]
  with pytest.raises(ValueError, match="8 rows are not 4 heads of size 4"):
    unpermute(permute(keys, 2), 4, 4)
  assert not np.array_equal(unpermute(permute(keys, 2), 4, 2), keys)


def test_m2_rotation_of_neighbours_in_file_order_equals_ours():
  # What the format means, without any code of ours: rows 2i and 2i + 1 turn together.
  rng = np.random.default_rng(0)
  q, k, x = rng.normal(size=(4, 8)), rng.normal(size=(4, 8)), rng.normal(size=8)
  freqs = 10000.0 ** (-np.arange(0, 4, 2) / 4)

  def neighbours(v, position):
    pairs = (v[0::2] + 1j * v[1::2]) * np.exp(1j * position * freqs)
    return np.stack([pairs.real, pairs.imag], 1).ravel()

  def halves(v, position):
    pairs = (v[:2] + 1j * v[2:]) * np.exp(1j * position * freqs)
    return np.concatenate([pairs.real, pairs.imag])

  expected = neighbours(q @ x, 3) @ neighbours(k @ x, 1)
  found = halves(unpermute(q, 1, 4) @ x, 3) @ halves(unpermute(k, 1, 4) @ x, 1)
  np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parity
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_m2_every_architecture_equals_transformers(write, arch, tied):
  model = torch_model(arch, tie_word_embeddings=tied)
  path = write(arch, model)
  loaded = load_model(path)
  assert loaded.config.family == arch and loaded.config.norm_eps == 1e-5
  assert loaded.config.tie_embeddings is tied
  assert (loaded.config.vocab_size, loaded.config.real_vocab_size) == (64, 60)
  raw, names = gguf_tensors(arch, model), gguf_names(2)
  for name, value in params(loaded.model).items():
    stored = raw[names[name]]
    heads = {"q": 4, "k": 2}.get(name.split(".")[-2]) if name.endswith(("q.weight", "k.weight")) else None
    expected = unpermute(stored, heads, 8) if arch == "llama" and heads else stored
    np.testing.assert_array_equal(value, expected, err_msg=name)
  if tied:  # compiling is what takes the time
    assert logits_differ_by(loaded, model) < 1e-4


def test_m2_quantized_tensors(write):
  model = torch_model("llama", tie_word_embeddings=True)
  kinds = {
    "token_embd.weight": gguf.GGMLQuantizationType.Q8_0,
    "blk.0.attn_q.weight": gguf.GGMLQuantizationType.Q4_1,
    "blk.0.attn_k.weight": gguf.GGMLQuantizationType.Q8_0,
    "blk.1.ffn_up.weight": gguf.GGMLQuantizationType.Q4_0,
    "blk.1.ffn_down.weight": gguf.GGMLQuantizationType.BF16,
    "blk.1.ffn_gate.weight": gguf.GGMLQuantizationType.F16,
  }
  loaded = load_model(write("llama", model, quantize=kinds))
  found, raw = params(loaded.model), gguf_tensors("llama", model)
  state = state_of(model)
  for path, name in gguf_names(2).items():
    if name in kinds:
      stored = gguf.quants.dequantize(gguf.quants.quantize(raw[name], kinds[name]), kinds[name])
      if "attn_" in name:
        stored = unpermute(stored, 4 if "attn_q" in name else 2, 8)
      np.testing.assert_array_equal(found[path], stored, err_msg=name)
  assert np.abs(found["embed"] - state["model.embed_tokens.weight"]).max() < 0.01
  np.testing.assert_array_equal(found["norm.weight"], state["model.norm.weight"])


def test_m2_llama3_divisors_are_those_of_the_rotation():
  scaling = Llama3RopeScaling(32.0, 1.0, 4.0, 8192)
  plain, scaled = (np.asarray(rope_frequencies(64, 500000.0, s)) for s in (None, scaling))
  np.testing.assert_allclose(plain / scaled, llama3_divisors(64, 500000.0, scaling), rtol=1e-5)


@pytest.mark.parity
def test_m2_rope_divisors_become_llama3_scaling(write):
  scaled = {**LLAMA3, "original_max_position_embeddings": 8192, "rope_theta": 500000.0}
  model = torch_model("llama", rope_parameters=scaled)
  scaling = Llama3RopeScaling(8.0, 1.0, 4.0, 8192)
  divisors = llama3_divisors(8, 500000.0, scaling).astype(np.float32)
  loaded = load_model(write("llama", model, tensors={"rope_freqs.weight": divisors}))
  assert loaded.config.rope_scaling == scaling
  assert logits_differ_by(loaded, model) < 1e-4
  ones = {"rope_freqs.weight": np.ones(4, np.float32)}
  assert gguf_config(read_gguf(write("llama", model, tensors=ones))).rope_scaling is None
  other = {"rope_freqs.weight": np.array([1, 2, 4, 8], np.float32)}
  with pytest.raises(CheckpointError, match=r"rope_freqs.weight is not llama3 scaling"):
    load_model(write("llama", model, tensors=other))


def test_m3_missing_extra_and_misshaped_tensors(write):
  model = torch_model("llama")
  for name in ("blk.1.attn_k.weight", "output_norm.weight", "token_embd.weight"):
    with pytest.raises(CheckpointError, match=f"1 tensor missing: {name}"):
      load_model(write("llama", model, tensors={name: None}))
  with pytest.raises(CheckpointError, match=r"no place in a llama model.*blk.0.attn_q.bias"):
    load_model(write("llama", model, tensors={"blk.0.attn_q.bias": np.ones(32, np.float32)}))
  with pytest.raises(CheckpointError, match=r"blk.0.attn_k.weight has shape \[32, 32\].*\[16, 32\]"):
    load_model(write("llama", model, tensors={"blk.0.attn_k.weight": np.ones((32, 32), np.float32)}))


@pytest.mark.parametrize(
  "metadata, message",
  [
    ({"llama.expert_count": 8}, "llama.expert_count = 8"),
    ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type = 'yarn'.*'none'"),
    ({"llama.rope.dimension_count": 4}, "rope.dimension_count = 4.*supported: 8"),
    ({"llama.block_count": None}, "metadata key llama.block_count is missing"),
    ({"llama.block_count": "2"}, "llama.block_count = '2'; it must be of type int"),
    ({"llama.attention.head_count_kv": [2, 1]}, r"head_count_kv = \[2, 1\].*one integer"),
    ({"llama.block_count": 4000000000}, "4000000000 layers"),
    ({"llama.attention.head_count": 5}, "num_heads = 5"),
  ],
)
def test_m2_unsupported_metadata_names_key_and_value(write, metadata, message):
  with pytest.raises(CheckpointError, match=message):
    load_model(write("llama", torch_model("llama"), metadata=metadata))


def test_unknown_architecture(write):
  model = torch_model("llama")
  with pytest.raises(CheckpointError, match=r"general.architecture = 'gemma'.*llama, qwen2, qwen3"):
    load_model(write("gemma", model))


def test_damaged_files_give_one_error(write, tmp_path):
  path = write("llama", torch_model("llama", tie_word_embeddings=True))
  whole = open(path, "rb").read()
  header = whole.index(b"output_norm.weight") + 64
  broken = tmp_path / "broken.gguf"
  for size in [*range(0, header, header // 40), header, len(whole) // 2, len(whole) - 4096]:
    broken.write_bytes(whole[:size])
    with pytest.raises(CheckpointError, match=r"broken.gguf: (truncated|cannot be read)"):
      read_gguf(str(broken))
  broken.write_bytes(b"GGML" + whole[4:])
  with pytest.raises(CheckpointError, match="not a GGUF file"):
    read_gguf(str(broken))
  broken.write_bytes(whole[:4] + b"\x09" + whole[5:])
  with pytest.raises(CheckpointError, match="GGUF version 9"):
    read_gguf(str(broken))
  rng = np.random.default_rng(0)
  for _ in range(150):  # no other exception, whatever byte is wrong
    flipped = bytearray(whole)
    flipped[rng.integers(8, header)] ^= 1 << rng.integers(8)
    broken.write_bytes(flipped)
    try:
      config = gguf_config(read_gguf(str(broken)))
      assert config.num_layers >= 1
    except CheckpointError:
      pass


def test_types_are_converted(write):
  loaded = load_model(write("llama", torch_model("llama")), dtype=jnp.bfloat16)
  assert {str(v.dtype) for v in params(loaded.model).values()} == {"bfloat16"}
  assert SIZES["vocab_size"] == loaded.config.vocab_size
