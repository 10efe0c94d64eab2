"""The compiled programs of an engine: a row is begun, read, placed, run, emptied.

Each is one call for all that it does, around the steps of `decode`. A *lane* is a state of one row in which a
prompt is read while the batch decodes; when it is read the row is placed into the batch.

What is compiled takes numbers and arrays of one type each, so that every program compiles once; `Engine`
runs each of them before it serves.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax import cache as kv
from specjax import decode
from specjax.base import Weights
from specjax.decode import DecodeConfig, DecodeState
from specjax.sampling import Settings

Array = jax.Array

# Columns of `RoundLog` with one entry a round, in the order of `RowResult`'s lists.
LOG_COLUMNS = ("proposed", "depth", "reached", "accepted", "emitted", "nodes", "width")

_is_cache = lambda node: isinstance(node, kv.KVCache)


@flax.struct.dataclass
class RowInputs:
  """What a row is begun with; every leaf has one row.

  Attributes:
    tokens: int32 ``[1, C]``, its text, then anything.
    length: int32 ``[1]``, of the text.
    prompt_length: int32 ``[1]``; new text starts there.
    limit: int32 ``[1]``, most tokens, prompt included.
    stop_ids: int32 ``[1, MAX_STOP_IDS]``.
    settings: of its sampling.
  """

  tokens: Array
  length: Array
  prompt_length: Array
  limit: Array
  stop_ids: Array
  settings: Settings


class Report(NamedTuple):
  """What a call of rounds did, on the host; R rounds at most, T tokens.

  Attributes:
    emitted: int32 ``[B]``, new tokens.
    finish: int32 ``[B]``, a `Finish`.
    rounds: int32 ``[B]``, that the row took part in.
    tokens: int32 ``[B, T]``, the new ones, then anything.
    log: int32 ``[B, 7, R]``, `LOG_COLUMNS` of these rounds, then anything.
    logprobs: float32 ``[B, T]``, None if there are none.
  """

  emitted: np.ndarray
  finish: np.ndarray
  rounds: np.ndarray
  tokens: np.ndarray
  log: np.ndarray
  logprobs: np.ndarray | None


@functools.partial(jax.jit, static_argnames=("config", "batch"))
def empty(weights: Weights, config: DecodeConfig, batch: int) -> DecodeState:
  """``batch`` empty rows."""
  return decode.init_state(weights, config, batch)


def _emptied(weights: Weights, state: DecodeState, config: DecodeConfig, gone: Array) -> DecodeState:
  """Empties the rows ``gone [B]``. Keys and values stay where they are: what no length counts is masked."""

  def reset(old, new):
    if _is_cache(old):
      return old.replace(length=jnp.where(gone, new.length, old.length))
    return jnp.where(gone.reshape(-1, *[1] * (old.ndim - 1)), new, old)

  fresh = decode.init_state(weights, config, len(gone))
  return jax.tree.map(reset, state, fresh, is_leaf=_is_cache)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="lane")
def begin(
  weights: Weights, lane: DecodeState, inputs: RowInputs, carried: Any, config: DecodeConfig
) -> DecodeState:
  """A lane whose text is ``inputs``, nothing of it read, whatever it held before.

  Args:
    carried: what `carry` took from a row that goes on here; None of a new one.
  """
  lane = _emptied(weights, lane, config, jnp.ones((1,), bool))
  if carried is not None:
    control, processor = carried
    lane = lane.replace(control=control, processor=processor)
  return lane.replace(
    tokens=inputs.tokens,
    length=inputs.length,
    prompt_length=inputs.prompt_length,
    limit=inputs.limit,
    stop_ids=inputs.stop_ids,
    settings=inputs.settings,
  )


@jax.jit
def carry(state: DecodeState, row: Array) -> Any:
  """What reading its text again does not bring back of a row: what controller and processor know of it."""
  cut = lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, row, 1, axis=0)
  return jax.tree.map(cut, (state.control, state.processor))


@functools.partial(jax.jit, static_argnames=("config", "width"), donate_argnames="lane")
def read(
  weights: Weights, lane: DecodeState, start: Array, config: DecodeConfig, width: int
) -> tuple[DecodeState, Any]:
  """`prefill_chunk` of a lane.

  Returns:
    The lane, and a mark: all that target and drafter know of the text now, but keys and values. Rows below a
    cache's length are not written again while a prompt is read, so these can be copied later, from the lane
    when it has read on: with the mark they are what it is now, whatever the drafter.
  """
  lane = decode.prefill_chunk(weights, lane, start, config, width)
  known = lambda node: node.length if _is_cache(node) else node
  return lane, jax.tree.map(known, (lane.cache, lane.drafter), is_leaf=_is_cache)


@functools.partial(jax.jit, donate_argnames="lane")
def copy_prefix(lane: DecodeState, source: DecodeState, mark: Any) -> DecodeState:
  """A lane that was begun, as if it had read what ``source`` had when ``mark`` was made of it.

  Rows are copied in blocks as far as they count, the drafter's among them.
  """

  def copy(into, of, known):
    if not _is_cache(into):
      return known
    return _copy_rows(into, of, known[0]).replace(length=known)

  caches = (lane.cache, lane.drafter)
  cache, drafter = jax.tree.map(copy, caches, (source.cache, source.drafter), mark, is_leaf=_is_cache)
  return lane.replace(cache=cache, drafter=drafter)


def _copy_rows(into: kv.KVCache, of: kv.KVCache, rows: Array) -> kv.KVCache:
  """The first ``rows`` rows of the one sequence of ``of``, and what stands behind them in the last block."""
  block = kv.SLOT_MULTIPLE

  def put(i, buffers):
    def one(buffer, new):
      piece = jax.lax.dynamic_slice_in_dim(new, i * block, block, axis=2)
      return jax.lax.dynamic_update_slice_in_dim(buffer, piece, i * block, axis=2)

    return jax.tree.map(one, buffers, (of.k, of.v))

  k, v = jax.lax.fori_loop(0, (rows + block - 1) // block, put, (into.k, into.v))
  return into.replace(k=k, v=v)


@functools.partial(jax.jit, static_argnames=("config", "most"), donate_argnames="state")
def run(
  weights: Weights,
  state: DecodeState,
  gone: Array,
  rounds: Array,
  deepest: Array,
  config: DecodeConfig,
  most: int,
) -> tuple[DecodeState, Array]:
  """Empties rows and runs rounds, one call.

  Args:
    gone: bool ``[B]``, rows to empty.
    rounds: int32 ``[]``, at most ``most``.
    deepest: int32 ``[]``, as in `decode.decode_round`.

  Returns:
    The state, and what `unpack` reads: int32 ``[B, …]``, one small array, so that there is one transfer.
  """
  state = _emptied(weights, state, config, gone)
  start, first = state.length, state.log.rounds
  state = decode.run_rounds(weights, state, config, rounds, deepest)

  def behind(buffer, at, count):
    index = jnp.minimum(at[:, None] + jnp.arange(count), buffer.shape[1] - 1)
    return jnp.take_along_axis(buffer, index, axis=1)

  tokens = behind(state.tokens, start, most_tokens(config, most))
  parts = [
    (state.length - start)[:, None],
    state.finish[:, None],
    (state.log.rounds - first)[:, None],
    tokens,
    *(behind(getattr(state.log, name), first, most).astype(jnp.int32) for name in LOG_COLUMNS),
  ]
  if state.logprobs is not None:
    values = behind(state.logprobs, start, tokens.shape[1])
    parts.append(jax.lax.bitcast_convert_type(values, jnp.int32))
  return state, jnp.concatenate(parts, axis=1)


def most_tokens(config: DecodeConfig, most: int) -> int:
  """T: tokens of a row in ``most`` rounds."""
  return most * (max(tree.max_depth for tree in config.trees) + 1)


def unpack(packed: Array, tokens: int, most: int) -> Report:
  """What `run` returned, once it is done; ``tokens`` are `most_tokens`."""
  values = np.asarray(packed)
  logged, end = 3 + tokens, 3 + tokens + len(LOG_COLUMNS) * most
  return Report(
    emitted=values[:, 0],
    finish=values[:, 1],
    rounds=values[:, 2],
    tokens=values[:, 3:logged],
    log=values[:, logged:end].reshape(len(values), len(LOG_COLUMNS), most),
    logprobs=values[:, end:].view(np.float32) if end < values.shape[1] else None,
  )
