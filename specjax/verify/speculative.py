"""Speculative sampling over a chain (Leviathan et al. 2023, algorithm 1; Chen et al. 2023)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.base import ALL_KINDS, Proposal, Verdict
from specjax.sampling import Purpose, Settings
from specjax.verify.follow import deepest_accepted, verdict_of

Array = jax.Array


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
    if not proposal.tree.is_chain:
      raise ValueError(f"rule speculative_sampling takes chains, got {proposal.tree}")
    batch, nodes = proposal.tokens.shape
    node_ids = jnp.arange(nodes)
    drafted = proposal.tokens[:, 1:]
    p_drafted = jnp.take_along_axis(target[:, :-1], drafted[..., None], axis=-1)[..., 0]
    if proposal.kind == "deterministic":
      q_drafted = jnp.ones_like(p_drafted)
      shared = p_drafted
    else:
      q = proposal.q[:, : nodes - 1]
      q_drafted = jnp.take_along_axis(q, drafted[..., None], axis=-1)[..., 0]
      shared = jnp.minimum(target[:, :-1], q).sum(axis=-1)

    u = sampling.uniform(
      settings.seed, Purpose.ACCEPT, jnp.broadcast_to(length[:, None], (batch, nodes)), node_ids
    )
    accepts = (u[:, 1:] * q_drafted < p_drafted).astype(bool)
    accepts = jnp.concatenate([jnp.ones((batch, 1), bool), accepts], axis=1)
    node = deepest_accepted(accepts, proposal)

    # The draft that was turned down is the one behind the last accepted node, if there was one.
    child = jnp.minimum(node + 1, nodes - 1)[:, None]
    rejected = (node < nodes - 1) & jnp.take_along_axis(proposal.valid, child, axis=1)[:, 0]
    weights = jnp.take_along_axis(target, node[:, None, None], axis=1)[:, 0]
    if nodes > 1:
      if proposal.kind == "deterministic":
        token = jnp.take_along_axis(proposal.tokens, child, axis=1)
        residual = jnp.where(jnp.arange(weights.shape[-1]) == token, 0.0, weights)
      else:
        at = jnp.minimum(node, nodes - 2)[:, None, None]
        residual = jnp.maximum(weights - jnp.take_along_axis(q, at, axis=1)[:, 0], 0.0)
      redraw = (rejected & (residual.sum(axis=-1) > 0))[:, None]
      weights = jnp.where(redraw, residual, weights)
    u = jnp.where(
      rejected,
      sampling.uniform(settings.seed, Purpose.RESIDUAL, length, node),
      sampling.uniform(settings.seed, Purpose.TARGET, length + node),
    )
    judged = proposal.valid[:, 1:] & (node_ids[:-1] <= node[:, None])
    judged &= jnp.isfinite(shared)  # an unusable row of logits says nothing about agreement
    return verdict_of(
      node,
      proposal,
      sampling.draw(weights, u),
      overlap=jnp.where(judged, shared, 0.0).sum(axis=-1),
      judged=judged.sum(axis=-1, dtype=jnp.int32),
    )
