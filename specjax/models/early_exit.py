"""The adapter of an early exit (Kangaroo, Liu et al. 2024, arXiv 2404.18911)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax import cache as kv
from specjax.base import ModelOutput
from specjax.models import layers
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder
from specjax.models.output import Bound, TokenMap, check_draft_vocabulary, checked_ids, output_rows

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class EarlyExitConfig:
  """Shapes of an adapter.

  Attributes:
    decoder: its attention: heads, rope base, sliding window; ``d_model`` and ``vocab_size`` are the target's.
      ``d_ff`` is not read.
    exit_layer: e, layers of the target before it: it reads the input of layer e.
    draft_vocab_size: Vd, tokens it can say; None: all V.
  """

  decoder: DecoderConfig
  exit_layer: int
  draft_vocab_size: int | None = None

  def __post_init__(self):
    if self.decoder.num_layers != 1:
      raise ValueError(f"EarlyExitConfig.decoder.num_layers = {self.decoder.num_layers}; it must be 1")
    if type(self.exit_layer) is not int or self.exit_layer < 1:
      raise ValueError(
        f"EarlyExitConfig.exit_layer = {self.exit_layer!r}; it must be an integer of at least 1"
      )
    check_draft_vocabulary(self.draft_vocab_size, self.decoder.vocab_size, "EarlyExitConfig")

  def check_target(self, target: DecoderConfig) -> None:
    """Raises ``ValueError``, naming the field, unless the adapter fits the target."""
    for name in ("d_model", "vocab_size"):
      mine, its = getattr(self.decoder, name), getattr(target, name)
      if mine != its:
        raise ValueError(f"early exit: {name} = {mine}; the target's is {its}")
    if self.exit_layer >= target.num_layers:
      raise ValueError(
        f"early exit: exit_layer = {self.exit_layer}; it must be in [1, {target.num_layers - 1}], the target "
        f"has {target.num_layers} layers"
      )


class EarlyExit(nnx.Module):
  """One attention layer and two norms between the target's layer e - 1 and its head; a pytree of parameters.

  With h the hidden state behind layer e - 1: ``logits = W_head · norm₂(h + attention(norm₁(h)))``, where
  W_head is the target's, its rows of the draft vocabulary; these are `Bound`, and no parameters. There is no
  feed-forward.
  """

  def __init__(
    self,
    config: EarlyExitConfig,
    target: Decoder,
    *,
    ids: Sequence[int] | np.ndarray | None = None,
    dtype,
    rngs: nnx.Rngs,
  ):
    """
    Args:
      target: whose output head is read.
      ids: the draft vocabulary, ascending ids of the target, as many as ``config.draft_vocab_size``.

    Raises:
      ValueError: a config that does not fit the target, or ids that do not fit the config.
    """
    config.check_target(target.config)
    self.config, c = config, config.decoder
    self.mesh = None  # as in `Decoder`
    ids = checked_ids(ids, config.draft_vocab_size, c.vocab_size)
    norm = lambda: layers.RMSNorm(c.d_model, eps=c.norm_eps, dtype=dtype)
    self.attention_norm, self.norm = norm(), norm()
    self.attention = layers.Attention(c, dtype=dtype, rngs=rngs)
    self.rows = Bound(output_rows(target, ids).astype(dtype))
    self.token_map = None if ids is None else TokenMap(jnp.asarray(ids))

  @property
  def dtype(self):
    return self.norm.weight.dtype

  @property
  def ids(self) -> Array | None:
    """int32 ``[Vd]``, the target's id of each logit; None: its own."""
    return None if self.token_map is None else self.token_map[...]

  def init_cache(self, batch: int, slots: int) -> kv.KVCache:
    """An empty cache of one layer, at least ``slots`` slots a row, in the adapter's type."""
    c = self.config.decoder
    return kv.create(1, batch, c.num_kv_heads, slots, c.head_dim, self.dtype)

  def unembed(self, hidden: Array) -> Array:
    """The adapter's output ``[..., D]`` → float32 logits ``[..., Vd]``: the second norm, then the head."""
    return layers.matmul(self.norm(hidden), self.rows[...]).astype(jnp.float32)

  def write(self, hidden: Array, cache: kv.KVCache) -> kv.KVCache:
    """Rows of ``hidden [B, T, D]`` behind the committed prefix: of these keys and values are all it takes."""
    c = self.config.decoder
    call = layers.new_call(cache, hidden.shape[1], c, None, None, 0, "auto", self.mesh)
    _, k, v = self.attention.qkv(self.attention_norm(hidden.astype(self.dtype)))
    put = lambda buffer, rows: kv.write_rows(buffer, rows.swapaxes(1, 2), call.start)
    return cache.replace(k=(put(cache.k[0], layers.rotate(k, call.rope)),), v=(put(cache.v[0], v),))

  def __call__(
    self,
    hidden: Array,
    cache: kv.KVCache,
    *,
    depths: Array | None = None,
    ancestors: Array | None = None,
    scratch: Array | int = 0,
    logits: bool = True,
    implementation: str = "auto",
  ) -> ModelOutput:
    """One forward over ``hidden [B, T, D]``, behind the committed prefix of the adapter's own cache.

    Args:
      cache, depths, ancestors, scratch, implementation: as for `Decoder.__call__`.
      logits: whether to compute them.

    Returns:
      `ModelOutput`: float32 logits ``[B, T, Vd]`` or None, the cache with scratch rows, and ``hidden``, the
      adapter's output before its second norm.
    """
    call = layers.new_call(
      cache, hidden.shape[1], self.config.decoder, depths, ancestors, scratch, implementation, self.mesh
    )
    hidden = hidden.astype(self.dtype)
    y, k, v = self.attention(self.attention_norm(hidden), cache.k[0], cache.v[0], call)
    hidden = hidden + y
    return ModelOutput(
      logits=self.unembed(hidden) if logits else None, cache=cache.replace(k=(k,), v=(v,)), hidden=hidden
    )
