"""How often the target without some sublayers says what the whole target says, at many places at once.

A draft that skips sublayers sees the target's rows of committed tokens, and rows of its own from the root on
(`drafters.self_speculation`). So the first draft behind a place needs no other place of the draft: all of
them go through its layers together, each with the target's keys and values before it and its own.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.models import Decoder, layers
from specjax.sampling import mask_padding
from specjax.training.batches import Batch, rows_at
from specjax.training.packed import attend, visible

Array = jax.Array


class Known(NamedTuple):
  """What the whole target makes of a batch.

  Attributes:
    keys, values: by layer ``[B, T, K, H]``, keys rotated.
    best: int32 ``[B, P]``, what it says at each learned token's place.
  """

  keys: tuple[Array, ...]
  values: tuple[Array, ...]
  best: Array


@jax.jit
def known_of(model: Decoder, batch: Batch) -> Known:
  """The target over packed rows."""
  c = model.config
  rope, seen = layers.rope_table(batch.positions, c), visible(batch, c.sliding_window)
  x = jnp.take(model.embed[...], batch.tokens, axis=0, mode="clip")
  keys, values = [], []
  for layer in model.layers:
    q, k, v = layer.attention.qkv(layer.attention_norm(x))
    k = layers.rotate(k, rope)
    attended = attend(layers.rotate(q, rope), k, v, seen)
    x = x + layer.attention.o(attended.reshape(*x.shape[:2], -1))
    x = x + layer.ff(layer.ff_norm(x))
    keys.append(k)
    values.append(v)
  return Known(tuple(keys), tuple(values), _said(model, rows_at(x, batch.counted - 1)))


@jax.jit
def agreed(model: Decoder, batch: Batch, known: Known, kept: Array) -> Array:
  """At how many of the learned tokens' places both say the same: int32 ``[]``.

  Args:
    kept: bool ``[L, 2]``, attention and feed-forward that are not skipped. It is traced: one program serves
      every skip set, and what is skipped is not computed.
  """
  c, places = model.config, jnp.maximum(batch.counted - 1, 0)
  rope = layers.rope_table(rows_at(batch.positions, places), c)
  # Before itself: a place sees its own row, and not the target's there.
  before = jnp.arange(batch.tokens.shape[1]) < places[:, :, None]
  seen = rows_at(visible(batch, c.sliding_window), places) & before
  x = jnp.take(model.embed[...], rows_at(batch.tokens, places), axis=0, mode="clip")
  for i, layer in enumerate(model.layers):

    def attention(x, layer=layer, i=i):
      q, k, v = layer.attention.qkv(layer.attention_norm(x))
      q, k = layers.rotate(q, rope), layers.rotate(k, rope)
      attended = attend(q, known.keys[i], known.values[i], seen, [(k, v)])
      return x + layer.attention.o(attended.reshape(*x.shape[:2], -1))

    x = jax.lax.cond(kept[i, 0], attention, lambda x: x, x)
    x = jax.lax.cond(kept[i, 1], lambda x, layer=layer: x + layer.ff(layer.ff_norm(x)), lambda x: x, x)
  same = _said(model, x) == known.best
  return jnp.sum(same & (batch.counted >= 0), dtype=jnp.int32)


def _said(model: Decoder, hidden: Array) -> Array:
  """The most likely tokens behind ``hidden [B, P, D]``, a row of the batch at a time: ``[B, P]``."""
  num_real = model.config.num_real_tokens
  return jax.lax.map(
    lambda row: jnp.argmax(mask_padding(model.unembed(model.norm(row)), num_real), axis=-1).astype(jnp.int32),
    hidden,
  )
