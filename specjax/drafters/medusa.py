"""Medusa: heads that each see the target's last hidden state and guess a token further ahead.

Cai et al. 2024, arXiv 2401.10774.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling
from specjax.base import Committed, DraftContext, Proposal
from specjax.drafters.growing import Growth
from specjax.drafters.step import Start
from specjax.drafters.tree_drafter import cascade
from specjax.models import MedusaHeads, layers, over_target
from specjax.tree import TokenTree

Array = jax.Array


@flax.struct.dataclass
class MedusaWeights:
  """The heads, the target's final norm, and the rows of the target's output head ``[Vd, D]`` for those that
  have none of their own, else None."""

  heads: MedusaHeads
  norm: layers.RMSNorm
  rows: Array | None = None


@flax.struct.dataclass
class MedusaState:
  """``hidden [B, D]``: what the target's last layer gave at the last position that has a row."""

  hidden: Array


@dataclasses.dataclass(frozen=True)
class Medusa:
  """Proposes a static tree: a node's token is, by its rank among its siblings, one of the likeliest of its
  depth's head. Weights are `MedusaWeights`.

  The heads do not depend on the nodes above, but what penalties, biases and masks make of their logits does:
  with any of these on, a node's children are chosen along its own path, else once a head.

  Attributes:
    tree: paths of ranks are in `TokenTree.from_paths`; as deep as there are heads, at most.
    vocab_size: width of the target's logits.
    num_real_tokens: ids below are real.
    num_heads: of the weights.
    taps: what the heads see is the output of the target's last layer, the input of the one that would follow.
  """

  tree: TokenTree
  vocab_size: int
  num_real_tokens: int
  num_heads: int
  taps: tuple[int, ...]

  name: ClassVar[str] = "medusa"
  kind: ClassVar[str] = "deterministic"

  def __post_init__(self):
    if not 1 <= self.tree.max_depth <= self.num_heads:
      raise ValueError(
        f"medusa: the tree is {self.tree.max_depth} deep; there are {self.num_heads} heads, it must be in "
        f"[1, {self.num_heads}]"
      )
    if len(self.taps) != 1:
      raise ValueError(f"taps = {self.taps}; medusa needs one, the number of the target's layers")
    most = max(map(len, self.tree.children))
    if most > self.num_real_tokens:
      raise ValueError(f"medusa: a node has {most} children; there are {self.num_real_tokens} real tokens")

  def init(self, weights: MedusaWeights, batch, slots):
    heads = weights.heads
    if heads.config.num_heads != self.num_heads:
      raise ValueError(f"num_heads = {self.num_heads}; the weights have {heads.config.num_heads} heads")
    return MedusaState(jnp.zeros((batch, heads.config.d_model), weights.norm.weight.dtype))

  def prefill(self, weights: MedusaWeights, state: MedusaState, chunk: Committed):
    return self.extend(weights, state, chunk)

  def extend(self, weights: MedusaWeights, state: MedusaState, committed: Committed):
    count = committed.valid.sum(axis=1)
    last = jnp.maximum(count - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(committed.taps[:, :, 0], last, axis=1)[:, 0]
    return MedusaState(jnp.where((count > 0)[:, None], hidden.astype(state.hidden.dtype), state.hidden))

  def propose(self, weights: MedusaWeights, state: MedusaState, context: DraftContext, target_cache):
    logits = self._logits(weights, state.hidden)
    # Behind a single token the target has no hidden state yet.
    ready = context.active & (context.length > 1)
    by_path = lambda: self._along_paths(logits, ready, context)
    at_once = lambda: self._at_once(logits, ready, context)
    if context.processor is not None:
      tokens, valid = by_path()
    else:
      tokens, valid = jax.lax.cond(jnp.any(context.settings.adjusts_logits), by_path, at_once)
    return Proposal(tokens, valid, None, tree=self.tree, kind=self.kind), state, target_cache

  def _logits(self, weights: MedusaWeights, hidden: Array) -> Array:
    """float32 ``[B, G, V]``: head d - 1 says what follows at depth d."""
    rows = weights.rows
    unembed = None if rows is None else lambda x: layers.matmul(x, rows).astype(jnp.float32)
    logits = weights.heads(weights.norm(hidden), unembed)[:, : self.tree.max_depth]
    return sampling.mask_padding(
      over_target(logits, weights.heads.ids, self.vocab_size), self.num_real_tokens
    )

  def _at_once(self, logits: Array, ready: Array, context: DraftContext) -> tuple[Array, Array]:
    """Tokens and validity ``[B, N]`` where nothing changes logits, so that paths do not matter."""
    tree = self.tree
    _, error = sampling.peak(logits)
    likely, tokens = jax.lax.top_k(logits, max(map(len, tree.children)))
    found = ready[:, None, None] & ~error[..., None] & (likely > -jnp.inf)
    depth = tree.depths[1:] - 1
    rank = np.array([tree.children[parent].index(node) for node, parent in enumerate(tree.parents) if node])
    root = context.root[:, None]
    tokens = jnp.concatenate([root, tokens[:, depth, rank]], axis=1)
    return tokens, jnp.concatenate([jnp.ones_like(root, bool), found[:, depth, rank]], axis=1)

  def _along_paths(self, logits: Array, ready: Array, context: DraftContext) -> tuple[Array, Array]:
    """The same, each node's children chosen from its head's logits processed along its own path."""

    def step(tokens, hidden, cache, *, depths, ancestors, scratch):
      # Nodes of depth d sit at d - 1 behind the root; their children are head d's, the first being 0.
      of_level = jax.lax.dynamic_index_in_dim(logits, depths[0] + 1, axis=1)
      return jnp.broadcast_to(of_level, (*tokens.shape, logits.shape[-1])), None, None

    start = Start(logits[:, :1], None, None, ready)
    proposal = Growth(self.tree, "top_k")(step, start, context).proposal
    return proposal.tokens, proposal.valid


def medusa(
  *,
  window: int | None = None,
  branching: Sequence[int] = (),
  tree: Sequence[Sequence[int]] = (),
  **options,
) -> Medusa:
  """A `Medusa` over a chain, a tree with the same branches everywhere, or any tree.

  Args:
    window: G, drafts along a path.
    branching: children of a node at depth 0, 1, …; deeper nodes have one.
    tree: instead of both, the nodes by their paths, e.g. ``((0,),(1,),(0,0))``: the two likeliest tokens of
      the first head, and the likeliest of the second behind the likelier of them.
    **options: fields of `Medusa`.

  Raises:
    ValueError: naming the field, the value and the limit.
  """
  if tree:
    if window is not None or branching:
      raise ValueError(f"tree = {tree!r} says all of its shape; leave window and branching out")
    if not isinstance(tree, Sequence) or not all(isinstance(path, Sequence) for path in tree):
      raise ValueError(f"tree = {tree!r}; it must be paths of ranks, e.g. ((0,),(1,),(0,0))")
    return Medusa(TokenTree.from_paths(tree), **options)
  return Medusa(cascade("medusa", window, branching), **options)
