"""A one-pass block drafter: one forward says the next G tokens, a small sequential head ties them together.

The block is DFlash's (Chen et al. 2026, arXiv 2602.06036): a small transformer, not causal within the block,
that sees the target through fused features whose keys and values are injected into every layer. The
sequential head is DSpark's low-rank Markov head (Cheng et al. 2026): of position k, with base logits U_k,

  p_k(v | x_0, …, x_{k-1}) ∝ exp(U_k(v) + W_1[x_{k-1}] · W_2[v])

with x_0 the root. Without it the tokens of a block are independent given the context.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax import cache as kv
from specjax.base import ModelOutput
from specjax.models import layers
from specjax.models.config import DecoderConfig
from specjax.models.output import Output, check_draft_vocabulary, check_output, check_rank, head_output
from specjax.tree import MAX_NODES, pack_bits

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class BlockConfig:
  """Shapes of a `BlockHead`.

  Attributes:
    decoder: its layers; ``d_model`` and ``vocab_size`` are the target's. ``tie_embeddings`` is not read.
    tap_layers: layers of the target whose *input* the head sees, ascending.
    block_size: G, tokens that one pass says.
    draft_vocab_size: Vd, tokens the head can say; None: all V.
    output_rank: of a factored output layer; None: one matrix.
    output: ``own``: an output layer of its own; ``target``: the target's rows of the draft vocabulary behind
      a matrix ``[D, D]`` of its own.
    markov_rank: r, of the Markov head; None: there is none.
  """

  decoder: DecoderConfig
  tap_layers: tuple[int, ...]
  block_size: int
  draft_vocab_size: int | None = None
  output_rank: int | None = None
  output: Output = "own"
  markov_rank: int | None = None

  def __post_init__(self):
    object.__setattr__(self, "tap_layers", tuple(self.tap_layers))
    taps, size, rank = self.tap_layers, self.block_size, self.markov_rank
    whole = bool(taps) and all(type(tap) is int and tap >= 0 for tap in taps)
    if not whole or list(taps) != sorted(set(taps)):
      raise ValueError(f"BlockConfig.tap_layers = {taps}; it must be ascending layers, the first not below 0")
    if type(size) is not int or not 2 <= size < MAX_NODES:
      raise ValueError(f"BlockConfig.block_size = {size!r}; it must be an integer in [2, {MAX_NODES - 1}]")
    if rank is not None and (type(rank) is not int or rank < 1):
      raise ValueError(f"BlockConfig.markov_rank = {rank!r}; it must be an integer of at least 1 or None")
    if self.decoder.sliding_window is not None:
      raise ValueError(
        f"BlockConfig.decoder.sliding_window = {self.decoder.sliding_window}; it must be None: a block sees "
        "all features before it"
      )
    check_draft_vocabulary(self.draft_vocab_size, self.decoder.vocab_size, "BlockConfig")
    check_rank(self.output_rank, "BlockConfig")
    check_output(self.output, self.output_rank, "BlockConfig")

  def check_target(self, target: DecoderConfig) -> None:
    """Raises ``ValueError``, naming the field, unless the head fits the target."""
    for name in ("d_model", "vocab_size"):
      mine, its = getattr(self.decoder, name), getattr(target, name)
      if mine != its:
        raise ValueError(f"block head: {name} = {mine}; the target's is {its}")
    if self.tap_layers[-1] > target.num_layers:
      raise ValueError(
        f"block head: tap_layers = {self.tap_layers}; the target has {target.num_layers} layers"
      )


class MarkovHead(nnx.Module):
  """``W_1[x_{k-1}] · W_2``: what the token before adds to the logits of a token.

  ``before [V, r]`` starts at 0, so that a fresh head adds nothing; ``after [Vd, r]``.
  """

  def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int, *, dtype, rngs: nnx.Rngs):
    after = jax.random.normal(rngs.params(), (draft_vocab_size, rank), jnp.float32) / math.sqrt(rank)
    self.before = nnx.Param(jnp.zeros((vocab_size, rank), dtype))
    self.after = nnx.Param(after.astype(dtype))

  def __call__(self, tokens: Array) -> Array:
    """int32 ``[...]``, ids of the target → float32 ``[..., Vd]``."""
    rows = jnp.take(self.before[...], tokens, axis=0, mode="clip")
    return layers.matmul(rows, self.after[...]).astype(jnp.float32)


class BlockHead(nnx.Module):
  """A one-pass block head; a pytree of parameters with a frozen config.

  Of a row of n tokens the head's cache has keys and values of the positions 0 … n - 2, made of the target's
  features there, ``g_t = fc([tap_1, tap_2, …])``, as if g were each layer's input: ``k = W_k · norm(g)``,
  ``v = W_v · norm(g)``. Nothing that the head guessed is ever in it. A block stands at the positions n - 1 …
  n + G - 2: the root's embedding (the target's own table), then G - 1 learned mask embeddings. Each of its
  positions sees all rows of the cache and the whole block, and says the token that follows it.
  """

  def __init__(
    self,
    config: BlockConfig,
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
    self.config = config
    c, width = config.decoder, config.decoder.d_model
    self.mesh = None  # as in `Decoder`
    self.fc = layers.Linear(len(config.tap_layers) * width, width, dtype=dtype, rngs=rngs)
    masks = jax.random.normal(rngs.params(), (config.block_size - 1, width), jnp.float32)
    self.masks = nnx.Param((masks / math.sqrt(width)).astype(dtype))
    self.layers = nnx.List(layers.DecoderLayer(c, dtype=dtype, rngs=rngs) for _ in range(c.num_layers))
    self.norm = layers.RMSNorm(width, eps=c.norm_eps, dtype=dtype)
    self.output = head_output(config, ids, rows, "BlockHead", dtype=dtype, rngs=rngs)
    size, rank = c.vocab_size if ids is None else len(ids), config.markov_rank
    self.markov = None if rank is None else MarkovHead(c.vocab_size, size, rank, dtype=dtype, rngs=rngs)

  @property
  def dtype(self):
    return self.fc.weight.dtype

  @property
  def ids(self) -> Array | None:
    """int32 ``[Vd]``, the target's id of each logit; None: its own."""
    return self.output.ids

  def init_cache(self, batch: int, slots: int) -> kv.KVCache:
    """An empty cache, at least ``slots`` slots a row and a block behind them, in the head's type.

    The loop makes room for what a round proposes; a block may be longer than that.
    """
    c = self.config.decoder
    slots += self.config.block_size
    return kv.create(c.num_layers, batch, c.num_kv_heads, slots, c.head_dim, self.dtype)

  def fuse(self, taps: Array) -> Array:
    """The target's hidden states ``[..., taps, D]`` → features ``[..., D]``, in the head's type."""
    return self.fc(taps.reshape(*taps.shape[:-2], -1).astype(self.dtype))

  def remember(self, features: Array, cache: kv.KVCache) -> kv.KVCache:
    """Writes rows of ``features [B, T, D]`` behind the cache's length, which stays: see `cache.commit`."""
    call = self._call(cache, features.shape[1], "auto", None)
    k_cache, v_cache = [], []
    for layer, k_old, v_old in zip(self.layers, cache.k, cache.v, strict=True):
      _, k, v = layer.attention.qkv(layer.attention_norm(features))  # q is not read, so it is not computed
      k, v = layers.write(layers.rotate(k, call.rope), v, k_old, v_old, call)
      k_cache.append(k)
      v_cache.append(v)
    return cache.replace(k=tuple(k_cache), v=tuple(v_cache))

  def block(self, embeddings: Array) -> Array:
    """The roots' embeddings ``[..., D]`` → what goes into the first layer, ``[..., G, D]``."""
    root = embeddings.astype(self.dtype)[..., None, :]
    masks = self.masks[...]
    masks = jnp.broadcast_to(masks, (*root.shape[:-2], *masks.shape))
    return jnp.concatenate([root, masks], axis=-2)

  def hidden(
    self, embeddings: Array, cache: kv.KVCache, *, implementation: str = "auto"
  ) -> tuple[Array, kv.KVCache]:
    """What the output layer reads of a block, ``[B, G, D]``, and the cache; arguments as for a call."""
    x = self.block(embeddings)
    width = self.config.block_size
    call = self._call(cache, width, implementation, np.ones((width, width), bool))
    k_cache, v_cache = list(cache.k), list(cache.v)
    for i, layer in enumerate(self.layers):
      x, k_cache[i], v_cache[i] = layer(x, k_cache[i], v_cache[i], call)
    return self.norm(x), cache.replace(k=tuple(k_cache), v=tuple(v_cache))

  def __call__(self, embeddings: Array, cache: kv.KVCache, *, implementation: str = "auto") -> ModelOutput:
    """One pass over a block a row, behind the committed rows of the head's own cache.

    Args:
      embeddings: ``[B, D]``, the target's embedding of each root, whose position is ``cache.length``.
      cache: see `remember`; the block is written behind its length, which stays.
      implementation: of `tree_attention`.

    Returns:
      `ModelOutput`: float32 base logits ``[B, G, Vd]`` over the *draft* vocabulary (see `conditioned`), and
      the cache with the block as scratch rows.
    """
    hidden, cache = self.hidden(embeddings, cache, implementation=implementation)
    return ModelOutput(logits=self.output(hidden), cache=cache)

  def conditioned(self, logits: Array, tokens: Array) -> Array:
    """Logits of the tokens behind ``tokens``: the Markov head's share added, where there is one.

    Args:
      logits: float32 ``[..., Vd]``, base logits of their positions; broadcast to the shape of ``tokens``.
      tokens: int32 ``[...]``, ids of the target, the token before each of them.

    Returns:
      float32 ``[..., Vd]``.
    """
    if self.markov is None:
      return jnp.broadcast_to(logits, (*tokens.shape, logits.shape[-1]))
    return logits + self.markov(tokens)

  def _call(self, cache: kv.KVCache, width: int, implementation: str, seen: np.ndarray | None) -> layers.Call:
    """Of a forward over ``width`` positions; ``seen`` bool ``[width, width]``, None where none attends."""
    bits = None if seen is None else pack_bits(seen)
    depths = np.arange(width, dtype=np.int32)
    return layers.new_call(cache, width, self.config.decoder, depths, bits, 0, implementation, self.mesh)
