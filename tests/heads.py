"""Tiny heads that are often right: random bodies whose output layers are fitted to a target's texts."""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.base import ModelOutput
from specjax.drafters import BlockWeights, EagleWeights, EarlyExitWeights, MedusaWeights
from specjax.models import (
  BlockConfig,
  BlockHead,
  Decoder,
  DecoderConfig,
  DraftConfig,
  DraftDecoder,
  Eagle1,
  Eagle1Config,
  Eagle3,
  Eagle3Config,
  EarlyExit,
  EarlyExitConfig,
  MedusaConfig,
  MedusaHeads,
  truncated,
)
from specjax.models.output import Bound

TAPS = (0, 1, 2)  # of a target of two layers: its embedding, what lies between, its output


def eagle3_config(target: DecoderConfig, ids=None) -> Eagle3Config:
  decoder = DecoderConfig(
    vocab_size=target.vocab_size,
    num_layers=1,
    d_model=48,
    d_ff=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    max_length=512,
    rope_base=500.0,
  )
  size = None if ids is None else len(ids)
  return Eagle3Config(decoder, target.d_model, TAPS, draft_vocab_size=size)


def eagle1_config(target: DecoderConfig, ids=None, d_ff=64) -> Eagle1Config:
  decoder = target.replace(num_layers=1, d_ff=d_ff, num_heads=2, num_kv_heads=1, head_dim=6, rope_base=500.0)
  return Eagle1Config(decoder, target.num_layers, draft_vocab_size=None if ids is None else len(ids))


@jax.jit
def _taps(target, tokens):
  return target(tokens, target.init_cache(*tokens.shape), taps=TAPS, logits=False).taps


@jax.jit
def _recurred(head, embed, tokens, features):
  """What recurs at each row t of ``features [R, T, D]``, with the token t + 1 of ``tokens [R, T]``."""
  following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
  return head(
    jnp.take(embed, following, axis=0), features, head.init_cache(*tokens.shape), logits=False
  ).hidden


def eagle3(target: Decoder, texts: np.ndarray, lengths, *, ids=None, seed: int = 3) -> EagleWeights:
  """A head whose output layer is fitted to the texts, for its first rows and for what recurs from them.

  Args:
    texts: int32 ``[R, T]``.
    lengths: tokens of each.
    ids: its draft vocabulary.
  """
  head = Eagle3(eagle3_config(target.config, ids), ids=ids, dtype=jnp.float32, rngs=nnx.Rngs(seed))
  tokens, embed = jnp.asarray(texts), target.embed[...]
  features, inputs, said = head.fuse(_taps(target, tokens)), [], []
  for ahead in range(2, 5):  # row t says token t + 2; once recurred it stands a position further on
    hidden = _recurred(head, embed, tokens, features)
    for row, length in enumerate(lengths):
      rows = np.arange(ahead - 2, length - 2)
      inputs.append(np.asarray(head.norm(hidden))[row, rows])
      said.append(texts[row, rows + 2])
    features = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
  head.output.weight = nnx.Param(_fitted(inputs, said, target.config.vocab_size, ids))
  return EagleWeights(head, embed)


def eagle1(target: Decoder, texts: np.ndarray, lengths, *, d_ff: int = 128) -> EagleWeights:
  """A random head whose feed-forward's last matrix is fitted to the target's next features in the texts."""
  head = Eagle1(eagle1_config(target.config, d_ff=d_ff), target, dtype=jnp.float32, rngs=nnx.Rngs(3))
  ff, tokens, embed = head.layer.ff, jnp.asarray(texts), target.embed[...]
  features = head.fuse(_taps(target, tokens)[:, :, -1:])
  ff.down.weight = nnx.Param(0 * ff.down.weight[...])
  residual = _recurred(head, embed, tokens, features)
  normed = head.layer.ff_norm(residual)
  inner = np.asarray(jax.nn.silu(ff.gate(normed)) * ff.up(normed), np.float64)
  missing = np.asarray(features[:, 1:] - residual[:, :-1], np.float64)
  rows = [(row, slice(0, length - 2)) for row, length in enumerate(lengths)]
  x, y = (np.concatenate([of[at] for at in rows]) for of in (inner, missing))
  fitted = np.linalg.solve(x.T @ x + 1e-4 * np.eye(d_ff), x.T @ y).T
  ff.down.weight = nnx.Param(jnp.asarray(fitted, jnp.float32))
  return EagleWeights(head, embed)


def medusa(target: Decoder, texts: np.ndarray, lengths, *, num_heads: int = 3) -> MedusaWeights:
  """Heads of their own output layers, fitted to the texts."""
  config = MedusaConfig(target.config.d_model, target.config.vocab_size, num_heads, output="own")
  heads = MedusaHeads(config, dtype=jnp.float32, rngs=nnx.Rngs(4))
  hidden = np.asarray(target.norm(_taps(target, jnp.asarray(texts))[:, :, -1]))
  for i, output in enumerate(heads.outputs):
    rows = [np.arange(length - 2 - i) for length in lengths]
    inputs = [hidden[row, at] for row, at in enumerate(rows)]
    said = [texts[row, at + 2 + i] for row, at in enumerate(rows)]
    output.weight = nnx.Param(_fitted(inputs, said, target.config.vocab_size, None))
  return MedusaWeights(heads, target.norm)


def early_exit(target: Decoder, texts: np.ndarray, lengths, *, exit_layer: int = 1) -> EarlyExitWeights:
  """An adapter before rows that are fitted to the texts, in place of the target's own."""
  config = EarlyExitConfig(target.config.replace(num_layers=1), exit_layer)
  adapter = EarlyExit(config, target, dtype=jnp.float32, rngs=nnx.Rngs(5))
  taps = _taps(target, jnp.asarray(texts))[:, :, exit_layer]
  hidden = np.asarray(adapter.norm(adapter(taps, adapter.init_cache(*texts.shape), logits=False).hidden))
  inputs = [hidden[row, : length - 1] for row, length in enumerate(lengths)]
  said = [texts[row, 1:length] for row, length in enumerate(lengths)]
  adapter.rows = Bound(_fitted(inputs, said, target.config.vocab_size, None))
  return EarlyExitWeights(adapter, truncated(target, exit_layer))


def _fitted(inputs, said, vocab: int, ids) -> jax.Array:
  """Ridge regression on one-hot tokens, ``[Vd, D]``, sharpened."""
  x, y = np.concatenate(inputs).astype(np.float64), np.eye(vocab)[np.concatenate(said)]
  weight = np.linalg.solve(x.T @ x + 1e-2 * np.eye(x.shape[1]), x.T @ y).T
  return jnp.asarray(8 * (weight if ids is None else weight[ids]), jnp.float32)


def draft_decoder(target: Decoder, like: Decoder, ids) -> DraftDecoder:
  """``like``'s layers between the target's embedding and its output rows of a draft vocabulary."""
  config = DraftConfig(target.config, draft_vocab_size=len(ids))
  draft = DraftDecoder(config, target, ids=ids, dtype=jnp.float32, rngs=nnx.Rngs(0))
  draft.layers, draft.norm = like.layers, like.norm
  return draft


@flax.struct.dataclass
class Reduced:
  """A draft that says only some tokens: another's logits at ``ids`` alone."""

  draft: Any
  ids: jax.Array

  def init_cache(self, batch, slots):
    return self.draft.init_cache(batch, slots)

  def __call__(self, tokens, cache, *, logits=True, **kwargs):
    output = self.draft(tokens, cache, logits=logits, **kwargs)
    return output.replace(logits=output.logits[..., self.ids]) if logits else output


@flax.struct.dataclass
class EagleRows:
  """Stands for a model whose cache rows are a head's, from the target's own features: see `fresh_cache`."""

  target: Decoder
  weights: EagleWeights

  def init_cache(self, batch, slots):
    return self.weights.head.init_cache(batch, slots)

  def __call__(self, tokens, cache, *, logits=False) -> ModelOutput:
    head, embed = self.weights.head, self.weights.embed
    taps = head.config.tap_layers
    taps = self.target(tokens, self.target.init_cache(*tokens.shape), taps=taps, logits=False).taps
    # The last row lacks its token: it is never a valid one.
    following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    embeddings = jnp.take(embed, following, axis=0, mode="clip")
    return head(embeddings, head.fuse(taps), cache, logits=logits)


@flax.struct.dataclass
class EarlyExitRows:
  """The same for an early exit's adapter."""

  target: Decoder
  weights: EarlyExitWeights

  def init_cache(self, batch, slots):
    return self.weights.adapter.init_cache(batch, slots)

  def __call__(self, tokens, cache, *, logits=False) -> ModelOutput:
    adapter = self.weights.adapter
    exit_layer = adapter.config.exit_layer
    taps = self.target(tokens, self.target.init_cache(*tokens.shape), taps=(exit_layer,), logits=False).taps
    return adapter(taps[:, :, 0], cache, logits=logits)


def block_config(target: DecoderConfig, ids=None, *, block_size: int = 5, markov_rank: int | None = 24):
  """Of a head of two layers with as few kv heads as query heads allow."""
  decoder = target.replace(num_layers=2, d_ff=40, num_heads=4, num_kv_heads=2, head_dim=6, rope_base=500.0)
  size = None if ids is None else len(ids)
  return BlockConfig(decoder, TAPS, block_size, draft_vocab_size=size, markov_rank=markov_rank)


def block_head(target: DecoderConfig, ids=None, *, seed: int = 6, **options) -> BlockHead:
  """A random head for a target."""
  return random_block(block_config(target, ids, **options), ids, seed=seed)


def random_block(config: BlockConfig, ids=None, *, seed: int = 6) -> BlockHead:
  """A random head whose Markov head, if it has one, says something."""
  head = BlockHead(config, ids=ids, dtype=jnp.float32, rngs=nnx.Rngs(seed))
  if head.markov is not None:
    before = np.random.default_rng(seed).standard_normal(head.markov.before.shape)
    head.markov.before = nnx.Param(jnp.asarray(before, jnp.float32))
  return head


@functools.partial(jax.jit, static_argnames="width")
def _block_hidden(head, embed, tokens, features, width):
  """The last layer's normed output of the block behind each root of ``tokens [T]``: ``[T, G, D]``."""
  root = jnp.arange(width)
  of_each = jnp.broadcast_to(features, (width, *features.shape))
  cache = head.remember(of_each, head.init_cache(width, width)).replace(length=root)
  return head.hidden(jnp.take(embed, tokens, axis=0), cache)[0]


def block(target: Decoder, texts: np.ndarray, lengths, *, ids=None, **options) -> BlockWeights:
  """A head whose output layer and Markov head are fitted to the texts, as far as rank r lets them."""
  head, embed = block_head(target.config, ids, **options), target.embed[...]
  tokens = jnp.asarray(texts)
  features, width, vocab = head.fuse(_taps(target, tokens)), texts.shape[1], target.config.vocab_size
  inputs, said, before = [], [], []
  for row, length in enumerate(lengths):
    hidden = np.asarray(_block_hidden(head, embed, tokens[row], features[row], width))
    for d in range(head.config.block_size):
      roots = np.arange(1, length - 1 - d)
      inputs.append(hidden[roots, d])
      said.append(texts[row, roots + 1 + d])
      before.append(texts[row, roots + d])
  if head.markov is None:
    head.output.weight = nnx.Param(_fitted(inputs, said, vocab, ids))
    return BlockWeights(head, embed)
  token_before = np.eye(vocab)[np.concatenate(before)]
  weight = _fitted([np.concatenate([np.concatenate(inputs), token_before], axis=1)], said, vocab, ids)
  width = head.config.decoder.d_model
  head.output.weight = nnx.Param(weight[:, :width])
  u, s, vt = np.linalg.svd(np.asarray(weight[:, width:]), full_matrices=False)
  rank = head.config.markov_rank
  head.markov.after = nnx.Param(jnp.asarray(u[:, :rank] * s[:rank], jnp.float32))
  head.markov.before = nnx.Param(jnp.asarray(vt[:rank].T, jnp.float32))
  return BlockWeights(head, embed)


@flax.struct.dataclass
class BlockRows:
  """Stands for a model whose cache rows are a block head's, from the target's own features."""

  target: Decoder
  weights: BlockWeights

  def init_cache(self, batch, slots):
    head = self.weights.head
    return head.init_cache(batch, slots - head.config.block_size)

  def __call__(self, tokens, cache, *, logits=False) -> ModelOutput:
    head = self.weights.head
    taps = self.target(tokens, self.target.init_cache(*tokens.shape), taps=TAPS, logits=False).taps
    return ModelOutput(None, head.remember(head.fuse(taps), cache))


@flax.struct.dataclass
class Tapped:
  """A target of another's logits with hidden states to tap: rows of ``table [V, D]``, at each layer."""

  target: Any
  table: jax.Array

  def init_cache(self, batch, slots):
    return self.target.init_cache(batch, slots)

  def __call__(self, tokens, cache, *, taps=(), **kwargs) -> ModelOutput:
    output = self.target(tokens, cache, **kwargs)
    seen = jnp.take(self.table, tokens, axis=0)[:, :, None]
    return output.replace(taps=jnp.repeat(seen, len(taps), axis=2) if taps else None)
