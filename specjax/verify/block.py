"""Block verification of a chain (Sun et al. 2024)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from specjax.base import ALL_KINDS, Proposal, Verdict
from specjax.sampling import Settings
from specjax.verify.follow import verdict_of
from specjax.verify.residual import acceptance_noise, at, check, draw_last, mass_left, ratio
from specjax.verify.speculative import agreement, read_chain, remove_draft

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class BlockVerification:
  """Judges the drafts of a chain together: accepts the longest part whose test passes.

  With x_1 … x_γ the valid drafts, P_i and Q_i the rows behind x_i, p_0 = 1 and

    p_i = min(1, p_{i-1} P_{i-1}(x_i) / Q_{i-1}(x_i)),    S_i = Σ_x (p_i P_i(x) - Q_i(x))+,
    h_i = S_i / (S_i + 1 - p_i) for i < γ,    h_γ = p_γ,

  τ is the largest i with u_i < h_i; i = 0 always passes. The next token is drawn from
  (p_τ P_τ - Q_τ)+ when τ < γ, else from P_γ. The first τ drafts are accepted at least as often as token
  by token, and the law is the target's: with probability p_i, x_1 … x_i is a part of what is emitted
  (from the end: (p P - Q)+ is what later drafts leave over, and S + 1 - p how often they leave it).
  A deterministic draft has a point mass Q.

  Open cases: p_i = 1 gives h_i = 1, also where S_i = 0, which means P = Q: then everything behind is
  accepted first. S_i = 0 with p_i < 1 gives 0. P(x_i) = 0 gives p_i = 0 from there on. A residual
  without mass, which is rounding, is replaced by P. All mass on one token: p_i is 1 while the drafts are
  that token, and 0 behind the first that is not.

  ``overlap`` is Σ min(P, Q), the expected acceptance token by token, over the accepted drafts and the
  one behind them.
  """

  name: ClassVar[str] = "block_verification"
  lossless: ClassVar[bool] = True
  kinds: ClassVar[frozenset[str]] = ALL_KINDS
  chains_only: ClassVar[bool] = True
  needs: ClassVar[str] = "probs"

  def __call__(self, target: Array, proposal: Proposal, settings: Settings, length: Array) -> Verdict:
    check(self, proposal)
    batch, nodes = proposal.tokens.shape
    # γ of the docstring: what stands behind an invalid draft does not count.
    drafts = jnp.cumprod(proposal.valid[:, 1:].astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
    p, q = read_chain(target, proposal)

    def step(mass, pair):
      mass = ratio(mass * pair[0], pair[1])
      return mass, mass

    first = jnp.ones((batch,), jnp.float32)
    _, masses = jax.lax.scan(step, first, (p.T, q.T))
    masses = jnp.concatenate([first[:, None], masses.T], axis=1)  # [B, N]

    def left(node):
      """S behind ``node [B]``, a draft with another behind it."""
      mass = at(masses, node)
      if nodes == 1:
        return mass  # nothing drafted, never asked for
      if proposal.kind == "deterministic":
        return mass - mass * at(p, jnp.minimum(node, nodes - 2))
      rows = at(proposal.q, jnp.minimum(node, nodes - 2))
      return jnp.maximum(mass[:, None] * at(target, node) - rows, 0.0).sum(axis=-1)

    # From the end, and only where h_i <= p_i leaves it open: a pass over the vocabulary for each test.
    u, index = acceptance_noise(settings, length, nodes), jnp.arange(nodes)
    open_ = (u < masses) & (index <= drafts[:, None])
    before = lambda node: jnp.max(jnp.where(open_ & (index < node[:, None]), index, 0), axis=1)
    ended = lambda node: (node == 0) | (node == drafts)  # the root always passes, and h_γ = p_γ

    def turn(state):
      node, done = state
      done |= at(u, node) < mass_left(left(node), at(masses, node))
      node = jnp.where(done, node, before(node))
      return node, done | (node == 0)

    start = before(jnp.full((batch,), nodes))
    node, _ = jax.lax.while_loop(lambda state: ~jnp.all(state[1]), turn, (start, ended(start)))
    node = node.astype(jnp.int32)

    rejected = node < drafts
    weights = remove_draft(target, proposal, node, rejected, at(masses, node))
    token = draw_last(weights, settings, length, node, node, rejected)
    return verdict_of(node, proposal, token, **agreement(target, proposal, p, node))
