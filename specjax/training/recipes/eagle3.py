"""EAGLE-3 (Li et al. 2025) by training-time test: the head is trained on chains of its own states.

Step 0 runs the head over all places t of a row, with the target's features and the token at t + 1. Step j ≥ 1
runs it again at every t: the feature is what recurred from step j − 1 at t, the token that at t + 1 + j, the
rotary position t + j. Its query sees the keys of step 0 at places ≤ t, which came from true features, and of
the steps 1 … j only its own place: what a chain of j drafts behind row t sees when decoding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.checkpoints import save_eagle3
from specjax.models import Decoder, Eagle3, Eagle3Config, default_tap_layers, layers, output_rows
from specjax.training.batches import Batch, rows_at
from specjax.training.packed import attend, visible
from specjax.training.recipes.base import Recipe, check_positive, copied, start_from_target

Array = jax.Array


class FeatureSizes(nnx.Variable):
  """Float32 ``[3, D]``, what features are divided by while training; never trained."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleThree(Recipe):
  """Loss Σ_j decay^j · loss of step j; the paper's is cross-entropy on the target's probabilities.

  Attributes:
    steps: of the training-time test, 1 … ; one a depth of the chains it will draft.
    tap_layers: three layers of the target whose input is seen; None: 2, L // 2, L − 3.
    d_ff: width of the feed-forward; None: the target's.
    output: ``own``: an output layer that is trained; ``target``: the target's rows behind a square
      matrix that is trained.
    start: layer of the target that the head's layer starts as: it adds that layer's queries, keys and values
      of the feature and the first layer's of the embedding, and the feature starts as the last of the three.
      None: drawn at random. The output layer and the norm before it start as the target's either way.

  Features are divided by their usual sizes while training, and `fc` by the same when it is saved: a target's
  residual stream has numbers of very different size, and one rate of learning suits none of them.
  """

  steps: int = 4
  tap_layers: tuple[int, ...] | None = None
  d_ff: int | None = None
  output: str = "own"
  start: int | None = None

  name: ClassVar[str] = "eagle3"
  kind: ClassVar[str] = "eagle3"
  lag: ClassVar[int] = 1
  sized: ClassVar[bool] = True

  def __post_init__(self):
    super().__post_init__()
    check_positive("eagle3", "steps", self.steps)
    check_positive("eagle3", "d_ff", self.d_ff, optional=True)

    if self.start is not None and self.d_ff is not None:
      raise ValueError(f"eagle3: d_ff = {self.d_ff}; with start = {self.start} it is the target's")

  @property
  def depth(self):
    return self.steps

  def taps(self, target):
    chosen = default_tap_layers(target.num_layers) if self.tap_layers is None else self.tap_layers
    return (*chosen, target.num_layers)

  def init(self, target, stats, rngs):
    c = target.config
    if self.start is not None and not (isinstance(self.start, int) and 0 <= self.start < c.num_layers):
      raise ValueError(f"eagle3: start = {self.start!r}; the target's layers are 0 … {c.num_layers - 1}")
    ids = self.choose_ids(c, stats)
    # As public heads are: no biases, no norms of queries and keys, no window.
    own = dict(num_layers=1, d_ff=self.d_ff or c.d_ff, tie_embeddings=False, rope_scaling=None)
    plain = dict(qkv_bias=False, qk_norm=False, sliding_window=None)
    config = Eagle3Config(
      decoder=c.replace(**own, **plain),
      target_width=c.d_model,
      tap_layers=self.taps(c)[:-1],
      draft_vocab_size=self.draft_vocab,
      output_rank=self.rank,
      output=self.output,
    )
    config.check_target(c)
    rows = output_rows(target, ids) if self.output == "target" else None
    module = Eagle3(config, ids=ids, rows=rows, dtype=jnp.float32, rngs=rngs)
    module.norm = copied(target.norm)
    if rows is None:
      start_from_target(module.output, target, ids)
    sizes = np.ones((len(config.tap_layers), c.d_model)) if stats.sizes is None else stats.sizes[:-1]
    module.sizes = FeatureSizes(jnp.asarray(sizes, jnp.float32))
    if self.start is not None:
      _start_as(module, target, self.start)
    return module

  def go_on(self, fresh, trained):
    sizes = fresh.sizes[...]
    module = super().go_on(fresh, trained)
    module.sizes = FeatureSizes(sizes)
    module.fc.weight[...] = module.fc.weight[...] * sizes.reshape(-1)
    return module

  def chain_logits(self, module, frozen, batch, depth):
    width = batch.counted.shape[1]
    logits = []
    for step, hidden in enumerate(hidden_by_step(module, frozen, batch, depth)):
      # A chain whose first draft is the token at u stands behind row u - 2.
      hidden = rows_at(hidden, batch.counted[:, : width - step] - 2)
      logits.append(module.output(module.norm(hidden)))
    return logits

  def save(self, path, module, target, *, dtype):
    save_eagle3(path, on_raw_features(module), target=target, dtype=dtype)


def on_raw_features(module: Eagle3) -> Eagle3:
  """The head as it decodes: its `fc` divided by the sizes, which are gone."""
  part = nnx.clone(module)
  part.fc.weight[...] = part.fc.weight[...] / part.sizes[...].reshape(-1)
  del part.sizes
  return part


def hidden_by_step(module: Eagle3, frozen: Decoder, batch: Batch, steps: int) -> Iterator[Array]:
  """What recurs, ``[B, T, D]``, of each step of the training-time test.

  Step j at place t is what decoding a chain behind row t gives at its j-th node, the root 0, if the drafts
  are the text's own tokens. Of a sample's last 1 + j places it means nothing.
  """
  c = module.config.decoder
  seen = visible(batch, c.sliding_window)
  embeddings = jnp.take(frozen.embed[...], batch.tokens, axis=0, mode="clip").astype(module.dtype)
  features = module.fuse(batch.taps[:, :, :-1].astype(jnp.float32) / module.sizes[...])
  true, own = None, []
  for step in range(steps):
    q, k, v = module.layer.qkv(jnp.roll(embeddings, -(1 + step), axis=1), features)
    rope = layers.rope_table(batch.positions + step, c)
    q, k = layers.rotate(q, rope), layers.rotate(k, rope)
    if true is None:
      true = k, v
    else:
      own.append((k, v))
    attended = attend(q, *true, seen, own)
    features = module.layer.finish(module.layer.residual(features), attended)
    yield features


def _start_as(module: Eagle3, target: Decoder, start: int) -> None:
  """Fills the head's layer from the target's layer ``start`` and, for the embedding, from its first."""
  first, chosen = copied(target.layers[0]), copied(target.layers[start])
  layer, width = module.layer, target.config.d_model
  layer.embedding_norm, layer.feature_norm = first.attention_norm, chosen.attention_norm
  layer.ff_norm, layer.ff, layer.attention.o = chosen.ff_norm, chosen.ff, chosen.attention.o
  for name in ("q", "k", "v"):
    halves = [getattr(part.attention, name).weight[...] for part in (first, chosen)]
    getattr(layer.attention, name).weight[...] = jnp.concatenate(halves, axis=1)
  last = jnp.eye(width, 3 * width, 2 * width, dtype=jnp.float32)
  module.fc.weight[...] = last * module.sizes[...].reshape(-1)
