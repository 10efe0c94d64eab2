"""Tree attention in plain XLA: the oracle, and what serves where no kernel does."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.kernels.tree_attention.masks import Mask, visible_slots

Array = jax.Array

BLOCK = 128
# What follows is for keys of so many bytes, which no core's cache holds; of fewer, each would cost time.
LARGE = 8 * 2**20
# Up to so many slots are one block, dead ones and all: the copies of blocks cost more than those.
WHOLE = 512
# Up to so many rows a head XLA's product with keys is slower than a sum over so many lanes on CPU.
FEW_ROWS, LANES = 4, 8


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
  large = k.nbytes >= LARGE
  block = slots if large and slots <= WHOLE else min(BLOCK, slots)
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
    scores = _products(rows, k_block, dot, large) * scale
    if softcap is not None:
      scores = softcap * jnp.tanh(scores / softcap)
    shown = jnp.broadcast_to(seen[:, None, None], (batch, 1, group, nodes, block))
    shown = shown.reshape(batch, 1, group * nodes, block)
    scores = jnp.where(shown, scores, -jnp.inf)
    new_top = jnp.maximum(top, scores.max(axis=-1))
    # Rows that have seen nothing yet have top = -inf; 0 keeps the exponents finite.
    base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
    weights = jnp.exp(scores - base[..., None])
    rescale = jnp.exp(top - base)
    total = total * rescale + weights.sum(axis=-1)
    acc = acc * rescale[..., None] + _weighted(weights, v_block, shown, dot, large)
    return k, v, new_top, total, acc

  shape = (batch, kv_heads, group * nodes)
  init = (k, v, jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))
  first, last = mask.begin.min() // block, (mask.end.max() + block - 1) // block
  k, v, _, total, acc = jax.lax.fori_loop(first, last, step, init)
  out = acc / jnp.where(total == 0, 1.0, total)[..., None]
  out = out.reshape(batch, kv_heads, group, nodes, head_dim).transpose(0, 3, 1, 2, 4)
  return out.reshape(batch, nodes, heads, head_dim).astype(q.dtype), k, v


def _products(rows: Array, k: Array, dot, large: bool) -> Array:
  """Products of rows ``[B, K, R, H]`` and keys ``[B, K, S, H]``: float32 ``[B, K, R, S]``."""
  product = lambda rows, k: dot("BKRH,BKSH->BKRS", rows, k)
  if not large or rows.shape[2] > FEW_ROWS or rows.shape[3] % LANES:
    return product(rows, k)

  def sums(rows, k):
    # Reduced over lanes last: a sum along memory alone is not vectorised.
    cut = lambda x: x.astype(jnp.float32).reshape(*x.shape[:3], -1, LANES)
    return (cut(rows)[:, :, :, None] * cut(k)[:, :, None]).sum(axis=-2).sum(axis=-1)

  return jax.lax.platform_dependent(rows, k, cpu=sums, default=product)


def _weighted(weights: Array, v: Array, shown: Array, dot, large: bool) -> Array:
  """Σ_s w_s v_s over the slots of a block, of which those that are not shown may hold anything.

  A weight of 0 does not hide a NaN: values that are not finite count as 0, and the weight of a slot that has
  one is NaN where it is shown. So a broken draft spoils neither its siblings nor a prompt that is padded with
  it, and nodes that see it still come out as NaN.

  Args:
    weights: float32 ``[B, K, R, S]``, 0 where not shown.
    v: ``[B, K, S, H]``.
    shown: bool ``[B, 1, R, S]``.
  """

  def careful(weights, v):
    finite = jnp.isfinite(v)
    spoilt = shown & ~finite.all(axis=-1)[:, :, None, :]
    weights = jnp.where(spoilt, jnp.nan, weights).astype(v.dtype)
    return dot("BKRS,BKSH->BKRH", weights, jnp.where(finite, v, jnp.zeros((), v.dtype)))

  def careful_if_needed(weights, v):
    # What is not finite anywhere shows in the plain sum. A look at it costs less than one at all values.
    plain = dot("BKRS,BKSH->BKRH", weights.astype(v.dtype), v)
    return jax.lax.cond(jnp.isfinite(plain).all(), lambda *_: plain, careful, weights, v)

  if not large:
    return careful(weights, v)
  # On other devices a branch costs more than the look: a GPU's host decides it.
  return jax.lax.platform_dependent(weights, v, cpu=careful_if_needed, default=careful)
