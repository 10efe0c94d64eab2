"""Two-model drafting: a small language model proposes (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp

from specjax import cache as kv
from specjax.base import DraftContext
from specjax.drafters.growing import plan
from specjax.drafters.step import Grown, Start, Step
from specjax.drafters.tree_drafter import TreeDrafter, shaped

Array = jax.Array

# The first forward of a round feeds the root and the row a fully accepted round left out.
_CATCH_UP = 2


@flax.struct.dataclass
class TwoModelState:
  """The draft model's cache; its length counts rows of committed tokens only.

  ``drafted [B]`` is how many rows behind it belong to the round in flight: the root and fed drafts.
  """

  cache: kv.KVCache
  drafted: Array


@dataclasses.dataclass(frozen=True)
class TwoModel(TreeDrafter):
  """Any model that says the target's tokens as the draft; weights are that model.

  The draft may differ in everything else: depth, heads, padding of the vocabulary, length limit. It may say
  only some of the tokens: then its logits are over these, and ``weights.ids`` gives the target's id of each.
  A tree is grown level by level, one forward of the draft a level, over the nodes that have children.
  """

  name: ClassVar[str] = "two_model"
  taps: ClassVar[tuple[int, ...]] = ()

  def init(self, weights, batch, slots):
    return TwoModelState(weights.init_cache(batch, slots), jnp.zeros((batch,), jnp.int32))

  def prefill(self, weights, state, chunk):
    cache = self._run(weights, chunk.tokens, state.cache, logits=False).cache
    return state.replace(cache=kv.commit(cache, None, chunk.valid.sum(axis=1, dtype=jnp.int32)))

  def propose(self, weights, state, context: DraftContext, target_cache):
    grown = self.grow(self._step(weights), self._feed_root(weights, state.cache, context), context)
    # Back to committed rows only; a row that is not decoding keeps what it had.
    fed_to = jnp.where(context.active, jnp.maximum(context.length - 1, 0), state.cache.length)
    cache, num_rows = self._kept(grown, grown.cache.replace(length=fed_to))
    fed = jnp.where(context.active, num_rows, 0)
    return grown.proposal, TwoModelState(cache, fed.astype(jnp.int32)), target_cache

  def extend(self, weights, state, committed):
    # The drafts' rows are there; those of accepted ones stay. What has none is fed with the next root.
    count = committed.valid.sum(axis=1, dtype=jnp.int32)
    if self.is_dynamic:
      # In the order of the nodes. The last of the path may not have been fed; what it follows was.
      path, kept, scratch = committed.path, jnp.where(count > 1, count - 1, count), self.tree.num_nodes
    else:
      row = jnp.asarray(plan(self.tree).row)[committed.path]
      kept = jnp.sum(committed.valid & (row >= 0), axis=1, dtype=jnp.int32)
      path = None if self.tree.is_chain else jnp.maximum(row, 0)
      scratch = plan(self.tree).num_rows
    kept = jnp.minimum(kept, state.drafted)
    cache = kv.commit(state.cache, path, kept, scratch=scratch)
    return TwoModelState(cache, jnp.zeros_like(state.drafted))

  def _kept(self, grown: Grown, cache: kv.KVCache) -> tuple[kv.KVCache, int]:
    """The cache as `extend` finds it, and how many rows the round has there.

    Which node has which row is known of a static tree. Those of a dynamic one are put in the nodes' order, so
    that nothing of the round is kept but rows.
    """
    if not self.is_dynamic:
      return cache, plan(self.tree).num_rows
    rows, none = jnp.maximum(grown.rows, 0), jnp.zeros_like(cache.length)
    return kv.commit(cache, rows, none, scratch=self.tree.drafted), self.tree.num_nodes

  def _run(self, weights, tokens, cache, **kwargs):
    return weights(tokens, cache, implementation=self.implementation, **kwargs)

  def _logits(self, weights, logits: Array) -> Array:
    return self.over_target_vocabulary(logits, getattr(weights, "ids", None))

  def _step(self, weights) -> Step:
    def step(tokens, hidden, cache, **where):
      output = self._run(weights, tokens, cache, **where)
      return self._logits(weights, output.logits), None, output.cache

    return step

  def _feed_root(self, weights, cache, context) -> Start:
    """Logits behind the root, and the cache with the root's row counted in."""
    cache = self._catch_up(weights, cache, context)
    # One or two rows are missing: the root, and before it the leaf that a round ended with.
    missing = context.length - cache.length
    at = cache.length[:, None] + jnp.arange(_CATCH_UP)
    tokens = jnp.take_along_axis(context.tokens, jnp.minimum(at, context.tokens.shape[1] - 1), axis=1)
    output = self._run(weights, tokens, cache)
    last = jnp.clip(missing - 1, 0, _CATCH_UP - 1)
    logits = jnp.take_along_axis(output.logits, last[:, None, None], axis=1)
    cache = output.cache.replace(length=context.length)
    return Start(self._logits(weights, logits), None, cache, context.active)

  def _catch_up(self, weights, cache, context):
    """Feeds committed tokens in blocks until at most the last two have no row.

    Rounds that did not draft leave rows behind; with none behind this loop does not run.
    """
    block = self.tree.num_nodes  # the buffer has room for as many
    behind = lambda cache: jnp.where(context.active, context.length - cache.length, 0)

    def feed(cache):
      at = cache.length[:, None] + jnp.arange(block)
      tokens = jnp.take_along_axis(context.tokens, jnp.minimum(at, context.tokens.shape[1] - 1), axis=1)
      output = self._run(weights, tokens, cache, logits=False)
      return kv.commit(output.cache, None, jnp.clip(behind(cache) - 1, 0, block))

    return jax.lax.while_loop(lambda cache: jnp.any(behind(cache) > _CATCH_UP), feed, cache)


def two_model(
  *,
  window: int,
  branching: Sequence[int] = (),
  nodes: int | None = None,
  beam: int | None = None,
  **options: Any,
) -> TwoModel:
  """A `TwoModel` over a chain of ``window`` drafts, or a tree as deep; see `tree_drafter.shaped`.

  Args:
    **options: fields of `TwoModel`.

  Raises:
    ValueError: naming the field, the value and the limit.
  """
  return TwoModel(
    **shaped("two_model", window=window, branching=branching, nodes=nodes, beam=beam, **options)
  )
