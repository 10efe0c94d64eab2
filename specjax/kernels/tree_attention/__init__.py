"""Attention of a round's nodes over a cached prefix and over each other."""

from specjax.kernels.tree_attention.api import IMPLEMENTATIONS, tree_attention

__all__ = ["IMPLEMENTATIONS", "tree_attention"]
