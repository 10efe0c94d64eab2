"""Expected tokens a round: chains, trees, and what measured counts say about acceptance.

A round emits the drafts it accepts and one token more, so plain decoding has 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specjax.analysis.checks import numbers, share, shares, topology, whole


def iid_tokens(alpha: float, window: int) -> float:
  """Tokens a round of a chain whose drafts are accepted independently (Leviathan et al. 2023, eq. 1).

  ``(1 - α^(γ + 1)) / (1 - α)``, summed so that α = 1 gives γ + 1.

  Args:
    alpha: α, acceptance of a draft once those before it are accepted, in [0, 1].
    window: γ, drafts a round, at least 0.
  """
  share("alpha", alpha)
  return float(np.sum(float(alpha) ** np.arange(whole("window", window, 0) + 1)))


def alpha_from_tokens(tokens: float, window: int) -> float:
  """α that gives so many tokens a round: the inverse of `iid_tokens`, by bisection.

  Args:
    tokens: in [1, γ + 1].
    window: γ, at least 1.
  """
  window = whole("window", window, 1)
  if not 1 <= tokens <= window + 1:
    raise ValueError(f"tokens = {tokens}; it must be in [1, window + 1 = {window + 1}]")
  low, high = 0.0, 1.0
  for _ in range(60):
    middle = (low + high) / 2
    low, high = (middle, high) if iid_tokens(middle, window) < tokens else (low, middle)
  return (low + high) / 2


def accepted_law(rates: Sequence[float]) -> np.ndarray:
  """Probability that a chain of G drafts has exactly a accepted, float64 ``[G + 1]``.

  Args:
    rates: ``[G]``, acceptance of draft d + 1 once the d before it are accepted.
  """
  reached = np.concatenate(([1.0], np.cumprod(shares("rates", rates))))
  return reached - np.concatenate((reached[1:], [0.0]))


def chain_tokens(rates: Sequence[float]) -> float:
  """Tokens a round of a chain with these conditional acceptances by position, ``[G]``."""
  return 1.0 + float(np.sum(np.cumprod(shares("rates", rates))))


def rank_acceptance(rate: float, ranks: int) -> np.ndarray:
  """Acceptance by rank ``[K]`` of siblings that are tried in turn, each accepted with ``rate``.

  The child of rank k is the accepted one with probability ``a (1 - a)^k``.
  """
  share("rate", rate)
  return rate * (1.0 - rate) ** np.arange(whole("ranks", ranks, 1))


def positional(acceptance) -> np.ndarray:
  """Acceptance by depth and rank ``[D, K]``, of one by rank ``[K]`` or by both.

  Raises:
    ValueError: no entry, one outside [0, 1], or ranks of a depth that sum to more than 1: at most one
      child of a node is accepted.
  """
  table = np.atleast_2d(shares("acceptance", acceptance, axes=(1, 2)))
  if not table.size:
    raise ValueError("acceptance is empty; it must hold a rank")
  total = float(table.sum(axis=1).max())
  if total > 1 + 1e-9:
    raise ValueError(f"acceptance of the ranks of a depth sums to {total:g}; it must be at most 1")
  return table


def tree_tokens(parents: Sequence[int], acceptance) -> float:
  """Tokens a round of a tree (Sequoia's positional acceptance, Chen et al. 2024).

  The sum over nodes of the probability that the node is accepted: the product along its path.

  Args:
    parents: a parent a node, the root's is -1, as in `TokenTree`.
    acceptance: ``[K]``, or ``[D, K]`` with the last row for all that is deeper: the probability that of a
      node's children the one of rank k is accepted, given that the node is. A child of a rank beyond K is
      never accepted.
  """
  table = positional(acceptance)
  reached, depth, seen = [1.0], [0], [0]
  for parent in topology(parents)[1:]:
    row = table[min(depth[parent], len(table) - 1)]
    rank = seen[parent]
    reached.append(reached[parent] * (float(row[rank]) if rank < len(row) else 0.0))
    depth.append(depth[parent] + 1)
    seen[parent] += 1
    seen.append(0)
  return float(np.sum(reached))


def deepest_tokens(parents: Sequence[int], rates: Sequence[float]) -> float:
  """Tokens a round of a tree whose nodes are all accepted independently, the deepest path taken.

  This is the rule ``synthetic``. A path to depth d is missing below a node if it is below every child
  that is accepted, so the probabilities follow from the leaves up. More than `tree_tokens` gives for the
  same acceptance of siblings, since there a sibling accepted first hides the deeper paths of the others.

  Args:
    parents: a parent a node, the root's is -1.
    rates: acceptance of a node at depth d once its parent is, ``rates[d - 1]``; the last one for all
      that is deeper.
  """
  parents, rates = topology(parents), shares("rates", rates)
  if not len(rates):
    raise ValueError("rates is empty; it must hold a rate")
  depth = [0] * len(parents)
  for node, parent in enumerate(parents[1:], start=1):
    depth[node] = depth[parent] + 1
  # [node, d]: that no accepted path goes d levels below the node.
  missing = np.ones((len(parents), max(depth) + 1))
  missing[:, 0] = 0.0
  for node in range(len(parents) - 1, 0, -1):
    rate = rates[min(depth[node], len(rates)) - 1]
    missing[parents[node], 1:] *= 1.0 - rate * (1.0 - missing[node, :-1])
  return float(np.sum(1.0 - missing[0]))


def rates_from_counts(accept_counts: Sequence[int], reach_counts: Sequence[int]) -> np.ndarray:
  """Acceptance by position ``[G]`` from a result row: of rounds that reached depth d, the accepted share.

  Args:
    accept_counts: ``[a]``, rounds that accepted a drafts.
    reach_counts: ``[d - 1]``, rounds in which a draft at depth d was judged. Where it is 0, so is the rate.

  Raises:
    ValueError: more rounds accepted at a depth than reached it.
  """
  counts = {"accept_counts": accept_counts, "reach_counts": reach_counts}
  for name, value in counts.items():
    counts[name] = numbers(name, value)
    if counts[name].ndim != 1 or (counts[name] < 0).any():
      raise ValueError(f"{name} = {value}; it must be a list of counts of at least 0")
  accepts, reached = counts.values()
  accepted = np.zeros(max(len(accepts) - 1, len(reached)))
  accepted[: max(len(accepts) - 1, 0)] = np.cumsum(accepts[::-1])[::-1][1:]
  reached = np.pad(reached, (0, len(accepted) - len(reached)))
  for d in np.flatnonzero(accepted > reached)[:1]:
    raise ValueError(f"{accepted[d]:g} rounds accepted at depth {d + 1}, which {reached[d]:g} reached")
  return np.divide(accepted, reached, out=np.zeros_like(accepted), where=reached > 0)
