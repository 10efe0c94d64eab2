"""Prompt lookup: copy what followed the same n-gram earlier in the text (Saxena 2023).

All on device, over the buffer of committed tokens; no state and no host work.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from specjax.base import DraftContext, Proposal, StatelessDrafter
from specjax.tree import MAX_NODES, DynamicTree, TokenTree, TreeBudget

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class PromptLookup(StatelessDrafter):
  """Proposes the ``window`` tokens behind earlier occurrences of the text's last tokens.

  Which occurrences: first those that share the longest suffix with the text, up to ``max_ngram`` tokens,
  among equals the latest; with ``matches`` left, those that share less. Shorter than ``min_ngram``: nothing
  is proposed. The suffix never matches itself.
  Where an occurrence is fewer than ``window`` tokens before the end, the copy runs on into what it has
  just copied, so a period is continued at its full length.

  One occurrence gives a chain. Several give a tree: their continuations merged where they begin alike,
  the best one first, until the nodes are used up.

  Attributes:
    window: G, drafts along a path.
    max_ngram: longest suffix compared.
    min_ngram: shortest suffix that counts. With 1 a few more drafts are accepted, but twice as many rounds
      pay for a wide verify.
    matches: occurrences used, at most.
    nodes: of a tree, the root included; None is ``2 · window + 1``. A chain has ``window + 1``.
  """

  window: int = 5
  max_ngram: int = 3
  min_ngram: int = 2
  matches: int = 1
  nodes: int | None = None

  name: ClassVar[str] = "prompt_lookup"
  kind: ClassVar[str] = "deterministic"

  def __post_init__(self):
    if self.window < 1:
      raise ValueError(f"window = {self.window}; prompt_lookup needs at least 1")
    if not 1 <= self.min_ngram <= self.max_ngram:
      raise ValueError(
        f"min_ngram = {self.min_ngram}, max_ngram = {self.max_ngram}; need 1 <= min_ngram <= max_ngram"
      )
    if not 1 <= self.matches <= MAX_NODES:
      raise ValueError(f"matches = {self.matches}; it must be in [1, {MAX_NODES}]")
    if self.nodes is not None and self.matches == 1:
      raise ValueError(f"nodes = {self.nodes} shapes a tree; with matches = 1 the draft is a chain")
    if self.nodes is not None and not self.window < self.nodes <= MAX_NODES:
      raise ValueError(f"nodes = {self.nodes}; it must be in [window + 1 = {self.window + 1}, {MAX_NODES}]")

  @property
  def tree(self) -> TokenTree | TreeBudget:
    if self.matches == 1:
      return TokenTree.chain(self.window)
    return TreeBudget(min(2 * self.window + 1, MAX_NODES) if self.nodes is None else self.nodes, self.window)

  def propose(self, weights, state, context: DraftContext, target_cache):
    drafts, found = self._continuations(context)
    if self.matches == 1:
      tokens = jnp.concatenate([context.root[:, None], drafts[:, 0]], axis=1)
      valid = jnp.broadcast_to(found, tokens.shape).at[:, 0].set(True)
      return Proposal(tokens, valid, q=None, tree=self.tree, kind=self.kind), state, target_cache
    tokens, valid, parents = merge(drafts, found, self.tree.num_nodes)
    tree = DynamicTree.from_parents(parents, self.window)
    proposal = Proposal(tokens.at[:, 0].set(context.root), valid, q=None, tree=tree, kind=self.kind)
    return proposal, state, target_cache

  def _continuations(self, context: DraftContext) -> tuple[Array, Array]:
    """What stands behind the best occurrences, int32 ``[B, M, G]``, and whether there is one ``[B, M]``."""
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
    score = suffix * capacity + position * (suffix > 0)
    if self.matches == 1:
      score = jnp.max(score, axis=1, keepdims=True)
    else:
      score = jax.lax.top_k(score, min(self.matches, capacity))[0]
    longest, end = score // capacity, score % capacity
    period = jnp.maximum(length - 1 - end, 1)[:, :, None]
    source = end[:, :, None] + 1 + jnp.arange(self.window) % period
    source = jnp.clip(source, 0, capacity - 1).reshape(buffer.shape[0], -1)
    drafts = jnp.take_along_axis(buffer, source, axis=1).reshape(*end.shape, self.window)
    return drafts, longest >= self.min_ngram


def merge(drafts: Array, found: Array, nodes: int) -> tuple[Array, Array, Array]:
  """Chains merged into one tree a row (a trie), first chain first, cut at ``nodes``.

  Args:
    drafts: int32 ``[B, M, G]``.
    found: bool ``[B, M]``; other chains are left out.
    nodes: N, the root included.

  Returns:
    tokens int32, valid bool and parents int32, each ``[B, N]``. The root's token is 0.
  """
  batch, matches, window = drafts.shape
  alike = drafts[:, :, None, :] == drafts[:, None, :, :]  # [B, M, M', G]
  for depth in range(1, window):
    alike = alike.at[..., depth].set(alike[..., depth] & alike[..., depth - 1])
  # A node belongs to the first chain that has it.
  owner = jnp.argmax(alike & found[:, None, :, None], axis=2)  # [B, M, G]
  new = found[:, :, None] & (owner == jnp.arange(matches)[:, None])
  number = jnp.cumsum(new.reshape(batch, -1), axis=1, dtype=jnp.int32).reshape(new.shape)
  number = jnp.take_along_axis(number, owner, axis=1)
  parent = jnp.pad(number[..., :-1], ((0, 0), (0, 0), (1, 0)))
  # A parent is numbered before its children, so what the budget cuts has nothing below it that stays.
  at = jnp.where(new, number, nodes).reshape(batch, -1)
  put = lambda into, what: into.at[jnp.arange(batch)[:, None], at].set(what.reshape(batch, -1), mode="drop")
  zeros = jnp.zeros((batch, nodes), jnp.int32)
  valid = jnp.arange(nodes) <= new.sum(axis=(1, 2))[:, None]
  return put(zeros, drafts), valid, put(zeros, parent).at[:, 0].set(-1)
