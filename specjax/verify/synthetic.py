"""A rule for cost experiments: drafts are accepted at given rates, whatever they say."""

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
class Synthetic:
  """Accepts a draft at depth d with probability ``rates[d - 1]`` once the one before it is accepted.

  The text is **not** the target's: real rounds of a real model at a chosen acceptance, to measure
  what they cost. In a tree every sibling has the rate of its depth.

  Attributes:
    rates: conditional acceptance by depth, each in [0, 1]; the last one holds for all deeper drafts.
  """

  rates: tuple[float, ...] = (0.7,)

  name: ClassVar[str] = "synthetic"
  lossless: ClassVar[bool] = False
  kinds: ClassVar[frozenset[str]] = ALL_KINDS
  chains_only: ClassVar[bool] = False
  needs: ClassVar[str] = "argmax"

  def __post_init__(self):
    if not self.rates or not all(0.0 <= rate <= 1.0 for rate in self.rates):
      raise ValueError(f"synthetic rates = {self.rates}; at least one is needed, each in [0, 1]")

  def __call__(self, target: Array, proposal: Proposal, settings: Settings, length: Array) -> Verdict:
    rates = jnp.asarray(self.rates, jnp.float32)[jnp.clip(proposal.tree.depths - 1, 0, len(self.rates) - 1)]
    starts = jnp.broadcast_to(length[:, None], proposal.tokens.shape)
    u = sampling.uniform(settings.seed, Purpose.ACCEPT, starts, jnp.arange(proposal.tree.num_nodes))
    node = deepest_accepted(u < rates, proposal)
    return verdict_of(node, proposal, jnp.take_along_axis(target, node[:, None], axis=1)[:, 0])
