"""Tree attention in plain XLA: the oracle, and what serves where no kernel does."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.kernels.tree_attention.masks import Mask, visible_slots

Array = jax.Array

BLOCK = 128


def attend(
  q: Array, k: Array, v: Array, mask: Mask, *, scale: float, softcap: float | None
) -> tuple[Array, Array, Array]:
  """See `tree_attention`. Online softmax over blocks of slots, from the first to the last live one.

  The caches are carried by the loop and handed back: a loop that holds them as constants makes XLA
  copy them at the next write.
  """
  batch, nodes, heads, head_dim = q.shape
  kv_heads, slots = k.shape[1], k.shape[2]
  group = heads // kv_heads
  block = min(BLOCK, slots)
  exact = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
  dot = lambda spec, a, b: jnp.einsum(spec, a, b, precision=exact, preferred_element_type=jnp.float32)

  # [B, K, group · N, H]: the heads that share keys and the nodes are rows of one product.
  rows = q.reshape(batch, nodes, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
  rows = rows.reshape(batch, kv_heads, group * nodes, head_dim)

  def step(i, carry):
    k, v, top, total, acc = carry
    start = jnp.minimum(i * block, slots - block)
    slot = start + jnp.arange(block)
    # The last block may overlap the one before.
    seen = visible_slots(slot, mask) & (slot >= i * block)[None, None, :]
    k_block = jax.lax.dynamic_slice_in_dim(k, start, block, axis=2)
    v_block = jax.lax.dynamic_slice_in_dim(v, start, block, axis=2)
    # A probability of 0 does not hide a NaN: values that are not finite are replaced, and the scores of
    # their slot made NaN, which the mask does hide. A broken draft spoils neither its siblings nor a
    # prompt that is padded with it, and nodes that see it still come out as NaN.
    finite = jnp.isfinite(v_block)
    v_block = jnp.where(finite, v_block, jnp.zeros((), v.dtype))
    poison = jnp.where(finite.all(axis=-1), 0.0, jnp.nan)[:, :, None, :]
    scores = dot("BKRH,BKSH->BKRS", rows, k_block) * scale
    if softcap is not None:
      scores = softcap * jnp.tanh(scores / softcap)
    shown = jnp.broadcast_to(seen[:, None, None], (batch, 1, group, nodes, block))
    shown = shown.reshape(batch, 1, group * nodes, block)
    scores = jnp.where(shown, scores + poison, -jnp.inf)
    new_top = jnp.maximum(top, scores.max(axis=-1))
    # Rows that have seen nothing yet have top = -inf; 0 keeps the exponents finite.
    base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
    weights = jnp.exp(scores - base[..., None])
    rescale = jnp.exp(top - base)
    total = total * rescale + weights.sum(axis=-1)
    acc = acc * rescale[..., None] + dot("BKRS,BKSH->BKRH", weights.astype(v.dtype), v_block)
    return k, v, new_top, total, acc

  shape = (batch, kv_heads, group * nodes)
  init = (k, v, jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))
  first, last = mask.begin.min() // block, (mask.end.max() + block - 1) // block
  k, v, _, total, acc = jax.lax.fori_loop(first, last, step, init)
  out = acc / jnp.where(total == 0, 1.0, total)[..., None]
  out = out.reshape(batch, kv_heads, group, nodes, head_dim).transpose(0, 3, 1, 2, 4)
  return out.reshape(batch, nodes, heads, head_dim).astype(q.dtype), k, v
