"""GGUF metadata → config, GGUF tensors → decoder."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.checkpoints.files import CheckpointError
from specjax.checkpoints.fill import StoredTensor, fill
from specjax.checkpoints.gguf_file import GGUFFile
from specjax.checkpoints.names import gguf_names
from specjax.models import Decoder, DecoderConfig, Llama3RopeScaling

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral files say llama


def unpermute(weight: np.ndarray, heads: int, head_dim: int) -> np.ndarray:
  """Undoes the row order of q and k in ``llama`` GGUF files.

  Those files are made for a rotation of neighbours (2i, 2i + 1); `Decoder` rotates i with i + H/2.

  Args:
    weight: ``[heads · head_dim, ...]`` in file order.
    heads: q: the query heads; k: the **key** heads. Anything else scrambles the rows.
    head_dim: H.

  Returns:
    The rows in the order of Hugging Face files.

  Raises:
    ValueError: the rows are not ``heads · head_dim``.
  """
  if weight.shape[0] != heads * head_dim:
    raise ValueError(f"{weight.shape[0]} rows are not {heads} heads of size {head_dim}")
  split = weight.reshape(heads, head_dim // 2, 2, *weight.shape[1:])
  return split.swapaxes(1, 2).reshape(weight.shape)


def gguf_config(file: GGUFFile) -> DecoderConfig:
  """The architecture in a file's metadata.

  Raises:
    CheckpointError: an architecture, rope scaling or expert count that `Decoder` does not compute, or
      missing keys.
  """
  arch = file.get("general.architecture", str)
  if arch not in ARCHITECTURES:
    raise _unsupported(file, "general.architecture", arch, ", ".join(ARCHITECTURES))
  num_heads = _integer(file, f"{arch}.attention.head_count")
  d_model = _integer(file, f"{arch}.embedding_length")
  head_dim = _integer(file, f"{arch}.attention.key_length", d_model // max(num_heads, 1))
  checks = {
    f"{arch}.attention.value_length": head_dim,
    f"{arch}.rope.dimension_count": head_dim,
    f"{arch}.expert_count": 0,
    f"{arch}.rope.scaling.type": "none",
  }
  for key, supported in checks.items():
    if file.metadata.get(key, supported) != supported:
      raise _unsupported(file, key, file.metadata[key], repr(supported))
  base = file.get(f"{arch}.rope.freq_base", float, 10000.0)
  if "token_embd.weight" not in file.tensors:
    raise CheckpointError(f"{file.path}: 1 tensor missing: token_embd.weight")
  try:
    return DecoderConfig(
      family=arch,
      # The embedding's rows; metadata may leave vocab_size out.
      vocab_size=file.tensors["token_embd.weight"].shape[0],
      num_layers=_integer(file, f"{arch}.block_count"),
      d_model=d_model,
      d_ff=_integer(file, f"{arch}.feed_forward_length"),
      num_heads=num_heads,
      num_kv_heads=_integer(file, f"{arch}.attention.head_count_kv", num_heads),
      head_dim=head_dim,
      max_length=_integer(file, f"{arch}.context_length"),
      rope_base=base,
      rope_scaling=_rope_scaling(file, head_dim, base),
      norm_eps=_eps(file.get(f"{arch}.attention.layer_norm_rms_epsilon", float)),
      # The format has no flag: a file without a head is a tied model.
      tie_embeddings="output.weight" not in file.tensors,
      qkv_bias=arch == "qwen2",
      qk_norm=arch == "qwen3",
      sliding_window=_integer(file, f"{arch}.attention.sliding_window", 0) or None,
    )
  except ValueError as error:
    raise error if isinstance(error, CheckpointError) else CheckpointError(f"{file.path}: {error}") from None


def load_gguf(file: GGUFFile, config: DecoderConfig, *, dtype: jnp.dtype) -> Decoder:
  """The decoder in a GGUF file, dequantized tensor by tensor; the config is `gguf_config`'s."""
  tensors = dict(file.tensors)
  if config.family == "llama":
    heads = {"attn_q.weight": config.num_heads, "attn_k.weight": config.num_kv_heads}
    for name, tensor in file.tensors.items():
      part = name.split(".", 2)[-1]
      if name.startswith("blk.") and part in heads:
        tensors[name] = _reordered(tensor, heads[part], config.head_dim)
  return fill(config, tensors, gguf_names, dtype=dtype, source=file.path)


def _reordered(tensor: StoredTensor, heads: int, head_dim: int) -> StoredTensor:
  return StoredTensor(tensor.shape, lambda: unpermute(tensor.read(), heads, head_dim))


def _rope_scaling(file: GGUFFile, head_dim: int, base: float) -> Llama3RopeScaling | None:
  """Llama 3.1 files keep only the divisors that the scaling makes of each frequency, in a tensor.

  The divisors do not determine all four numbers, but every published file uses the same three
  (1, 4, 8192) and differs in the factor, which is the largest divisor.
  """
  tensor = file.tensors.get("rope_freqs.weight")
  if tensor is None:
    return None
  found = np.asarray(tensor.read(), np.float64)
  if np.allclose(found, 1.0):
    return None
  scaling = Llama3RopeScaling(float(np.max(found)), 1.0, 4.0, 8192)
  expected = llama3_divisors(head_dim, base, scaling)
  if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-4):
    raise CheckpointError(
      f"{file.path}: tensor rope_freqs.weight is not llama3 scaling with low_freq_factor 1, "
      "high_freq_factor 4 and original length 8192, the only kind supported in GGUF files"
    )
  return scaling


def llama3_divisors(head_dim: int, base: float, scaling: Llama3RopeScaling) -> np.ndarray:
  """What Llama-3 scaling divides each of the ``[H / 2]`` rotary frequencies by."""
  wavelength = 2 * np.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  smooth = np.clip((scaling.original_max_length / wavelength - low) / (high - low), 0.0, 1.0)
  return 1.0 / ((1.0 - smooth) / scaling.factor + smooth)


def _eps(value: float) -> float:
  # Stored as float32: 1e-5 comes back as 9.999999747378752e-06.
  return float(f"{value:.6g}")


def _integer(file: GGUFFile, key: str, default: int | None = None) -> int:
  value = file.metadata.get(key)
  if isinstance(value, np.ndarray):
    raise _unsupported(file, key, value.tolist(), "one integer for all layers")
  return file.get(key, int, default)


def _unsupported(file: GGUFFile, key: str, value: Any, supported: str) -> CheckpointError:
  return CheckpointError(f"{file.path}: {key} = {value!r} is not supported; supported: {supported}")
