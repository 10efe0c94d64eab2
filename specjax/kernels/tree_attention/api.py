"""The one attention function of the package."""

from __future__ import annotations

import importlib
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.kernels.tree_attention import reference, tiles
from specjax.kernels.tree_attention.masks import make_mask

Array = jax.Array

KERNELS = ("pallas_tpu", "pallas_gpu")
INTERPRETED = "_interpreted"
IMPLEMENTATIONS = ("auto", "reference", *KERNELS, *(kernel + INTERPRETED for kernel in KERNELS))


class Choice(NamedTuple):
  """Which implementation runs, and why."""

  implementation: str
  reason: str


def _kernel(name: str):
  """The module of a kernel. Imported when asked for: each needs its backend's part of Pallas."""
  return importlib.import_module(f"specjax.kernels.tree_attention.{name.removesuffix(INTERPRETED)}")


def choose(implementation: str, q, k, device_kind: str | None = None) -> Choice:
  """What `tree_attention` does with arrays like ``q`` and ``k`` (only shapes and types are read).

  ``auto`` takes a kernel where ``tiles/`` records a correctness run of it on the device kind and the
  kernel takes the shapes; else the reference. A kernel asked for by name is taken, or refused.

  Args:
    implementation: one of `IMPLEMENTATIONS`.
    q: ``[B, N, Q, H]``.
    k: ``[B, K, S, H]``.
    device_kind: None is the kind of the default device.

  Raises:
    ValueError: an unknown name, or a kernel asked for by name that does not take the shapes.
  """
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(
      f"tree_attention: implementation = {implementation!r}; it must be one of {', '.join(IMPLEMENTATIONS)}"
    )
  if implementation == "reference":
    return Choice(implementation, "asked for")
  if implementation != "auto":
    refusal = _kernel(implementation).refusal(q, k)
    if refusal:
      raise ValueError(f"tree_attention: {implementation} {refusal}")
    return Choice(implementation, "asked for")
  kind = jax.devices()[0].device_kind if device_kind is None else device_kind
  record = tiles.verified(kind)
  if record is None:
    return Choice("reference", f"no kernel has a recorded correctness run on {kind}")
  refusal = _kernel(record.kernel).refusal(q, k)
  if refusal:
    return Choice("reference", f"{record.kernel} {refusal}")
  return Choice(record.kernel, f"correct on {kind}, {record.date}")


def tree_attention(
  q: Array,
  k: Array,
  v: Array,
  prefix_length: Array,
  ancestors: Array | None = None,
  *,
  sliding_window: int | None = None,
  logit_softcap: float | None = None,
  implementation: str = "auto",
) -> tuple[Array, Array, Array]:
  """Attention of N nodes over a prefix and over their ancestors among the scratch rows behind it.

  Query head h reads kv head ``h // (Q // K)``. Scores are ``q · k / sqrt(H)``; scores, softmax and sums
  are float32. Work and memory follow the live slots, not the buffer, and no mask of N × S is ever made.

  Args:
    q: ``[B, N, Q, H]``, rotated.
    k: ``[B, K, S, H]``, rotated keys; slots ``prefix_length[b] + j`` hold scratch row j.
    v: ``[B, K, S, H]``.
    prefix_length: int32 ``[B]``; slots below are seen by every node.
    ancestors: uint32 ``[N, W]`` or ``[B, N, W]``: bit j of node i says that it sees scratch row j. Rows
      are numbered parents first. There may be more columns than nodes: a drafter that grows its tree
      level by level asks for the newest level only. None is causal: node i sees scratch rows 0 … i.
    sliding_window: a node sees only the last so many positions, itself included; its position is the
      prefix length plus the number of its visible scratch rows minus one (its depth).
    logit_softcap: scores s become ``c · tanh(s / c)`` before the mask.
    implementation: ``reference`` (XLA), ``pallas_tpu`` or ``pallas_gpu``; the latter two with
      ``_interpreted`` run in Pallas's interpreters on any machine. ``auto``: see `choose`.

  Returns:
    ``(out [B, N, Q, H], k, v)``. A node that sees nothing gives 0, one that sees a value (of ``v``) that is
    not finite NaN; what a node does not see never changes a bit of it. The caches come back so that a
    caller can go on writing to them: a loop that only reads an array makes XLA copy it at the next write.

  Raises:
    ValueError: shapes that do not fit, a window or cap that is not positive, an unknown implementation,
      or a kernel asked for by name that does not take the shapes.
  """
  batch, nodes, heads, head_dim = q.shape
  if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != head_dim:
    raise ValueError(f"tree_attention: k {k.shape} and v {v.shape} do not fit q {q.shape}")
  if q.dtype != k.dtype or k.dtype != v.dtype:
    raise ValueError(f"tree_attention: q, k, v have types {q.dtype}, {k.dtype}, {v.dtype}; they must agree")
  if heads % k.shape[1]:
    raise ValueError(f"tree_attention: {heads} query heads are not a multiple of {k.shape[1]} kv heads")
  if prefix_length.shape != (batch,):
    raise ValueError(f"tree_attention: prefix_length has shape {prefix_length.shape}, expected ({batch},)")
  if sliding_window is not None and sliding_window < 1:
    raise ValueError(f"tree_attention: sliding_window = {sliding_window}; it must be at least 1")
  if logit_softcap is not None and not logit_softcap > 0:
    raise ValueError(f"tree_attention: logit_softcap = {logit_softcap}; it must be positive")
  if ancestors is not None:
    ancestors = jnp.asarray(ancestors, jnp.uint32)
    if ancestors.ndim == 2:
      ancestors = jnp.broadcast_to(ancestors, (batch, *ancestors.shape))
    if ancestors.ndim != 3 or ancestors.shape[:2] != (batch, nodes):
      raise ValueError(
        f"tree_attention: ancestors has shape {ancestors.shape}, expected ({batch}, {nodes}, W)"
      )
  chosen = choose(implementation, q, k).implementation
  mask = make_mask(prefix_length, ancestors, nodes, k.shape[2], sliding_window)
  scale = 1 / math.sqrt(head_dim)
  if chosen == "reference":
    return reference.attend(q, k, v, mask, scale=scale, softcap=logit_softcap)
  interpret = chosen.endswith(INTERPRETED)
  out = _kernel(chosen).attend(q, k, v, mask, scale=scale, softcap=logit_softcap, interpret=interpret)
  return out, k, v
