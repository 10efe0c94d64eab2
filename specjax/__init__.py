"""Speculative decoding for JAX: draft, verify and accept as pure functions over static shapes."""

__version__ = "0.1.0"
