"""What EAGLE's heads share: one layer over the target's features, whose output takes a feature's place."""

from __future__ import annotations

import jax
from flax import nnx

from specjax import cache as kv
from specjax.base import ModelOutput
from specjax.models import layers
from specjax.models.config import DecoderConfig

Array = jax.Array


class HeadLayer(nnx.Module):
  """The draft layer behind its queries, keys and values.

  Attention takes inputs ``d_in`` wide. Training attends in a way of its own before `finish`.
  """

  def __init__(self, config: DecoderConfig, *, d_in: int, dtype, rngs: nnx.Rngs):
    self.attention = layers.Attention(config, d_in=d_in, dtype=dtype, rngs=rngs)
    self.ff_norm = layers.RMSNorm(config.d_model, eps=config.norm_eps, dtype=dtype)
    self.ff = layers.FeedForward(config, dtype=dtype, rngs=rngs)

  def finish(self, residual: Array, attended: Array) -> Array:
    """The layer's output ``[B, T, D]`` from what it adds to and what attention gave, ``[B, T, Q, H]``."""
    x = residual + self.attention.o(attended.reshape(*attended.shape[:2], -1))
    return x + self.ff(self.ff_norm(x))


class FeatureHead(nnx.Module):
  """A draft head on the target's features; a pytree of parameters with a frozen config.

  At row t it sees the target's feature of position t and the *next* token, and predicts the token after that
  one: ``logits = read(h_t)``. Where the target has no feature yet, its own output h takes the feature's
  place, as it is.

  A subclass has ``config`` (with the layer's ``decoder`` and the target's ``tap_layers``), ``fc``, ``layer``
  (a `HeadLayer`) and ``output`` (an `OutputLayer`), and three methods:

  - ``fuse(taps [..., taps, D_target]) → [..., D]``, features from the target's hidden states;
  - ``enter(embeddings [B, T, D_target], features [B, T, D])`` → what the layer adds to ``[B, T, D]``, and
    q ``[B, T, Q, H]``, k and v ``[B, T, K, H]`` before rotation;
  - ``read(hidden [..., D]) → [..., Vd]``, float32 logits over the draft vocabulary.
  """

  mesh = None  # where parameters and caches lie, as in `Decoder`

  @property
  def dtype(self):
    return self.fc.weight.dtype

  @property
  def ids(self) -> Array | None:
    """int32 ``[Vd]``, the target's id of each logit; None: its own."""
    return self.output.ids

  def init_cache(self, batch: int, slots: int) -> kv.KVCache:
    """An empty cache of one layer, at least ``slots`` slots a row, in the head's type."""
    c = self.config.decoder
    return kv.create(1, batch, c.num_kv_heads, slots, c.head_dim, self.dtype)

  def __call__(
    self,
    embeddings: Array,
    features: Array,
    cache: kv.KVCache,
    *,
    depths: Array | None = None,
    ancestors: Array | None = None,
    scratch: Array | int = 0,
    logits: bool = True,
    implementation: str = "auto",
  ) -> ModelOutput:
    """One forward over T rows a sequence, behind the committed prefix of the head's own cache.

    Args:
      embeddings: ``[B, T, D_target]``, the target's embedding of the token *after* each row's position.
      features: ``[B, T, D]``: `fuse` of the target's hidden states, or what recurs (``hidden`` of an
        earlier call).
      cache, depths, ancestors, scratch, implementation: as for `Decoder.__call__`; row t has the rotary
        position ``cache.length + depths[t]``.
      logits: whether to compute them.

    Returns:
      `ModelOutput`: float32 logits ``[B, T, Vd]`` over the *draft* vocabulary or None, the cache with
      scratch rows, and ``hidden [B, T, D]``, what recurs.

    Raises:
      ValueError: ``scratch`` without ``ancestors`` or ``depths``.
    """
    c = self.config.decoder
    call = layers.new_call(
      cache, embeddings.shape[1], c, depths, ancestors, scratch, implementation, self.mesh
    )
    residual, q, k, v = self.enter(embeddings.astype(self.dtype), features.astype(self.dtype))
    attended, k, v = layers.rotate_and_attend(q, k, v, cache.k[0], cache.v[0], call, c.sliding_window)
    hidden = self.layer.finish(residual, attended)
    return ModelOutput(
      logits=self.read(hidden) if logits else None,
      cache=cache.replace(k=(k,), v=(v,)),
      hidden=hidden,
    )
