"""Targets for tests: tiny decoders, and a table with a cache."""

from __future__ import annotations

from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax import cache as kv
from specjax.base import ModelOutput
from specjax.models import Decoder, DecoderConfig

Array = jax.Array

_WORD_BITS = 32


def tiny_config(**overrides: Any) -> DecoderConfig:
  """A decoder of two layers and about ten thousand weights; a step takes well under a millisecond.

  Its head is its own: with a tied one a random model says its last token again and again, and a
  constant text hides nearly every mistake.
  """
  sizes = dict(
    vocab_size=61, num_layers=2, d_model=32, d_ff=48, num_heads=4, num_kv_heads=2, head_dim=8, max_length=512
  )
  return DecoderConfig(**{"tie_embeddings": False, **sizes, **overrides})


def tiny_model(seed: int = 0, *, dtype=jnp.float32, spread: float = 4.0, **overrides: Any) -> Decoder:
  """A random decoder with `tiny_config`.

  Args:
    seed: of its weights.
    dtype: of its weights.
    spread: scale of the logits; 1 leaves them nearly flat, where two tokens of a greedy run tie within
      rounding and sampling says little about the model.
    **overrides: fields of `DecoderConfig`.
  """
  model = Decoder(tiny_config(**overrides), dtype=dtype, rngs=nnx.Rngs(seed))
  scale = lambda weight: nnx.Param(weight[...] * jnp.asarray(spread, dtype))
  if model.head is None:
    model.embed = scale(model.embed)
  else:
    model.head.weight = scale(model.head.weight)
  return model


def perturbed(model: Decoder, scale: float, seed: int = 1) -> Decoder:
  """A copy with Gaussian noise of ``scale`` times the weights' size: a draft that is often right."""
  leaves, structure = jax.tree.flatten(model)
  noise = np.random.default_rng(seed)
  shift = lambda x: x + scale * x.std() * jnp.asarray(noise.standard_normal(x.shape), x.dtype)
  return jax.tree.unflatten(structure, [shift(leaf) for leaf in leaves])


@flax.struct.dataclass
class TableTarget:
  """A target whose logits are a row of a table: its law is known exactly.

  Cache rows are ``(token, position)`` in layer 0 of k and v, so that a test can read what was
  committed. ``history`` picks the table's row by a checksum over *all rows a node sees in the cache*:
  one wrong, missing, shifted or extra row changes the output.

  Attributes:
    table: float32 ``[R, V]``.
    by: ``position``: the row is the position of the token that is fed (beyond the end: the last);
      ``token``: the token that is fed, a Markov chain (R = V), which keeps no cache rows at all;
      ``history``: the checksum modulo R.
  """

  table: Array
  by: Literal["position", "token", "history"] = flax.struct.field(pytree_node=False, default="history")

  @classmethod
  def random(cls, seed: int, vocab: int, *, by="history", rows: int = 61, spread: float = 1.0) -> TableTarget:
    """Gaussian logits."""
    table = np.random.default_rng(seed).standard_normal((vocab if by == "token" else rows, vocab))
    return cls(jnp.asarray(spread * table, jnp.float32), by)

  @property
  def config(self):
    """As much of a config as a caller may ask a target for."""
    return tiny_config(vocab_size=self.table.shape[1])

  def init_cache(self, batch: int, slots: int) -> kv.KVCache:
    if self.by == "token":
      return kv.KVCache(k=(), v=(), length=jnp.zeros((batch,), jnp.int32))
    return kv.create(1, batch, 1, slots, 2)

  def logits_after(self, history: tuple[int, ...]) -> np.ndarray:
    """The logits behind ``history``, on the host: what a fresh forward would say."""
    if self.by == "token":
      row = history[-1]
    elif self.by == "position":
      row = min(len(history) - 1, self.table.shape[0] - 1)
    else:
      row = sum((token + 1) * int(_weight(i)) for i, token in enumerate(history)) % self.table.shape[0]
    return np.asarray(self.table[row])

  def __call__(
    self,
    tokens,
    cache,
    *,
    depths=None,
    ancestors=None,
    scratch=0,
    taps=(),
    logits=True,
    implementation="auto",
  ) -> ModelOutput:
    width = tokens.shape[1]
    depths = jnp.arange(width) if depths is None else jnp.asarray(depths)
    positions = jnp.broadcast_to(cache.length[:, None] + depths, tokens.shape)
    rows = self.table.shape[0]
    if self.by == "token":
      index = tokens
    else:
      block = jnp.stack([tokens, positions], axis=-1)[:, None].astype(jnp.float32)
      write = lambda buffer: kv.write_rows(buffer, block, cache.length + scratch)
      cache = cache.replace(k=(write(cache.k[0]),), v=(write(cache.v[0]),))
      index = jnp.minimum(positions, rows - 1)
      if self.by == "history":
        seen = _visible(cache.capacity, cache.length, ancestors, width)
        stored = jnp.where(seen[..., None], cache.k[0][:, :1], 0.0)  # hides NaN, too
        index = jnp.where(seen, (stored[..., 0] + 1) * _weight(stored[..., 1]), 0.0).sum(axis=-1)
        # A hole or an unmasked NaN must not end as a number in range that happens to be right.
        index = jnp.where(jnp.isfinite(index), index, -1).astype(jnp.int32) % rows
    return ModelOutput(
      logits=jnp.take(self.table, index, axis=0, mode="clip") if logits else None,
      cache=cache,
      taps=_token_taps(tokens, len(taps)) if taps else None,
    )


def _token_taps(tokens, count):
  """What a layer's input is for a table: the token itself, ``[B, T, count, 1]``."""
  return jnp.broadcast_to(tokens[:, :, None, None], (*tokens.shape, count, 1)).astype(jnp.float32)


def _weight(position):
  """Small odd-looking integers: sums of (token + 1) · weight stay exact in float32."""
  return (position * 7 + 3) % 31 + 1


def _visible(slots, length, ancestors, width):
  """bool ``[B, T, S]``, written independently of the package's attention."""
  column = jnp.arange(slots)[None, None, :] - length[:, None, None]
  node = jnp.arange(width)[None, :, None]
  if ancestors is None:
    return column <= node
  ancestors = jnp.broadcast_to(
    jnp.asarray(ancestors, jnp.uint32), (length.shape[0], width, ancestors.shape[-1])
  )
  inside = (column >= 0) & (column < ancestors.shape[-1] * _WORD_BITS)
  word = jnp.clip(column // _WORD_BITS, 0, ancestors.shape[-1] - 1)
  word = jnp.broadcast_to(word, (length.shape[0], width, slots))
  bit = (jnp.take_along_axis(ancestors, word, axis=-1) >> (column % _WORD_BITS).astype(jnp.uint32)) & 1
  return (column < 0) | (inside & (bit == 1))
