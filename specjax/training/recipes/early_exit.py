"""Early exit (Kangaroo, Liu et al. 2024): an adapter behind some layers learns what the whole target says.

The target's layers are frozen, and so is its head; the paper's loss is cross-entropy on the target's
probabilities. What the adapter says at a place depends on the hidden states of the text up to there alone, so
it is the same at every depth of a chain: one depth is trained, and `judged` ones follow from it.

Recorded are the hidden states of `features.usual_taps`; behind other layers they are computed batch by batch.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from specjax.checkpoints import save_early_exit
from specjax.models import EarlyExit as Adapter
from specjax.models import EarlyExitConfig, layers
from specjax.training.batches import Batch, rows_at
from specjax.training.packed import attend, visible
from specjax.training.recipes.base import Recipe, check_positive, copied


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyExit(Recipe):
  """Its attention and first norm start as those of layer ``exit``, its second norm as the target's last.

  Attributes:
    exit: e, layers of the target before the adapter; there is no default, since what is best depends on the
      target (the paper: layer 2 of 32 for 7B, 3 of 40 for 13B).
  """

  exit: int | None = None
  judged: int | None = 4

  name: ClassVar[str] = "early_exit"
  kind: ClassVar[str] = "early_exit"
  lag: ClassVar[int] = 0

  def __post_init__(self):
    super().__post_init__()
    check_positive("early_exit", "exit", self.exit)
    if self.rank is not None:
      raise ValueError(
        f"early_exit: rank = {self.rank}; it reads the target's own head, which is not factored"
      )

  @property
  def depth(self):
    return 1

  def taps(self, target):
    return (self.exit, target.num_layers)

  def init(self, target, stats, rngs):
    c = target.config
    if self.exit >= c.num_layers:
      raise ValueError(f"early_exit: exit = {self.exit}; it must be in [1, {c.num_layers - 1}]")
    ids = self.choose_ids(c, stats)
    config = EarlyExitConfig(c.replace(num_layers=1), self.exit, draft_vocab_size=self.draft_vocab)
    module = Adapter(config, target, ids=ids, dtype=jnp.float32, rngs=rngs)
    following = target.layers[self.exit]
    module.attention_norm, module.attention = copied(following.attention_norm), copied(following.attention)
    module.norm = copied(target.norm)
    return module

  def chain_logits(self, module, frozen, batch, depth):
    logits = module.unembed(rows_at(adapted(module, batch), batch.counted - 1))
    return [logits[:, d:] for d in range(depth)]

  def save(self, path, module, target, *, dtype):
    save_early_exit(path, module, target=target, dtype=dtype)


def adapted(module: Adapter, batch: Batch):
  """The adapter's output at every place, before its second norm: ``[B, T, D]``."""
  c = module.config.decoder
  hidden = batch.taps[:, :, 0].astype(module.dtype)
  rope = layers.rope_table(batch.positions, c)
  q, k, v = module.attention.qkv(module.attention_norm(hidden))
  attended = attend(layers.rotate(q, rope), layers.rotate(k, rope), v, visible(batch, c.sliding_window))
  return hidden + module.attention.o(attended.reshape(*hidden.shape[:2], -1))
