"""The one attention function of the package."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.kernels.tree_attention import reference

Array = jax.Array

IMPLEMENTATIONS = ("auto", "reference")


def tree_attention(
  q: Array,
  k: Array,
  v: Array,
  prefix_length: Array,
  ancestors: Array | None = None,
  *,
  sliding_window: int | None = None,
  implementation: str = "auto",
) -> tuple[Array, Array, Array]:
  """Attention of N nodes over a prefix and over their ancestors among the scratch rows behind it.

  Query head h reads kv head ``h // (Q // K)``. Softmax scale is ``H ** -0.5``; scores and sums are
  float32. Work and memory follow the longest live row, not the buffer: blocks of slots are walked up
  to ``max(prefix_length) + columns``.

  Args:
    q: ``[B, N, Q, H]``, rotated.
    k: ``[B, K, S, H]``, rotated keys; slots ``prefix_length[b] + j`` hold scratch row j.
    v: ``[B, K, S, H]``.
    prefix_length: int32 ``[B]``; slots below are seen by every node.
    ancestors: uint32 ``[N, W]`` or ``[B, N, W]``: bit j of node i says that it sees scratch row j.
      None is causal: node i sees scratch rows 0 … i. There may be more columns than nodes.
    sliding_window: a node sees only the last so many positions, itself included; its position is the
      prefix length plus the number of its visible scratch rows minus one (its depth).
    implementation: ``reference`` (XLA) or ``auto``, which takes a kernel where one has a recorded
      correctness run on the device kind, and the reference elsewhere (today: everywhere).

  Returns:
    ``(out [B, N, Q, H], k, v)``. The caches come back so that a caller can go on writing to them:
    a loop that only reads an array makes XLA copy it at the next write.

  Raises:
    ValueError: on shapes that do not fit, or an unknown implementation.
  """
  batch, nodes, heads, head_dim = q.shape
  if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != head_dim:
    raise ValueError(f"tree_attention: k {k.shape} and v {v.shape} do not fit q {q.shape}")
  if heads % k.shape[1]:
    raise ValueError(f"tree_attention: {heads} query heads are not a multiple of {k.shape[1]} kv heads")
  if prefix_length.shape != (batch,):
    raise ValueError(f"tree_attention: prefix_length has shape {prefix_length.shape}, expected ({batch},)")
  if ancestors is not None:
    ancestors = jnp.asarray(ancestors, jnp.uint32)
    if ancestors.ndim == 2:
      ancestors = jnp.broadcast_to(ancestors, (batch, *ancestors.shape))
    if ancestors.shape[:2] != (batch, nodes):
      raise ValueError(
        f"tree_attention: ancestors has shape {ancestors.shape}, expected ({batch}, {nodes}, W)"
      )
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(
      f"tree_attention: implementation = {implementation!r}; it must be one of {IMPLEMENTATIONS}"
    )
  return reference.attend(q, k, v, prefix_length, ancestors, sliding_window)
