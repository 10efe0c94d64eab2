"""Traversal verification: a tree judged from its leaves up (Weng et al. 2025)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from specjax.base import ALL_KINDS, Proposal, Verdict
from specjax.sampling import Settings
from specjax.verify.follow import verdict_of
from specjax.verify.residual import Residuals, acceptance_noise, at, check, draw_last, ratio

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class TraversalVerification:
  """Accepts whole paths, deepest first; on a chain it is block verification.

  A node has a mass a, a target P and a draft distribution Q. The root's mass is 1; a child x has
  a(x) = min(1, a P(x) / Q(x)), from its parent as it stands when x is reached. Nodes are judged in
  post-order, siblings by index: when all below v was rejected, the path to v is accepted with probability
  a(v), and the next token drawn from P. Otherwise v's parent becomes P ← norm((a P - Q)+) and
  a ← S / (S + 1 - a) with S = Σ (a P - Q)+; without replacement Q loses v's token. The root's mass stays
  1, so it accepts when all else was rejected.

  The law holds by induction from the leaves: the subtree of v as a whole is accepted with probability
  a(v), and continues with P. Its first child accounts for Q(x) a(x) = min(Q, a P); the missing (a P - Q)+,
  seen from the rejection of the child, whose probability is S + 1 - a, is the new a P. Without replacement
  the children of a node that are not valid come last, as in recursive rejection.

  Open cases: S = 0 with a = 1 means P = Q, where the child's subtree accepts for sure: only rounding gets
  past it, and a and P stay. S = 0 with a < 1 is a = 0: never accepted. P(x) = 0 is a(x) = 0. All mass on
  one token: a is 1 along that path and 0 off it.

  ``overlap`` is left at 0, unknown: masses are of paths, and Σ min(p, q) would be another pass. One pass
  over a row of the vocabulary is made for each node rejected, none below a node without mass.
  """

  name: ClassVar[str] = "traversal_verification"
  lossless: ClassVar[bool] = True
  kinds: ClassVar[frozenset[str]] = ALL_KINDS
  chains_only: ClassVar[bool] = False
  needs: ClassVar[str] = "probs"

  def __call__(self, target: Array, proposal: Proposal, settings: Settings, length: Array) -> Verdict:
    check(self, proposal)
    batch, nodes = proposal.tokens.shape
    residuals = Residuals(target, proposal)
    u = acceptance_noise(settings, length, nodes)

    def below(left, node, done):
      child, found = residuals.next_child(left, node)
      # Where no mass is left, everything below is rejected for sure.
      return child, found & ~done & (at(left.mass, node) > 0)

    def enter(state):
      node, left, done, (child, found) = state
      mass = ratio(*residuals.test(left, child))[:, None]
      here = found[:, None] & (jnp.arange(nodes) == child[:, None])
      left = left.replace(
        mass=jnp.where(here, mass, left.mass), scale=jnp.where(here, mass, left.scale)
      )  # scale · P sums to the mass
      node = jnp.where(found, child, node)
      return node, left, done, below(left, node, done)

    def turn(state):
      node, left, done = state
      node, left, done, _ = jax.lax.while_loop(
        lambda state: jnp.any(state[3][1]), enter, (node, left, done, below(left, node, done))
      )
      done |= (node == 0) | (at(u, node) < at(left.mass, node))
      left, _ = residuals.turn_down(left, node, ~done)
      return jnp.where(done, node, at(residuals.parents, node)), left, done

    start = jnp.zeros((batch,), jnp.int32), residuals.start(), jnp.zeros((batch,), bool)
    node, left, _ = jax.lax.while_loop(lambda state: ~jnp.all(state[2]), turn, start)

    weights, rejected = residuals.weights(left, node)
    depth = at(jnp.broadcast_to(proposal.tree.depths, proposal.tokens.shape), node)
    return verdict_of(node, proposal, draw_last(weights, settings, length, node, depth, rejected))
