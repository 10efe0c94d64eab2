"""Trees whose shape follows the draft's own probabilities (EAGLE-2, Li et al. 2024, arXiv 2406.16858).

A node's value is the product of the draft's probabilities along its path, a guess of its chance to be
accepted. **Expand**: of the candidates of a level the ``beam`` of highest value are fed, and each offers its
``beam`` most likely children, the candidates of the next level. **Re-rank**: of all candidates of all levels
the N - 1 of highest value are proposed.

What is proposed is a tree: a child's value is at most its parent's (a probability is at most 1, and rounding
keeps that), and where they are equal the parent goes first, being of an earlier level. So what outranks the
last candidate taken holds, with each node, its parent.

The paper's ablations are options: to expand by a node's own probability in place of its value, and to propose
what was expanded, level by level, without ranking it again. They change how much is accepted, not the law.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import processors
from specjax.base import DraftContext, Proposal
from specjax.drafters.step import Grown, Start, Step, may_have_children
from specjax.sampling import Settings
from specjax.tree import DynamicTree, TreeBudget, pack_bits

Array = jax.Array

# By what the nodes of a level are picked that are expanded: their path's value, or their own probability.
Expand = Literal["value", "confidence"]


class _Fed(NamedTuple):
  """The K nodes of a level that are expanded, best first: fed, unless the level is the last.

  ``tokens [B, K]``, ``hidden [B, K, D]`` (of their parents) or None, ``values [B, K]``, logarithms,
  ``paths [B, K, G]``, ``seen`` bool ``[B, K, R]``, scratch rows that each sees, ``number [B, K]`` among the
  candidates.
  """

  tokens: Array
  hidden: Array | None
  values: Array
  paths: Array
  seen: Array
  number: Array


class _Candidates(NamedTuple):
  """All M candidates, level by level, the root first: ``tokens, values, parents [B, M]``, and ``fed [B, R]``,
  the candidate of each scratch row, -1 where there is none."""

  tokens: Array
  values: Array
  parents: Array
  fed: Array


@dataclasses.dataclass(frozen=True)
class DynamicGrowth:
  """Grows a tree a row.

  The probabilities are the draft's, processed along each node's path with the row's own settings, as those of
  the target will be. A greedy row's would be 0 and 1: its processed logits are taken at temperature 1.

  Attributes:
    budget: N and G.
    beam: K, nodes fed a level and children that each of them offers.
    confidence: nodes behind which the draft gives its most likely token less than this (before temperature
      and cut-offs) get no children.
    max_length: positions the draft was made for; None is no limit.
    expand: see `Expand`.
    rerank: propose the best of all candidates; if not, the expanded ones, level by level, best first.
  """

  budget: TreeBudget
  beam: int
  confidence: float = 0.0
  max_length: int | None = None
  expand: Expand = "value"
  rerank: bool = True

  @staticmethod
  def num_candidates(depth: int, beam: int) -> int:
    """M, the root included."""
    return 1 + beam + (depth - 1) * beam * beam

  @staticmethod
  def num_rows(depth: int, beam: int) -> int:
    """Nodes that are fed, the root included."""
    return 1 + (depth - 1) * beam

  def __call__(self, step: Step, start: Start, context: DraftContext) -> Grown:
    """One round's tree behind ``context.root``."""
    fed, candidates = self._begin(start, context)
    depth, beam = self.budget.max_depth, self.beam

    def grow(carry):
      cache, fed, candidates, level = carry  # `level` is the depth of the nodes that are fed
      first = (level - 1) * beam
      own = jnp.arange(fed.seen.shape[-1]) == (first + jnp.arange(beam))[:, None]
      fed = fed._replace(seen=fed.seen | own)
      logits, hidden, cache = step(
        fed.tokens,
        fed.hidden,
        cache,
        depths=jnp.full(beam, level - 1),  # behind the root, which the length counts
        ancestors=pack_bits(fed.seen),
        scratch=first,
      )
      tokens, values, likely = self._offers(logits, context, fed)
      base = 1 + beam + (level - 1) * beam * beam
      put = lambda all, new, at: jax.lax.dynamic_update_slice(all, new, (0, at))
      candidates = _Candidates(
        tokens=put(candidates.tokens, tokens, base),
        values=put(candidates.values, values, base),
        parents=put(candidates.parents, jnp.repeat(fed.number, beam, axis=1), base),
        fed=put(candidates.fed, fed.number, first),
      )
      return cache, self._best(tokens, values, likely, hidden, fed, base, level), candidates, level + 1

    # Ends where no row has a node to draft behind.
    more = lambda carry: (carry[3] < depth) & jnp.any(carry[1].values > -jnp.inf)
    carry = (start.cache, fed, candidates, jnp.int32(1))
    if depth > 1:
      carry = jax.lax.while_loop(more, grow, carry)
    cache, last, candidates, _ = carry
    proposal, rows = self._proposed(context, candidates, self._ranks(candidates, last))
    return Grown(proposal, cache, rows)

  def _begin(self, start: Start, context: DraftContext) -> tuple[_Fed, _Candidates]:
    """The root's children, all of which are fed, and candidates without any more."""
    batch, beam = context.root.shape[0], self.beam
    depth = self.budget.max_depth
    rows = max(depth - 1, 1) * beam  # a tree of one level feeds none, but no array is empty
    zeros = lambda *shape, dtype=jnp.int32: jnp.zeros((batch, *shape), dtype)
    root = _Fed(
      tokens=context.root[:, None],
      hidden=None,
      values=jnp.where(start.ready, 0.0, -jnp.inf)[:, None],
      paths=jnp.full((batch, 1, depth), -1, jnp.int32),
      seen=zeros(1, rows, dtype=bool),
      number=zeros(1),
    )
    tokens, values, likely = self._offers(start.logits, context, root)
    spare = ((0, 0), (0, (depth - 1) * beam * beam))
    of_root = lambda of, first: jnp.concatenate([first, of], axis=1)
    candidates = _Candidates(
      tokens=jnp.pad(of_root(tokens, root.tokens), spare),
      values=jnp.pad(of_root(values, zeros(1, dtype=jnp.float32)), spare, constant_values=-jnp.inf),
      parents=zeros(self.num_candidates(depth, beam)),
      fed=zeros(rows) - 1,
    )
    return self._best(tokens, values, likely, start.hidden, root, 1, 0), candidates

  def _offers(self, logits: Array, context: DraftContext, fed: _Fed) -> tuple[Array, Array, Array]:
    """Each fed node's ``beam`` likeliest children, ``[B, F · K]``: tokens, values, own log-probabilities.

    Those that are not there have -inf.
    """
    processed = processors.process(logits, context, fed.paths)
    usable = may_have_children(logits, processed, fed.values > -jnp.inf, self.confidence)
    likely, tokens = jax.lax.top_k(processed.probs(_softened(context.settings)), self.beam)
    found = usable[..., None] & (likely > 0)  # processing may leave fewer
    own = jnp.where(found, jnp.log(likely), -jnp.inf)
    values = jnp.where(found, fed.values[..., None] + jnp.log(likely), -jnp.inf)
    flat = lambda of: of.reshape(of.shape[0], -1)
    return flat(tokens), flat(values), flat(own)

  def _best(self, tokens, values, likely, hidden, parents: _Fed, base: Any, level: Any) -> _Fed:
    """The ``beam`` best of a level's candidates ``[B, F · K]``, whose numbers begin at ``base``.

    Args:
      tokens, values, likely: as `_offers` gives them.
      hidden: ``[B, F, D]``, what recurs from their parents, or None.
      parents: at depth ``level``.
    """
    which = jax.lax.top_k(values if self.expand == "value" else likely, self.beam)[1]
    tokens, values = (jnp.take_along_axis(of, which, axis=1) for of in (tokens, values))
    parent = which // self.beam
    of = lambda field: jnp.take_along_axis(field, parent[..., None], axis=1)
    behind = jnp.arange(self.budget.max_depth) == level
    return _Fed(
      tokens=tokens,
      hidden=None if hidden is None else of(hidden),
      values=values,
      paths=jnp.where(behind, tokens[..., None], of(parents.paths)),
      seen=of(parents.seen),
      number=base + which,
    )

  def _ranks(self, candidates: _Candidates, last: _Fed) -> Array:
    """What candidates are proposed by, ``[B, M]``, the higher the better, the root's 0; -inf: never.

    Args:
      last: the nodes of the deepest level that would be expanded next.
    """
    if self.rerank:
      return candidates.values
    fed = candidates.fed[:, : (self.budget.max_depth - 1) * self.beam]
    order = jnp.concatenate([fed, last.number], axis=1)
    # A level that was never grown has -1, and puts nothing anywhere.
    order = jnp.where(order < 0, candidates.values.shape[1], order)
    put = lambda ranks, order: ranks.at[order].max(-1.0 - jnp.arange(len(order)), mode="drop")
    ranks = jnp.full_like(candidates.values, -jnp.inf).at[:, 0].set(0.0)
    return jnp.where(candidates.values > -jnp.inf, jax.vmap(put)(ranks, order), -jnp.inf)

  def _proposed(self, context: DraftContext, candidates: _Candidates, ranks: Array) -> tuple[Proposal, Array]:
    """The N best candidates, the root among them, in their own order, so that parents come first."""
    nodes, depth, beam = self.budget.num_nodes, self.budget.max_depth, self.beam
    # Of equals `top_k` takes the first; nothing exceeds the root.
    chosen = jnp.sort(jax.lax.top_k(ranks, nodes)[1], axis=1)
    at = lambda of: jnp.take_along_axis(of, chosen, axis=1)
    valid = at(ranks) > -jnp.inf
    if self.max_length is not None:
      levels = np.arange(2, depth + 1).repeat(beam * beam)
      depths = jnp.asarray(np.concatenate([[0], np.ones(beam, int), levels]))[chosen]
      # A node was chosen by feeding the draft the position before it, which must be within its limit.
      valid &= context.length[:, None] - 2 + depths < self.max_length
    valid = valid.at[:, 0].set(True)
    # A candidate's node is the number of chosen ones before it.
    parents = jnp.sum(chosen[:, None, :] < at(candidates.parents)[:, :, None], axis=-1, dtype=jnp.int32)
    parents = jnp.where(valid, parents, 0).at[:, 0].set(-1)
    tree = DynamicTree.from_parents(parents, depth)
    proposal = Proposal(at(candidates.tokens), valid, None, tree=tree, kind="deterministic")
    was_fed = chosen[:, :, None] == candidates.fed[:, None, :]  # [B, N, R]
    rows = jnp.where(was_fed.any(axis=-1), jnp.argmax(was_fed, axis=-1) + 1, -1).astype(jnp.int32)
    return proposal, rows.at[:, 0].set(0)


def _softened(settings: Settings) -> Settings:
  """Greedy rows at temperature 1, without cut-offs."""
  either = lambda value, off: jnp.where(settings.greedy, jnp.asarray(off, value.dtype), value)
  return settings.replace(
    temperature=either(settings.temperature, 1.0),
    top_k=either(settings.top_k, 0),
    top_p=either(settings.top_p, 1.0),
    min_p=either(settings.min_p, 0.0),
  )
