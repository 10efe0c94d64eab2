"""Medusa-1 (Cai et al. 2024): heads on the frozen target's last hidden state; head i drafts t + 2 + i."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from specjax.checkpoints import save_medusa
from specjax.models import MedusaConfig, MedusaHeads, layers, output_rows
from specjax.training.batches import rows_at
from specjax.training.recipes.base import Recipe, check_positive, start_from_target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Medusa(Recipe):
  """Loss Σ_i decay^i · loss of head i. The paper's own loss is ``tokens``.

  Attributes:
    heads: of them, one a depth.
    layers: residual blocks a head.
    output: ``target``: behind the blocks stands the target's own head, its rows of the draft vocabulary,
      frozen; ``own``: a trained output layer a head; ``shared``: one for all. Both start as the target's.
  """

  heads: int = 4
  layers: int = 1
  output: str = "target"

  name: ClassVar[str] = "medusa"
  kind: ClassVar[str] = "medusa"
  lag: ClassVar[int] = 1

  def __post_init__(self):
    super().__post_init__()
    for field in ("heads", "layers"):
      check_positive("medusa", field, getattr(self, field))
    if self.judged is not None and self.judged > self.heads:
      raise ValueError(f"medusa: judged = {self.judged}; there are {self.heads} heads")

  @property
  def depth(self):
    return self.heads

  def taps(self, target):
    return (target.num_layers,)

  def init(self, target, stats, rngs):
    ids = self.choose_ids(target.config, stats)
    config = MedusaConfig(
      d_model=target.config.d_model,
      vocab_size=target.config.vocab_size,
      num_heads=self.heads,
      num_layers=self.layers,
      output=self.output,
      draft_vocab_size=self.draft_vocab,
      output_rank=self.rank,
    )
    module = MedusaHeads(config, ids=ids, dtype=jnp.float32, rngs=rngs)
    for output in module.outputs:
      start_from_target(output, target, ids)
    return module

  def chain_logits(self, module, frozen, batch, depth):
    # The root of a chain, the token at u - 1, has no hidden state yet: the last one is that of u - 2.
    hidden = rows_at(batch.taps[:, :, -1], batch.counted - 2)
    normed, width = frozen.norm(hidden.astype(frozen.dtype)), batch.counted.shape[1]
    if self.output != "target":
      logits = module(normed)
      return [logits[:, : width - i, i] for i in range(depth)]
    # A product a head: slices of one product's logits, heads side by side, cost a third of a step on CPU.
    rows, drafts = output_rows(frozen, module.ids), module(normed, lambda x: x).astype(normed.dtype)
    return [layers.matmul(drafts[:, : width - i, i], rows).astype(jnp.float32) for i in range(depth)]

  def save(self, path, module, target, *, dtype):
    save_medusa(path, module, target=target, dtype=dtype)
