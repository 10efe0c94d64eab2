"""Static trees grown by a draft level by level, one forward a level over the nodes that have children.

The draft is a `Step`: a small language model, or a head whose hidden states recur from parent to child.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import processors, sampling
from specjax.base import DraftContext, Proposal
from specjax.drafters.step import Grown, Start, Step, may_have_children
from specjax.sampling import Purpose
from specjax.tree import MAX_NODES, TokenTree, pack_bits

Array = jax.Array

Policy = Literal["sample", "sample_without_replacement", "top_k"]
KINDS = {
  "sample": "sampled",
  "sample_without_replacement": "sampled_without_replacement",
  "top_k": "deterministic",
}


class _Level(NamedTuple):
  """One forward of the draft: nodes of one depth that have children, and those children.

  Numpy constants; levels of one shape are stacked and looped over.
  """

  depth: np.ndarray  # int32 [], of the children
  fed: np.ndarray  # int32 [F], places of the fed nodes among the nodes of their depth
  first_row: np.ndarray  # int32 [], scratch row of the first fed node, behind the root's
  ancestors: np.ndarray  # uint32 [F, W], over scratch rows behind the root's
  parent: np.ndarray  # int32 [C], which fed node each child has
  rank: np.ndarray  # int32 [C], its place among its siblings
  nodes: np.ndarray  # int32 [F, K], the child of each rank, or a number that no node has


@dataclasses.dataclass(frozen=True)
class Plan:
  """How a topology is grown: static tables of a tree.

  Only nodes with children are fed, in the order of their depth; the draft's cache has rows for these.

  Attributes:
    levels: one a forward.
    order: nodes in the order they are drafted, the root first.
    row: of each node, its scratch row: 0 the root, then fed nodes in order; a leaf has -1.
  """

  levels: tuple[_Level, ...]
  order: tuple[int, ...]
  row: tuple[int, ...]

  @property
  def num_rows(self) -> int:
    """Scratch rows of a round: nodes that are fed."""
    return max(self.row) + 1


@functools.lru_cache
def plan(tree: TokenTree) -> Plan:
  fed = [node for level in tree.levels for node in level if tree.children[node]]
  row = np.full(tree.num_nodes, -1)
  row[fed] = np.arange(len(fed))
  words = pack_bits(tree.ancestor_mask[np.ix_(fed[1:], fed[1:])])
  levels, order = [], [0]
  for depth, members in enumerate(tree.levels[:-1], start=1):
    parents = [node for node in members if tree.children[node]]
    children = tree.levels[depth]
    most = max(len(tree.children[node]) for node in parents)
    # Where there is no child, a number of its own: what is drawn with it is not used.
    spare = itertools.count(tree.num_nodes + MAX_NODES * depth)
    nodes = [
      (*tree.children[node], *itertools.islice(spare, most - len(tree.children[node]))) for node in parents
    ]
    rows = row[parents] - 1  # the root's own row is part of the prefix by then
    levels.append(
      _Level(
        depth=np.int32(depth),
        fed=np.array([members.index(node) for node in parents], np.int32),
        first_row=np.int32(max(rows[0], 0)),
        ancestors=words[rows] if depth > 1 else np.zeros((1, 0), np.uint32),
        parent=np.array([parents.index(tree.parents[node]) for node in children], np.int32),
        rank=np.array([tree.children[tree.parents[node]].index(node) for node in children], np.int32),
        nodes=np.array(nodes, np.int32),
      )
    )
    order.extend(children)
  return Plan(tuple(levels), tuple(order), tuple(row.tolist()))


def _runs(levels: Sequence[_Level]) -> list[list[_Level]]:
  """Neighbouring levels that grow in the same way, together: a chain is one run, and one loop."""
  way = lambda level: (level.fed.tobytes(), level.parent.tobytes(), level.rank.tobytes(), level.nodes.shape)
  return [list(run) for _, run in itertools.groupby(levels, key=way)]


class _Children(NamedTuple):
  """Drafted nodes of one level.

  ``tokens, found [B, C]``, ``paths [B, C, G]`` as `processors.process` takes them, ``hidden [B, C, D]``, what
  recurs from their parents, or None, and the parents' ``q [B, F, V]`` or None.
  """

  tokens: Array
  found: Array
  paths: Array
  hidden: Array | None
  q: Array | None


@dataclasses.dataclass(frozen=True)
class Growth:
  """Grows a static tree.

  Attributes:
    tree: what to grow; a chain or with branches.
    policy: how a node's children are chosen. ``sample``: each drawn from the draft's distribution,
      processed with the row's own settings, which is reported as q. ``sample_without_replacement``: the
      same without the tokens of elder siblings; a child that finds nothing left is not proposed.
      ``top_k``: the most likely tokens, a deterministic draft.
    confidence: nodes below one where the draft gives its most likely token less than this (before
      temperature and cut-offs) are not proposed. It looks at the distribution, not at what is drawn from it,
      which would bias the law (AdaEDL; Kangaroo stops in this way).
    max_length: positions the draft was made for; None is no limit.
  """

  tree: TokenTree
  policy: Policy
  confidence: float = 0.0
  max_length: int | None = None

  def __call__(self, step: Step, start: Start, context: DraftContext) -> Grown:
    """One round's tree behind ``context.root``."""
    first, *deeper = plan(self.tree).levels
    paths = jnp.full((*context.root.shape, 1, self.tree.max_depth), -1, jnp.int32)
    ready = start.ready[:, None]
    drafted = [self._children(start.logits, start.hidden, context, first, paths, ready)]
    cache = start.cache
    for run in _runs(deeper):
      cache, grown = self._grow(step, cache, context, drafted[-1], run)
      drafted.extend(grown)
    return Grown(self._proposal(context, drafted), cache, np.array(plan(self.tree).row, np.int32))

  def _grow(self, step: Step, cache: Any, context, parents: _Children, run: list[_Level]):
    """Grows the levels of a run behind ``parents``, the nodes of the level before."""
    feed = lambda nodes: jax.tree.map(
      lambda of: of[:, run[0].fed], (nodes.tokens, nodes.paths, nodes.found, nodes.hidden)
    )

    def one(carry, level):
      cache, fed, paths, found, hidden = carry
      logits, hidden, cache = step(
        fed,
        hidden,
        cache,
        depths=jnp.full(fed.shape[1], level.depth - 2),  # behind the root, which the length counts
        ancestors=level.ancestors,
        scratch=level.first_row,
      )
      # Of the fields, only these change along a run.
      level = run[0]._replace(depth=level.depth, nodes=level.nodes)
      children = self._children(logits, hidden, context, level, paths, found)
      # Of the last level of a run nothing is fed by this pattern, and what is made up here is not used.
      return (cache, *feed(children)), children

    start = (cache, *feed(parents))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *run)
    at = lambda tree, i: jax.tree.map(lambda leaf: leaf[i], tree)
    grown = jax.eval_shape(lambda start: one(start, run[0])[1], start)
    grown = jax.tree.map(lambda leaf: jnp.zeros((len(run), *leaf.shape), leaf.dtype), grown)

    def grow(carry):
      start, grown, _, i = carry
      start, children = one(start, at(stacked, i))
      grown = jax.tree.map(lambda all, new: all.at[i].set(new), grown, children)
      return start, grown, jnp.any(children.found), i + 1

    # Ends where no row has a node to draft behind.
    more = lambda carry: carry[2] & (carry[3] < len(run))
    begin = (start, grown, jnp.any(parents.found), jnp.int32(0))
    (cache, *_), grown, _, _ = jax.lax.while_loop(more, grow, begin)
    return cache, [at(grown, i) for i in range(len(run))]

  def _children(self, logits, hidden, context: DraftContext, level: _Level, paths, found) -> _Children:
    """Chooses the children of the fed nodes.

    Args:
      logits: ``[B, F, V]`` behind them.
      hidden: ``[B, F, D]``, what recurs from them, or None.
      paths: ``[B, F, G]`` to them.
      found: bool ``[B, F]``, those that are proposed; others have no children.
    """
    processed = processors.process(logits, context, paths)
    usable = may_have_children(logits, processed, found, self.confidence)
    ranks = level.nodes.shape[1]
    if self.policy == "top_k":
      if ranks == 1:
        tokens, found = processed.argmax()[..., None], usable[..., None]
      else:
        likely, tokens = jax.lax.top_k(processed.logits, ranks)
        found = usable[..., None] & (likely > -jnp.inf)  # processing may leave fewer
      q = None
    else:
      q = left = processed.probs(context.settings)
      at = jnp.broadcast_to(context.length[:, None], q.shape[:2])
      tokens, found = [], []
      for rank in range(ranks):
        found.append(usable & (left.sum(axis=-1) > 0))
        u = sampling.uniform(context.settings.seed, Purpose.DRAFT, at, level.nodes[:, rank])
        tokens.append(sampling.draw(left, u))
        if self.policy == "sample_without_replacement":
          left = jnp.where(jnp.arange(q.shape[-1]) == tokens[-1][..., None], 0.0, left)
      tokens, found = jnp.stack(tokens, axis=-1), jnp.stack(found, axis=-1)
    tokens, found = tokens[:, level.parent, level.rank], found[:, level.parent, level.rank]
    behind = jnp.arange(paths.shape[-1]) == level.depth - 1
    paths = jnp.where(behind, tokens[..., None], paths[:, level.parent])
    return _Children(tokens, found, paths, None if hidden is None else hidden[:, level.parent], q)

  def _proposal(self, context: DraftContext, drafted: list[_Children]) -> Proposal:
    table = plan(self.tree)
    by_node = np.argsort(table.order)
    tokens = jnp.concatenate([context.root[:, None], *(level.tokens for level in drafted)], axis=1)
    found = [jnp.ones_like(context.active)[:, None], *(level.found for level in drafted)]
    valid = jnp.concatenate(found, axis=1)[:, by_node]
    if self.max_length is not None:
      # A node was drawn by feeding the draft the position before it, which must be within its limit.
      valid &= context.length[:, None] - 2 + self.tree.depths < self.max_length
    q = None
    if self.policy != "top_k":
      # By parent: fed nodes are the first of a tree numbered by level; else a leaf shows another's row.
      q = jnp.concatenate([level.q for level in drafted], axis=1)
      row = np.maximum(table.row, 0)
      if row[: q.shape[1]].tolist() != list(range(q.shape[1])):
        q = q[:, row]
    valid = valid.at[:, 0].set(True)
    return Proposal(tokens[:, by_node], valid, q, tree=self.tree, kind=KINDS[self.policy])
