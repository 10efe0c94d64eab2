"""What the recipes of EAGLE's heads share: chains of a head's own states."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import jax
import jax.numpy as jnp

from specjax.models import Decoder, DecoderConfig, FeatureHead, layers
from specjax.training.batches import Batch, rows_at
from specjax.training.packed import attend, visible
from specjax.training.recipes.base import Recipe, check_positive
from specjax.training.recipes.sizes import on_raw_features, on_sized_features

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recurrent(Recipe):
  """A `FeatureHead`.

  Attributes:
    d_ff: width of the feed-forward; None: the target's.
    start: layer of the target that the head's layer starts as; None: drawn at random.

  While training, `fc` is on sized features, see `sizes`.
  """

  d_ff: int | None = None
  start: int | None = None

  lag: ClassVar[int] = 1
  sized: ClassVar[bool] = True

  def __post_init__(self):
    super().__post_init__()
    check_positive(self.name, "d_ff", self.d_ff, optional=True)
    if self.start is not None and self.d_ff is not None:
      raise ValueError(f"{self.name}: d_ff = {self.d_ff}; with start = {self.start} it is the target's")

  @abc.abstractmethod
  def features(self, head: FeatureHead, batch: Batch) -> Array:
    """The head's features at all places of a batch: ``[B, T, D]``."""

  def layer_config(self, target: DecoderConfig) -> DecoderConfig:
    """Of one layer, as wide as the target.

    Raises:
      ValueError: ``start`` is no layer of the target.
    """
    if self.start is not None and not (isinstance(self.start, int) and 0 <= self.start < target.num_layers):
      raise ValueError(
        f"{self.name}: start = {self.start!r}; the target's layers are 0 … {target.num_layers - 1}"
      )
    return target.replace(num_layers=1, d_ff=self.d_ff or target.d_ff, tie_embeddings=False)

  def go_on(self, fresh, trained):
    sizes = fresh.sizes[...]
    return on_sized_features(super().go_on(fresh, trained), sizes)

  def chain_logits(self, module, frozen, batch, depth):
    head, width = on_raw_features(module), batch.counted.shape[1]
    logits = []
    for step, hidden in enumerate(hidden_by_step(head, frozen, batch, self.features(head, batch), depth)):
      # A chain whose first draft is the token at u stands behind row u - 2.
      logits.append(head.read(rows_at(hidden, batch.counted[:, : width - step] - 2)))
    return logits


def hidden_by_step(
  head: FeatureHead, frozen: Decoder, batch: Batch, features: Array, steps: int
) -> Iterator[Array]:
  """What recurs, ``[B, T, D]``, of each step of EAGLE-3's training-time test.

  Step 0 runs the head over all places t of a row, with the target's features and the token at t + 1. Step
  j ≥ 1 runs it again at every t: the feature is what recurred from step j − 1 at t, the token that at
  t + 1 + j, the rotary position t + j. Its query sees the keys of step 0 at places ≤ t, which came from true
  features, and of the steps 1 … j only its own place. So step j at place t is what decoding a chain behind
  row t gives at its j-th node, the root 0, if the drafts are the text's own tokens. Of a sample's last 1 + j
  places it means nothing.

  Args:
    head: on raw features, see `on_raw_features`.
    frozen: the target, for its embedding.
    features: ``[B, T, D]`` of the target.
  """
  c = head.config.decoder
  seen = visible(batch, c.sliding_window)
  embeddings = jnp.take(frozen.embed[...], batch.tokens, axis=0, mode="clip").astype(head.dtype)
  true, own = None, []
  for step in range(steps):
    residual, q, k, v = head.enter(jnp.roll(embeddings, -(1 + step), axis=1), features)
    rope = layers.rope_table(batch.positions + step, c)
    q, k = layers.rotate(q, rope), layers.rotate(k, rope)
    if true is None:
      true = k, v
    else:
      own.append((k, v))
    features = head.layer.finish(residual, attend(q, *true, seen, own))
    yield features
