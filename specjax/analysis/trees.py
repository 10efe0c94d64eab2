"""The best shape of a draft: how long a chain, and which tree."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from specjax.analysis.checks import above, at_least, numbers, shares, whole
from specjax.analysis.expected import positional

# Costs by nodes or window: a function, or an array.
Costs = Callable[[int], float] | Sequence[float]


def best_window(rates, round_ms: Costs, draft_ms: Costs = lambda window: 0.0, *, max_window: int) -> int:
  """The window whose rounds emit most tokens a second; 0 is plain decoding. Of equals the smallest.

  Args:
    rates: α of every draft, or acceptance by position ``[G]``, the last one for all that is deeper.
    round_ms: time of a round by **nodes** 1 … max_window + 1: a function of them, or an array whose
      entry n - 1 is that of n nodes.
    draft_ms: time of drafting by **window** 1 … max_window: a function, or an array whose entry w - 1 is
      that of w drafts. Plain decoding drafts nothing. Default: free.
    max_window: the longest to look at, at least 0.

  Raises:
    ValueError: times that are not finite, a round of 0, or an array that ends too early.
  """
  max_window = whole("max_window", max_window, 0)
  rates = np.atleast_1d(shares("rates", rates, axes=(0, 1)))
  if not len(rates):
    raise ValueError("rates is empty; it must hold a rate")
  by_position = rates[np.minimum(np.arange(max_window), len(rates) - 1)]
  tokens = 1.0 + np.concatenate(([0.0], np.cumsum(np.cumprod(by_position))))
  rounds = _costs("round_ms", round_ms, max_window + 1)
  above("round_ms", float(rounds.min()), 0)
  drafts = np.concatenate(([0.0], _costs("draft_ms", draft_ms, max_window)))
  return int(np.argmax(tokens / (rounds + drafts)))


def _costs(name: str, costs: Costs, count: int) -> np.ndarray:
  """Times ``[count]`` of 1 … count."""
  if callable(costs):
    costs = [costs(number) for number in range(1, count + 1)]
  array = numbers(name, costs)
  if array.ndim != 1 or len(array) < count:
    raise ValueError(f"{name} has the shape {array.shape}; it must be ({count},) at least")
  for value in array[:count]:
    at_least(name, float(value), 0)
  return array[:count]


@dataclasses.dataclass(frozen=True)
class BestTree:
  """A tree and what is expected of it.

  Attributes:
    parents: a parent a node, numbered level by level; the root's is -1. `TokenTree` takes it.
    depth: levels below the root.
    tokens: expected tokens a round.
  """

  parents: tuple[int, ...]
  depth: int
  tokens: float

  @property
  def nodes(self) -> int:
    """The root included."""
    return len(self.parents)


def best_tree(acceptance, nodes: int, *, max_depth: int | None = None) -> BestTree:
  """The tree with most expected tokens a round of at most ``nodes`` nodes (Sequoia's dynamic programme).

  Chen et al. 2024, section 4.1: T(n, d) by the number of nodes and depth, the children of a node by rank.
  Nodes that could never be accepted are left out, so the tree may be smaller.

  Args:
    acceptance: by rank ``[K]``, or by depth and rank ``[D, K]``; see `expected.tree_tokens`.
    nodes: the root included, at least 1.
    max_depth: levels below the root; None: no limit.
  """
  nodes = whole("nodes", nodes, 1)
  depth = nodes - 1 if max_depth is None else min(whole("max_depth", max_depth, 0), nodes - 1)
  return _Programme(positional(acceptance), nodes, depth).tree(nodes)


def best_tree_under(
  acceptance, cost_of: Callable[[int, int], float], max_nodes: int, max_depth: int
) -> BestTree:
  """The tree with most expected tokens for what its round costs, over all budgets and depths.

  The best of all trees within the limits, if a tree never gets cheaper by growing. Of equals the smallest.

  Args:
    acceptance: by rank ``[K]``, or by depth and rank ``[D, K]``; see `expected.tree_tokens`.
    cost_of: ``(nodes, depth) → cost`` of a round with such a tree, draft included, above 0. ``(1, 0)`` is
      plain decoding.
    max_nodes: the root included, at least 1.
    max_depth: levels below the root, at least 0.
  """
  table = positional(acceptance)
  max_nodes, max_depth = whole("max_nodes", max_nodes, 1), whole("max_depth", max_depth, 0)
  found = {}
  for depth in range(min(max_depth, max_nodes - 1) + 1):
    programme = _Programme(table, max_nodes, depth)
    for nodes in range(1, max_nodes + 1):
      tree = programme.tree(nodes)
      found.setdefault((tree.nodes, tree.depth), tree)
  best, most = None, 0.0
  for size in sorted(found):
    cost = cost_of(*size)
    above(f"cost_of{size}", cost, 0)
    if found[size].tokens / cost > most:
      best, most = found[size], found[size].tokens / cost
  return best


class _Programme:
  """Best values of all budgets up to a number of nodes, and the choices that reach them.

  Of a node at depth d that is accepted, with n nodes for itself and all below it,
  ``value[d][n] = 1 + children[d][0][n - 1]``; of its children from rank k on, with m nodes,
  ``children[d][k][m] = max over s of p[d][k] value[d + 1][s] + children[d][k + 1][m - s]``, or 0 for none.
  """

  def __init__(self, table: np.ndarray, nodes: int, depth: int):
    self._depth = depth
    budgets = np.arange(nodes)
    # What the siblings behind have left when one takes s = 1 … nodes - 1 of m nodes: [m, s - 1].
    self._left = budgets[:, None] - budgets[None, 1:]
    value = np.concatenate(([0.0], np.ones(nodes)))
    # By depth and rank, how many nodes a child takes of m: 0 for no child.
    self._taken: list[list[np.ndarray]] = []
    for d in range(depth - 1, -1, -1):
      row = table[min(d, len(table) - 1)]
      children, taken = np.zeros(nodes), []
      for share in row[::-1]:
        children, choice = self._child(float(share), value, children)
        taken.insert(0, choice)
      value = np.concatenate(([0.0], 1.0 + children))
      self._taken.insert(0, taken)
    self._value = value

  def _child(self, share: float, value: np.ndarray, behind: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values ``[m]`` with a child of this rank before those behind it, and what it takes."""
    gains = share * value[1:-1] + behind[np.maximum(self._left, 0)]
    gains = np.where(self._left >= 0, gains, 0.0)
    gains = np.concatenate((np.zeros((len(gains), 1)), gains), axis=1)
    choice = np.argmax(gains, axis=1)
    return np.take_along_axis(gains, choice[:, None], axis=1)[:, 0], choice

  def tree(self, nodes: int) -> BestTree:
    """The best tree of at most so many nodes."""
    parents, deepest = [-1], 0
    queue = deque([(0, 0, nodes)])  # node, its depth, nodes for it and all below
    while queue:
      node, depth, budget = queue.popleft()
      deepest = max(deepest, depth)
      left = budget - 1
      for choice in self._taken[depth] if depth < self._depth else ():
        taken = int(choice[left])
        if not taken:
          break
        queue.append((len(parents), depth + 1, taken))
        parents.append(node)
        left -= taken
    return BestTree(tuple(parents), deepest, float(self._value[nodes]))
