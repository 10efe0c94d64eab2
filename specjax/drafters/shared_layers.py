"""Drafting with the target's own layers, on the target's own cache: what early exits and skipping share.

The draft sees the target's rows of committed tokens, in all layers that it has: nothing of the text is
computed or stored a second time, so there is no cache of the draft to fill, to catch up or to roll back. What
it drafts gets scratch rows behind them, which verification writes over or finds right.

**Right** are those of the first ``exit`` layers, which the draft runs as the target does. Of a chain they lie
where verification would put them, node i's behind i others; so their output goes into `Proposal.hidden`, and
verification runs the other layers alone. For that the last draft, behind which nothing is drafted, is run
through these layers, too. A tree's rows lie in the order it grew in, which is not that of its nodes:
verification runs all layers and writes over them.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax import cache as kv
from specjax.base import DraftContext
from specjax.drafters.step import Start, Step
from specjax.drafters.tree_drafter import TreeDrafter
from specjax.models import Decoder

Array = jax.Array


class Rows(NamedTuple):
  """What a round writes while it drafts.

  Attributes:
    target: the target's cache, with scratch rows of the layers that the draft has.
    own: a cache of the drafter's own, as long, or None.
    hidden: ``[B, N, D]``, what the first ``exit`` layers gave, by node; None where nobody reads it.
  """

  target: kv.KVCache
  own: kv.KVCache | None
  hidden: Array | None

  def behind(self, length: Array) -> Rows:
    """The same with ``length [B]`` rows that are seen whole."""
    own = None if self.own is None else self.own.replace(length=length)
    return self._replace(target=self.target.replace(length=length), own=own)


@dataclasses.dataclass(frozen=True)
class SharedLayers(TreeDrafter, abc.ABC):
  """Grows a chain or a tree.

  Attributes:
    exit: layers of the target, from the first on, that the draft runs as the target does.
  """

  exit: int = 0

  def __post_init__(self):
    super().__post_init__()
    if type(self.exit) is not int or self.exit < 0:
      raise ValueError(f"{self.name}: exit = {self.exit!r}; it must be a number of layers, at least 0")

  @property
  def hands_over(self) -> bool:
    """Whether verification begins behind the first ``exit`` layers."""
    return self.tree.is_chain and self.exit > 0

  @abc.abstractmethod
  def layers(self, weights: Any) -> Decoder:
    """A decoder whose first ``exit`` layers are the target's."""

  @abc.abstractmethod
  def behind_exit(
    self, weights: Any, tokens: Array, hidden: Array | None, rows: Rows, *, logits: bool = True, **where: Any
  ) -> tuple[Array | None, Rows]:
    """The draft from layer ``exit`` on.

    Args:
      tokens: int32 ``[B, T]``.
      hidden: ``[B, T, D]`` from the layers before; None if ``exit`` is 0.
      rows: where to write.
      logits: whether anything is drafted behind these tokens; if not, only rows of ``own`` are asked for.
      **where: as `Decoder` takes it: depths, ancestors, scratch.

    Returns:
      Logits ``[B, T, V]`` over the target's vocabulary, None without ``logits``, and the rows.
    """

  def grow_on(self, weights: Any, own: kv.KVCache | None, context: DraftContext, target_cache: kv.KVCache):
    """One round.

    Args:
      own: a cache of the drafter's own, whose rows are as many as the target's.

    Returns:
      The proposal, ``own`` with scratch rows in the order of the nodes, and the target's cache; their lengths
      as they were.
    """
    length, width = target_cache.length, self.layers(weights).config.d_model
    shape = (*context.root.shape, self.tree.num_nodes, width)
    hidden = jnp.zeros(shape, self.layers(weights).dtype) if self.hands_over else None
    # The root of every row, drafting or not: all of them are verified from the exit on.
    logits, rows = self._fed(weights, context.root[:, None], Rows(target_cache, own, hidden), 0)
    start = Start(logits, None, rows.behind(length + 1), context.active)
    grown = self.grow(self._step(weights), start, context)
    proposal, rows = grown.proposal, grown.cache
    if self.hands_over:
      reached = jnp.any(context.active & proposal.valid[:, -1])
      rows = self._leaf(weights, proposal.tokens, reached, rows, length)
      proposal = proposal.replace(hidden=rows.hidden, start_layer=self.exit)
    rows = rows.behind(length)
    return proposal, rows.own, rows.target

  def _fed(
    self, weights: Any, tokens: Array, rows: Rows, node: Array | int, *, logits: bool = True, **where: Any
  ) -> tuple[Array | None, Rows]:
    """One forward over ``tokens [B, T]``, nodes from ``node`` on: logits behind them, and the rows."""
    hidden = None
    if self.exit > 0:
      output = self.layers(weights)(
        tokens,
        rows.target,
        layer_range=(0, self.exit),
        logits=False,
        implementation=self.implementation,
        **where,
      )
      hidden, rows = output.hidden, rows._replace(target=output.cache)
      if rows.hidden is not None:
        put = jax.lax.dynamic_update_slice(rows.hidden, hidden.astype(rows.hidden.dtype), (0, node, 0))
        rows = rows._replace(hidden=put)
    return self.behind_exit(weights, tokens, hidden, rows, logits=logits, **where)

  def _step(self, weights: Any) -> Step:
    def step(tokens, hidden, rows, *, depths, ancestors, scratch):
      where = dict(depths=depths, ancestors=ancestors, scratch=scratch)
      # Of a chain nodes and scratch rows have the same numbers; the root's is not counted as one.
      logits, rows = self._fed(weights, tokens, rows, scratch + 1, **where)
      return logits, None, rows

    return step

  def _leaf(self, weights: Any, tokens: Array, wanted: Array, rows: Rows, length: Array) -> Rows:
    """The last node of a chain through the layers before the exit, if any row has got there (``wanted``)."""
    last = self.tree.num_nodes - 1

    def feed(carry):
      rows, _ = carry
      _, rows = self._fed(weights, tokens[:, -1:], rows.behind(length + last), last, logits=False)
      return rows.behind(length), jnp.zeros((), bool)

    # A loop of at most one turn: `lax.cond` would copy the caches.
    return jax.lax.while_loop(lambda carry: carry[1], feed, (rows.behind(length), wanted))[0]
