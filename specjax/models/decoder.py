"""The decoder: one class for the Llama line, driven by its config."""

from __future__ import annotations

import copy
import math

import jax
import jax.numpy as jnp
from flax import nnx

from specjax import cache as kv
from specjax.base import ModelOutput
from specjax.models import layers
from specjax.models.config import DecoderConfig
from specjax.models.output import output_rows

Array = jax.Array


class Decoder(nnx.Module):
  """A decoder-only language model; a pytree of parameters with a frozen config.

  Layers are unrolled and each has its own cache arrays: a scan over stacked layers copies every
  weight each step on CPU.
  """

  def __init__(self, config: DecoderConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
    self.config = config
    self.mesh = None  # where parameters and caches lie: see `sharding.shard_model`
    embed = jax.random.normal(rngs.params(), (config.vocab_size, config.d_model), jnp.float32)
    self.embed = nnx.Param((embed / math.sqrt(config.d_model)).astype(dtype))
    self.layers = nnx.List(
      layers.DecoderLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)
    )
    self.norm = layers.RMSNorm(config.d_model, eps=config.norm_eps, dtype=dtype)
    self.head = (
      None
      if config.tie_embeddings
      else layers.Linear(config.d_model, config.vocab_size, dtype=dtype, rngs=rngs)
    )

  @property
  def dtype(self):
    return self.embed.dtype

  def init_cache(self, batch: int, slots: int) -> kv.KVCache:
    """An empty cache of at least ``slots`` slots a row, in the model's type."""
    c = self.config
    return kv.create(c.num_layers, batch, c.num_kv_heads, slots, c.head_dim, self.dtype)

  def __call__(
    self,
    tokens: Array,
    cache: kv.KVCache,
    *,
    depths: Array | None = None,
    ancestors: Array | None = None,
    scratch: Array | int = 0,
    taps: tuple[int, ...] = (),
    layer_range: tuple[int, int | None] = (0, None),
    hidden: Array | None = None,
    logits: bool = True,
    implementation: str = "auto",
  ) -> ModelOutput:
    """One forward over T tokens a row, behind each row's committed prefix.

    Args:
      tokens: int32 ``[B, T]``.
      cache: prefix of ``cache.length[b]`` rows; the T new rows are written behind it (scratch). The
        length is left alone: `cache.commit` moves it.
      scratch: int32, how many scratch rows are there already: the new ones are written behind them. So a
        drafter grows its tree, one level a forward; needs ``ancestors`` and ``depths``.
      depths: int32 ``[T]`` or ``[B, T]``, position of token t minus the prefix length; None is
        ``0 … T-1``.
      ancestors: uint32 ``[T, W]`` or ``[B, T, W]``; bit j of token t says that it sees scratch row j.
        None is causal.
      taps: layers whose *input* is returned (``num_layers`` is the last layer's output).
      layer_range: first layer and end (None: all). A range that starts later takes ``hidden``; one
        that ends early returns no logits unless asked, and then through the final norm and head.
      hidden: ``[B, T, D]``, input of the first layer of the range.
      logits: whether to compute them.
      implementation: of `tree_attention`.

    Returns:
      `ModelOutput`: float32 logits ``[B, T, V]`` or None, the cache with scratch rows, taps
      ``[B, T, len(taps), D]`` or None, and the hidden state ``[B, T, D]`` behind the last layer run.

    Raises:
      ValueError: ``scratch`` without ``ancestors`` or ``depths``, or taps outside of the range.
    """
    c = self.config
    first, last = layer_range
    last = c.num_layers if last is None else last
    if not all(first <= i <= last for i in taps):
      raise ValueError(f"taps = {taps}; layers {first} to {last} are run")
    call = layers.new_call(cache, tokens.shape[1], c, depths, ancestors, scratch, implementation, self.mesh)
    x = jnp.take(self.embed[...], tokens, axis=0, mode="clip") if hidden is None else hidden
    tapped = {}
    k_cache, v_cache = list(cache.k), list(cache.v)
    for i in range(first, last):
      if i in taps:
        tapped[i] = x
      x, k_cache[i], v_cache[i] = self.layers[i](x, k_cache[i], v_cache[i], call)
    if last in taps:
      tapped[last] = x
    return ModelOutput(
      logits=self.unembed(self.norm(x)) if logits else None,
      cache=cache.replace(k=tuple(k_cache), v=tuple(v_cache)),
      taps=jnp.stack([tapped[i] for i in taps], axis=2) if taps else None,
      hidden=x,
    )

  def unembed(self, x: Array) -> Array:
    """Normed hidden states ``[..., D]`` → float32 logits ``[..., V]``."""
    return layers.matmul(x, output_rows(self, None)).astype(jnp.float32)


def truncated(model: Decoder, num_layers: int) -> Decoder:
  """The model's first layers under its own norm and head: a draft that adds no arrays.

  Raises:
    ValueError: not at least one layer fewer than the model, or none.
  """
  if not 1 <= num_layers < model.config.num_layers:
    raise ValueError(f"num_layers = {num_layers}; it must be in [1, {model.config.num_layers - 1}]")
  short = copy.copy(model)
  short.config = model.config.replace(num_layers=num_layers)
  short.layers = nnx.List(list(model.layers)[:num_layers])
  return short
