"""What speculation should give: costs of rounds, expected tokens, speedups and the best trees. No jax."""

from specjax.analysis.costs import CostTable
from specjax.analysis.expected import (
  accepted_law,
  alpha_from_tokens,
  chain_tokens,
  deepest_tokens,
  iid_tokens,
  rank_acceptance,
  rates_from_counts,
  tree_tokens,
)
from specjax.analysis.speed import (
  Prediction,
  leviathan_condition,
  leviathan_speedup,
  memory_bytes_a_token,
  operations_factor,
  predicted_seconds,
  speedup,
)
from specjax.analysis.trees import BestTree, best_tree, best_tree_under, best_window

__all__ = [
  "BestTree",
  "CostTable",
  "Prediction",
  "accepted_law",
  "alpha_from_tokens",
  "best_tree",
  "best_tree_under",
  "best_window",
  "chain_tokens",
  "deepest_tokens",
  "iid_tokens",
  "leviathan_condition",
  "leviathan_speedup",
  "memory_bytes_a_token",
  "operations_factor",
  "predicted_seconds",
  "rank_acceptance",
  "rates_from_counts",
  "speedup",
  "tree_tokens",
]
