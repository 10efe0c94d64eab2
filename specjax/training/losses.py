"""Losses of a draft against the target: functions of p and the draft's logits, over the last axis.

q is the softmax of the logits. p is the target's distribution over the same tokens; with a draft vocabulary
it is renormalised there. Each function gives one number a position; `masked_sum` adds up those that count.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

Array = jax.Array

# Below this an acceptance has no gradient left in float32; its logarithm is cut there.
_LEAST_OVERLAP = 1e-20


def cross_entropy(p: Array, logits: Array) -> Array:
  """−Σ p log q: `kl` up to the entropy of p, so with the same gradient, q − p.

  Args:
    p: float32 ``[..., V]``, not differentiated.
    logits: float32 ``[..., V]``.

  Returns:
    float32 ``[...]``, nats.
  """
  p = jax.lax.stop_gradient(p)
  return p.sum(axis=-1) * jax.nn.logsumexp(logits, axis=-1) - (p * logits).sum(axis=-1)


def kl(p: Array, logits: Array) -> Array:
  """KL(p ‖ q) = Σ p (log p − log q), 0 where they agree; arguments as for `cross_entropy`."""
  entropy = -(p * jnp.log(jnp.where(p > 0, p, 1.0))).sum(axis=-1)
  return cross_entropy(p, logits) - jax.lax.stop_gradient(entropy)


def overlap(p: Array, logits: Array) -> Array:
  """Σ min(p, q), the chance that speculative sampling accepts a draft from q; ``[...]``."""
  return jnp.minimum(jax.lax.stop_gradient(p), jax.nn.softmax(logits, axis=-1)).sum(axis=-1)


def total_variation(p: Array, logits: Array) -> Array:
  """1 − Σ min(p, q): the chance of a rejection itself (½ Σ |p − q| where both sum to 1)."""
  return 1.0 - overlap(p, logits)


def log_acceptance(p: Array, logits: Array) -> Array:
  """−log Σ min(p, q): its gradient is that of `total_variation` over the acceptance.

  So positions that are hardly ever accepted, where the total variation is flat, still pull.
  """
  return -jnp.log(jnp.maximum(overlap(p, logits), _LEAST_OVERLAP))


def smooth_l1(wanted: Array, said: Array) -> Array:
  """Mean over the last axis of ½ d² where |d| < 1 and |d| − ½ elsewhere, d = said − wanted (Huber's, δ = 1).

  Args:
    wanted: ``[..., D]``, not differentiated.
    said: ``[..., D]``.

  Returns:
    float32 ``[...]``.
  """
  d = said.astype(jnp.float32) - jax.lax.stop_gradient(wanted).astype(jnp.float32)
  return jnp.where(jnp.abs(d) < 1, 0.5 * jnp.square(d), jnp.abs(d) - 0.5).mean(axis=-1)


def token_cross_entropy(index: Array, logits: Array) -> Array:
  """−log q of the token that was written, of Medusa's own recipe.

  Args:
    index: int32 ``[...]``, its place in the draft vocabulary.
    logits: float32 ``[..., V]``.
  """
  chosen = jnp.take_along_axis(logits, index[..., None], axis=-1)[..., 0]
  return jax.nn.logsumexp(logits, axis=-1) - chosen


# By name, those that take the target's distribution.
LOSSES: dict[str, Callable[[Array, Array], Array]] = {
  "cross_entropy": cross_entropy,
  "kl": kl,
  "total_variation": total_variation,
  "log_acceptance": log_acceptance,
}
# And the one that takes the text.
TOKENS = "tokens"


def masked_sum(values: Array, counts: Array) -> Array:
  """Sum of ``values [...]`` where ``counts``, float32; what is masked may be anything, NaN included."""
  return jnp.where(counts, values, 0.0).sum(dtype=jnp.float32)
