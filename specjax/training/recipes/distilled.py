"""A small decoder that drafts alone: KL to the target on its own text (DistillSpec, Zhou et al. 2024)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx

from specjax.checkpoints import save_draft
from specjax.models import DraftConfig, DraftDecoder
from specjax.training.batches import rows_at
from specjax.training.packed import hidden_states
from specjax.training.recipes.base import Recipe, copied, start_from_target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distilled(Recipe):
  """A `DraftDecoder`: the target's embedding, some of its layers to start from, perhaps an output of its own.

  It reads the text alone, so what it says at a place is the same at every depth of a chain: one depth is
  trained, and `judged` ones follow from it.

  Attributes:
    layers: of the target, which the draft's layers start as.
    output: ``target``: the target's own head, its rows of the draft vocabulary, as they are; ``own``: a
      trained output layer that starts there.
  """

  layers: tuple[int, ...] = (0,)
  output: str = "target"
  loss: str = "kl"
  judged: int | None = 4

  name: ClassVar[str] = "distilled"
  kind: ClassVar[str] = "draft"
  lag: ClassVar[int] = 0

  def __post_init__(self):
    super().__post_init__()
    chosen = self.layers if isinstance(self.layers, tuple) else (self.layers,)
    if not chosen or not all(isinstance(i, int) and i >= 0 for i in chosen):
      raise ValueError(f"distilled: layers = {self.layers!r}; layers of the target are needed, e.g. (0,29)")
    object.__setattr__(self, "layers", chosen)

  @property
  def depth(self):
    return 1

  def taps(self, target):
    return (target.num_layers,)

  def init(self, target, stats, rngs):
    if max(self.layers) >= target.config.num_layers:
      raise ValueError(
        f"distilled: layers = {self.layers}; the target's are 0 … {target.config.num_layers - 1}"
      )
    ids = self.choose_ids(target.config, stats)
    config = DraftConfig(
      decoder=target.config.replace(num_layers=len(self.layers)),
      output=self.output,
      draft_vocab_size=self.draft_vocab,
      output_rank=self.rank,
    )
    module = DraftDecoder(config, target, ids=ids, dtype=jnp.float32, rngs=rngs)
    module.layers = nnx.List([copied(target.layers[i]) for i in self.layers])
    module.norm = copied(target.norm)
    if module.output is not None:
      start_from_target(module.output, target, ids)
    return module

  def chain_logits(self, module, frozen, batch, depth):
    hidden, _ = hidden_states(module, batch)
    logits = module.unembed(module.norm(rows_at(hidden, batch.counted - 1)))
    return [logits[:, d:] for d in range(depth)]

  def save(self, path, module, target, *, dtype):
    save_draft(path, module, target=target, dtype=dtype)
