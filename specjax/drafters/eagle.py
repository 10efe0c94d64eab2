"""EAGLE: a head of one layer drafts from the target's own features.

``eagle`` runs heads of EAGLE-1 and EAGLE-2 (Li et al. 2024, arXiv 2401.15077 and 2406.16858), ``eagle3``
those of EAGLE-3 (Li et al. 2025, arXiv 2503.01840). What they do with a head is the same: a chain, a static
tree (EAGLE-1) or a tree that follows the head's probabilities (EAGLE-2).
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
from specjax.models import FeatureHead

Array = jax.Array


@flax.struct.dataclass
class EagleWeights:
  """The head, an `Eagle1` or an `Eagle3`, and the target's table of embeddings ``[V, D_target]``."""

  head: FeatureHead
  embed: Array


@flax.struct.dataclass
class EagleState:
  """The head's cache, and what it has not been fed yet.

  Row t of the cache is made of the target's feature of position t and of token t + 1, at position t. So the
  last feature always waits for the next token, and of n tokens there are at most n - 1 rows.

  Attributes:
    cache: rows made of the target's features; what the head guessed lies behind them and is never counted.
    features: ``[B, R, D]``, fused; that of position t in slot t mod R.
    tokens: int32 ``[B, R]``, likewise.
    seen: int32 ``[B]``, positions whose feature is known. Rows from ``cache.length`` to there are pending.
  """

  cache: kv.KVCache
  features: Array
  tokens: Array
  seen: Array


@dataclasses.dataclass(frozen=True)
class EagleDrafter(TreeDrafter):
  """Grows a tree with a head of EAGLE-1 or EAGLE-2; weights are `EagleWeights`.

  The head predicts the token behind the next one, from a feature of the target and the next token. In a
  draft, where the target has no features yet, its own output takes their place, from parent to child.

  What a round kept is fed as one block before the next proposal, from the target's features: rows that the
  head made of its guesses are not kept, right as the guesses may have been. Rounds that do not draft only
  note features; when these no longer fit the ring, pending rows are fed then.

  Attributes:
    taps: layers of the target that the head sees.
    ring: R, features kept; at least as many as a round commits, the same for all widths of a controller.
  """

  taps: tuple[int, ...] = ()
  ring: int = 16

  name: ClassVar[str] = "eagle"

  def __post_init__(self):
    super().__post_init__()
    if not self.taps:
      raise ValueError(f"taps = {self.taps}; {self.name} needs the layers of the target that the head sees")
    if type(self.ring) is not int or self.ring <= self.tree.max_depth:
      least = self.tree.max_depth + 1
      raise ValueError(
        f"ring = {self.ring!r}; a round of {self.name} commits up to {least} tokens, it needs as many"
      )

  def init(self, weights: EagleWeights, batch, slots):
    head = weights.head
    if head.config.tap_layers != self.taps:
      raise ValueError(f"taps = {self.taps}; the head was made for {head.config.tap_layers}")
    zeros = lambda *shape, dtype=jnp.int32: jnp.zeros((batch, *shape), dtype)
    features = zeros(self.ring, head.config.decoder.d_model, dtype=head.dtype)
    return EagleState(head.init_cache(batch, slots), features, zeros(self.ring), zeros())

  def prefill(self, weights: EagleWeights, state: EagleState, chunk: Committed):
    count = chunk.valid.sum(axis=1, dtype=jnp.int32)
    features = weights.head.fuse(chunk.taps)
    # The feature that the chunk before ended with has its token now; before the first chunk there is none.
    pending = state.seen - state.cache.length
    last = state.features[jnp.arange(len(count)), (state.seen - 1) % self.ring][:, None]
    known = jnp.concatenate([last, features], axis=1)  # of positions seen - 1, seen, …; tokens[t] is behind
    at = jnp.arange(chunk.tokens.shape[1]) + 1 - pending[:, None]
    tokens = jnp.take_along_axis(chunk.tokens, jnp.minimum(at, chunk.tokens.shape[1] - 1), axis=1)
    known = jnp.take_along_axis(known, at[..., None], axis=1)
    cache = self._run(weights, tokens, known, state.cache).cache
    cache = kv.commit(cache, None, jnp.maximum(count - 1 + pending, 0))
    # Of the chunk only its last feature is still needed.
    end = jnp.maximum(count - 1, 0)[:, None]
    features = jnp.take_along_axis(features, end[..., None], axis=1)
    tokens = jnp.take_along_axis(chunk.tokens, end, axis=1)
    state = state.replace(cache=cache, seen=state.seen + jnp.maximum(count - 1, 0))
    return self._noted(state, features, tokens, jnp.minimum(count, 1))

  def propose(self, weights: EagleWeights, state: EagleState, context: DraftContext, target_cache):
    # The last row gives the first logits: it is fed once more if it has been.
    again = jnp.minimum(state.cache.length, jnp.maximum(state.seen - 1, 0))
    state = state.replace(cache=state.cache.replace(length=again))
    cache, hidden = self._fed(weights, state, context.root, jnp.bool_(True))
    head, hidden = weights.head, hidden[:, None]
    logits = self.over_target_vocabulary(head.read(hidden), head.ids)
    # Behind a single token the target has no feature yet.
    ready = context.active & (state.seen > 0)
    grown = self.grow(self._step(weights), Start(logits, hidden, cache, ready), context)
    return grown.proposal, state.replace(cache=grown.cache), target_cache

  def extend(self, weights: EagleWeights, state: EagleState, committed: Committed):
    count = committed.valid.sum(axis=1, dtype=jnp.int32)
    features = weights.head.fuse(committed.taps)
    full = jnp.any(state.seen - state.cache.length + count > self.ring)
    cache, _ = self._fed(weights, state, committed.tokens[:, 0], full)
    return self._noted(state.replace(cache=cache), features, committed.tokens, count)

  def _noted(self, state: EagleState, features: Array, tokens: Array, count: Array) -> EagleState:
    """Puts the first ``count [B]`` of ``features [B, T, D]`` and their ``tokens [B, T]`` into the ring."""
    which = (jnp.arange(self.ring) - state.seen[:, None]) % self.ring  # of the new ones, in each slot
    new, at = which < count[:, None], jnp.minimum(which, tokens.shape[1] - 1)
    chosen = jnp.take_along_axis(features, at[..., None], axis=1)
    return state.replace(
      features=jnp.where(new[..., None], chosen, state.features),
      tokens=jnp.where(new, jnp.take_along_axis(tokens, at, axis=1), state.tokens),
      seen=state.seen + count,
    )

  def _fed(self, weights, state: EagleState, following: Array, wanted: Array) -> tuple[kv.KVCache, Array]:
    """Feeds pending rows, in blocks as long as what a round of this tree leaves; usually that is one.

    Args:
      following: int32 ``[B]``, the token behind the last feature.
      wanted: bool ``[]``; if not, nothing is done.

    Returns:
      The cache, and what recurs from the last row that was fed, ``[B, D]``; 0 where there was none.
    """
    block, seen = self.tree.max_depth + 1, state.seen

    def feed(carry):
      cache, hidden = carry
      at = cache.length[:, None] + jnp.arange(block)
      tokens = jnp.take_along_axis(state.tokens, (at + 1) % self.ring, axis=1)
      tokens = jnp.where(at + 1 == seen[:, None], following[:, None], tokens)
      features = jnp.take_along_axis(state.features, (at % self.ring)[..., None], axis=1)
      output = self._run(weights, tokens, features, cache)
      rows = jnp.clip(seen - cache.length, 0, block)
      last = jnp.take_along_axis(output.hidden, jnp.maximum(rows - 1, 0)[:, None, None], axis=1)[:, 0]
      hidden = jnp.where((rows > 0)[:, None], last, hidden)
      return kv.commit(output.cache, None, rows), hidden

    more = lambda carry: wanted & jnp.any(carry[0].length < seen)
    return jax.lax.while_loop(more, feed, (state.cache, jnp.zeros_like(state.features[:, 0])))

  def _run(self, weights, tokens, features, cache, *, logits=False, **where):
    """One forward of the head over rows of ``features [B, T, D]`` and the tokens ``[B, T]`` behind them."""
    embeddings = jnp.take(weights.embed, tokens, axis=0, mode="clip")
    return weights.head(
      embeddings, features, cache, logits=logits, implementation=self.implementation, **where
    )

  def _step(self, weights) -> Step:
    def step(tokens, hidden, cache, **where):
      output = self._run(weights, tokens, hidden, cache, logits=True, **where)
      return self.over_target_vocabulary(output.logits, weights.head.ids), output.hidden, output.cache

    return step


@dataclasses.dataclass(frozen=True)
class Eagle3Drafter(EagleDrafter):
  """The same with a head of EAGLE-3."""

  name: ClassVar[str] = "eagle3"


def eagle(**options: Any) -> EagleDrafter:
  """An `EagleDrafter`; see `_made`."""
  return _made(EagleDrafter, **options)


def eagle3(**options: Any) -> Eagle3Drafter:
  """An `Eagle3Drafter`; see `_made`."""
  return _made(Eagle3Drafter, **options)


def _made(
  kind: type[EagleDrafter],
  *,
  window: int,
  branching: Sequence[int] = (),
  nodes: int | None = None,
  beam: int | None = None,
  **options: Any,
) -> Any:
  """A drafter over a chain of ``window`` drafts, or a tree as deep; see `tree_drafter.shaped`.

  Args:
    **options: fields of `EagleDrafter`.

  Raises:
    ValueError: naming the field, the value and the limit.
  """
  return kind(**shaped(kind.name, window=window, branching=branching, nodes=nodes, beam=beam, **options))
