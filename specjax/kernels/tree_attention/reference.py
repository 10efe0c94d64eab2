"""Tree attention in plain XLA: the oracle, and what serves where no kernel does."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array

BLOCK = 128
WORD_BITS = 32


def visible_slots(slots: Array, prefix_length: Array, ancestors: Array | None, nodes: int) -> Array:
  """Which slots each node sees: ``slots [S]`` → bool ``[B, N, S]``."""
  column = slots[None, :] - prefix_length[:, None]
  if ancestors is None:
    return column[:, None, :] <= jnp.arange(nodes)[None, :, None]
  seen = (column < 0)[:, None, :]
  for word in range(ancestors.shape[-1]):
    bit = column - word * WORD_BITS
    inside = (bit >= 0) & (bit < WORD_BITS)
    shift = jnp.clip(bit, 0, WORD_BITS - 1).astype(jnp.uint32)
    bits = jnp.right_shift(ancestors[:, :, word, None], shift[:, None, :]) & 1
    seen |= inside[:, None, :] & (bits == 1)
  return seen


def node_positions(prefix_length: Array, ancestors: Array | None, nodes: int) -> Array:
  """Absolute position of each node, int32 ``[B, N]``: the prefix plus its depth."""
  if ancestors is None:
    depth = jnp.arange(nodes)[None, :]
  else:
    depth = jax.lax.population_count(ancestors).sum(axis=-1).astype(jnp.int32) - 1
  return prefix_length[:, None] + depth


def slot_positions(slots: Array, prefix_length: Array, ancestors: Array | None) -> Array:
  """Absolute position of the token in each slot, int32 ``[B, S]`` (a scratch row sits at its depth)."""
  if ancestors is None:
    return jnp.broadcast_to(slots[None, :], (prefix_length.shape[0], slots.shape[0]))
  depth = jax.lax.population_count(ancestors).sum(axis=-1).astype(jnp.int32) - 1
  column = slots[None, :] - prefix_length[:, None]
  scratch = jnp.take_along_axis(depth, jnp.clip(column, 0, depth.shape[1] - 1), axis=1)
  return jnp.where(column < 0, slots[None, :], prefix_length[:, None] + scratch)


def attend(q, k, v, prefix_length, ancestors, sliding_window) -> tuple[Array, Array, Array]:
  """See `tree_attention`. Online softmax over blocks of slots, up to the longest live row."""
  batch, nodes, heads, head_dim = q.shape
  kv_heads, slots = k.shape[1], k.shape[2]
  group = heads // kv_heads
  columns = nodes if ancestors is None else min(ancestors.shape[-1] * WORD_BITS, slots)
  block = min(BLOCK, slots)
  exact = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
  dot = lambda spec, a, b: jnp.einsum(spec, a, b, precision=exact, preferred_element_type=jnp.float32)

  # [B, K, group · N, H]: the heads that share keys and the nodes are rows of one product.
  rows = q.reshape(batch, nodes, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
  rows = rows.reshape(batch, kv_heads, group * nodes, head_dim) * jnp.asarray(head_dim**-0.5, q.dtype)
  end = jnp.minimum(prefix_length + columns, slots)
  position = node_positions(prefix_length, ancestors, nodes)

  def step(i, carry):
    k, v, top, total, acc = carry
    start = jnp.minimum(i * block, slots - block)
    slot = start + jnp.arange(block)
    seen = visible_slots(slot, prefix_length, ancestors, nodes)
    seen &= (slot >= i * block)[None, None, :]  # the last block may overlap the one before
    if sliding_window is not None:
      seen &= (
        slot_positions(slot, prefix_length, ancestors)[:, None, :] > position[:, :, None] - sliding_window
      )
    k_block = jax.lax.dynamic_slice_in_dim(k, start, block, axis=2)
    v_block = jax.lax.dynamic_slice_in_dim(v, start, block, axis=2)
    # A probability of 0 does not hide a NaN: values that are not finite are replaced, and the scores of
    # their slot made NaN, which the mask does hide. A broken draft spoils neither its siblings nor a
    # prompt that is padded with it, and nodes that see it still come out as NaN.
    finite = jnp.isfinite(v_block)
    v_block = jnp.where(finite, v_block, jnp.zeros((), v.dtype))
    poison = jnp.where(finite.all(axis=-1), 0.0, jnp.nan)[:, :, None, :]
    scores = dot("BKRH,BKSH->BKRS", rows, k_block)
    mask = jnp.broadcast_to(seen[:, None, None], (batch, 1, group, nodes, block))
    mask = mask.reshape(batch, 1, group * nodes, block)
    scores = jnp.where(mask, scores + poison, -jnp.inf)
    new_top = jnp.maximum(top, scores.max(axis=-1))
    # Rows that have seen nothing yet have top = -inf; 0 keeps the exponents finite.
    base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
    weights = jnp.exp(scores - base[..., None])
    scale = jnp.exp(top - base)
    total = total * scale + weights.sum(axis=-1)
    acc = acc * scale[..., None] + dot("BKRS,BKSH->BKRH", weights.astype(v.dtype), v_block)
    return k, v, new_top, total, acc

  shape = (batch, kv_heads, group * nodes)
  init = (k, v, jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))
  blocks = (end.max() + block - 1) // block
  k, v, _, total, acc = jax.lax.fori_loop(0, blocks, step, init)
  out = acc / jnp.where(total == 0, 1.0, total)[..., None]
  out = out.reshape(batch, kv_heads, group, nodes, head_dim).transpose(0, 3, 1, 2, 4)
  return out.reshape(batch, nodes, heads, head_dim).astype(q.dtype), k, v
