"""The EAGLE-3 draft head (Li et al. 2025, arXiv 2503.01840): one decoder layer over the target's features."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.models import layers
from specjax.models.config import DecoderConfig
from specjax.models.feature_head import FeatureHead, HeadLayer
from specjax.models.output import Output, check_draft_vocabulary, check_output, check_rank, head_output

Array = jax.Array

# Layers of the target that public heads see.
NUM_TAPS = 3


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
  """Shapes of an EAGLE-3 head.

  Attributes:
    decoder: of the one draft layer: its own width D, heads and rope base; ``vocab_size`` is the target's V.
    target_width: width of the target's hidden states and embeddings. Public heads have D = it.
    tap_layers: layers of the target whose *input* the head sees, e.g. ``(2, L // 2, L - 3)``. Public heads
      have three; one alone is the paper's comparison without fused features.
    draft_vocab_size: Vd, tokens the head can say; None: all V.
    output_rank: of a factored output layer; None: one matrix.
    output: ``own``: an output layer of its own, as public heads have; ``target``: the target's rows of the
      draft vocabulary behind a matrix ``[D, D]`` of its own (what recurs need not be what is read out), so
      that the head is small on disk.
    norm_before_residual: what the layer adds to is the normed feature instead of the feature (a field of
      the speculators project).
  """

  decoder: DecoderConfig
  target_width: int
  tap_layers: tuple[int, ...]
  draft_vocab_size: int | None = None
  output_rank: int | None = None
  output: Output = "own"
  norm_before_residual: bool = False

  def __post_init__(self):
    object.__setattr__(self, "tap_layers", tuple(self.tap_layers))
    if self.decoder.num_layers != 1:
      raise ValueError(f"Eagle3Config.decoder.num_layers = {self.decoder.num_layers}; it must be 1")
    if not isinstance(self.target_width, int) or self.target_width < 1:
      raise ValueError(f"Eagle3Config.target_width = {self.target_width!r}; it must be an integer >= 1")
    taps = self.tap_layers
    whole = len(taps) > 0 and all(isinstance(t, int) and t >= 0 for t in taps)
    if not whole or list(taps) != sorted(set(taps)):
      raise ValueError(
        f"Eagle3Config.tap_layers = {taps}; it must be ascending layers, the first not below 0"
      )
    check_draft_vocabulary(self.draft_vocab_size, self.decoder.vocab_size, "Eagle3Config")
    check_rank(self.output_rank, "Eagle3Config")
    check_output(self.output, self.output_rank, "Eagle3Config")
    width = self.decoder.d_model
    if self.output == "target" and width != self.target_width:
      raise ValueError(
        f"Eagle3Config.decoder.d_model = {width}; the target's rows are {self.target_width} wide"
      )

  def check_target(self, target: DecoderConfig) -> None:
    """Raises ``ValueError``, naming the field, unless the head fits the target."""
    if self.target_width != target.d_model:
      raise ValueError(
        f"EAGLE-3 head: it reads features and embeddings of width {self.target_width}; the target's have "
        f"{target.d_model}"
      )
    if self.decoder.vocab_size != target.vocab_size:
      raise ValueError(
        f"EAGLE-3 head: vocab_size = {self.decoder.vocab_size}; the target's is {target.vocab_size}"
      )
    if self.tap_layers[-1] > target.num_layers:
      raise ValueError(
        f"EAGLE-3 head: tap_layers = {self.tap_layers}; the target has {target.num_layers} layers"
      )


def default_tap_layers(num_layers: int) -> tuple[int, int, int]:
  """The layers whose inputs EAGLE-3's authors take from a target of ``num_layers``: low, middle, high.

  Raises:
    ValueError: the target has fewer than 7 layers, where these are not three ascending ones.
  """
  taps = (2, num_layers // 2, num_layers - 3)
  if not taps[0] < taps[1] < taps[2]:
    raise ValueError(f"num_layers = {num_layers}: a target of fewer than 7 layers has no default tap_layers")
  return taps


class Eagle3Layer(HeadLayer):
  """The draft layer: attention over ``[norm(embedding), norm(feature)]``, then a gated feed-forward."""

  def __init__(self, config: Eagle3Config, *, dtype, rngs: nnx.Rngs):
    c = config.decoder
    super().__init__(c, d_in=config.target_width + c.d_model, dtype=dtype, rngs=rngs)
    norm = lambda size: layers.RMSNorm(size, eps=c.norm_eps, dtype=dtype)
    self.norm_before_residual = config.norm_before_residual
    self.embedding_norm = norm(config.target_width)
    self.feature_norm = norm(c.d_model)


class Eagle3(FeatureHead):
  """An EAGLE-3 head: ``g_t = fc([low_t, middle_t, high_t])``, ``h_t = layer(embed(x_{t+1}), g_t)``,
  ``logits = output(norm(h_t))``.

  Where the target has no feature yet, the head's own output h takes the place of g: neither `norm` nor `fc`
  touches what recurs.
  """

  def __init__(
    self,
    config: Eagle3Config,
    *,
    ids: Sequence[int] | np.ndarray | None = None,
    rows: Array | None = None,
    dtype,
    rngs: nnx.Rngs,
  ):
    """
    Args:
      ids: the draft vocabulary, ascending ids of the target, as many as ``config.draft_vocab_size``.
      rows: the target's rows of it, see `output_rows`; where ``config.output`` is ``target``.

    Raises:
      ValueError: ids or rows that do not fit.
    """
    c = self.config = config
    width = c.decoder.d_model
    self.fc = layers.Linear(len(c.tap_layers) * c.target_width, width, dtype=dtype, rngs=rngs)
    self.layer = Eagle3Layer(c, dtype=dtype, rngs=rngs)
    self.norm = layers.RMSNorm(width, eps=c.decoder.norm_eps, dtype=dtype)
    self.output = head_output(config, ids, rows, "Eagle3", dtype=dtype, rngs=rngs)

  def fuse(self, taps: Array) -> Array:
    """The target's hidden states ``[..., taps, D_target]`` → features ``[..., D]``, in the head's type."""
    return self.fc(taps.reshape(*taps.shape[:-2], -1).astype(self.dtype))

  def enter(self, embeddings: Array, features: Array) -> tuple[Array, Array, Array, Array]:
    layer = self.layer
    normed = layer.feature_norm(features)
    x = jnp.concatenate((layer.embedding_norm(embeddings), normed), axis=-1)
    return normed if layer.norm_before_residual else features, *layer.attention.qkv(x)

  def read(self, hidden: Array) -> Array:
    return self.output(self.norm(hidden))
