"""Self-speculation: the target drafts for itself, with some of its sublayers left out. Nothing is trained.

Left out is a set of attention and feed-forward sublayers (Draft & Verify, Zhang et al. 2023, 2309.08168), or
all layers behind the first n, so that the final norm and the head read the output of layer n - 1 (as
LayerSkip drafts, Elhoushi et al. 2024, 2404.16710, without its training).

The draft has no rows of its own for committed tokens. In each layer that it keeps it attends to the target's,
which are there and exact; a draft that ran alone over the text would have other rows behind its first skip,
and worse ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from specjax.base import DraftContext, StatelessDrafter
from specjax.drafters.shared_layers import SharedLayers
from specjax.drafters.tree_drafter import shaped


@dataclass(frozen=True)
class SelfSpeculation(SharedLayers, StatelessDrafter):
  """Weights are the target without its sublayers: `models.skipping`, or `models.truncated` for a prefix.

  Attributes:
    exit: layers that are whole, from the first on: `SkipSet.prefix`, or all that the draft has.
  """

  name: ClassVar[str] = "self_speculation"
  taps: ClassVar[tuple[int, ...]] = ()

  def init(self, weights, batch, slots):
    whole = 0
    for layer in weights.layers:
      if layer.attention is None or layer.ff is None:
        break
      whole += 1
    if self.exit > whole:
      raise ValueError(
        f"self_speculation: exit = {self.exit}; the draft has {whole} whole layers before a skip"
      )
    return ()

  def propose(self, weights, state, context: DraftContext, target_cache):
    proposal, _, target_cache = self.grow_on(weights, None, context, target_cache)
    return proposal, state, target_cache

  def layers(self, weights):
    return weights

  def behind_exit(self, weights, tokens, hidden, rows, *, logits=True, **where):
    if not logits:  # the rows behind the exit are verification's
      return None, rows
    output = weights(
      tokens,
      rows.target,
      layer_range=(self.exit, None),
      hidden=hidden,
      implementation=self.implementation,
      **where,
    )
    return self.over_target_vocabulary(output.logits, None), rows._replace(target=output.cache)


def self_speculation(
  *,
  window: int,
  branching: Sequence[int] = (),
  nodes: int | None = None,
  beam: int | None = None,
  **options: Any,
) -> SelfSpeculation:
  """A `SelfSpeculation` over a chain of ``window`` drafts, or a tree as deep; see `tree_drafter.shaped`.

  Args:
    **options: fields of `SelfSpeculation`.

  Raises:
    ValueError: naming the field, the value and the limit.
  """
  tree = shaped("self_speculation", window=window, branching=branching, nodes=nodes, beam=beam, **options)
  return SelfSpeculation(**tree)
