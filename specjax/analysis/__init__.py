"""What speculation should give: costs of rounds, expected tokens, speedups and the best trees. No jax."""

from specjax.analysis.costs import CostTable

__all__ = ["CostTable"]
