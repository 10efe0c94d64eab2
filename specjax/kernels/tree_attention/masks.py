"""Who sees which slot, as every implementation takes it: lengths, bounds and bits, never N × S."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array

WORD_BITS = 32


class Mask(NamedTuple):
  """Node i of row b sees prefix slots ``first[b, i] ≤ s < prefix[b]``, and among the scratch rows
  ``c = s - prefix[b] ≥ 0``: those whose bit is set in ``words[b, i]``, or, where ``words`` is None
  (causal), ``c ≤ i`` and ``s ≥ first[b, i]``.

  Attributes:
    prefix: int32 ``[B]``.
    begin: int32 ``[B]``, a lower bound of the slots that any node of the row sees.
    end: int32 ``[B]``, one past the last slot that any node of the row sees, at most S.
    first: int32 ``[B, N]``; 0 without a sliding window.
    words: uint32 ``[B, N, W]`` or None; columns outside the window are already gone.
  """

  prefix: Array
  begin: Array
  end: Array
  first: Array
  words: Array | None


def make_mask(
  prefix_length: Array, ancestors: Array | None, nodes: int, slots: int, window: int | None
) -> Mask:
  """The mask of `tree_attention`'s arguments; ``ancestors`` is uint32 ``[B, N, W]`` or None."""
  prefix = prefix_length.astype(jnp.int32)
  if ancestors is None:
    position = prefix[:, None] + jnp.arange(nodes, dtype=jnp.int32)
    words, columns = None, jnp.full_like(prefix, nodes)
  else:
    # Ancestors come before a node, so the bits of a node in order are its path from the root.
    depth = jax.lax.population_count(ancestors).sum(axis=-1).astype(jnp.int32) - 1
    position = prefix[:, None] + depth
    words = ancestors if window is None else _last_bits(ancestors, window)
    highest = WORD_BITS - jax.lax.clz(words).astype(jnp.int32)
    offset = WORD_BITS * jnp.arange(words.shape[-1], dtype=jnp.int32)
    columns = jnp.max(jnp.where(words == 0, 0, highest + offset), axis=(1, 2))
  first = jnp.zeros_like(position) if window is None else jnp.maximum(position - window + 1, 0)
  end = jnp.minimum(prefix + columns, slots)
  return Mask(prefix, jnp.minimum(first.min(axis=1), prefix), end, first, words)


def _last_bits(words: Array, count: int) -> Array:
  """Keeps the ``count`` highest set bits of ``words [..., W]``, one number of 32 · W bits."""
  index = jnp.arange(WORD_BITS, dtype=jnp.uint32)
  bits = (words[..., None] >> index) & 1  # [..., W, 32]
  flat = bits.reshape(*bits.shape[:-2], -1).astype(jnp.int32)
  from_above = jnp.cumsum(flat[..., ::-1], axis=-1)[..., ::-1]
  kept = jnp.where(from_above <= count, flat, 0).astype(jnp.uint32).reshape(bits.shape)
  return (kept << index).sum(axis=-1, dtype=jnp.uint32)


def visible_slots(slots: Array, mask: Mask) -> Array:
  """bool ``[B, N, S]``: which of ``slots [S]`` each node sees."""
  column = (slots[None, :] - mask.prefix[:, None])[:, None, :]
  inside_window = slots[None, None, :] >= mask.first[:, :, None]
  if mask.words is None:
    node = jnp.arange(mask.first.shape[1])[None, :, None]
    return inside_window & (column <= node)
  seen = inside_window & (column < 0)
  for word in range(mask.words.shape[-1]):
    bit = column - word * WORD_BITS
    shift = jnp.clip(bit, 0, WORD_BITS - 1).astype(jnp.uint32)
    set_bit = (mask.words[:, :, word, None] >> shift) & 1 == 1
    seen |= (bit >= 0) & (bit < WORD_BITS) & set_bit
  return seen
