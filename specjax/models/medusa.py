"""Medusa heads (Cai et al. 2024, arXiv 2401.10774): each guesses one token further ahead."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.models import layers
from specjax.models.config import DecoderConfig
from specjax.models.output import OutputLayer, TokenMap, check_draft_vocabulary, check_rank, checked_ids

Array = jax.Array

Output = Literal["target", "own", "shared"]


@dataclasses.dataclass(frozen=True)
class MedusaConfig:
  """Shapes of a set of Medusa heads.

  Attributes:
    d_model: D, of the target.
    vocab_size: V, of the target.
    num_heads: head i (from 0) guesses the token i + 2 places behind the position whose hidden state it sees;
      the next one the target says itself.
    num_layers: residual blocks a head.
    output: what comes behind the blocks. ``target``: the target's own output head; ``own``: an output
      layer a head (files of Medusa v1); ``shared``: one for all heads.
    draft_vocab_size: Vd, tokens the heads can say; None: all V.
    output_rank: of factored output layers; None: one matrix each.
  """

  d_model: int
  vocab_size: int
  num_heads: int
  num_layers: int = 1
  output: Output = "target"
  draft_vocab_size: int | None = None
  output_rank: int | None = None

  def __post_init__(self):
    for name in ("d_model", "vocab_size", "num_heads", "num_layers"):
      value = getattr(self, name)
      if not isinstance(value, int) or value < 1:
        raise ValueError(f"MedusaConfig.{name} = {value!r}; it must be an integer of at least 1")
    if self.output not in get_args(Output):
      raise ValueError(
        f"MedusaConfig.output = {self.output!r}; it must be one of {', '.join(get_args(Output))}"
      )
    check_draft_vocabulary(self.draft_vocab_size, self.vocab_size, "MedusaConfig")
    check_rank(self.output_rank, "MedusaConfig")
    if self.output == "target" and self.output_rank is not None:
      raise ValueError(
        f"MedusaConfig.output_rank = {self.output_rank}; the target's own head is not factored"
      )

  def check_target(self, target: DecoderConfig) -> None:
    """Raises ``ValueError``, naming the field, unless the heads fit the target."""
    for name in ("d_model", "vocab_size"):
      mine, its = getattr(self, name), getattr(target, name)
      if mine != its:
        raise ValueError(f"Medusa heads: {name} = {mine}; the target's is {its}")


class HeadBlocks(nnx.Module):
  """One residual block of every head, ``x + SiLU(W x + b)``: ``weight [heads, D, D]``, ``bias [heads, D]``.

  Both start at 0, so that a fresh head says what the output layer says of the hidden state itself.
  """

  def __init__(self, num_heads: int, d_model: int, *, dtype):
    self.weight = nnx.Param(jnp.zeros((num_heads, d_model, d_model), dtype))
    self.bias = nnx.Param(jnp.zeros((num_heads, d_model), dtype))

  def fan_out(self, x: Array) -> Array:
    """The same ``x [..., D]`` into every head, one product: ``[..., heads, D]``."""
    heads, width = self.bias.shape
    product = layers.matmul(x, self.weight[...].reshape(heads * width, width))
    return self._add(x[..., None, :], product.reshape(*x.shape[:-1], heads, width))

  def __call__(self, x: Array) -> Array:
    """``[..., heads, D]`` → ``[..., heads, D]``, each head's own."""
    weight = self.weight[...]
    product = jnp.einsum(
      "...QI,QOI->...QO",
      x,
      weight,
      precision=layers.precision(weight.dtype),
      preferred_element_type=jnp.float32,
    )
    return self._add(x, product.astype(x.dtype))

  def _add(self, x: Array, product: Array) -> Array:
    return x + jax.nn.silu(product + self.bias[...])


class MedusaHeads(nnx.Module):
  """Heads on the target's last hidden state; a pytree of parameters with a frozen config."""

  def __init__(
    self, config: MedusaConfig, *, ids: Sequence[int] | np.ndarray | None = None, dtype, rngs: nnx.Rngs
  ):
    """
    Args:
      ids: the draft vocabulary, ascending ids of the target, as many as ``config.draft_vocab_size``.

    Raises:
      ValueError: ids that do not fit.
    """
    c = self.config = config
    ids = checked_ids(ids, c.draft_vocab_size, c.vocab_size)
    size = c.vocab_size if ids is None else len(ids)
    self.token_map = None if ids is None else TokenMap(jnp.asarray(ids))
    self.blocks = nnx.List(HeadBlocks(c.num_heads, c.d_model, dtype=dtype) for _ in range(c.num_layers))
    count = {"target": 0, "shared": 1, "own": c.num_heads}[c.output]
    self.outputs = nnx.List(
      OutputLayer(c.d_model, size, rank=c.output_rank, dtype=dtype, rngs=rngs) for _ in range(count)
    )

  @property
  def dtype(self):
    return self.blocks[0].weight.dtype

  @property
  def ids(self) -> Array | None:
    """int32 ``[Vd]``, the target's id of each logit; None: its own."""
    return None if self.token_map is None else self.token_map[...]

  def __call__(self, hidden: Array, unembed: Callable[[Array], Array] | None = None) -> Array:
    """What each head says.

    Args:
      hidden: ``[..., D]``, behind the target's final norm.
      unembed: with ``output = "target"``: ``[..., D]`` → logits ``[..., Vd]``, the target's head or its
        rows of the draft vocabulary (see `output_rows`). Not called otherwise.

    Returns:
      float32 logits ``[..., heads, Vd]``.

    Raises:
      ValueError: ``output = "target"`` without ``unembed``.
    """
    first, *deeper = self.blocks
    x = first.fan_out(hidden.astype(self.dtype))
    for blocks in deeper:
      x = blocks(x)
    if self.config.output == "own":
      return jnp.stack([output(x[..., i, :]) for i, output in enumerate(self.outputs)], axis=-2)
    if self.config.output == "shared":
      return self.outputs[0](x)
    if unembed is None:
      raise ValueError('MedusaHeads: output = "target" needs unembed, the target\'s own head')
    return unembed(x.astype(hidden.dtype)).astype(jnp.float32)
