"""Kernels behind one function each; they import jax only."""
