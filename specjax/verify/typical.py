"""Typical acceptance over a tree (Cai et al. 2024, Medusa)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.base import ALL_KINDS, Proposal, Verdict
from specjax.sampling import Settings
from specjax.tree import TokenTree
from specjax.verify.follow import verdict_of
from specjax.verify.residual import at, check

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class TypicalAcceptance:
  """Accepts draft x where p(x) > min(epsilon, delta exp(-H(p))): likely enough for how open p is.

  p is the processed distribution of x's parent, H its entropy in nats. The longest path whose drafts are
  all accepted wins, among equally long ones the most likely, then the lowest index. The next token is the
  most likely one behind it, so a round emits at least the target's own first choice. Nothing is drawn
  and the law is **not** the target's; how the drafts were made does not matter.

  At temperature 0 p is a point mass, H = 0 and the threshold below 1 unless epsilon = delta = 1: drafts
  that are the target's choice are accepted and no others, which is greedy.

  Attributes:
    epsilon: no threshold is higher, in (0, 1]; Medusa's ``posterior_threshold``.
    delta: factor of exp(-H), in (0, 1]; its ``posterior_alpha``, which it advises to be sqrt(epsilon).
  """

  epsilon: float = 0.09
  delta: float = 0.3

  name: ClassVar[str] = "typical_acceptance"
  lossless: ClassVar[bool] = False
  kinds: ClassVar[frozenset[str]] = ALL_KINDS
  chains_only: ClassVar[bool] = False
  needs: ClassVar[str] = "probs"

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if not 0.0 < value <= 1.0:
        raise ValueError(f"{field.name} = {value}; it must be in (0, 1]")

  def __call__(self, target: Array, proposal: Proposal, settings: Settings, length: Array) -> Verdict:
    check(self, proposal)
    tree = proposal.tree
    valid = proposal.valid.at[:, 0].set(True)
    # Entropies of nodes that have children; in a static tree the leaves behind them are not looked at.
    rows = max(tree.parents) + 1 if isinstance(tree, TokenTree) else tree.num_nodes
    inner = target[:, : max(rows, 1)]
    entropy = -jnp.sum(jnp.where(inner > 0, inner * jnp.log(jnp.where(inner > 0, inner, 1.0)), 0.0), axis=-1)
    threshold = jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))
    batch = jnp.arange(proposal.tokens.shape[0])[:, None]
    above = jnp.maximum(jnp.asarray(tree.parents), 0)
    p = inner[batch, above, jnp.where(valid, proposal.tokens, 0)]
    accepts = (valid & (p > threshold[batch, above])).at[:, 0].set(True)
    likely = jnp.log(jnp.where(accepts, p, 1.0)).at[:, 0].set(0.0)

    reached = jnp.all(accepts[:, None, :] | ~tree.ancestor_mask, axis=-1)
    depth = jnp.where(reached, tree.depths, -1)
    longest = reached & (depth == depth.max(axis=1, keepdims=True))
    likely = jnp.sum(jnp.where(tree.ancestor_mask, likely[:, None, :], 0.0), axis=-1)
    node = jnp.argmax(jnp.where(longest, likely, -jnp.inf), axis=1).astype(jnp.int32)
    row = at(target, node)
    return verdict_of(node, proposal, sampling.argmax(row, row.max(axis=-1)))
