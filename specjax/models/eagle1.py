"""The head of EAGLE-1 and EAGLE-2 (Li et al. 2024, arXiv 2401.15077 and 2406.16858)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.models import layers
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder
from specjax.models.feature_head import FeatureHead, HeadLayer
from specjax.models.output import Bound, OutputLayer, check_draft_vocabulary, checked_ids, output_rows

Array = jax.Array

# What a row sees; anything but both is there for the paper's comparison of inputs.
Inputs = Literal["both", "token", "feature"]


@dataclasses.dataclass(frozen=True)
class Eagle1Config:
  """Shapes of an EAGLE-1 head.

  Attributes:
    decoder: of the one draft layer; its width D and ``vocab_size`` are the target's.
    target_layers: L, layers of the target; the feature is what comes out of the last one.
    inputs: what a row sees: ``both``, as public heads do, or the next ``token`` or the ``feature`` alone.
    bias: of `Eagle1.fc`; public heads have it.
    draft_vocab_size: Vd, tokens the head can say; None: all V, as public heads.
  """

  decoder: DecoderConfig
  target_layers: int
  inputs: Inputs = "both"
  bias: bool = True
  draft_vocab_size: int | None = None

  def __post_init__(self):
    if self.decoder.num_layers != 1:
      raise ValueError(f"Eagle1Config.decoder.num_layers = {self.decoder.num_layers}; it must be 1")
    if not isinstance(self.target_layers, int) or self.target_layers < 1:
      raise ValueError(f"Eagle1Config.target_layers = {self.target_layers!r}; it must be an integer >= 1")
    if self.inputs not in get_args(Inputs):
      raise ValueError(
        f"Eagle1Config.inputs = {self.inputs!r}; it must be one of {', '.join(get_args(Inputs))}"
      )
    check_draft_vocabulary(self.draft_vocab_size, self.decoder.vocab_size, "Eagle1Config")

  @property
  def tap_layers(self) -> tuple[int]:
    """The layer of the target whose *input* would be the feature: the one behind the last."""
    return (self.target_layers,)

  @property
  def d_in(self) -> int:
    """Numbers that `Eagle1.fc` takes."""
    return self.decoder.d_model * (2 if self.inputs == "both" else 1)

  def check_target(self, target: DecoderConfig) -> None:
    """Raises ``ValueError``, naming the field, unless the head fits the target."""
    pairs = (("d_model", self.decoder.d_model), ("vocab_size", self.decoder.vocab_size))
    for name, mine in (*pairs, ("num_layers", self.target_layers)):
      if mine != getattr(target, name):
        raise ValueError(
          f"EAGLE-1 head: it was made for {name} = {mine}; the target has {getattr(target, name)}"
        )


class Eagle1(FeatureHead):
  """An EAGLE-1 head, which predicts the target's next feature; the target's own output layer reads it.

  The feature f_t is the target's hidden state behind its final norm, so what its output layer takes:
  ``h_t = layer(fc([embed(x_{t+1}), f_t]))`` stands for f_{t+1}, and ``logits = W_target h_t``. The layer has
  no norm before its attention and the head none behind it. Norm and output layer of the target are `Bound`.
  """

  def __init__(
    self,
    config: Eagle1Config,
    target: Decoder,
    *,
    ids: Sequence[int] | np.ndarray | None = None,
    dtype,
    rngs: nnx.Rngs,
  ):
    """
    Args:
      target: whose final norm and output layer are read.
      ids: the draft vocabulary, ascending ids of the target, as many as ``config.draft_vocab_size``.

    Raises:
      ValueError: a config that does not fit the target, or ids that do not fit the config.
    """
    config.check_target(target.config)
    c = self.config = config
    width = c.decoder.d_model
    ids = checked_ids(ids, c.draft_vocab_size, c.decoder.vocab_size)
    self.norm = layers.RMSNorm(width, eps=target.config.norm_eps, dtype=dtype)
    self.norm.weight = Bound(target.norm.weight[...].astype(dtype))
    self.fc = layers.Linear(c.d_in, width, bias=c.bias, dtype=dtype, rngs=rngs)
    self.layer = HeadLayer(c.decoder, d_in=width, dtype=dtype, rngs=rngs)
    rows = output_rows(target, ids)
    self.output = OutputLayer(width, c.decoder.vocab_size, ids=ids, rows=rows, dtype=dtype, rngs=rngs)

  def fuse(self, taps: Array) -> Array:
    """The target's last hidden state ``[..., 1, D]`` → features ``[..., D]``, in the head's type."""
    return self.norm(taps[..., 0, :].astype(self.dtype))

  def joined(self, embeddings: Array, features: Array) -> Array:
    """What `fc` takes of a row, ``[..., d_in]``."""
    parts = {"both": (embeddings, features), "token": (embeddings,), "feature": (features,)}
    return jnp.concatenate(parts[self.config.inputs], axis=-1)

  def enter(self, embeddings: Array, features: Array) -> tuple[Array, Array, Array, Array]:
    x = self.fc(self.joined(embeddings, features))
    return x, *self.layer.attention.qkv(x)

  def read(self, hidden: Array) -> Array:
    return self.output(hidden)
