"""Prompt lookup: copy what followed the same n-gram earlier in the text (Saxena 2023).

All on device, over the buffer of committed tokens; no state and no host work.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from specjax.base import DraftContext, Proposal, StatelessDrafter
from specjax.tree import TokenTree


@dataclasses.dataclass(frozen=True)
class PromptLookup(StatelessDrafter):
  """Proposes the ``window`` tokens behind an earlier occurrence of the text's last tokens.

  Which occurrence: the one that shares the longest suffix with the text, up to ``max_ngram`` tokens;
  among equals the latest. Shorter than ``min_ngram``: nothing is proposed. The suffix never matches
  itself. Where the occurrence is fewer than ``window`` tokens before the end, the copy runs on into
  what it has just copied, so a period is continued at its full length.

  Attributes:
    window: G, drafts a round.
    max_ngram: longest suffix compared.
    min_ngram: shortest suffix that counts. With 1 a few more drafts are accepted, but twice as many rounds
      pay for a wide verify.
  """

  window: int = 5
  max_ngram: int = 3
  min_ngram: int = 2

  name: ClassVar[str] = "prompt_lookup"
  kind: ClassVar[str] = "deterministic"

  def __post_init__(self):
    if self.window < 1:
      raise ValueError(f"window = {self.window}; prompt_lookup needs at least 1")
    if not 1 <= self.min_ngram <= self.max_ngram:
      raise ValueError(
        f"min_ngram = {self.min_ngram}, max_ngram = {self.max_ngram}; need 1 <= min_ngram <= max_ngram"
      )

  @property
  def tree(self) -> TokenTree:
    return TokenTree.chain(self.window)

  def propose(self, weights, state, context: DraftContext, target_cache):
    buffer, length = context.tokens, context.length[:, None]
    capacity = buffer.shape[1]
    position = jnp.arange(capacity)[None, :]
    # suffix[b, i] = how many of the last tokens equal those that end at position i.
    suffix = jnp.zeros(buffer.shape, jnp.int32)
    matching = position < length - 1
    for back in range(self.max_ngram):
      last = jnp.take_along_axis(buffer, jnp.maximum(length - 1 - back, 0), axis=1)
      shifted = jnp.pad(buffer, ((0, 0), (back, 0)))[:, :capacity]
      matching &= (shifted == last) & (position >= back)
      suffix += matching
    score = jnp.max(suffix * capacity + position * (suffix > 0), axis=1, keepdims=True)
    longest, end = score // capacity, score % capacity
    found = longest >= self.min_ngram

    period = jnp.maximum(length - 1 - end, 1)
    source = end + 1 + jnp.arange(self.window)[None, :] % period
    drafts = jnp.take_along_axis(buffer, jnp.clip(source, 0, capacity - 1), axis=1)
    tokens = jnp.concatenate([context.root[:, None], drafts], axis=1)
    valid = jnp.concatenate([jnp.ones_like(found), jnp.broadcast_to(found, drafts.shape)], axis=1)
    return Proposal(tokens, valid, q=None, tree=self.tree, kind=self.kind), state, target_cache
