"""Attention of a round's nodes over a cached prefix and over each other."""

from specjax.kernels.tree_attention.api import IMPLEMENTATIONS, Choice, choose, tree_attention

__all__ = ["IMPLEMENTATIONS", "Choice", "choose", "tree_attention"]
