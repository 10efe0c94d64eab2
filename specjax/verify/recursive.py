"""Recursive rejection down a tree (SpecInfer: Miao et al. 2024; Sequoia: Chen et al. 2024)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from specjax.base import ALL_KINDS, Proposal, Verdict
from specjax.sampling import Settings
from specjax.verify.follow import verdict_of
from specjax.verify.residual import Residuals, acceptance_noise, at, check, draw_last

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class RecursiveRejection:
  """Tries the children of a node in order, from the root down; on a chain it is speculative sampling.

  At a node, R starts as the target's row P and Q as q. Child x is accepted with min(1, R(x) / Q(x)), and
  the walk goes on at x. Otherwise R ← norm((R - Q)+), and the next child is tried. Siblings drawn with
  replacement are independent draws of one Q (SpecInfer); without replacement Q loses x and is
  renormalised, as when the next one was drawn (Sequoia); a deterministic child is its own point mass.
  Where no child is left, the next token is drawn from R.

  The law holds by induction over siblings: whatever the earlier ones were, the next is a draw from Q, it
  is emitted with Q min(1, R/Q) = min(Q, R), and what is missing is (R - Q)+, the law behind a rejection.
  Without replacement that asks for drafts whose elder siblings were judged: in a node's children, those
  that are not valid come last.

  Open cases: R = Q always accepts (u < 1) and R(x) = 0 never does; where rounding leaves no residual, R
  stays; where none of P is left for the last draw, it is from P. All mass on one token: it is accepted
  when drafted, else R stays that point mass and is drawn.

  ``overlap`` sums Σ min(R, Q), the chance of each test before its token is known, over ``judged`` tests:
  its expectation is that of ``accepted``.
  """

  name: ClassVar[str] = "recursive_rejection"
  lossless: ClassVar[bool] = True
  kinds: ClassVar[frozenset[str]] = ALL_KINDS
  chains_only: ClassVar[bool] = False
  needs: ClassVar[str] = "probs"

  def __call__(self, target: Array, proposal: Proposal, settings: Settings, length: Array) -> Verdict:
    check(self, proposal)
    batch, nodes = proposal.tokens.shape
    residuals = Residuals(target, proposal)
    u = acceptance_noise(settings, length, nodes)

    def turn(state):
      node, left, (child, found), overlap, judged = state
      r, q = residuals.test(left, child)
      accepts = at(u, child) * q < r
      left, shared = residuals.turn_down(left, child, found & ~accepts)
      node = jnp.where(found & accepts, child, node)
      overlap += jnp.where(found, shared, 0.0)
      return node, left, residuals.next_child(left, node), overlap, judged + found

    node, left = jnp.zeros((batch,), jnp.int32), residuals.start()
    first = residuals.next_child(left, node)
    state = (node, left, first, jnp.zeros((batch,), jnp.float32), jnp.zeros((batch,), jnp.int32))
    node, left, _, overlap, judged = jax.lax.while_loop(lambda state: jnp.any(state[2][1]), turn, state)

    weights, rejected = residuals.weights(left, node)
    depth = at(jnp.broadcast_to(proposal.tree.depths, proposal.tokens.shape), node)
    token = draw_last(weights, settings, length, node, depth, rejected)
    return verdict_of(node, proposal, token, overlap=overlap, judged=judged)
