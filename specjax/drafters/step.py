"""What drafters that grow trees share: one forward of the draft, where growing begins, what comes of it."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from specjax.base import Proposal
from specjax.processors import Processed

Array = jax.Array


class Step(Protocol):
  """One forward of a draft over F nodes of one depth."""

  def __call__(
    self, tokens: Array, hidden: Array | None, cache: Any, *, depths: Array, ancestors: Array, scratch: Array
  ) -> tuple[Array, Array | None, Any]:
    """Logits behind the nodes.

    Args:
      tokens: int32 ``[B, F]``.
      hidden: ``[B, F, D]``, of each node what recurred from its parent; None where nothing does.
      cache: the draft's own; its length counts the row that gave the logits behind the root.
      depths: int32 ``[F]``, positions of the nodes behind that length.
      ancestors: uint32 ``[F, W]`` or ``[B, F, W]``; bit j says that a node sees scratch row j.
      scratch: int32, scratch rows that are there already; those of these nodes follow.

    Returns:
      float32 logits ``[B, F, V]`` over the target's vocabulary (-inf where the draft has no token), what
      recurs from these nodes to their children ``[B, F, D]``, and the cache with their rows.
    """


class Start(NamedTuple):
  """Where a tree begins: the root has been fed.

  Attributes:
    logits: float32 ``[B, 1, V]`` behind the root.
    hidden: ``[B, 1, D]``, what recurs from it, or None.
    cache: as `Step` takes it.
    ready: bool ``[B]``; other rows propose nothing.
  """

  logits: Array
  hidden: Array | None
  cache: Any
  ready: Array


class Grown(NamedTuple):
  """What came of it.

  Attributes:
    proposal: the tree.
    cache: with the scratch rows of what was fed; its length as at the start.
    rows: int32 ``[N]`` or ``[B, N]``: of each node its scratch row, counted from the root's, which is 0;
      -1 where the node was not fed.
  """

  proposal: Proposal
  cache: Any
  rows: np.ndarray | Array


def may_have_children(logits: Array, processed: Processed, found: Array, confidence: float) -> Array:
  """bool ``[B, F]``: nodes that are proposed, offer a token, and of which the draft is sure enough.

  Args:
    logits: ``[B, F, V]``, before processing.
    found: bool ``[B, F]``, those that are proposed.
    confidence: least probability of the most likely token, before temperature and cut-offs.
  """
  usable = ~processed.unusable & found
  if confidence > 0:
    usable &= jnp.max(jax.nn.softmax(logits, axis=-1), axis=-1) >= confidence
  return usable
