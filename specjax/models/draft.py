"""A small decoder that drafts for one target: the target's embedding, perhaps its output head, own layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.models import layers
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder
from specjax.models.output import (
  Bound,
  Output,
  OutputLayer,
  TokenMap,
  check_draft_vocabulary,
  check_output,
  check_rank,
  checked_ids,
  output_rows,
)

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class DraftConfig:
  """Shapes of a `DraftDecoder`.

  Attributes:
    decoder: its layers; ``d_model`` and ``vocab_size`` are the target's. ``tie_embeddings`` is not read.
    output: ``target``: the target's output head, its rows of the draft vocabulary; ``own``: an output layer.
    draft_vocab_size: Vd, tokens the draft can say; None: all V.
    output_rank: of a factored output layer of its own; None: one matrix.
  """

  decoder: DecoderConfig
  output: Output = "target"
  draft_vocab_size: int | None = None
  output_rank: int | None = None

  def __post_init__(self):
    check_draft_vocabulary(self.draft_vocab_size, self.decoder.vocab_size, "DraftConfig")
    check_rank(self.output_rank, "DraftConfig")
    check_output(self.output, self.output_rank, "DraftConfig")

  def check_target(self, target: DecoderConfig) -> None:
    """Raises ``ValueError``, naming the field, unless the draft fits the target."""
    for name in ("d_model", "vocab_size"):
      mine, its = getattr(self.decoder, name), getattr(target, name)
      if mine != its:
        raise ValueError(f"draft decoder: {name} = {mine}; the target, whose embedding it reads, has {its}")


class DraftDecoder(Decoder):
  """A decoder whose embedding is the target's and whose logits are over a draft vocabulary.

  Called as a `Decoder` is; ``config`` is the decoder's, ``draft_config`` the whole. The target's arrays are
  `Bound`: in the draft's type they are the target's own buffers (another type, or a part of the rows,
  makes a copy), and ``nnx.state(draft, nnx.Param)`` leaves them out.
  """

  def __init__(
    self,
    config: DraftConfig,
    target: Decoder,
    *,
    ids: Sequence[int] | np.ndarray | None = None,
    dtype,
    rngs: nnx.Rngs,
  ):
    """
    Args:
      target: whose embedding and output head are read.
      ids: the draft vocabulary, ascending ids of the target, as many as ``config.draft_vocab_size``.

    Raises:
      ValueError: a config that does not fit the target, or ids that do not fit the config.
    """
    config.check_target(target.config)
    c = self.config = config.decoder
    self.draft_config = config
    self.mesh = None
    ids = checked_ids(ids, config.draft_vocab_size, c.vocab_size)
    size = c.vocab_size if ids is None else len(ids)
    self.embed = Bound(target.embed[...].astype(dtype))
    self.layers = nnx.List(layers.DecoderLayer(c, dtype=dtype, rngs=rngs) for _ in range(c.num_layers))
    self.norm = layers.RMSNorm(c.d_model, eps=c.norm_eps, dtype=dtype)
    own = config.output == "own"
    self.output = (
      OutputLayer(c.d_model, size, rank=config.output_rank, dtype=dtype, rngs=rngs) if own else None
    )
    self.rows = None if own else Bound(output_rows(target, ids).astype(dtype))
    self.token_map = None if ids is None else TokenMap(jnp.asarray(ids))

  @property
  def ids(self) -> Array | None:
    """int32 ``[Vd]``, the target's id of each logit; None: its own."""
    return None if self.token_map is None else self.token_map[...]

  def unembed(self, x: Array) -> Array:
    """Normed hidden states ``[..., D]`` → float32 logits ``[..., Vd]``."""
    if self.output is not None:
      return self.output(x)
    return layers.matmul(x, self.rows[...]).astype(jnp.float32)
