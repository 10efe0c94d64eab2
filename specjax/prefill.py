"""Prompts in: checked, cut into chunks of a few compiled widths, and run through target and drafter."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import cache as kv
from specjax.base import Committed, Weights
from specjax.results import Finish
from specjax.sampling import Settings
from specjax.state import MAX_STOP_IDS, DecodeConfig, DecodeState, init_state, shard_state

Array = jax.Array


def _check_prompts(config, prompts, max_new_tokens, stop_ids):
  """Per-row limits and padded stop ids, or one clear error."""
  batch = len(prompts)
  if not batch:
    raise ValueError("prompts is empty; at least one is needed")
  budgets = np.broadcast_to(np.asarray(max_new_tokens), (batch,))
  if budgets.dtype.kind not in "iu" or (budgets < 1).any():
    raise ValueError(f"max_new_tokens = {max_new_tokens!r}; it must be an integer of at least 1")
  for row, prompt in enumerate(prompts):
    if not len(prompt):
      raise ValueError(f"prompt {row} is empty; it needs at least one token")
    if len(prompt) > config.length_limit:
      raise ValueError(f"prompt {row} has {len(prompt)} tokens; the length limit is {config.length_limit}")
    ids = np.asarray(prompt)
    if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= config.num_real_tokens:
      raise ValueError(f"prompt {row} holds an id outside [0, {config.num_real_tokens})")
  per_row = stop_ids if len(stop_ids) and np.ndim(stop_ids[0]) else [stop_ids] * batch
  if len(per_row) != batch:
    raise ValueError(f"stop_ids has {len(per_row)} rows for {batch} prompts")
  padded = np.full((batch, MAX_STOP_IDS), -1, np.int32)
  for row, ids in enumerate(per_row):
    if len(ids) > MAX_STOP_IDS:
      raise ValueError(f"stop_ids of row {row} has {len(ids)} ids; the limit is {MAX_STOP_IDS}")
    if len(ids) and np.asarray(ids).dtype.kind not in "iu":
      raise ValueError(f"stop_ids of row {row} = {list(ids)}; they must be integers")
    padded[row, : len(ids)] = ids
  lengths = np.array([len(prompt) for prompt in prompts], np.int64)
  return np.minimum(lengths + budgets, config.length_limit).astype(np.int32), padded


def _check_settings(config, settings, budgets):
  """What of the settings depends on the vocabulary and the budgets."""
  least, ids = np.asarray(settings.min_new_tokens), np.asarray(settings.bias_ids)
  for row in np.flatnonzero(least > np.maximum(budgets, 0)):
    raise ValueError(f"min_new_tokens = {least[row]} in row {row}; it has room for {budgets[row]} new tokens")
  if ids.max(initial=-1) >= config.num_real_tokens:
    raise ValueError(
      f"logit_bias holds id {ids.max()}; the vocabulary has {config.num_real_tokens} real tokens"
    )


def _checked_states(processor, like, given):
  """``given`` with the structure, shapes and types of ``like``, as copies."""
  given = jax.tree.map(jnp.array, given)
  shapes = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), tree)
  if shapes(given) != shapes(like):
    raise ValueError(f"processor_state is {shapes(given)}; the processor's states are {shapes(like)}")
  if hasattr(processor, "check"):
    processor.check(given)
  return given


def prefill_chunks(rows: int, config: DecodeConfig) -> list[tuple[int, int]]:
  """``(start, width)`` of the chunks that cover ``rows`` positions and fit the buffer."""
  widths, chunks, start = config.prefill_widths, [], 0
  while start < rows:
    fitting = [width for width in widths if start + width <= config.slots]
    width = next((width for width in fitting if width >= rows - start), fitting[-1])
    chunks.append((start, width))
    start += width
  return chunks


@functools.partial(jax.jit, static_argnames=("config", "width"), donate_argnames="state")
def prefill_chunk(weights: Weights, state: DecodeState, start: Array, config: DecodeConfig, width: int):
  """Positions ``start … start + width`` of every prompt; a row ends at its last token but one."""
  tokens = jax.lax.dynamic_slice_in_dim(state.tokens, start, width, axis=1)
  valid = start + jnp.arange(width) < state.length[:, None] - 1
  output = weights.target(
    tokens, state.cache, taps=config.drafter.taps, logits=False, implementation=config.implementation
  )
  return state.replace(
    cache=kv.commit(output.cache, None, valid.sum(axis=1, dtype=jnp.int32)),
    drafter=config.drafter.prefill(weights.drafter, state.drafter, Committed(tokens, valid, output.taps)),
  )


def prefill(
  weights: Weights,
  config: DecodeConfig,
  prompts: Sequence[Sequence[int]],
  *,
  settings: Settings | None = None,
  max_new_tokens: int | Sequence[int] = 128,
  stop_ids: Sequence[int] | Sequence[Sequence[int]] = (),
  processor_state: Any = None,
  mesh: jax.sharding.Mesh | None = None,
) -> DecodeState:
  """A state whose rows hold the prompts, ready for the first round. Emits nothing.

  Prompts are cut into chunks of a few compiled widths and padded on the right. A prompt of P tokens
  writes P - 1 rows; its last token is the first root. A prompt as long as the limit gives a row that
  has ended with `Finish.LENGTH` and no new token.

  Args:
    weights: of target and drafter.
    config: static part.
    prompts: token ids, a sequence a row.
    settings: sampling of each row; None is greedy.
    max_new_tokens: budget, one or one a row.
    stop_ids: ids that end a row, for all rows or one sequence a row.
    processor_state: where `Weights.processor` begins in each row, leaves ``[B, …]``; None is its start.
    mesh: shards the state; the weights must lie on the same mesh.

  Raises:
    ValueError: naming the field, the value and the limit, before anything compiles.
  """
  limit, stops = _check_prompts(config, prompts, max_new_tokens, stop_ids)
  batch = len(prompts)
  settings = Settings.create(batch) if settings is None else settings
  if settings.seed.shape != (batch,):
    raise ValueError(f"settings are for {settings.seed.shape[0]} rows; there are {batch} prompts")
  _check_settings(config, settings, limit - np.array([len(prompt) for prompt in prompts]))
  if processor_state is not None and weights.processor is None:
    raise ValueError("processor_state is given, but the weights hold no processor")
  if config.rule.needs == "argmax" and config.rule.lossless and not bool(settings.greedy.all()):
    raise ValueError(f"rule {config.rule.name} needs temperature 0 in every row, got {settings.temperature}")
  lengths = np.array([len(prompt) for prompt in prompts], np.int32)
  tokens = np.zeros((batch, config.slots), np.int32)
  for row, prompt in enumerate(prompts):
    tokens[row, : len(prompt)] = prompt
  state = init_state(weights, config, batch).replace(
    tokens=jnp.asarray(tokens),
    length=jnp.asarray(lengths),
    prompt_length=jnp.array(lengths),
    limit=jnp.asarray(limit),
    stop_ids=jnp.asarray(stops),
    finish=jnp.asarray(np.where(lengths >= limit, Finish.LENGTH, Finish.NONE).astype(np.int32)),
    # A copy: the state is donated, the caller's settings are not.
    settings=jax.tree.map(jnp.array, settings),
  )
  if processor_state is not None:
    state = state.replace(processor=_checked_states(weights.processor, state.processor, processor_state))
  if mesh is not None:
    state = shard_state(state, mesh)
  for start, width in prefill_chunks(int(lengths.max()) - 1, config):
    state = prefill_chunk(weights, state, np.int32(start), config, width)
  return state
