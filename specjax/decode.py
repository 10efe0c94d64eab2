"""The loop: draft, verify, accept, as pure functions over a static-shape state.

Before a round a row has n committed tokens and the target's cache n - 1 rows; the last committed token
is the root of the draft. A round drafts a tree behind the root, runs the target once over its nodes,
lets the rule pick a path, and commits the path's rows: 1 to G + 1 tokens a row, rows of a batch
differing. Plain decoding is the same loop with the drafter ``none``.

`draft_step`, `verify_step` and `accept_step` are jit-compiled and public; `decode_round` is their
composition, `run_rounds` a `lax.while_loop` over it, and `generate` calls that. Every function that takes
a state donates it. With a controller each round runs at one of a few compiled widths, plain decoding
among them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax import cache as kv
from specjax import processors, sampling
from specjax.base import (
  ANY_DEPTH,
  Committed,
  DraftContext,
  Proposal,
  RoundOutcome,
  RoundPlan,
  Verdict,
  Weights,
)
from specjax.prefill import prefill, prefill_chunk, prefill_chunks
from specjax.processors import History, Processed
from specjax.results import Finish, RoundLog, RowResult, results
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
  "ANY_DEPTH",
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
# While a controlled round goes on: the target has not run at any width.
_NOT_YET = -1


@flax.struct.dataclass
class Verification:
  """What the target says about a proposal."""

  logits: Array  # float32 [B, N, V]
  taps: Array | None  # [B, N, taps, D]


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
  hidden = None if proposal.hidden is None else proposal.hidden.shape[:-1]
  if hidden != (proposal.tokens.shape if proposal.start_layer else None):
    raise ValueError(
      f"drafter {drafter.name} proposes hidden states of {hidden} nodes with start_layer = "
      f"{proposal.start_layer}; a start behind layer 0 needs those of {proposal.tokens.shape}, 0 has none"
    )
  if proposal.kind != drafter.kind:
    raise ValueError(f"drafter {drafter.name} proposes {proposal.kind} drafts; it announced {drafter.kind}")


# --- one round -------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def draft_step(
  weights: Weights, state: DecodeState, config: DecodeConfig, depth: Array | None = None
) -> tuple[Proposal, DecodeState]:
  """Drafts a tree behind each row's root.

  A node counts as proposed only if its row is active, its parent counts, the row's budget leaves room
  for it and a bonus token, and its id is real (a deterministic draft) or was drawn from a q that is a
  distribution (a sampled one). Of a sampled id only that q can give it is asked, so the law is kept.

  Args:
    depth: int32 ``[B]``, deepest draft of each row; a row with 0 drafts nothing. None is no limit.
  """
  depth = jnp.full_like(state.length, config.drafter.tree.max_depth) if depth is None else depth
  root = _roots(state)
  context = DraftContext(**_past(weights, state), root=root, active=state.active & (depth > 0))
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
  valid &= context.active[:, None] & (tree.depths <= depth[:, None])
  valid &= tree.depths < (state.limit - state.length)[:, None]
  proposal = proposal.replace(valid=_whole_paths(valid, tree))
  return proposal, state.replace(drafter=drafter, cache=cache)


def _roots(state: DecodeState) -> Array:
  """int32 ``[B]``: the last committed tokens."""
  return jnp.take_along_axis(state.tokens, jnp.maximum(state.length - 1, 0)[:, None], axis=1)[:, 0]


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
  """Runs the target once over the nodes; their rows are scratch rows of the cache.

  Layers that the drafter has run over them (`Proposal.hidden`) are not run again.
  """
  tree = proposal.tree
  begun = proposal.hidden is not None
  rest = dict(layer_range=(proposal.start_layer, None), hidden=proposal.hidden) if begun else {}
  output = weights.target(
    proposal.tokens,
    state.cache,
    depths=tree.depths,
    ancestors=None if tree.is_chain else tree.ancestors,
    taps=config.drafter.taps,
    implementation=config.implementation,
    **rest,
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
    nodes=put(log.nodes, jnp.full_like(emitted, proposal.tree.num_nodes)),
    width=put(log.width, jnp.ones_like(emitted)),
    overlap=log.overlap + jnp.where(active, verdict.overlap, 0.0),
    judged=log.judged + jnp.where(active, verdict.judged, 0),
  )


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def decode_round(
  weights: Weights, state: DecodeState, config: DecodeConfig, deepest: Array | int = ANY_DEPTH
) -> DecodeState:
  """Draft, verify, accept: one target call for every active row.

  Args:
    deepest: int32 ``[]``, the deepest draft there may be. A controller takes a width that is no deeper;
      without one the round is as wide as ever, and only its first levels count.
  """
  if config.control is None:
    depth = jnp.full_like(state.length, jnp.minimum(config.drafter.tree.max_depth, deepest))
    proposal, state = draft_step(weights, state, config, depth)
    return _judge(weights, state, proposal, config)
  plan, before = config.control.plan(weights.beliefs, config.trees, state, deepest), state
  verified = jnp.int32(_NOT_YET)
  for group in config.groups:
    state, verified = _round_of_group(weights, state, config, group, plan, verified)
  plain = lambda state: _judge(weights, state, _root_only(state), config)
  state = _run_if(verified == _NOT_YET, plain, state)
  verified = jnp.maximum(verified, 0)
  state, outcome = _outcome(state, before.active, plan, verified)
  return state.replace(control=config.control.learn(weights.beliefs, config.trees, before, plan, outcome))


def _judge(weights, state, proposal, config) -> DecodeState:
  verification, state = verify_step(weights, state, proposal, config)
  return accept_step(weights, state, proposal, verification, config)


def _round_of_group(weights, state, config, group: tuple[int, ...], plan: RoundPlan, verified: Array):
  """The round at one of the widths of a group, if the plan is one of them and anything is proposed.

  A draft is verified at the narrowest width that holds it: a chain may have ended before its window. Where
  nothing was proposed and the target's first layers ran over the roots all the same, the others follow here.

  Returns:
    The state, and the width that the target ran at, 0 over the roots alone: ``verified`` unless it ran here.
  """
  at = [config.at_width(width) for width in group]
  shape = functools.partial(draft_step, weights, config=at[-1], depth=plan.depth)
  pending = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(shape, state)[0])
  for width, narrow in zip(group, at):

    def draft(carry, narrow=narrow):
      proposal, state = draft_step(weights, carry[0], narrow, plan.depth)
      if narrow.drafter.tree.is_chain:
        proposal = proposal.replace(tree=carry[1].tree)
      return state, jax.tree.map(_put_first, carry[1], proposal)

    state, pending = _run_if(plan.width == width, draft, (state, pending))
  # The root of a proposal is valid, and nothing is where nothing was drafted.
  deepest = jnp.max(jnp.where(pending.valid, pending.tree.depths, 0))
  least = 0
  if pending.hidden is not None:
    root = _root_only(state).replace(hidden=pending.hidden[:, :1], start_layer=pending.start_layer)
    silent = jnp.any(plan.width == jnp.array(group)) & (deepest == 0)
    state = _run_if(silent, lambda state: _judge(weights, state, root, at[0]), state)
    verified = jnp.where(silent, 0, verified)
  for width, narrow in zip(group, at):
    most = narrow.drafter.tree.max_depth
    judge = lambda state, narrow=narrow: _judge(weights, state, _first_nodes(pending, narrow), narrow)
    fits = (deepest > least) & (deepest <= most)
    state = _run_if(fits, judge, state)
    verified, least = jnp.where(fits, width, verified), most
  return state, verified


def _put_first(into: Array, what: Array) -> Array:
  """``what`` as the first entries of ``into``, which has as many dimensions and is nowhere smaller."""
  if into.shape == what.shape:
    return what
  return jax.lax.dynamic_update_slice(into, what, (0,) * into.ndim)


def _first_nodes(chain: Proposal, config: DecodeConfig) -> Proposal:
  """The first nodes of a chain, as many as the config's drafter proposes; a tree is whole."""
  tree = config.drafter.tree
  nodes = tree.num_nodes
  if chain.tree.num_nodes <= nodes:
    return chain
  first = lambda of_node: None if of_node is None else of_node[:, :nodes]
  return chain.replace(
    tokens=first(chain.tokens),
    valid=first(chain.valid),
    q=first(chain.q),
    hidden=first(chain.hidden),
    tree=tree,
  )


def _root_only(state: DecodeState) -> Proposal:
  """A proposal of nothing: the round is plain decoding."""
  tokens = _roots(state)[:, None]
  return Proposal(tokens, jnp.ones_like(tokens, bool), None, tree=TokenTree.chain(0), kind="deterministic")


def _outcome(state: DecodeState, active: Array, plan: RoundPlan, verified: Array):
  """What the round that has just been logged brought, and the state whose log knows the plan."""
  log = state.log
  last = jnp.maximum(log.rounds - 1, 0)
  asked = jnp.where(plan.depth > 0, plan.width, 0)
  width = _write(log.width, asked.astype(jnp.uint8)[:, None], last)
  state = state.replace(log=log.replace(width=jnp.where(active[:, None], width, log.width)))
  at_last = lambda column: jnp.take_along_axis(column, last[:, None], axis=1)[:, 0].astype(jnp.int32)
  return state, RoundOutcome(
    verified=verified,
    depth=at_last(log.depth),
    accepted=at_last(log.accepted),
    emitted=at_last(log.emitted),
  )


def _run_if(condition: Array, step: Callable[[Any], Any], state: Any) -> Any:
  """``step(state)`` if the condition holds: a loop of at most one turn.

  A loop updates what it carries in place; `lax.cond` copies every cache its branches hand back.
  """
  run = lambda carry: (step(carry[0]), jnp.zeros((), bool))
  return jax.lax.while_loop(lambda carry: carry[1], run, (state, condition))[0]


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def run_rounds(
  weights: Weights,
  state: DecodeState,
  config: DecodeConfig,
  round_limit: Array,
  deepest: Array | int = ANY_DEPTH,
) -> DecodeState:
  """The loop that `generate` calls: rounds until every row has ended, or ``round_limit`` of them.

  ``deepest`` is `decode_round`'s, for all of them.
  """

  def running(carry):
    state, rounds = carry
    return jnp.any(state.active) & (rounds < round_limit)

  def step(carry):
    state, rounds = carry
    return decode_round(weights, state, config, deepest), rounds + 1

  return jax.lax.while_loop(running, step, (state, jnp.int32(0)))[0]


def generate(
  weights: Weights, state: DecodeState, config: DecodeConfig, round_limit: int = ALL_ROUNDS
) -> DecodeState:
  """Rounds until every row has ended, or at most ``round_limit`` of them.

  The limit is traced, so one compiled program runs to the end and streams.
  """
  return run_rounds(weights, state, config, np.int32(round_limit))
