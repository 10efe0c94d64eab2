"""Two-model drafting: a small language model proposes a chain (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import flax.struct
import jax
import jax.numpy as jnp

from specjax import cache as kv
from specjax import sampling
from specjax.base import DraftContext, Proposal
from specjax.sampling import Purpose
from specjax.tree import TokenTree

Array = jax.Array

# The first draft step of a round feeds the root and the row a fully accepted round left out.
_CATCH_UP = 2


@flax.struct.dataclass
class TwoModelState:
  """The draft model's cache; its length counts rows of committed tokens only.

  ``drafted [B]`` is how many rows behind it hold the drafts of the round in flight.
  """

  cache: kv.KVCache
  drafted: Array


@dataclasses.dataclass(frozen=True)
class TwoModel:
  """Any model with the target's vocabulary as the draft; weights are that model.

  The draft may differ in everything else: depth, heads, padding of the vocabulary, length limit. Where
  its own limit ends it proposes nothing, and decoding goes on plainly.

  Attributes:
    window: G, drafts a round.
    vocab_size: width of the target's logits; q is given over it.
    num_real_tokens: ids below are real.
    max_length: positions the draft model was made for.
    policy: ``sample`` draws from the draft's distribution, processed with the row's own settings, and
      reports it as q; ``argmax`` takes its most likely token, a deterministic draft.
  """

  window: int
  vocab_size: int
  num_real_tokens: int
  max_length: int
  policy: Literal["sample", "argmax"] = "sample"

  name: ClassVar[str] = "two_model"
  taps: ClassVar[tuple[int, ...]] = ()

  def __post_init__(self):
    if self.window < 1:
      raise ValueError(f"window = {self.window}; two_model needs at least 1")
    if self.policy not in ("sample", "argmax"):
      raise ValueError(f"policy = {self.policy!r}; it must be sample or argmax")

  @property
  def kind(self) -> str:
    return "deterministic" if self.policy == "argmax" else "sampled"

  @property
  def tree(self) -> TokenTree:
    return TokenTree.chain(self.window)

  def init(self, weights, batch, slots):
    return TwoModelState(weights.init_cache(batch, slots), jnp.zeros((batch,), jnp.int32))

  def prefill(self, weights, state, tokens, taps, valid):
    cache = weights(tokens, state.cache, logits=False).cache
    return state.replace(cache=kv.commit(cache, None, valid.sum(axis=1, dtype=jnp.int32)))

  def propose(self, weights, state, context: DraftContext, target_cache):
    cache = self._catch_up(weights, state.cache, context)
    # One or two rows are missing: the root, and before it the last draft of a fully accepted round.
    missing = context.length - cache.length
    at = cache.length[:, None] + jnp.arange(_CATCH_UP)
    tokens = jnp.take_along_axis(context.tokens, jnp.minimum(at, context.tokens.shape[1] - 1), axis=1)
    output = weights(tokens, cache)
    last = jnp.clip(missing - 1, 0, _CATCH_UP - 1)
    logits = jnp.take_along_axis(output.logits, last[:, None, None], axis=1)
    cache = output.cache.replace(length=context.length)
    first, q_first = self._choose(logits, context, 1)

    def step(carry, node):
      cache, token = carry
      output = weights(token[:, None], cache)
      cache = output.cache.replace(length=cache.length + 1)
      token, q = self._choose(output.logits, context, node)
      return (cache, token), (token, q)

    (cache, _), (rest, q_rest) = jax.lax.scan(step, (cache, first), jnp.arange(2, self.window + 1))
    tokens = jnp.concatenate([context.root[:, None], first[:, None], rest.T], axis=1)
    q = None
    if self.kind == "sampled":
      q = jnp.concatenate([q_first[:, None], q_rest.swapaxes(0, 1)], axis=1)
    # Node j was drawn by feeding the draft the position before it, which must be within its limit.
    fed = context.length[:, None] - 2 + jnp.arange(self.window + 1)
    valid = (fed < self.max_length).at[:, 0].set(True)
    # Back to committed rows only; a row that is not decoding keeps what it had.
    fed_to = jnp.where(context.active, jnp.maximum(context.length - 1, 0), state.cache.length)
    state = TwoModelState(cache.replace(length=fed_to), jnp.full_like(context.length, self.window))
    return Proposal(tokens, valid, q, tree=self.tree, kind=self.kind), state, target_cache

  def extend(self, weights, state, tokens, taps, valid):
    # The drafts' rows are already there; those of accepted ones stay. The last draft has none: it is
    # fed with the next root.
    kept = jnp.minimum(valid.sum(axis=1, dtype=jnp.int32), state.drafted)
    return TwoModelState(kv.commit(state.cache, None, kept), jnp.zeros_like(state.drafted))

  def _catch_up(self, weights, cache, context):
    """Feeds committed tokens in blocks until at most the last two have no row.

    Rounds that did not draft leave rows behind; with none behind this loop does not run.
    """
    block = self.window + 1
    behind = lambda cache: jnp.where(context.active, context.length - cache.length, 0)

    def feed(cache):
      at = cache.length[:, None] + jnp.arange(block)
      tokens = jnp.take_along_axis(context.tokens, jnp.minimum(at, context.tokens.shape[1] - 1), axis=1)
      output = weights(tokens, cache, logits=False)
      return kv.commit(output.cache, None, jnp.clip(behind(cache) - 1, 0, block))

    return jax.lax.while_loop(lambda cache: jnp.any(behind(cache) > _CATCH_UP), feed, cache)

  def _choose(self, logits: Array, context: DraftContext, node) -> tuple[Array, Array | None]:
    """The draft behind ``logits [B, 1, V_draft]`` and the distribution it was drawn from ``[B, V]``."""
    width = logits.shape[-1]
    logits = sampling.mask_padding(logits, min(self.num_real_tokens, width))
    if width < self.vocab_size:
      logits = jnp.pad(logits, ((0, 0), (0, 0), (0, self.vocab_size - width)), constant_values=-jnp.inf)
    logits = logits[..., : self.vocab_size]
    top, _ = sampling.peak(logits)
    if self.kind == "deterministic":
      return sampling.argmax(logits, top)[:, 0], None
    q = sampling.processed_probs(logits, top, context.settings)[:, 0]
    u = sampling.uniform(context.settings.seed, Purpose.DRAFT, context.length, node)
    return sampling.draw(q, u), q
