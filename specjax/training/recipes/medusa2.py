"""Medusa-2 (Cai et al. 2024, section 2.2.2): heads and backbone are trained together.

The paper's loss is L = L_LM + λ_0 Σ_k λ_k L_k with λ_0 = 0.2, λ_k = 0.8^k, head k = 1, 2, …, and a learning
rate four times as high for the heads. With self-distillation (section 2.3.2) L_LM of a token is KL(p ‖ q), p
of the original target, which is the backbone without its adapters, and q of the backbone with them.

What comes of it is **another target**: rounds with any lossless rule keep *its* law, not the original's. How
far apart the two are is in the log, in nats a token of held-out text.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models import Decoder, MedusaHeads
from specjax.training import losses
from specjax.training.adapters import Adapters
from specjax.training.batches import Batch
from specjax.training.packed import hidden_states
from specjax.training.recipes.base import before, reference, target_logits
from specjax.training.recipes.medusa import Medusa

Array = jax.Array

# Of a row, whose logits are made together; rows have a multiple of 16.
_TOKENS_AT_ONCE = 64


class Joint(nnx.Module):
  """Heads, and what is added to the backbone."""

  def __init__(self, heads: MedusaHeads, adapters: Adapters):
    self.heads, self.adapters = heads, adapters

  @property
  def ids(self) -> Array | None:
    return self.heads.ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaTwo(Medusa):
  """Loss KL(original ‖ backbone) + share · Σ_k decay^k · loss of head k.

  The first of the paper's two stages is a run of ``medusa``; this is the second, from its head
  (``--start_from``). Heads learn what the changed backbone says (``loss``), or the text (``loss=tokens``).

  Attributes:
    share: λ_0, of the heads in the loss.
    head_rate: times the learning rate for the heads.
    lora: rank of the backbone's adapters; 0: its linear weights are trained whole.
    alpha: adapters are scaled by ``alpha / lora``.
  """

  share: float = 0.2
  head_rate: float = 4.0
  lora: int = 32
  alpha: float = 16.0

  name: ClassVar[str] = "medusa2"
  changes_target: ClassVar[bool] = True

  def __post_init__(self):
    super().__post_init__()
    for field in ("share", "head_rate", "alpha"):
      value = getattr(self, field)
      if not (isinstance(value, int | float) and 0 < value < float("inf")):
        raise ValueError(f"medusa2: {field} = {value!r}; it must be a number above 0")
    if type(self.lora) is not int or self.lora < 0:
      raise ValueError(f"medusa2: lora = {self.lora!r}; it must be an integer of at least 0")

  def init(self, target, stats, rngs):
    heads = super().init(target, stats, rngs)
    return Joint(heads, Adapters(target, self.lora or None, alpha=self.alpha, rngs=rngs))

  def head_of(self, module):
    return module.heads

  def go_on(self, fresh, trained):
    fresh.heads = super().go_on(fresh.heads, trained)
    return fresh

  def rate(self, parameter):
    return self.head_rate if parameter.startswith("heads.") else 1.0

  def target_of(self, module, target):
    return module.adapters.merged(target)

  def loss_sums(self, module, frozen, batch, key):
    ahead = self._through_backbone(module, frozen, batch)
    heads, sums = super().loss_sums(module.heads, frozen, ahead, key)
    kl = kl_sums(frozen, batch, ahead)
    return kl[0] + self.share * self.decay * heads, sums | {"kl": kl}

  def evaluate(self, module, frozen, batch):
    """As of other heads, with the changed backbone as the target; and ``kl``, see `kl_sums`."""
    ahead = self._through_backbone(module, frozen, batch)
    best, mass = reference(frozen, ahead, module.ids)
    sums = super().evaluate(module.heads, frozen, ahead.replace(best=best, mass=mass))
    return sums | {"kl": kl_sums(frozen, batch, ahead)}

  def save(self, path, module, target, *, dtype):
    super().save(path, module.heads, target, dtype=dtype)

  def _through_backbone(self, module: Joint, frozen: Decoder, batch: Batch) -> Batch:
    """The batch with hidden states of the changed backbone. Its norm and output head are the original's, so
    what else is read of the target stays."""
    _, taps = hidden_states(module.adapters.merged(frozen), batch, self.taps(frozen.config))
    return batch.replace(taps=taps)


def kl_sums(frozen: Decoder, original: Batch, changed: Batch) -> Array:
  """Σ over learned tokens of KL(original ‖ changed) of the whole vocabulary, nats, and their number: ``[2]``.

  The original's hidden states may be recorded ones in bfloat16: what that alone makes is in the log's first
  row, before anything was trained. A few tokens of each row at a time, computed again for the gradient: all
  logits at once would be a step's largest arrays. (Not row by row: these may lie on several devices.)
  """
  real = slice(frozen.config.num_real_tokens)  # padding is -inf in both
  logits = lambda hidden: target_logits(frozen, hidden, None)[..., real]

  @jax.checkpoint
  def of_part(part):
    was, now, counts = part
    p = jax.nn.softmax(jax.lax.stop_gradient(logits(was)), axis=-1)
    return losses.masked_sum(losses.kl(p, logits(now)), counts)

  counts = original.counted >= 0
  size = math.gcd(counts.shape[1], _TOKENS_AT_ONCE)
  cut = lambda x: jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)
  sums = jax.lax.map(of_part, jax.tree.map(cut, (before(original), before(changed), counts)))
  return jnp.stack([sums.sum(), counts.sum(dtype=jnp.float32)])
