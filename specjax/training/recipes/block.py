"""The one-pass block drafter, trained on blocks anchored at every learned token of a text at once.

The block of the learned token at place u has its root at u - 1, the token before, and sees the target's
features of the places up to u - 2 of its sample, and itself: what decoding has when u - 1 is the root. Its
position d is trained on the token at u + d, with the text's own token at u + d - 1 before it (teacher forcing
of the Markov head), which is what a draft has there if all before it was accepted.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.checkpoints import save_block
from specjax.models import BlockConfig, BlockHead, Decoder, default_tap_layers, layers, output_rows
from specjax.training.batches import Batch, rows_at
from specjax.training.recipes.base import Recipe, check_positive, copied, start_from_target
from specjax.training.recipes.sizes import on_raw_features, on_sized_features, set_sizes

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block(Recipe):
  """Loss Σ_d decay^d · loss of position d of each block.

  Attributes:
    size: G, tokens that one pass says.
    markov: rank of the Markov head; 0: there is none, and the tokens of a block are independent given the
      text.
    layers: of the head, drawn at random unless ``start`` is given.
    start: layers of the target that the head's layers start as, e.g. ``(27,)``, as many as ``layers``; the
      feature then starts as the last tap. The output layer and the norm before it start as the target's
      either way.
    tap_layers: layers of the target whose input is seen; None: 2, L // 2, L − 3.
    d_ff: width of the feed-forward; None: the target's.
    output: ``own``: an output layer that is trained; ``target``: the target's rows behind a square matrix
      that is trained.
  """

  size: int = 4
  markov: int = 0
  layers: int = 1
  start: tuple[int, ...] | None = None
  tap_layers: tuple[int, ...] | None = None
  d_ff: int | None = None
  output: str = "own"

  name: ClassVar[str] = "block"
  kind: ClassVar[str] = "block"
  lag: ClassVar[int] = 1
  sized: ClassVar[bool] = True

  def __post_init__(self):
    super().__post_init__()
    for field in ("size", "layers"):
      check_positive("block", field, getattr(self, field))
    check_positive("block", "d_ff", self.d_ff, optional=True)
    if type(self.markov) is not int or self.markov < 0:
      raise ValueError(f"block: markov = {self.markov!r}; it must be an integer of at least 0")
    if self.judged is not None and self.judged > self.size:
      raise ValueError(f"block: judged = {self.judged}; a block has {self.size} tokens")
    if self.start is None:
      return
    start = self.start if isinstance(self.start, tuple) else (self.start,)
    if len(start) != self.layers or not all(isinstance(i, int) and i >= 0 for i in start):
      raise ValueError(f"block: start = {self.start!r}; it must name layers = {self.layers} of the target's")
    if self.d_ff is not None:
      raise ValueError(f"block: d_ff = {self.d_ff}; with start = {self.start} it is the target's")
    object.__setattr__(self, "start", start)

  @property
  def depth(self):
    return self.size

  def taps(self, target):
    chosen = default_tap_layers(target.num_layers) if self.tap_layers is None else self.tap_layers
    return (*chosen, target.num_layers)

  def init(self, target, stats, rngs):
    c = target.config
    if self.start is not None and max(self.start) >= c.num_layers:
      raise ValueError(f"block: start = {self.start}; the target's layers are 0 … {c.num_layers - 1}")
    ids = self.choose_ids(c, stats)
    config = BlockConfig(
      decoder=c.replace(num_layers=self.layers, d_ff=self.d_ff or c.d_ff, sliding_window=None),
      tap_layers=self.taps(c)[:-1],
      block_size=self.size,
      draft_vocab_size=self.draft_vocab,
      output_rank=self.rank,
      output=self.output,
      markov_rank=self.markov or None,
    )
    config.check_target(c)
    rows = output_rows(target, ids) if self.output == "target" else None
    module = BlockHead(config, ids=ids, rows=rows, dtype=jnp.float32, rngs=rngs)
    module.norm = copied(target.norm)
    if rows is None:
      start_from_target(module.output, target, ids)
    # Masks stand beside the root's embedding: as large as that.
    module.masks[...] = module.masks[...] * jnp.std(target.embed[...]) * c.d_model**0.5
    wide = len(config.tap_layers) * c.d_model
    # As heads that recur do: what `fc` takes is divided by its usual size while training.
    set_sizes(module, np.ones(wide) if stats.sizes is None else stats.sizes[:-1])
    if self.start is not None:
      module.layers = nnx.List([copied(target.layers[i]) for i in self.start])
      last = jnp.eye(c.d_model, wide, wide - c.d_model, dtype=jnp.float32)
      module.fc.weight[...] = last * module.sizes[...]
    return module

  def go_on(self, fresh, trained):
    sizes = fresh.sizes[...]
    # A Markov head has trained rows a token, so these keep their draft vocabulary.
    module = trained if self.markov else super().go_on(fresh, trained)
    return on_sized_features(module, sizes)

  def chain_logits(self, module, frozen, batch, depth):
    head, width = on_raw_features(module), batch.counted.shape[1]
    hidden, logits = head.norm(hidden_by_block(head, frozen, batch)), []
    for d in range(depth):
      first = batch.counted[:, : width - d]
      base = head.output(hidden[:, : width - d, d])
      logits.append(head.conditioned(base, rows_at(batch.tokens, first + d - 1)))
    return logits

  def save(self, path, module, target, *, dtype):
    save_block(path, on_raw_features(module), target=target, dtype=dtype)


def hidden_by_block(head: BlockHead, frozen: Decoder, batch: Batch) -> Array:
  """The last layer's output ``[B, P, G, D]`` of the blocks before each learned token.

  The head is on raw features, see `on_raw_features`. Of entries that are -1, or whose token stands at a
  sample's first place, it means nothing and is finite.
  """
  c, size = head.config.decoder, head.config.block_size
  features = head.fuse(batch.taps[:, :, :-1])
  root = jnp.maximum(batch.counted - 1, 0)
  segment, position = rows_at(batch.segments, root), rows_at(batch.positions, root)
  seen = (batch.segments[:, None] == segment[..., None]) & (batch.positions[:, None] < position[..., None])
  embeddings = jnp.take(frozen.embed[...], rows_at(batch.tokens, root), axis=0, mode="clip")
  x = head.block(embeddings)  # [B, P, G, D]
  flat, blocks = (*x.shape[:1], -1), x.shape[:3]
  rope = layers.rope_table((position[..., None] + jnp.arange(size)).reshape(flat), c)
  known = layers.rope_table(batch.positions, c)
  x = x.reshape(*flat, x.shape[-1])
  for layer in head.layers:
    _, k, v = layer.attention.qkv(layer.attention_norm(features))
    q, own_k, own_v = layer.attention.qkv(layer.attention_norm(x))
    q, own_k = layers.rotate(q, rope), layers.rotate(own_k, rope)
    q, own_k, own_v = (part.reshape(*blocks, *part.shape[2:]) for part in (q, own_k, own_v))
    attended = attend_blocks(q, layers.rotate(k, known), v, own_k, own_v, seen)
    x = x + layer.attention.o(attended.reshape(*flat, c.num_heads * c.head_dim))
    x = x + layer.ff(layer.ff_norm(x))
  return x.reshape(*blocks, x.shape[-1])


def attend_blocks(q: Array, k: Array, v: Array, own_k: Array, own_v: Array, seen: Array) -> Array:
  """Grouped-query attention of blocks over a row's features and each over itself, whole.

  Args:
    q: ``[B, P, G, Q, H]``, at its positions, as keys are.
    k, v: ``[B, T, K, H]``, of the features.
    own_k, own_v: ``[B, P, G, K, H]``, of the blocks.
    seen: bool ``[B, P, T]``, the features that each block sees.

  Returns:
    ``[B, P, G, Q, H]``.
  """
  batch, count, size, heads, width = q.shape
  kv_heads = k.shape[2]
  kwargs = dict(precision=layers.precision(q.dtype), preferred_element_type=jnp.float32)
  q = q.reshape(batch, count, size, kv_heads, heads // kv_heads, width) * jnp.asarray(width**-0.5, q.dtype)
  far = jnp.einsum("BPGKRH,BTKH->BKRPGT", q, k, **kwargs)
  far = jnp.where(seen[:, None, None, :, None], far, -jnp.inf)
  near = jnp.einsum("BPGKRH,BPJKH->BKRPGJ", q, own_k, **kwargs)
  weights = jax.nn.softmax(jnp.concatenate([far, near], axis=-1), axis=-1).astype(v.dtype)
  far, near = jnp.split(weights, [k.shape[1]], axis=-1)
  y = jnp.einsum("BKRPGT,BTKH->BPGKRH", far, v, **kwargs)
  y = y + jnp.einsum("BKRPGJ,BPJKH->BPGKRH", near, own_v, **kwargs)
  return y.astype(q.dtype).reshape(batch, count, size, heads, width)
