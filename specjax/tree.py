"""Token trees: the shape of a draft.

A draft is a tree of nodes. Node 0 is the root, the last committed token; every other node is a
proposed token whose parent comes before it. The target verifies the N nodes in one forward, where node
i sees the prefix and its own ancestors (a bitmask), and sits at position ``n - 1 + depth[i]``.

`TokenTree` is static: part of the compiled program, checked when made. `DynamicTree` is an array a row,
with a fixed budget of nodes: every row of every round has a shape of its own. Both answer the same
questions, the static one with numpy constants ``[N, …]``, the dynamic one with arrays ``[B, N, …]``, so
what is written against them serves both. A chain is a tree without branches and needs no code of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array

WORD_BITS = 32
MAX_NODES = 128


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class TokenTree:
  """A static topology: hashable, a pytree without leaves.

  Attributes:
    parents: ``parents[i]`` is the parent of node i; ``parents[0] == -1`` (the root) and
      ``0 <= parents[i] < i`` otherwise.
  """

  parents: tuple[int, ...]

  def __post_init__(self):
    object.__setattr__(self, "parents", tuple(map(int, self.parents)))
    if not self.parents or self.parents[0] != -1:
      raise ValueError(f"TokenTree.parents must start with -1 (the root), got {self.parents[:3]}")
    if len(self.parents) > MAX_NODES:
      raise ValueError(f"TokenTree has {len(self.parents)} nodes; the limit is {MAX_NODES}")
    for node, parent in enumerate(self.parents[1:], start=1):
      if not 0 <= parent < node:
        raise ValueError(f"TokenTree.parents[{node}] = {parent}; it must be in [0, {node})")

  @classmethod
  def chain(cls, window: int) -> TokenTree:
    """The root and ``window`` drafts in a row (``window = 0`` is plain decoding)."""
    if not 0 <= window < MAX_NODES:
      raise ValueError(f"window = {window}; it must be in [0, {MAX_NODES - 1}]")
    return cls(tuple(range(-1, window)))

  @classmethod
  def from_paths(cls, paths: Iterable[Sequence[int]]) -> TokenTree:
    """A tree from the list of its nodes, each named by its path, as Medusa's choices are written.

    ``(0, 2)`` is the third child of the root's first child. Nodes are numbered level by level.

    Args:
      paths: one a node, the root left out, in any order.

    Raises:
      ValueError: a path that is empty, given twice, or whose parent or elder sibling is missing (ranks
        of siblings count from 0 without gaps).
    """
    paths = [tuple(path) for path in paths]
    known = set(paths)
    if len(known) != len(paths):
      twice = next(path for path in paths if paths.count(path) > 1)
      raise ValueError(f"TokenTree.from_paths: path {twice} is given twice")
    for path in paths:
      if not path or any(not isinstance(rank, int) or rank < 0 for rank in path):
        raise ValueError(f"TokenTree.from_paths: path {path}; it must hold ranks of at least 0, and one")
      for before in (path[:-1], (*path[:-1], path[-1] - 1)):
        if before and before[-1] >= 0 and before not in known:
          raise ValueError(f"TokenTree.from_paths: path {path} needs {before}, which is missing")
    ordered = sorted(paths, key=lambda path: (len(path), path))
    number = {path: node for node, path in enumerate([(), *ordered])}
    return cls((-1, *(number[path[:-1]] for path in ordered)))

  @classmethod
  def cartesian(cls, branching: Sequence[int]) -> TokenTree:
    """Every node at depth d has ``branching[d]`` children."""
    _check_widths("branching", branching)
    parents, level = [-1], range(1)
    for count in branching:
      start = len(parents)
      parents.extend(parent for parent in level for _ in range(count))
      level = range(start, len(parents))
      if len(parents) > MAX_NODES:
        raise ValueError(f"TokenTree: branching {tuple(branching)} makes more than {MAX_NODES} nodes")
    return cls(tuple(parents))

  @classmethod
  def of_widths(cls, widths: Sequence[int]) -> TokenTree:
    """``widths[d - 1]`` nodes at depth d, given to the likeliest places first.

    A place is (parent, rank); what counts is the sum of ranks along its path, a node's first child being
    its likeliest. So with 4, 8, … the root's first child has 4 children, its fourth none.
    """
    _check_widths("widths", widths)
    paths, level = [], [()]
    for width in widths:
      places = ((*path, rank) for path in level for rank in range(width))
      level = sorted(places, key=lambda path: (sum(path), path))[:width]
      paths.extend(level)
    return cls.from_paths(paths)

  @property
  def num_nodes(self) -> int:
    return len(self.parents)

  @property
  def num_rows(self) -> int:
    """Rows behind the committed ones that a buffer must have room for: one a node."""
    return self.num_nodes

  @functools.cached_property
  def depths(self) -> np.ndarray:
    """int32 ``[N]``: distance from the root, ``depths[0] == 0``."""
    return self.ancestor_mask.sum(axis=1, dtype=np.int32) - 1

  @property
  def max_depth(self) -> int:
    """G: the most drafts one round can accept."""
    return int(self.depths.max())

  @property
  def is_chain(self) -> bool:
    return self.parents == tuple(range(-1, self.num_nodes - 1))

  @functools.cached_property
  def children(self) -> tuple[tuple[int, ...], ...]:
    """Of each node, in order: a child's rank is its place here."""
    children = [[] for _ in self.parents]
    for node, parent in enumerate(self.parents[1:], start=1):
      children[parent].append(node)
    return tuple(map(tuple, children))

  @functools.cached_property
  def levels(self) -> tuple[tuple[int, ...], ...]:
    """Nodes by depth, the root first."""
    return tuple(tuple(np.flatnonzero(self.depths == d).tolist()) for d in range(self.max_depth + 1))

  @functools.cached_property
  def paths(self) -> np.ndarray:
    """int32 ``[N, G + 1]``: the way from the root to each node, then zeros."""
    paths = np.zeros((self.num_nodes, self.max_depth + 1), np.int32)
    for node in range(self.num_nodes):
      way = np.flatnonzero(self.ancestor_mask[node])
      paths[node, : len(way)] = way
    return paths

  @functools.cached_property
  def ancestor_mask(self) -> np.ndarray:
    """bool ``[N, N]``: ``[i, j]`` says that node i sees node j (its ancestors and itself)."""
    mask = np.eye(self.num_nodes, dtype=bool)
    for node, parent in enumerate(self.parents[1:], start=1):
      mask[node] |= mask[parent]
    return mask

  @functools.cached_property
  def ancestors(self) -> np.ndarray:
    """uint32 ``[N, ceil(N / 32)]``: the same as a bitmask, bit j of a row is scratch row j."""
    return pack_bits(self.ancestor_mask)

  def of_parent(self, values: Array) -> Array:
    """``values [B, N]`` → what each node's parent has (the root: its own)."""
    return values[:, np.maximum(self.parents, 0)]

  def path_to(self, node: Array) -> Array:
    """int32 ``[B, G + 1]``: the way from the root to ``node [B]``, then zeros."""
    return jnp.asarray(self.paths)[node]

  def path_tokens(self, tokens: Array) -> Array:
    """int32 ``[B, N, G]``: of ``tokens [B, N]`` those behind the root on the way to each node, then -1."""
    return jnp.where(_on_path(self), tokens[:, self.paths[:, 1:]], -1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DynamicTree:
  """A topology a row, N nodes each: what a drafter shapes while it drafts. Made by `from_parents`.

  Nodes a row does not use are children of the root that the proposal marks invalid.

  Attributes:
    parents: int32 ``[B, N]``; the root's is -1.
    ancestor_mask: bool ``[B, N, N]``; ``[b, i, j]`` says that node i sees node j.
    max_depth: G; no node is deeper.
  """

  parents: Array
  ancestor_mask: Array
  max_depth: int = dataclasses.field(metadata=dict(static=True))

  is_chain = False

  @classmethod
  def from_parents(cls, parents: Array, max_depth: int) -> DynamicTree:
    """The tree of ``parents [B, N]``, parents before children, none deeper than ``max_depth``.

    Values are traced and cannot be checked: right by construction, or wrong.
    """
    nodes = parents.shape[1]
    mask = jnp.broadcast_to(jnp.eye(nodes, dtype=bool), (*parents.shape, nodes))
    # Pointer doubling: `up` is the 2^i-th ancestor, and the mask holds the 2^i nearest of them.
    up = jnp.maximum(parents, 0)
    for _ in range(max_depth.bit_length()):
      mask |= jnp.take_along_axis(mask, up[:, :, None], axis=1)
      up = jnp.take_along_axis(up, up, axis=1)
    return cls(parents.astype(jnp.int32), mask, max_depth)

  @property
  def num_nodes(self) -> int:
    return self.parents.shape[1]

  @property
  def depths(self) -> Array:
    """int32 ``[B, N]``."""
    return self.ancestor_mask.sum(axis=-1, dtype=jnp.int32) - 1

  @property
  def ancestors(self) -> Array:
    """uint32 ``[B, N, ceil(N / 32)]``."""
    return pack_bits(self.ancestor_mask)

  def of_parent(self, values: Array) -> Array:
    """``values [B, N]`` → what each node's parent has (the root: its own)."""
    return jnp.take_along_axis(values, jnp.maximum(self.parents, 0), axis=1)

  def path_to(self, node: Array) -> Array:
    """int32 ``[B, G + 1]``: the way from the root to ``node [B]``, then zeros."""
    on_path = jnp.take_along_axis(self.ancestor_mask, node[:, None, None], axis=1)  # [B, 1, N]
    at_depth = self.depths[:, None, :] == jnp.arange(self.max_depth + 1)[:, None]  # [B, G + 1, N]
    number = jnp.arange(self.num_nodes, dtype=jnp.int32)
    return jnp.sum(jnp.where(on_path & at_depth, number, 0), axis=-1, dtype=jnp.int32)

  def path_tokens(self, tokens: Array) -> Array:
    """int32 ``[B, N, G]``: of ``tokens [B, N]`` those behind the root on the way to each node, then -1."""
    at_depth = self.depths[:, None, None, :] == jnp.arange(1, self.max_depth + 1)[:, None]  # [B, 1, G, N]
    seen = self.ancestor_mask[:, :, None, :] & at_depth
    found = jnp.sum(jnp.where(seen, tokens[:, None, None, :], 0), axis=-1, dtype=jnp.int32)
    return jnp.where(_on_path(self), found, -1)


@dataclasses.dataclass(frozen=True)
class TreeBudget:
  """What a drafter of dynamic trees announces.

  Attributes:
    num_nodes: N, the root included.
    max_depth: G.
    drafted: rows that a round writes into a cache of the drafter's own; it may draft more nodes than it
      proposes.
  """

  num_nodes: int
  max_depth: int
  drafted: int = 0

  is_chain = False

  def __post_init__(self):
    if not 1 <= self.num_nodes <= MAX_NODES:
      raise ValueError(f"TreeBudget.num_nodes = {self.num_nodes}; it must be in [1, {MAX_NODES}]")
    if not 0 <= self.max_depth < self.num_nodes:
      raise ValueError(f"TreeBudget.max_depth = {self.max_depth}; it must be in [0, {self.num_nodes - 1}]")

  @property
  def num_rows(self) -> int:
    """Rows behind the committed ones that a buffer must have room for."""
    return max(self.num_nodes, self.drafted)


def alike(trees: Sequence[TokenTree | TreeBudget]) -> tuple[tuple[int, ...], ...]:
  """Indices of topologies whose drafts begin alike: chains, shortest first; every other is its own group."""
  chains = sorted((i for i, tree in enumerate(trees) if tree.is_chain), key=lambda i: trees[i].num_nodes)
  others = ((i,) for i, tree in enumerate(trees) if not tree.is_chain)
  return (*((tuple(chains),) if chains else ()), *others)


def _on_path(tree: TokenTree | DynamicTree):
  """bool ``[…, N, G]``: whether a node's path is that long."""
  return tree.depths[..., None] > np.arange(tree.max_depth)


def pack_bits(mask):
  """bool ``[..., N]`` → uint32 ``[..., ceil(N / 32)]``, bit j of word w is entry 32 w + j."""
  xp = np if isinstance(mask, np.ndarray) else jnp
  words = -(-mask.shape[-1] // WORD_BITS)
  padding = [(0, 0)] * (mask.ndim - 1) + [(0, words * WORD_BITS - mask.shape[-1])]
  bits = xp.pad(mask, padding).reshape(*mask.shape[:-1], words, WORD_BITS).astype(xp.uint32)
  return (bits << xp.arange(WORD_BITS, dtype=xp.uint32)).sum(axis=-1, dtype=xp.uint32)


def _check_widths(name: str, widths: Sequence[int]) -> None:
  if not len(widths) or any(not isinstance(width, int) or width < 1 for width in widths):
    raise ValueError(f"TokenTree: {name} = {tuple(widths)}; it must hold integers of at least 1, and one")
