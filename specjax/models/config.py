"""Architecture of a decoder, as one frozen, hashable record."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Llama3RopeScaling:
  """Frequency-dependent stretching of the rotary angles (Llama 3.1's ``rope_type: llama3``)."""

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_length: int


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """A decoder-only transformer of the Llama line (Llama, Mistral, Qwen2, Qwen3).

  Attributes:
    family: ``llama``, ``mistral``, ``qwen2`` or ``qwen3``; used in names and messages only.
    vocab_size: V, rows of the embedding, padding included.
    num_layers: decoder layers.
    d_model: D.
    d_ff: width of the gated feed-forward.
    num_heads: Q, query heads.
    num_kv_heads: K, key/value heads; divides Q.
    head_dim: H.
    max_length: positions the model was made for.
    rope_base: base of the rotary angles.
    rope_scaling: Llama-3 stretching, or None.
    norm_eps: epsilon of the RMS norms.
    tie_embeddings: the output head is the embedding.
    qkv_bias: biases on q, k and v (Qwen2).
    qk_norm: RMS norm of each q and k head before rotation (Qwen3).
    sliding_window: a query sees this many last positions, itself included; None sees all.
    real_vocab_size: ids below this are real, the rest pad the embedding and are never emitted.
  """

  vocab_size: int
  num_layers: int
  d_model: int
  d_ff: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  max_length: int
  family: str = "llama"
  rope_base: float = 10000.0
  rope_scaling: Llama3RopeScaling | None = None
  norm_eps: float = 1e-5
  tie_embeddings: bool = True
  qkv_bias: bool = False
  qk_norm: bool = False
  sliding_window: int | None = None
  real_vocab_size: int | None = None

  def __post_init__(self):
    sizes = ("vocab_size num_layers d_model d_ff num_heads num_kv_heads head_dim max_length").split()
    for name in sizes:
      value = getattr(self, name)
      if not isinstance(value, int) or value < 1:
        raise ValueError(f"DecoderConfig.{name} = {value!r}; it must be an integer of at least 1")
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"DecoderConfig.num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}"
      )
    if self.head_dim % 2:
      raise ValueError(f"DecoderConfig.head_dim = {self.head_dim}; rotary embeddings need an even size")
    if self.sliding_window is not None and self.sliding_window < 1:
      raise ValueError(f"DecoderConfig.sliding_window = {self.sliding_window}; it must be at least 1 or None")
    if not 0 < self.num_real_tokens <= self.vocab_size:
      raise ValueError(
        f"DecoderConfig.real_vocab_size = {self.real_vocab_size}; "
        f"it must be in [1, vocab_size = {self.vocab_size}]"
      )

  @property
  def num_real_tokens(self) -> int:
    return self.vocab_size if self.real_vocab_size is None else self.real_vocab_size

  def replace(self, **changes: Any) -> DecoderConfig:
    return dataclasses.replace(self, **changes)
