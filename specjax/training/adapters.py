"""Differences that training adds to a model's linear weights: low-rank (LoRA, Hu et al. 2021), or whole.

The model itself is never changed: `Adapters.merged` makes another one. So the original is at hand in the same
step, to be compared with, and costs no second copy.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.checkpoints.fill import path_of
from specjax.models import Decoder

Array = jax.Array

# The linear layers of a decoder layer; embedding, output head, norms and biases stay as they are.
_PARTS = ("attention.q", "attention.k", "attention.v", "attention.o", "ff.gate", "ff.up", "ff.down")


class LowRank(nnx.Module):
  """``scale · up [O, r] · down [r, I]``. ``up`` starts at 0: nothing changes at first."""

  def __init__(self, shape: tuple[int, int], rank: int, scale: float, *, rngs: nnx.Rngs):
    size_out, size_in = shape
    down = jax.random.normal(rngs.params(), (rank, size_in), jnp.float32) / math.sqrt(size_in)
    self.up, self.down = nnx.Param(jnp.zeros((size_out, rank), jnp.float32)), nnx.Param(down)
    self.scale = scale

  def __call__(self) -> Array:
    return self.scale * jnp.matmul(self.up[...], self.down[...], precision=jax.lax.Precision.HIGHEST)


class Whole(nnx.Module):
  """A matrix ``[O, I]`` of its own; starts at 0. Weight decay pulls it to the original, not to 0."""

  def __init__(self, shape: tuple[int, int]):
    self.weight = nnx.Param(jnp.zeros(shape, jnp.float32))

  def __call__(self) -> Array:
    return self.weight[...]


class Adapters(nnx.Module):
  """What is added to every linear weight of a decoder's layers; float32."""

  def __init__(self, model: Decoder, rank: int | None, *, alpha: float = 16.0, rngs: nnx.Rngs):
    """
    Args:
      model: whose shapes they have.
      rank: r of the low-rank ones; None: whole matrices.
      alpha: low-rank ones are scaled by ``alpha / rank``.

    Raises:
      ValueError: a rank that some weight has not.
    """
    paths, differences = [], []
    for i in range(model.config.num_layers):
      for part in _PARTS:
        owner, name = part.split(".")
        shape = getattr(getattr(model.layers[i], owner), name).weight.shape
        if rank is not None and not 1 <= rank <= min(shape):
          raise ValueError(f"adapters: rank = {rank}; layers.{i}.{part} of {list(shape)} has {min(shape)}")
        paths.append(f"layers.{i}.{part}.weight")
        low = rank is not None
        differences.append(LowRank(shape, rank, alpha / rank, rngs=rngs) if low else Whole(shape))
    self.paths = tuple(paths)
    self.differences = nnx.List(differences)

  def merged(self, model: Decoder) -> Decoder:
    """The model with the differences added to its weights, in its own type; differentiable in them."""
    added: dict[str, Any] = dict(zip(self.paths, self.differences, strict=True))
    graph, state = nnx.split(model)
    leaves = []
    for path, leaf in nnx.to_flat_state(state):
      if (difference := added.get(path_of(path))) is not None:
        weight = leaf.get_value()
        leaf = leaf.replace((weight.astype(jnp.float32) + difference()).astype(weight.dtype))
      leaves.append((path, leaf))
    return nnx.merge(graph, nnx.from_flat_state(leaves))
