"""EAGLE-3 (Li et al. 2025) by training-time test: the head is trained on chains of its own states."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from specjax.checkpoints import save_eagle3
from specjax.models import Decoder, Eagle3, Eagle3Config, default_tap_layers, output_rows
from specjax.training.recipes.base import check_positive, copied, start_from_target
from specjax.training.recipes.recurrent import Recurrent
from specjax.training.recipes.sizes import on_raw_features, set_sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleThree(Recurrent):
  """Loss Σ_j decay^j · loss of step j; the paper's is cross-entropy on the target's probabilities.

  The paper's ablations: ``steps=1`` is without training-time test, one layer in ``tap_layers`` (the last
  one's output: L of a target of L layers) without fused features.

  Attributes:
    steps: of the training-time test, 1 … ; one a depth of the chains it will draft.
    tap_layers: layers of the target whose input is seen; None: 2, L // 2, L − 3.
    output: ``own``: an output layer that is trained; ``target``: the target's rows behind a square
      matrix that is trained.
    start: the head's layer adds that layer's queries, keys and values of the feature and the first layer's of
      the embedding, and the feature starts as the last of the tapped ones. The output layer and the norm
      before it start as the target's with or without it.
  """

  steps: int = 4
  tap_layers: tuple[int, ...] | None = None
  output: str = "own"

  name: ClassVar[str] = "eagle3"
  kind: ClassVar[str] = "eagle3"

  def __post_init__(self):
    super().__post_init__()
    check_positive("eagle3", "steps", self.steps)
    taps = self.tap_layers
    if taps is not None and not isinstance(taps, tuple):
      raise ValueError(f"eagle3: tap_layers = {taps!r}; layers of the target are needed, e.g. (2,15,27)")

  @property
  def depth(self):
    return self.steps

  def taps(self, target):
    chosen = default_tap_layers(target.num_layers) if self.tap_layers is None else self.tap_layers
    return (*chosen, target.num_layers)

  def init(self, target, stats, rngs):
    c = target.config
    decoder = self.layer_config(c)
    ids = self.choose_ids(c, stats)
    config = Eagle3Config(
      # As public heads are: no biases, no norms of queries and keys, no window.
      decoder=decoder.replace(rope_scaling=None, qkv_bias=False, qk_norm=False, sliding_window=None),
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
    set_sizes(module, np.ones(module.fc.weight.shape[1]) if stats.sizes is None else stats.sizes[:-1])
    if self.start is not None:
      _start_as(module, target, self.start)
    return module

  def features(self, head, batch):
    return head.fuse(batch.taps[:, :, :-1])

  def save(self, path, module, target, *, dtype):
    save_eagle3(path, on_raw_features(module), target=target, dtype=dtype)


def _start_as(module: Eagle3, target: Decoder, start: int) -> None:
  """Fills the head's layer from the target's layer ``start`` and, for the embedding, from its first."""
  first, chosen = copied(target.layers[0]), copied(target.layers[start])
  layer, width, taps = module.layer, target.config.d_model, len(module.config.tap_layers)
  layer.embedding_norm, layer.feature_norm = first.attention_norm, chosen.attention_norm
  layer.ff_norm, layer.ff, layer.attention.o = chosen.ff_norm, chosen.ff, chosen.attention.o
  for name in ("q", "k", "v"):
    halves = [getattr(part.attention, name).weight[...] for part in (first, chosen)]
    getattr(layer.attention, name).weight[...] = jnp.concatenate(halves, axis=1)
  last = jnp.eye(width, taps * width, (taps - 1) * width, dtype=jnp.float32)
  module.fc.weight[...] = last * module.sizes[...]
