"""The loop: draft, verify, accept, as pure functions over a static-shape state.

Before a round a row has n committed tokens and the target's cache n - 1 rows; the last committed token
is the root of the draft. A round drafts a tree behind the root, runs the target once over its nodes,
lets the rule pick a path, and commits the path's rows: 1 to G + 1 tokens a row, rows of a batch
differing. Plain decoding is the same loop with the drafter ``none``.

`draft_step`, `verify_step` and `accept_step` are jit-compiled and public; `decode_round` is their
composition, `run_rounds` a `lax.while_loop` over it, and `generate` calls that. Every function that takes
a state donates it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax import cache as kv
from specjax import processors, sampling
from specjax.base import Committed, DraftContext, Proposal, Verdict, Weights
from specjax.processors import History, Processed
from specjax.results import Finish, RoundLog, RowResult, results
from specjax.sampling import Settings
from specjax.state import (
  MAX_STOP_IDS,
  DecodeConfig,
  DecodeState,
  init_state,
  insert,
  insert_row,
  shard_state,
  state_shardings,
)
from specjax.tree import TokenTree

__all__ = [
  "ALL_ROUNDS",
  "MAX_STOP_IDS",
  "DecodeConfig",
  "DecodeState",
  "Finish",
  "RoundLog",
  "RowResult",
  "Verification",
  "Weights",
  "accept_step",
  "decode_round",
  "draft_step",
  "generate",
  "init_state",
  "insert",
  "insert_row",
  "judged_nodes",
  "prefill",
  "prefill_chunk",
  "prefill_chunks",
  "read_nodes",
  "results",
  "run_rounds",
  "shard_state",
  "state_shardings",
  "verify_step",
]

Array = jax.Array

ALL_ROUNDS = np.iinfo(np.int32).max


@flax.struct.dataclass
class Verification:
  """What the target says about a proposal."""

  logits: Array  # float32 [B, N, V]
  taps: Array | None  # [B, N, taps, D]


# --- prefill ---------------------------------------------------------------------------------------


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


def _check_proposal(proposal: Proposal, config: DecodeConfig) -> None:
  """While tracing: the proposal is what the drafter announced, so that the buffers hold it."""
  drafter, nodes = config.drafter, proposal.tree.num_nodes
  if nodes > drafter.tree.num_nodes:
    raise ValueError(f"drafter {drafter.name} proposes {nodes} nodes; it announced {drafter.tree.num_nodes}")
  if proposal.tree.max_depth > drafter.tree.max_depth:
    raise ValueError(
      f"drafter {drafter.name} proposes a depth of {proposal.tree.max_depth}; it announced "
      f"{drafter.tree.max_depth}"
    )
  if proposal.tokens.shape[1] != nodes or proposal.valid.shape != proposal.tokens.shape:
    raise ValueError(
      f"drafter {drafter.name} proposes tokens {proposal.tokens.shape} and valid {proposal.valid.shape} "
      f"for a tree of {nodes} nodes"
    )
  if proposal.kind != drafter.kind:
    raise ValueError(f"drafter {drafter.name} proposes {proposal.kind} drafts; it announced {drafter.kind}")


# --- one round -------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def draft_step(weights: Weights, state: DecodeState, config: DecodeConfig) -> tuple[Proposal, DecodeState]:
  """Drafts a tree behind each row's root.

  A node counts as proposed only if its row is active, its parent counts, the row's budget leaves room
  for it and a bonus token, and its id is real (a deterministic draft) or was drawn from a q that is a
  distribution (a sampled one). Of a sampled id only that q can give it is asked, so the law is kept.
  """
  root = jnp.take_along_axis(state.tokens, jnp.maximum(state.length - 1, 0)[:, None], axis=1)[:, 0]
  context = DraftContext(**_past(weights, state), root=root, active=state.active)
  proposal, drafter, cache = config.drafter.propose(weights.drafter, state.drafter, context, state.cache)
  tree = proposal.tree
  _check_proposal(proposal, config)
  valid = proposal.valid
  if proposal.kind == "deterministic":
    ids = config.num_real_tokens
  else:
    # An id that q can give must not be dropped for what it is: padding has probability 0 in the target, so
    # it is rejected, and redrawn from the residual as the law asks.
    ids = proposal.q.shape[-1]
    mass = proposal.q.sum(axis=-1)
    sound = jnp.pad(jnp.isfinite(mass) & (mass > 0), ((0, 0), (0, tree.num_nodes - mass.shape[1])))
    valid &= tree.of_parent(sound)
  valid &= (proposal.tokens >= 0) & (proposal.tokens < ids)
  valid &= state.active[:, None] & (tree.depths < (state.limit - state.length)[:, None])
  proposal = proposal.replace(valid=_whole_paths(valid, tree))
  return proposal, state.replace(drafter=drafter, cache=cache)


def _past(weights: Weights, state: DecodeState) -> dict[str, Any]:
  """Fields of a `History`."""
  return dict(
    tokens=state.tokens,
    length=state.length,
    prompt_length=state.prompt_length,
    stop_ids=state.stop_ids,
    settings=state.settings,
    processor=weights.processor,
    processor_state=state.processor,
  )


def _whole_paths(valid: Array, tree) -> Array:
  """Nodes that are valid together with all their ancestors; the root always is."""
  valid = valid.at[:, 0].set(True)
  return jnp.all(valid[:, None, :] | ~tree.ancestor_mask, axis=-1)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def verify_step(
  weights: Weights, state: DecodeState, proposal: Proposal, config: DecodeConfig
) -> tuple[Verification, DecodeState]:
  """Runs the target once over the nodes; their rows are scratch rows of the cache."""
  tree = proposal.tree
  output = weights.target(
    proposal.tokens,
    state.cache,
    depths=tree.depths,
    ancestors=None if tree.is_chain else tree.ancestors,
    taps=config.drafter.taps,
    implementation=config.implementation,
  )
  return Verification(output.logits, output.taps), state.replace(cache=output.cache)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def accept_step(
  weights: Weights, state: DecodeState, proposal: Proposal, verification: Verification, config: DecodeConfig
) -> DecodeState:
  """Applies the rule, cuts the block at stops and budgets, commits tokens and cache rows."""
  logits = sampling.mask_padding(verification.logits, config.num_real_tokens)
  target, processed = read_nodes(weights, state, proposal, logits, config)
  verdict = config.rule(target, judged_nodes(proposal, processed), state.settings, state.length)

  # The block: tokens of the accepted path behind the root, then the rule's next token.
  width = verdict.path.shape[1]
  index = jnp.arange(width)
  path_tokens = jnp.take_along_axis(proposal.tokens, verdict.path, axis=1)
  accepted = verdict.accepted[:, None]
  block = jnp.where(index == accepted, verdict.next_token[:, None], jnp.roll(path_tokens, -1, axis=1))

  # Cut it, in order: at the first visited node that offers no token, at a stop id, at the budget.
  at_path = lambda of_node: jnp.take_along_axis(of_node, verdict.path, axis=1)
  dry = at_path(processed.unusable) & (index <= accepted)
  sound = jnp.where(dry.any(axis=1), jnp.argmax(dry, axis=1), width + 1)
  wrong = jnp.any(at_path(processed.error) & (index == sound[:, None]), axis=1)
  available = jnp.minimum(verdict.accepted + 1, sound)
  is_stop = (block[:, :, None] == state.stop_ids[:, None, :]).any(axis=-1)
  to_stop = jnp.where(is_stop.any(axis=1), jnp.argmax(is_stop, axis=1) + 1, width + 1)
  remaining = state.limit - state.length
  emitted = jnp.minimum(jnp.minimum(available, to_stop), remaining)
  emitted = jnp.where(state.active, emitted, 0).astype(jnp.int32)
  reason = jnp.select(
    [emitted == to_stop, emitted == remaining, emitted == sound],
    [Finish.STOP, Finish.LENGTH, jnp.where(wrong, Finish.ERROR, Finish.STOP)],
    0,
  )

  after = _advanced(weights.processor, state.processor, processed, verdict, block, emitted)
  if after is not None:
    complete = ~jnp.any(jax.vmap(weights.processor.mask)(after), axis=-1)
    reason = jnp.where(complete & (emitted > 0), Finish.STOP, reason)

  taps = verification.taps
  if taps is not None:
    taps = jnp.take_along_axis(taps, verdict.path[:, :, None, None], axis=1)
  # The root and the drafts before the last emitted token.
  committed = Committed(path_tokens, index < emitted[:, None], taps, verdict.path)
  return state.replace(
    tokens=_write(state.tokens, block, state.length),
    length=state.length + emitted,
    finish=jnp.where(state.active, reason, state.finish).astype(jnp.int32),
    cache=kv.commit(
      state.cache,
      None if proposal.tree.is_chain else verdict.path,
      emitted,
      scratch=proposal.tree.num_nodes,
    ),
    drafter=config.drafter.extend(weights.drafter, state.drafter, committed),
    processor=after,
    log=_log(state, proposal, verdict, emitted),
    logprobs=_logprobs(state, logits, target, verdict, block, config),
  )


def read_nodes(
  weights: Weights, state: DecodeState, proposal: Proposal, logits: Array, config: DecodeConfig
) -> tuple[Array, Processed]:
  """What the rule needs of the target, and how the logits were processed.

  Args:
    logits: float32 ``[B, N, V]`` of each node, padding masked; each is processed along its node's path.

  Returns:
    Most likely tokens ``[B, N]`` or probabilities ``[B, N, V]``, as the rule says.
  """
  history, paths = History(**_past(weights, state)), proposal.tree.path_tokens(proposal.tokens)
  if config.rule.needs == "argmax":
    return processors.most_likely(logits, history, paths)
  processed = processors.process(logits, history, paths)
  return processed.probs(state.settings), processed


def judged_nodes(proposal: Proposal, processed: Processed) -> Proposal:
  """The proposal as a rule sees it: nothing can be said about drafts behind a node that offers no token."""
  tree = proposal.tree
  return proposal.replace(valid=_whole_paths(proposal.valid & ~tree.of_parent(processed.unusable), tree))


def _advanced(processor, before, processed: Processed, verdict: Verdict, block, emitted) -> Any:
  """The processor's states behind the emitted tokens."""
  if processor is None:
    return None
  last = jnp.maximum(emitted - 1, 0)[:, None]
  node = jnp.take_along_axis(verdict.path, last, axis=1)[:, 0]
  there = jax.tree.map(lambda leaf: leaf[jnp.arange(len(node)), node], processed.processor_state)
  after = processors.advance(processor, there, jnp.take_along_axis(block, last, axis=1)[:, 0])
  moved = lambda new, old: jnp.where((emitted > 0).reshape(-1, *[1] * (old.ndim - 1)), new, old)
  return jax.tree.map(moved, after, before)


def _logprobs(state, logits, target, verdict: Verdict, block, config) -> Array | None:
  """The buffer with the block's log-probabilities, each at the node behind which its token stands."""
  if config.logprobs == "off":
    return None
  path = verdict.path
  if config.logprobs == "raw":
    rows = jnp.take_along_axis(logits, path[:, :, None], axis=1)
    chosen = jnp.take_along_axis(rows, block[:, :, None], axis=2)[..., 0]
    values = chosen - jax.nn.logsumexp(rows, axis=-1)
  elif config.rule.needs == "argmax":
    values = jnp.where(block == jnp.take_along_axis(target, path, axis=1), 0.0, -jnp.inf)
  else:
    values = jnp.log(target[jnp.arange(len(path))[:, None], path, block])
  return _write(state.logprobs, values, state.length)


def _write(buffer: Array, block: Array, start: Array) -> Array:
  """``block [B, W]`` into ``buffer [B, C]`` at column ``start[b]``; the capacity leaves room for W."""
  return jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))(buffer, block, start)


def _log(state, proposal, verdict, emitted) -> RoundLog:
  log, active = state.log, state.active
  proposed = proposal.valid[:, 1:].sum(axis=1)
  depth = jnp.where(proposal.valid, proposal.tree.depths, 0).max(axis=1)
  last = jnp.take_along_axis(verdict.path, verdict.accepted[:, None], axis=1)
  went_on = jnp.any(proposal.valid & (jnp.asarray(proposal.tree.parents) == last), axis=1)
  put = lambda column, value: _write(column, value.astype(jnp.uint8)[:, None], log.rounds)
  return RoundLog(
    rounds=log.rounds + active,
    proposed=put(log.proposed, proposed),
    depth=put(log.depth, depth),
    reached=put(log.reached, verdict.accepted + went_on),
    accepted=put(log.accepted, verdict.accepted),
    emitted=put(log.emitted, emitted),
    overlap=log.overlap + jnp.where(active, verdict.overlap, 0.0),
    judged=log.judged + jnp.where(active, verdict.judged, 0),
  )


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def decode_round(weights: Weights, state: DecodeState, config: DecodeConfig) -> DecodeState:
  """Draft, verify, accept: one target call for every active row."""
  proposal, state = draft_step(weights, state, config)

  def judge(state, proposal):
    verification, state = verify_step(weights, state, proposal, config)
    return accept_step(weights, state, proposal, verification, config)

  if not config.plain_rounds or proposal.tree.num_nodes == 1:
    return judge(state, proposal)
  drafted = jnp.any(proposal.valid[:, 1:])
  state = _run_if(drafted, lambda state: judge(state, proposal), state)
  return _run_if(~drafted, lambda state: judge(state, _root_only(proposal)), state)


def _root_only(proposal: Proposal) -> Proposal:
  q = None if proposal.q is None else proposal.q[:, :1]
  return proposal.replace(
    tokens=proposal.tokens[:, :1], valid=proposal.valid[:, :1], q=q, tree=TokenTree.chain(0)
  )


def _run_if(condition: Array, step: Callable[[DecodeState], DecodeState], state: DecodeState) -> DecodeState:
  """``step(state)`` if the condition holds: a loop of at most one turn.

  A loop updates what it carries in place; `lax.cond` copies every cache its branches hand back.
  """
  run = lambda carry: (step(carry[0]), jnp.zeros((), bool))
  return jax.lax.while_loop(lambda carry: carry[1], run, (state, condition))[0]


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def run_rounds(weights: Weights, state: DecodeState, config: DecodeConfig, round_limit: Array) -> DecodeState:
  """The loop that `generate` calls: rounds until every row has ended, or ``round_limit`` of them."""

  def running(carry):
    state, rounds = carry
    return jnp.any(state.active) & (rounds < round_limit)

  def step(carry):
    state, rounds = carry
    return decode_round(weights, state, config), rounds + 1

  return jax.lax.while_loop(running, step, (state, jnp.int32(0)))[0]


def generate(
  weights: Weights, state: DecodeState, config: DecodeConfig, round_limit: int = ALL_ROUNDS
) -> DecodeState:
  """Rounds until every row has ended, or at most ``round_limit`` of them.

  The limit is traced, so one compiled program runs to the end and streams.
  """
  return run_rounds(weights, state, config, np.int32(round_limit))
