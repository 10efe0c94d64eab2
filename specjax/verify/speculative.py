"""Speculative sampling over a chain (Leviathan et al. 2023, algorithm 1; Chen et al. 2023)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from specjax.base import ALL_KINDS, Proposal, Verdict
from specjax.sampling import Settings
from specjax.verify.follow import deepest_accepted, verdict_of
from specjax.verify.residual import acceptance_noise, at, check, draw_last

Array = jax.Array


def read_chain(target: Array, proposal: Proposal) -> tuple[Array, Array]:
  """p and q of each draft, float32 ``[B, N - 1]``; what invalid ones have is of no meaning."""
  drafted = jnp.where(proposal.valid, proposal.tokens, 0)[:, 1:, None]
  p = jnp.take_along_axis(target[:, :-1], drafted, axis=-1)[..., 0]
  if proposal.kind == "deterministic":
    return p, jnp.ones_like(p)
  return p, jnp.take_along_axis(proposal.q[:, : p.shape[1]], drafted, axis=-1)[..., 0]


def remove_draft(
  target: Array, proposal: Proposal, node: Array, rejected: Array, mass: Array | float = 1.0
) -> Array:
  """Weights ``[B, V]`` of the token behind ``node [B]``: (mass P - Q)+ where its draft was rejected, else P.

  Also P where that has no mass: only rounding rejects then.
  """
  row = at(target, node)
  last = proposal.tokens.shape[1] - 1
  if last == 0:
    return row
  if proposal.kind == "deterministic":
    token = at(proposal.tokens, jnp.minimum(node + 1, last))
    residual = jnp.where(jnp.arange(row.shape[-1]) == token[:, None], 0.0, row)
  else:
    mass = jnp.broadcast_to(mass, node.shape)[:, None]
    residual = jnp.maximum(mass * row - at(proposal.q, jnp.minimum(node, last - 1)), 0.0)
  return jnp.where((rejected & (residual.sum(axis=-1) > 0))[:, None], residual, row)


def agreement(target: Array, proposal: Proposal, p: Array, node: Array, lenience: float = 1.0) -> dict:
  """``overlap`` and ``judged`` of a verdict: Σ min(P / lenience, Q) over the drafts down to ``node [B]``
  and the one behind it. ``p`` is from `read_chain`.

  Only rows of such drafts are looked at: a pass over all costs more than the rest of the rule.
  """
  judged = proposal.valid[:, 1:] & (jnp.arange(p.shape[1]) <= node[:, None])

  def row(state):
    i, total = state
    pick = lambda values: jax.lax.dynamic_index_in_dim(values, i, axis=1, keepdims=False)
    shared = jnp.minimum(pick(target) / lenience, pick(proposal.q)).sum(axis=-1)
    # An unusable row of logits says nothing about agreement.
    return i + 1, total + jnp.where(pick(judged) & jnp.isfinite(shared), shared, 0.0)

  if p.shape[1] == 0 or proposal.kind == "deterministic":
    shared = jnp.minimum(p / lenience, 1.0)
    judged &= jnp.isfinite(shared)
    overlap = jnp.where(judged, shared, 0.0).sum(axis=-1)
  else:
    last = jnp.max(judged.sum(axis=1, dtype=jnp.int32))
    start = jnp.int32(0), jnp.zeros(node.shape, jnp.float32)
    _, overlap = jax.lax.while_loop(lambda state: state[0] < last, row, start)
  return dict(overlap=overlap, judged=judged.sum(axis=1, dtype=jnp.int32))


def _token_by_token(rule, target, proposal, settings, length, lenience: float) -> Verdict:
  """Accepts draft x with min(1, p / (lenience q)), else draws from (p - q)+."""
  check(rule, proposal)
  nodes = proposal.tokens.shape[1]
  p, q = read_chain(target, proposal)
  accepts = acceptance_noise(settings, length, nodes)[:, 1:] * (lenience * q) < p
  node = deepest_accepted(jnp.pad(accepts, ((0, 0), (1, 0))), proposal)

  # The draft that was turned down is the one behind the last accepted node, if there was one.
  rejected = (node < nodes - 1) & at(proposal.valid, jnp.minimum(node + 1, nodes - 1))
  weights = remove_draft(target, proposal, node, rejected)
  token = draw_last(weights, settings, length, node, node, rejected)
  return verdict_of(node, proposal, token, **agreement(target, proposal, p, node, lenience))


@dataclasses.dataclass(frozen=True)
class SpeculativeSampling:
  """Accepts draft x with probability min(1, p(x) / q(x)); a rejected one is redrawn from (p - q)+.

  The emitted token then has law p: q(x) min(1, p/q) = min(p, q), and what is missing, p - min(p, q),
  is the residual scaled by the probability of rejecting. A deterministic draft is the case of a point
  mass q: accepted with p(x), else redrawn from p without x. Behind the last accepted draft, when
  nothing was proposed there, the token is an ordinary draw from p with the noise of plain decoding.

  Open cases: p(x) = q(x) always accepts (u < 1); p(x) = 0 always rejects; a residual without mass can
  only come from rounding (p = q rejects nothing) and is replaced by p.
  """

  name: ClassVar[str] = "speculative_sampling"
  lossless: ClassVar[bool] = True
  kinds: ClassVar[frozenset[str]] = ALL_KINDS
  chains_only: ClassVar[bool] = True
  needs: ClassVar[str] = "probs"

  def __call__(self, target: Array, proposal: Proposal, settings: Settings, length: Array) -> Verdict:
    return _token_by_token(self, target, proposal, settings, length, 1.0)


@dataclasses.dataclass(frozen=True)
class LenientSpeculativeSampling:
  """Speculative sampling that accepts min(1, p(x) / (l q(x))): more drafts, another law.

  (Leviathan et al. 2023, appendix.) The residual stays (p - q)+. The token emitted at a judged position
  has the law min(q, p / l) + r (p - q)+ / Σ (p - q)+ with r = 1 - Σ min(q, p / l), and **no token is more
  likely than p(x) / l**: where p <= q the second term is 0 and the first at most p / l; where p > q the
  first is q, and r <= 1 - Σ min(q, p) = Σ (p - q)+, so the sum is at most q + (p - q) = p. For a point
  mass q likewise. l = 1 is speculative sampling.

  Attributes:
    lenience: l, in (0, 1].
  """

  lenience: float = 1.0

  name: ClassVar[str] = "lenient_speculative_sampling"
  lossless: ClassVar[bool] = False
  kinds: ClassVar[frozenset[str]] = ALL_KINDS
  chains_only: ClassVar[bool] = True
  needs: ClassVar[str] = "probs"

  def __post_init__(self):
    if not 0.0 < self.lenience <= 1.0:
      raise ValueError(f"lenience = {self.lenience}; it must be in (0, 1]")

  def __call__(self, target: Array, proposal: Proposal, settings: Settings, length: Array) -> Verdict:
    return _token_by_token(self, target, proposal, settings, length, self.lenience)
