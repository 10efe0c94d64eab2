"""From normed hidden states to logits over a draft vocabulary, and from those to the target's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.models import layers

Array = jax.Array

# Whose the output layer of a draft is: the target's rows of the draft vocabulary, or one of its own.
Output = Literal["target", "own"]


class TokenMap(nnx.Variable):
  """int32 ``[Vd]``, the target's id of each token of a draft vocabulary, ascending. Never trained."""


class Bound(nnx.Variable):
  """An array of the target's that a draft reads: neither trained nor stored with the draft."""


def checked_ids(ids: Sequence[int] | np.ndarray | None, size: int | None, vocab_size: int):
  """The ids of a draft vocabulary as int32 ``[Vd]``, or None where it is the target's.

  Args:
    ids: the target's ids, ascending.
    size: how many there must be; None: there must be none.
    vocab_size: V, of the target.

  Raises:
    ValueError: not ``size`` whole numbers, an id outside of ``[0, V)``, or ids that do not ascend.
  """
  if (ids is None) != (size is None):
    given = "none" if ids is None else len(ids)
    raise ValueError(f"ids: {given} given, but draft_vocab_size = {size}; one goes with the other")
  if ids is None:
    return None
  ids = np.asarray(ids)
  if ids.shape != (size,) or not np.issubdtype(ids.dtype, np.integer):
    raise ValueError(f"ids has shape {list(ids.shape)} and type {ids.dtype}; {size} integers are expected")
  outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
  if outside.size:
    raise ValueError(f"ids[{outside[0]}] = {ids[outside[0]]}; it must be in [0, vocab_size = {vocab_size})")
  falls = np.flatnonzero(np.diff(ids.astype(np.int64)) <= 0)
  if falls.size:
    at = falls[0] + 1
    raise ValueError(f"ids[{at}] = {ids[at]} follows {ids[at - 1]}; the ids must ascend")
  return ids.astype(np.int32)


def check_draft_vocabulary(size: int | None, vocab_size: int, what: str) -> None:
  """Raises ``ValueError`` unless the draft vocabulary is a part of the target's, or it (None)."""
  if size is not None and not (isinstance(size, int) and 1 <= size <= vocab_size):
    raise ValueError(
      f"{what}.draft_vocab_size = {size!r}; it must be an integer in [1, vocab_size = {vocab_size}] or None"
    )


def check_rank(rank: int | None, what: str) -> None:
  """Raises ``ValueError`` unless the rank of an output layer is an integer of at least 1, or None."""
  if rank is not None and not (isinstance(rank, int) and rank >= 1):
    raise ValueError(f"{what}.output_rank = {rank!r}; it must be an integer of at least 1 or None")


def check_output(output: str, rank: int | None, what: str) -> None:
  """Raises ``ValueError`` for an output layer that is neither of `Output`, or the target's and factored."""
  if output not in get_args(Output):
    raise ValueError(f"{what}.output = {output!r}; it must be one of {', '.join(get_args(Output))}")
  if output == "target" and rank is not None:
    raise ValueError(f"{what}.output_rank = {rank}; the target's own head is not factored")


class OutputLayer(nnx.Module):
  """Normed hidden states ``[..., D]`` → float32 logits ``[..., Vd]``.

  Args of the constructor:
    d_model: D.
    vocab_size: V, of the target.
    ids: the draft vocabulary, ascending ids of the target; None: all of them, Vd = V.
    rank: r: the weight is ``up [Vd, r] · down [r, D]``; None: it is ``weight [Vd, D]``. With D = 576 and
      32000 tokens, rank 128 reads a quarter of the bytes.
    rows: the target's own rows ``[Vd, D]``, see `output_rows`: the weight is these, `Bound`.
    readout: a matrix ``[D, D]`` of the draft's own stands before the rows: logits = rows · readout · x. It
      starts as the identity.

  Raises:
    ValueError: rows of another shape, or beside a rank; a readout without rows.
  """

  def __init__(
    self,
    d_model: int,
    vocab_size: int,
    *,
    ids: Sequence[int] | np.ndarray | None = None,
    rank: int | None = None,
    rows: Array | None = None,
    readout: bool = False,
    dtype,
    rngs: nnx.Rngs,
  ):
    check_rank(rank, "OutputLayer")
    if readout and rows is None:
      raise ValueError("OutputLayer: a readout stands before the target's rows; there are none")
    ids = checked_ids(ids, None if ids is None else len(ids), vocab_size)
    size = vocab_size if ids is None else len(ids)
    normal = lambda rows, columns: nnx.Param(
      (jax.random.normal(rngs.params(), (rows, columns), jnp.float32) / math.sqrt(columns)).astype(dtype)
    )
    if rows is not None and (rank is not None or rows.shape != (size, d_model)):
      raise ValueError(
        f"OutputLayer: rows {list(rows.shape)}, rank = {rank}; rows {[size, d_model]} without a rank fit"
      )
    if rows is not None:
      self.weight = Bound(rows.astype(dtype))
    else:
      self.weight = normal(size, d_model) if rank is None else None
    self.up = None if rank is None else normal(size, rank)
    self.down = None if rank is None else normal(rank, d_model)
    self.readout = nnx.Param(jnp.eye(d_model, dtype=dtype)) if readout else None
    self.token_map = None if ids is None else TokenMap(jnp.asarray(ids))

  @property
  def ids(self) -> Array | None:
    """int32 ``[Vd]``, the target's id of each logit; None: its own."""
    return None if self.token_map is None else self.token_map[...]

  def __call__(self, x: Array) -> Array:
    if self.readout is not None:
      x = layers.matmul(x, self.readout[...])
    if self.weight is not None:
      return layers.matmul(x, self.weight[...]).astype(jnp.float32)
    return layers.matmul(layers.matmul(x, self.down[...]), self.up[...]).astype(jnp.float32)


def head_output(
  config: Any, ids: Any, rows: Array | None, what: str, *, dtype, rngs: nnx.Rngs
) -> OutputLayer:
  """The output layer of a head whose config says whose it is.

  Args:
    config: with ``decoder``, ``output``, ``output_rank`` and ``draft_vocab_size``.
    ids, rows: as for `OutputLayer`; rows where ``config.output`` is ``target``, behind a readout.
    what: the head, for messages.

  Raises:
    ValueError: ids or rows that do not fit the config.
  """
  if (rows is not None) != (config.output == "target"):
    given = "no rows" if rows is None else "rows"
    raise ValueError(f"{what}: {given} of the target are given, config.output = {config.output!r}")
  given, wanted = None if ids is None else len(ids), config.draft_vocab_size
  if given != wanted:
    raise ValueError(f"{what}: {given} ids are given, config.draft_vocab_size = {wanted}")
  return OutputLayer(
    config.decoder.d_model,
    config.decoder.vocab_size,
    ids=ids,
    rank=config.output_rank,
    rows=rows,
    readout=rows is not None,
    dtype=dtype,
    rngs=rngs,
  )


def output_rows(model, ids: Array | np.ndarray | None) -> Array:
  """The target's own output weight, only the rows of a draft vocabulary: ``[Vd, D]``.

  Args:
    model: a `Decoder`; with tied embeddings the weight is the embedding.
    ids: int32 ``[Vd]``; None is the whole weight, not a copy.
  """
  weight = model.embed[...] if model.head is None else model.head.weight[...]
  return weight if ids is None else jnp.take(weight, jnp.asarray(ids), axis=0, mode="clip")


def over_target(logits: Array, ids: Array | np.ndarray | None, vocab_size: int) -> Array:
  """Logits over a draft vocabulary, ``[..., Vd]``, as logits over the target's, ``[..., V]``.

  Tokens that the draft vocabulary lacks get -inf: a draft never says them.

  Args:
    ids: int32 ``[Vd]``, ascending; None: draft id i is the target's id i, and a draft whose padded vocabulary
      has another size is padded with -inf or cut.
    vocab_size: V.
  """
  width = logits.shape[-1]
  if ids is not None:
    empty = jnp.full((*logits.shape[:-1], vocab_size), -jnp.inf, logits.dtype)
    return empty.at[..., jnp.asarray(ids)].set(logits, unique_indices=True, indices_are_sorted=True)
  if width < vocab_size:
    beside = [(0, 0)] * (logits.ndim - 1)
    return jnp.pad(logits, (*beside, (0, vocab_size - width)), constant_values=-jnp.inf)
  return logits[..., :vocab_size]
