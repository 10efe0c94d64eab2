"""Token trees: the shape of a draft.

A draft is a tree of nodes. Node 0 is the root, the last committed token; every other node is a
proposed token whose parent comes before it. A chain is a tree without branches and needs no code of
its own: the target verifies the N nodes in one forward, where node i sees the prefix and its own
ancestors (a bitmask), and sits at position ``n - 1 + depth[i]``.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

WORD_BITS = 32
MAX_NODES = 128


@dataclasses.dataclass(frozen=True)
class TokenTree:
  """A static topology. Hashable: it is part of a compiled program, never traced.

  Attributes:
    parents: ``parents[i]`` is the parent of node i; ``parents[0] == -1`` (the root) and
      ``parents[i] < i`` otherwise.
  """

  parents: tuple[int, ...]

  def __post_init__(self):
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

  @property
  def num_nodes(self) -> int:
    return len(self.parents)

  @functools.cached_property
  def depths(self) -> tuple[int, ...]:
    """Distance from the root, ``depths[0] == 0``."""
    depths = [0]
    for parent in self.parents[1:]:
      depths.append(depths[parent] + 1)
    return tuple(depths)

  @property
  def max_depth(self) -> int:
    """G: the most drafts one round can accept."""
    return max(self.depths)

  @property
  def is_chain(self) -> bool:
    return self.parents == tuple(range(-1, self.num_nodes - 1))

  @functools.cached_property
  def paths(self) -> np.ndarray:
    """int32 ``[N, max_depth + 1]``: the way from the root to each node, then zeros."""
    paths = np.zeros((self.num_nodes, self.max_depth + 1), np.int32)
    for node, parent in enumerate(self.parents[1:], start=1):
      depth = self.depths[node]
      paths[node, :depth] = paths[parent, :depth]
      paths[node, depth] = node
    return paths

  @functools.cached_property
  def ancestor_mask(self) -> np.ndarray:
    """Boolean ``[N, N]``: ``[i, j]`` says that node i sees node j (its ancestors and itself)."""
    mask = np.eye(self.num_nodes, dtype=bool)
    for node, parent in enumerate(self.parents[1:], start=1):
      mask[node] |= mask[parent]
    return mask

  @functools.cached_property
  def ancestors(self) -> np.ndarray:
    """uint32 ``[N, ceil(N / 32)]``: the same as a bitmask, bit j of a row is scratch row j."""
    words = -(-self.num_nodes // WORD_BITS)
    mask = np.zeros((self.num_nodes, words * WORD_BITS), dtype=np.uint64)
    mask[:, : self.num_nodes] = self.ancestor_mask
    bits = mask.reshape(self.num_nodes, words, WORD_BITS) << np.arange(WORD_BITS, dtype=np.uint64)
    return bits.sum(axis=-1).astype(np.uint32)
