"""Rules that let the target choose at every node and follow the drafts that it chose too."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.base import ALL_KINDS, Proposal, Verdict
from specjax.sampling import Purpose, Settings

Array = jax.Array


def verdict_of(node: Array, proposal: Proposal, next_token: Array, **known) -> Verdict:
  """The verdict that accepts everything from the root down to ``node [B]``."""
  tree = proposal.tree
  depths = jnp.broadcast_to(tree.depths, proposal.tokens.shape)
  return Verdict(
    path=tree.path_to(node),
    accepted=jnp.take_along_axis(depths, node[:, None], axis=1)[:, 0],
    next_token=next_token,
    overlap=known.get("overlap", jnp.zeros(node.shape, jnp.float32)),
    judged=known.get("judged", jnp.zeros(node.shape, jnp.int32)),
  )


def deepest_accepted(accepts: Array, proposal: Proposal) -> Array:
  """The deepest node that is accepted together with all its ancestors, int32 ``[B]``.

  Args:
    accepts: bool ``[B, N]``, whether node i is accepted once its parent is; the root's is ignored.
    proposal: invalid nodes are never accepted.
  """
  tree = proposal.tree
  accepts = (accepts & proposal.valid).at[:, 0].set(True)
  reached = jnp.all(accepts[:, None, :] | ~tree.ancestor_mask, axis=-1)
  return jnp.argmax(jnp.where(reached, tree.depths + 1, 0), axis=-1).astype(jnp.int32)


def follow(chosen: Array, proposal: Proposal) -> Verdict:
  """Accepts the path along which each node's token is what its parent chose.

  Args:
    chosen: int32 ``[B, N]``, the target's own next token behind each node.
    proposal: of any kind and topology.
  """
  node = deepest_accepted(proposal.tokens == proposal.tree.of_parent(chosen), proposal)
  next_token = jnp.take_along_axis(chosen, node[:, None], axis=1)[:, 0]
  return verdict_of(node, proposal, next_token)


@dataclasses.dataclass(frozen=True)
class Greedy:
  """Accepts drafts that equal the target's most likely token (temperature 0)."""

  name: ClassVar[str] = "greedy"
  lossless: ClassVar[bool] = True
  kinds: ClassVar[frozenset[str]] = ALL_KINDS
  chains_only: ClassVar[bool] = False
  needs: ClassVar[str] = "argmax"

  def __call__(self, target: Array, proposal: Proposal, settings: Settings, length: Array) -> Verdict:
    return follow(target, proposal)


@dataclasses.dataclass(frozen=True)
class DrawAndFollow:
  """Draws the target's token at every node and follows the drafts that match.

  Each emitted token is a draw from the target given what stands before it, whatever was drafted, so
  the law is the target's for any proposal; and since the draw at a position is keyed by (seed,
  position), the output equals plain sampling token for token. A draft x is accepted with probability
  p(x): for deterministic drafts that is the best possible, for drafts sampled from q it is
  Σ p q instead of Σ min(p, q).
  """

  name: ClassVar[str] = "draw_and_follow"
  lossless: ClassVar[bool] = True
  kinds: ClassVar[frozenset[str]] = ALL_KINDS
  chains_only: ClassVar[bool] = False
  needs: ClassVar[str] = "probs"

  def __call__(self, target: Array, proposal: Proposal, settings: Settings, length: Array) -> Verdict:
    u = sampling.uniform(settings.seed, Purpose.TARGET, length[:, None] + proposal.tree.depths)
    return follow(sampling.draw(target, u), proposal)
