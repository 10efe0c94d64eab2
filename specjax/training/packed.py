"""Forwards over packed rows: plain XLA attention with a mask ``[T, T]`` a row, differentiable.

Decoding attends through `kernels.tree_attention`, whose loops have no gradient; rows here are short and there
is no cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from specjax.models import Decoder, layers
from specjax.training.batches import Batch

Array = jax.Array


def visible(batch: Batch, window: int | None) -> Array:
  """Which places of a row each place sees: bool ``[B, T, T]``.

  Those of the same sample, itself and before; with a sliding window the last ``window`` of them.
  """
  same = batch.segments[:, :, None] == batch.segments[:, None, :]
  distance = batch.positions[:, :, None] - batch.positions[:, None, :]
  seen = same & (distance >= 0)
  return seen if window is None else seen & (distance < window)


def attend(q: Array, k: Array, v: Array, seen: Array, own: Sequence[tuple[Array, Array]] = ()) -> Array:
  """Grouped-query attention.

  Args:
    q: ``[B, T, Q, H]``, at its positions, as k is.
    k, v: ``[B, T, K, H]``.
    seen: bool ``[B, T, T]``, see `visible`.
    own: further keys and values ``[B, T, K, H]`` of which a query sees that of its own place only.

  Returns:
    ``[B, T, Q, H]``.
  """
  batch, width, heads, size = q.shape
  kv_heads = k.shape[2]
  kwargs = dict(precision=layers.precision(q.dtype), preferred_element_type=jnp.float32)
  q = q.reshape(batch, width, kv_heads, heads // kv_heads, size) * jnp.asarray(size**-0.5, q.dtype)
  scores = jnp.einsum("BTKGH,BSKH->BKGTS", q, k, **kwargs)
  scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
  single = [jnp.einsum("BTKGH,BTKH->BKGT", q, own_k, **kwargs)[..., None] for own_k, _ in own]
  most = jnp.max(scores, axis=-1, keepdims=True)
  for score in single:
    most = jnp.maximum(most, score)
  most = jax.lax.stop_gradient(most)
  weights = jnp.exp(scores - most)
  total = weights.sum(axis=-1, keepdims=True)
  y = jnp.einsum("BKGTS,BSKH->BKGTH", weights.astype(v.dtype), v, **kwargs)
  for score, (_, own_v) in zip(single, own):
    weight = jnp.exp(score - most)
    total = total + weight
    y = y + weight * own_v.astype(jnp.float32).transpose(0, 2, 1, 3)[:, :, None]
  y = (y / total).astype(q.dtype)
  return y.transpose(0, 3, 1, 2, 4).reshape(batch, width, heads, size)


def hidden_states(model: Decoder, batch: Batch, taps: Sequence[int] = ()) -> tuple[Array, Array | None]:
  """The model over packed rows.

  Args:
    model: any `Decoder`, the target or a draft of its kind.
    taps: layers whose input is returned, ``num_layers`` for the last one's output.

  Returns:
    ``[B, T, D]`` behind the last layer, and ``[B, T, len(taps), D]``, None without taps.
  """
  c = model.config
  rope = layers.rope_table(batch.positions, c)
  seen = visible(batch, c.sliding_window)
  x = jnp.take(model.embed[...], batch.tokens, axis=0, mode="clip")
  tapped = {}
  for i, layer in enumerate(model.layers):
    tapped[i] = x
    q, k, v = layer.attention.qkv(layer.attention_norm(x))
    attended = attend(layers.rotate(q, rope), layers.rotate(k, rope), v, seen)
    x = x + layer.attention.o(attended.reshape(*x.shape[:2], -1))
    x = x + layer.ff(layer.ff_norm(x))
  tapped[c.num_layers] = x
  return x, jnp.stack([tapped[i] for i in taps], axis=2) if taps else None
