"""No drafts: plain decoding in the same loop, the baseline and the fallback."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from specjax.base import DraftContext, Proposal, StatelessDrafter
from specjax.tree import TokenTree


@dataclasses.dataclass(frozen=True)
class NoDrafter(StatelessDrafter):
  """Proposes only the root. ``window`` is accepted for symmetry and must be 0."""

  window: int = 0

  name: ClassVar[str] = "none"
  kind: ClassVar[str] = "deterministic"

  def __post_init__(self):
    if self.window != 0:
      raise ValueError(f"window = {self.window}; the drafter 'none' proposes nothing, its window is 0")

  @property
  def tree(self) -> TokenTree:
    return TokenTree.chain(0)

  def propose(self, weights, state, context: DraftContext, target_cache):
    tokens = context.root[:, None]
    proposal = Proposal(tokens, jnp.ones_like(tokens, bool), q=None, tree=self.tree, kind=self.kind)
    return proposal, state, target_cache
