"""Logits of tiny random models of each family equal transformers' (torch, float32, eager attention)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints import load_model

pytestmark = pytest.mark.parity

SIZES = dict(
  vocab_size=97,
  hidden_size=32,
  intermediate_size=56,
  num_hidden_layers=3,
  num_attention_heads=4,
  num_key_value_heads=2,
  max_position_embeddings=128,
  rms_norm_eps=1e-5,
)
LLAMA3 = dict(
  rope_type="llama3",
  rope_theta=10000.0,
  factor=4.0,
  low_freq_factor=1.0,
  high_freq_factor=4.0,
  original_max_position_embeddings=16,
)
FAMILIES = {
  "llama-gqa-untied": ("Llama", dict(tie_word_embeddings=False)),
  "llama3-rope-tied": ("Llama", dict(tie_word_embeddings=True, rope_parameters=LLAMA3)),
  "mistral-window": ("Mistral", dict(sliding_window=6, head_dim=8)),
  "qwen2-bias": ("Qwen2", dict(tie_word_embeddings=True)),
  "qwen3-qk-norm": ("Qwen3", dict(head_dim=16, tie_word_embeddings=False)),
}
LENGTHS = (24, 3, 11)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
  """The transformers model and ours, read from the folder it saved."""
  import torch
  import transformers

  family, options = FAMILIES[request.param]
  config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
  torch.manual_seed(0)
  theirs = getattr(transformers, f"{family}ForCausalLM")._from_config(config, attn_implementation="eager")
  theirs = theirs.float().eval()
  with torch.no_grad():
    for name, parameter in theirs.named_parameters():
      # Biases start at 0 and norms at 1 there: a swapped or forgotten one would not show.
      scale = 0.2 if parameter.ndim > 1 else 0.5
      parameter.copy_(torch.randn_like(parameter) * scale + ("norm" in name))
  folder = tmp_path_factory.mktemp(request.param)
  theirs.save_pretrained(folder)
  return theirs, load_model(str(folder)).model


@pytest.fixture(scope="module")
def text():
  return np.random.default_rng(0).integers(0, 97, (len(LENGTHS), max(LENGTHS)))


@pytest.fixture(scope="module")
def wanted(pair, text):
  """Their logits, each row alone, and their scale."""
  import torch

  with torch.no_grad():
    out = [pair[0](torch.tensor(row[None, :n])).logits[0].numpy() for row, n in zip(text, LENGTHS)]
  assert all(np.isfinite(x).all() and x.std() > 0.1 for x in out)
  return out


@pytest.fixture(scope="module")
def forward(pair):
  return jax.jit(lambda tokens, cache: pair[1](tokens, cache))


def test_whole_prompts(pair, text, wanted, forward):
  """Fails for a transposed weight, another pairing in rope, a missing bias or norm."""
  output = forward(jnp.asarray(text[:1]), pair[1].init_cache(1, 64))
  np.testing.assert_allclose(output.logits[0], wanted[0], atol=1e-4)


def test_j4_ragged_batches(pair, text, wanted, forward):
  """Right-padded rows with lengths, then three steps a row at its own position, from ragged prefixes.

  Fails when padding is seen, or one position serves all rows.
  """
  _, ours = pair
  prefix = np.array([n - 3 for n in LENGTHS])
  padded = np.where(np.arange(text.shape[1]) < prefix[:, None], text, 96)
  output = forward(jnp.asarray(padded), ours.init_cache(len(LENGTHS), 64))
  for row, n in enumerate(prefix):
    np.testing.assert_allclose(output.logits[row, :n], wanted[row][:n], atol=1e-4)
  cache = output.cache.replace(length=jnp.asarray(prefix, jnp.int32))
  for step in range(3):
    tokens = text[np.arange(len(LENGTHS)), prefix + step]
    output = forward(jnp.asarray(tokens[:, None]), cache)
    cache = output.cache.replace(length=cache.length + 1)
    for row, n in enumerate(prefix):
      np.testing.assert_allclose(output.logits[row, 0], wanted[row][n + step], atol=1e-4)


def test_n4_blocks_of_any_size(pair, text, wanted, forward):
  """A text in blocks of 1, 4, 7, 12 through the cache: the same logits, 1e-4 from theirs."""
  cache, got, at = pair[1].init_cache(1, 64), [], 0
  for width in (1, 4, 7, 12):
    output = forward(jnp.asarray(text[:1, at : at + width]), cache)
    cache = output.cache.replace(length=cache.length + width)
    got.append(np.asarray(output.logits[0]))
    at += width
  np.testing.assert_allclose(np.concatenate(got), wanted[0], atol=1e-4)
