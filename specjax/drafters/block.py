"""One-pass block drafting (DFlash, Chen et al. 2026, arXiv 2602.06036), with a sequential head (DSpark).

One forward of a small head, conditioned on the target's features, says all next tokens; a low-rank Markov
head, if there is one, makes each depend on the token before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp

from specjax import cache as kv
from specjax.base import Committed, DraftContext
from specjax.drafters.step import Start, Step
from specjax.drafters.tree_drafter import TreeDrafter, shaped
from specjax.models import BlockHead

Array = jax.Array


@flax.struct.dataclass
class BlockWeights:
  """The head, and the target's table of embeddings ``[V, D]``."""

  head: BlockHead
  embed: Array


@flax.struct.dataclass
class BlockState:
  """The head's cache: its counted rows are made of the target's features alone, one a position that has any.

  What a block wrote lies behind them and is never counted, right as the guesses may have been.
  """

  cache: kv.KVCache


@dataclasses.dataclass(frozen=True)
class Block(TreeDrafter):
  """Grows a tree from one pass of a block head; weights are `BlockWeights`.

  The children of a node at depth d are drawn from position d of the block: q is the softmax of its logits,
  processed along the node's path, with the Markov head's share of the node's own token. Without a Markov head
  all nodes of a depth share their logits. Either way q is the distribution that children were drawn from, and
  a tree costs no forward more than a chain.

  The whole block is run however shallow the tree is: a position sees those behind it, as it was trained.
  A row's features are made into keys and values when they are committed; nothing waits for the next round.

  Attributes:
    taps: the layers of the target that the head sees.
    block_size: G of the weights, the deepest a draft can be.
  """

  taps: tuple[int, ...] = ()
  block_size: int = 0

  name: ClassVar[str] = "block"

  def __post_init__(self):
    super().__post_init__()
    if not self.taps:
      raise ValueError("taps = (); block needs the layers that the head sees")
    if not self.tree.max_depth <= self.block_size:
      raise ValueError(
        f"block: the tree is {self.tree.max_depth} deep; the head says {self.block_size} tokens in a pass"
      )

  def init(self, weights: BlockWeights, batch, slots):
    config = weights.head.config
    for field, found in (("taps", config.tap_layers), ("block_size", config.block_size)):
      if getattr(self, field) != found:
        raise ValueError(f"{field} = {getattr(self, field)}; the head was made for {found}")
    return BlockState(weights.head.init_cache(batch, slots))

  def prefill(self, weights: BlockWeights, state: BlockState, chunk: Committed):
    return self.extend(weights, state, chunk)

  def extend(self, weights: BlockWeights, state: BlockState, committed: Committed):
    head = weights.head
    cache = head.remember(head.fuse(committed.taps), state.cache)
    return BlockState(kv.commit(cache, None, committed.valid.sum(axis=1, dtype=jnp.int32)))

  def propose(self, weights: BlockWeights, state: BlockState, context: DraftContext, target_cache):
    head, root = weights.head, context.root
    embeddings = jnp.take(weights.embed, root, axis=0, mode="clip")
    output = head(embeddings, state.cache, implementation=self.implementation)
    # Behind a single token the target has no feature yet, and no head was trained for that.
    ready = context.active & (state.cache.length > 0)
    first = self._said(head, output.logits[:, :1], root[:, None])
    start = Start(first, None, None, ready)
    grown = self.grow(self._step(head, output.logits), start, context)
    return grown.proposal, BlockState(output.cache), target_cache

  def _step(self, head: BlockHead, logits: Array) -> Step:
    """Takes what is said behind a level from the pass's ``logits [B, G, Vd]``; nothing is run."""

    def step(tokens, hidden, cache, *, depths, ancestors, scratch):
      # Nodes of depth d stand at d - 1 behind the root; what follows them is position d's.
      behind = jax.lax.dynamic_index_in_dim(logits, depths[0] + 1, axis=1)
      return self._said(head, behind, tokens), None, None

    return step

  def _said(self, head: BlockHead, logits: Array, tokens: Array) -> Array:
    """Over the target's vocabulary, ``[B, F, V]``, behind ``tokens [B, F]`` of a position ``[B, 1, Vd]``."""
    return self.over_target_vocabulary(head.conditioned(logits, tokens), head.ids)


def block(
  *,
  window: int,
  branching: Sequence[int] = (),
  nodes: int | None = None,
  beam: int | None = None,
  **options: Any,
) -> Block:
  """A `Block` over a chain of ``window`` drafts, or a tree as deep; see `tree_drafter.shaped`.

  Args:
    **options: fields of `Block`.

  Raises:
    ValueError: naming the field, the value and the limit.
  """
  return Block(**shaped("block", window=window, branching=branching, nodes=nodes, beam=beam, **options))
