"""Two-model drafting: a small language model proposes (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple, get_args

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax import cache as kv
from specjax import processors, sampling
from specjax.base import DraftContext, Proposal
from specjax.sampling import Purpose
from specjax.tree import MAX_NODES, TokenTree, pack_bits

Array = jax.Array

Policy = Literal["sample", "sample_without_replacement", "top_k"]
_KINDS = {
  "sample": "sampled",
  "sample_without_replacement": "sampled_without_replacement",
  "top_k": "deterministic",
}

# The first forward of a round feeds the root and the row a fully accepted round left out.
_CATCH_UP = 2


@flax.struct.dataclass
class TwoModelState:
  """The draft model's cache; its length counts rows of committed tokens only.

  ``drafted [B]`` is how many rows behind it belong to the round in flight: the root and fed drafts.
  """

  cache: kv.KVCache
  drafted: Array


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
class _Plan:
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
def _plan(tree: TokenTree) -> _Plan:
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
  return _Plan(tuple(levels), tuple(order), tuple(row.tolist()))


def _runs(levels: Sequence[_Level]) -> list[list[_Level]]:
  """Neighbouring levels that grow in the same way, together: a chain is one run, and one loop."""
  way = lambda level: (level.fed.tobytes(), level.parent.tobytes(), level.rank.tobytes(), level.nodes.shape)
  return [list(run) for _, run in itertools.groupby(levels, key=way)]


class _Children(NamedTuple):
  """Drafted nodes of one level.

  ``tokens, found [B, C]``, ``paths [B, C, G]`` as `processors.process` takes them, and the parents'
  ``q [B, F, V]`` or None.
  """

  tokens: Array
  found: Array
  paths: Array
  q: Array | None


@dataclasses.dataclass(frozen=True)
class TwoModel:
  """Any model with the target's vocabulary as the draft; weights are that model.

  The draft may differ in everything else: depth, heads, padding of the vocabulary, length limit. Where
  its own limit ends it proposes nothing, and decoding goes on plainly. A tree is grown level by level,
  one forward of the draft a level, over the nodes that have children.

  Attributes:
    tree: what to grow; a chain or with branches.
    vocab_size: width of the target's logits; q is given over it.
    num_real_tokens: ids below are real.
    max_length: positions the draft model was made for.
    policy: how a node's children are chosen. ``sample``: each drawn from the draft's distribution,
      processed with the row's own settings, which is reported as q. ``sample_without_replacement``: the
      same without the tokens of elder siblings; a child that finds nothing left is not proposed.
      ``top_k``: the most likely tokens, a deterministic draft.
    confidence: nodes below one where the draft gives its most likely token less than this (before
      temperature and cut-offs) are not proposed. It looks at the distribution, not at what is drawn from it,
      which would bias the law (AdaEDL; Kangaroo stops in this way).
    implementation: of `tree_attention` in the draft model.
  """

  tree: TokenTree
  vocab_size: int
  num_real_tokens: int
  max_length: int
  policy: Policy = "sample"
  confidence: float = 0.0
  implementation: str = "auto"

  name: ClassVar[str] = "two_model"
  taps: ClassVar[tuple[int, ...]] = ()

  def __post_init__(self):
    if self.tree.num_nodes < 2:
      raise ValueError(f"two_model: the tree has {self.tree.num_nodes} node; a draft needs at least 2")
    if self.policy not in get_args(Policy):
      raise ValueError(f"policy = {self.policy!r}; it must be one of {', '.join(get_args(Policy))}")
    if not 0 <= self.confidence <= 1:
      raise ValueError(f"confidence = {self.confidence}; it must be in [0, 1]")
    most = max(map(len, self.tree.children))
    if most > self.num_real_tokens:
      raise ValueError(f"two_model: a node has {most} children; there are {self.num_real_tokens} real tokens")

  @property
  def kind(self) -> str:
    return _KINDS[self.policy]

  def init(self, weights, batch, slots):
    return TwoModelState(weights.init_cache(batch, slots), jnp.zeros((batch,), jnp.int32))

  def prefill(self, weights, state, chunk):
    cache = self._run(weights, chunk.tokens, state.cache, logits=False).cache
    return state.replace(cache=kv.commit(cache, None, chunk.valid.sum(axis=1, dtype=jnp.int32)))

  def propose(self, weights, state, context: DraftContext, target_cache):
    first, *deeper = _plan(self.tree).levels
    logits, cache = self._feed_root(weights, state.cache, context)
    root = jnp.full((*context.root.shape, 1, self.tree.max_depth), -1, jnp.int32)
    drafted = [self._children(logits, context, first, root, context.active[:, None])]
    for run in _runs(deeper):
      cache, grown = self._grow(weights, cache, context, drafted[-1], run)
      drafted.extend(grown)
    # Back to committed rows only; a row that is not decoding keeps what it had.
    fed_to = jnp.where(context.active, jnp.maximum(context.length - 1, 0), state.cache.length)
    fed = _plan(self.tree).num_rows
    fed = jnp.where(context.active, fed, 0)
    state = TwoModelState(cache.replace(length=fed_to), fed.astype(jnp.int32))
    return self._proposal(context, drafted), state, target_cache

  def extend(self, weights, state, committed):
    # The drafts' rows are already there; those of accepted ones stay. A leaf has none: it is fed with the
    # next root.
    row = jnp.asarray(_plan(self.tree).row)[committed.path]
    kept = jnp.sum(committed.valid & (row >= 0), axis=1, dtype=jnp.int32)
    kept = jnp.minimum(kept, state.drafted)
    path = None if self.tree.is_chain else jnp.maximum(row, 0)
    cache = kv.commit(state.cache, path, kept, scratch=_plan(self.tree).num_rows)
    return TwoModelState(cache, jnp.zeros_like(state.drafted))

  def _run(self, weights, tokens, cache, **kwargs):
    return weights(tokens, cache, implementation=self.implementation, **kwargs)

  def _feed_root(self, weights, cache, context) -> tuple[Array, kv.KVCache]:
    """Logits behind the root, ``[B, 1, V_draft]``, and the cache with the root's row counted in."""
    cache = self._catch_up(weights, cache, context)
    # One or two rows are missing: the root, and before it the leaf that a round ended with.
    missing = context.length - cache.length
    at = cache.length[:, None] + jnp.arange(_CATCH_UP)
    tokens = jnp.take_along_axis(context.tokens, jnp.minimum(at, context.tokens.shape[1] - 1), axis=1)
    output = self._run(weights, tokens, cache)
    last = jnp.clip(missing - 1, 0, _CATCH_UP - 1)
    logits = jnp.take_along_axis(output.logits, last[:, None, None], axis=1)
    return logits, output.cache.replace(length=context.length)

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

  def _grow(self, weights, cache, context, parents: _Children, run: list[_Level]):
    """Grows the levels of a run behind ``parents``, the nodes of the level before."""
    feed = lambda children: tuple(
      of[:, run[0].fed] for of in (children.tokens, children.paths, children.found)
    )

    def step(carry, level):
      cache, fed, paths, found = carry
      output = self._run(
        weights,
        fed,
        cache,
        depths=jnp.full(fed.shape[1], level.depth - 2),  # behind the root, which the length counts
        ancestors=level.ancestors,
        scratch=level.first_row,
      )
      # Of the fields, only these change along a run.
      level = run[0]._replace(depth=level.depth, nodes=level.nodes)
      children = self._children(output.logits, context, level, paths, found)
      # Of the last level of a run nothing is fed by this pattern, and what is made up here is not used.
      return (output.cache, *feed(children)), children

    start = (cache, *feed(parents))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *run)
    at = lambda tree, i: jax.tree.map(lambda leaf: leaf[i], tree)
    grown = jax.eval_shape(lambda start: step(start, run[0])[1], start)
    grown = jax.tree.map(lambda leaf: jnp.zeros((len(run), *leaf.shape), leaf.dtype), grown)

    def grow(carry):
      start, grown, _, i = carry
      start, children = step(start, at(stacked, i))
      grown = jax.tree.map(lambda all, new: all.at[i].set(new), grown, children)
      return start, grown, jnp.any(children.found), i + 1

    # Ends where no row has a node to draft behind.
    more = lambda carry: carry[2] & (carry[3] < len(run))
    begin = (start, grown, jnp.any(parents.found), jnp.int32(0))
    (cache, *_), grown, _, _ = jax.lax.while_loop(more, grow, begin)
    return cache, [at(grown, i) for i in range(len(run))]

  def _children(self, logits, context: DraftContext, level: _Level, paths: Array, found: Array) -> _Children:
    """Chooses the children of the fed nodes.

    Args:
      logits: ``[B, F, V_draft]`` behind them.
      paths: ``[B, F, G]`` to them.
      found: bool ``[B, F]``, those that are proposed; others have no children.
    """
    logits = self._over_target_vocabulary(logits)
    processed = processors.process(logits, context, paths)
    usable = ~processed.unusable & found
    if self.confidence > 0:
      usable &= jnp.max(jax.nn.softmax(logits, axis=-1), axis=-1) >= self.confidence
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
    return _Children(tokens, found, paths, q)

  def _over_target_vocabulary(self, logits: Array) -> Array:
    width = logits.shape[-1]
    logits = sampling.mask_padding(logits, min(self.num_real_tokens, width))
    if width < self.vocab_size:
      logits = jnp.pad(logits, ((0, 0), (0, 0), (0, self.vocab_size - width)), constant_values=-jnp.inf)
    return logits[..., : self.vocab_size]

  def _proposal(self, context: DraftContext, drafted: list[_Children]) -> Proposal:
    plan = _plan(self.tree)
    by_node = np.argsort(plan.order)
    tokens = jnp.concatenate([context.root[:, None], *(level.tokens for level in drafted)], axis=1)
    found = [jnp.ones_like(context.active)[:, None], *(level.found for level in drafted)]
    # A node was drawn by feeding the draft the position before it, which must be within its limit.
    fed = context.length[:, None] - 2 + self.tree.depths
    valid = jnp.concatenate(found, axis=1)[:, by_node] & (fed < self.max_length)
    q = None
    if self.kind != "deterministic":
      # By parent: fed nodes are the first of a tree numbered by level; else a leaf shows another's row.
      q = jnp.concatenate([level.q for level in drafted], axis=1)
      row = np.maximum(plan.row, 0)
      if row[: q.shape[1]].tolist() != list(range(q.shape[1])):
        q = q[:, row]
    return Proposal(tokens[:, by_node], valid.at[:, 0].set(True), q, tree=self.tree, kind=self.kind)


def two_model(*, window: int, branching: Sequence[int] = (), **options) -> TwoModel:
  """A `TwoModel` over a chain of ``window`` drafts, or a tree as deep.

  Args:
    window: G.
    branching: children of a node at depth 0, 1, …; deeper nodes have one.
    **options: fields of `TwoModel`.

  Raises:
    ValueError: naming the field, the value and the limit.
  """
  if not isinstance(window, int) or window < 1:
    raise ValueError(f"window = {window!r}; two_model needs an integer of at least 1")
  if not isinstance(branching, Sequence):
    raise ValueError(f"branching = {branching!r}; it must be numbers of children by depth, e.g. (3,2)")
  if len(branching) > window:
    raise ValueError(f"branching = {tuple(branching)} names {len(branching)} depths; window = {window}")
  return TwoModel(TokenTree.cartesian((*branching, *[1] * (window - len(branching)))), **options)
