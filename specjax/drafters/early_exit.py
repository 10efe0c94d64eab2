"""Early exit with a trained adapter behind the target's first layers (Kangaroo, Liu et al. 2024, 2404.18911).

The draft is the target's layers before ``exit``, an adapter of one attention layer and two norms, and the
target's head. The layers' rows are the target's own; the adapter has a cache of one layer. Where the draft is
unsure (``confidence``) the chain ends: Kangaroo's second exit.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import flax.struct
import jax.numpy as jnp

from specjax import cache as kv
from specjax.base import Committed, DraftContext
from specjax.drafters.shared_layers import SharedLayers
from specjax.drafters.tree_drafter import cascade
from specjax.models import Decoder, EarlyExit


@flax.struct.dataclass
class EarlyExitWeights:
  """The adapter, and a decoder of the target's layers before the exit (`models.truncated`)."""

  adapter: EarlyExit
  layers: Decoder


@flax.struct.dataclass
class EarlyExitState:
  """The adapter's cache: of n tokens it has n - 1 rows, as the target's has.

  Row t is made of the hidden state of position t alone, so that none is ever missing.
  """

  cache: kv.KVCache


@dataclasses.dataclass(frozen=True)
class EarlyExitDrafter(SharedLayers):
  """Grows a chain; weights are `EarlyExitWeights`.

  Attributes:
    exit: e, layers before the adapter; it reads the input of layer e.
  """

  name: ClassVar[str] = "early_exit"

  def __post_init__(self):
    super().__post_init__()
    if not self.tree.is_chain:
      raise ValueError("early_exit proposes chains; its tree has branches")
    if self.exit < 1:
      raise ValueError(f"early_exit: exit = {self.exit}; at least 1 layer stands before the adapter")

  @property
  def taps(self) -> tuple[int, ...]:
    return (self.exit,)

  def init(self, weights: EarlyExitWeights, batch, slots):
    trained, there = weights.adapter.config.exit_layer, weights.layers.config.num_layers
    if (trained, there) != (self.exit, self.exit):
      raise ValueError(
        f"early_exit: exit = {self.exit}; the adapter was trained behind {trained} layers, {there} are given"
      )
    return EarlyExitState(weights.adapter.init_cache(batch, slots))

  def prefill(self, weights: EarlyExitWeights, state: EarlyExitState, chunk: Committed):
    cache = weights.adapter.write(chunk.taps[:, :, 0], state.cache)
    return EarlyExitState(kv.commit(cache, None, chunk.valid.sum(axis=1, dtype=jnp.int32)))

  def propose(self, weights: EarlyExitWeights, state: EarlyExitState, context: DraftContext, target_cache):
    proposal, own, target_cache = self.grow_on(weights, state.cache, context, target_cache)
    return proposal, EarlyExitState(own), target_cache

  def extend(self, weights: EarlyExitWeights, state: EarlyExitState, committed: Committed):
    if committed.tokens.shape[1] == 1:  # perhaps nothing was drafted, and the adapter has not seen the root
      return self.prefill(weights, state, committed)
    count = committed.valid.sum(axis=1, dtype=jnp.int32)
    return EarlyExitState(kv.commit(state.cache, None, count))

  def layers(self, weights: EarlyExitWeights):
    return weights.layers

  def behind_exit(self, weights: EarlyExitWeights, tokens, hidden, rows, *, logits=True, **where):
    adapter = weights.adapter
    if not logits:
      return None, rows._replace(own=adapter.write(hidden, rows.own))
    output = adapter(hidden, rows.own, implementation=self.implementation, **where)
    said = self.over_target_vocabulary(output.logits, adapter.ids)
    return said, rows._replace(own=output.cache)


def early_exit(*, window: int, **options: Any) -> EarlyExitDrafter:
  """An `EarlyExitDrafter` over a chain of ``window`` drafts.

  Args:
    **options: fields of `EarlyExitDrafter`.

  Raises:
    ValueError: naming the field, the value and the limit.
  """
  return EarlyExitDrafter(cascade("early_exit", window), **options)
