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

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax import cache as kv
from specjax import sampling
from specjax.base import Committed, DraftContext, Drafter, Proposal, Rule, Weights
from specjax.sampling import Settings
from specjax.tree import TokenTree

Array = jax.Array

MAX_STOP_IDS = 8
ALL_ROUNDS = np.iinfo(np.int32).max


class Finish(enum.IntEnum):
  """Why a row ended; `NONE` while it runs or is empty."""

  NONE = 0
  STOP = 1
  LENGTH = 2
  ERROR = 3


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
  """What is static about decoding: a new value compiles a new program.

  Attributes:
    drafter: how to propose.
    rule: how to accept.
    num_real_tokens: ids below are real; the rest of the target's vocabulary is padding.
    length_limit: most tokens of a row, prompt included.
    prefill_widths: chunk widths of the prefill, ascending; each compiles once. The widest is the chunk
      of long prompts.
    implementation: of `kernels.tree_attention`.
    plain_rounds: a round in which no row proposes anything runs the target over the roots alone. Worth a
      second copy of the target in the program where a drafter often has nothing to say.
  """

  drafter: Drafter
  rule: Rule
  num_real_tokens: int
  length_limit: int
  prefill_widths: tuple[int, ...] = (16, 64, 128, 256)
  implementation: str = "auto"
  plain_rounds: bool = False

  def __post_init__(self):
    if self.drafter.kind not in self.rule.kinds:
      raise ValueError(
        f"rule {self.rule.name} takes {sorted(self.rule.kinds)} proposals; "
        f"drafter {self.drafter.name} makes {self.drafter.kind} ones"
      )
    if self.rule.chains_only and not self.drafter.tree.is_chain:
      raise ValueError(f"rule {self.rule.name} takes chains; drafter {self.drafter.name} proposes a tree")
    if self.length_limit < 2:
      raise ValueError(f"length_limit = {self.length_limit}; it must be at least 2")
    widths = self.prefill_widths
    if not widths or widths[0] < 1 or list(widths) != sorted(set(widths)) or kv.SLOT_MULTIPLE % widths[0]:
      raise ValueError(
        f"prefill_widths = {widths}; they must ascend from a divisor of {kv.SLOT_MULTIPLE}, "
        f"so that chunks fit the buffer"
      )
    if any(width % widths[0] for width in widths):
      raise ValueError(f"prefill_widths = {widths}; each must be a multiple of the first")

  @property
  def slots(self) -> int:
    """Capacity of every buffer: the length limit and the widest round behind it."""
    needed = self.length_limit + self.drafter.tree.num_nodes
    return -(-needed // kv.SLOT_MULTIPLE) * kv.SLOT_MULTIPLE


@flax.struct.dataclass
class RoundLog:
  """What each round did, uint8 ``[B, C]`` at ``[row, round]``; ``rounds [B]`` of them are written.

  ``emitted`` counts tokens after stops and budgets cut the block, the bonus token included.
  """

  rounds: Array
  proposed: Array  # valid nodes but the root
  depth: Array  # of the deepest of them
  reached: Array  # drafts accepted, and one more if something was proposed behind the last of them
  accepted: Array
  emitted: Array
  overlap: Array  # float32 [B], sum of Σ min(p, q) over judged positions
  judged: Array  # int32 [B]


@flax.struct.dataclass
class DecodeState:
  """Rows in flight. Axis 0 of every leaf is the row, so a row can be inserted or read by one slice."""

  tokens: Array  # int32 [B, C], committed tokens, then anything
  length: Array  # int32 [B], n; 0 is an empty row
  prompt_length: Array  # int32 [B]
  limit: Array  # int32 [B], most tokens, prompt included
  stop_ids: Array  # int32 [B, MAX_STOP_IDS], -1 is unused
  finish: Array  # int32 [B], a Finish
  settings: Settings
  cache: kv.KVCache  # the target's
  drafter: Any
  log: RoundLog

  @property
  def active(self) -> Array:
    """bool ``[B]``: rows that take part in the next round."""
    return (self.finish == Finish.NONE) & (self.length > 0)


@flax.struct.dataclass
class Verification:
  """What the target says about a proposal."""

  logits: Array  # float32 [B, N, V]
  taps: Array | None  # [B, N, taps, D]


def init_state(weights: Weights, config: DecodeConfig, batch: int) -> DecodeState:
  """``batch`` empty rows."""
  slots = config.slots
  zeros = lambda: jnp.zeros((batch,), jnp.int32)
  rounds = lambda: jnp.zeros((batch, slots), jnp.uint8)
  return DecodeState(
    tokens=jnp.zeros((batch, slots), jnp.int32),
    length=zeros(),
    prompt_length=zeros(),
    limit=zeros(),
    stop_ids=jnp.full((batch, MAX_STOP_IDS), -1, jnp.int32),
    finish=zeros(),
    settings=Settings.create(batch),
    cache=weights.target.init_cache(batch, slots),
    drafter=config.drafter.init(weights.drafter, batch, slots),
    log=RoundLog(zeros(), *(rounds() for _ in range(5)), jnp.zeros((batch,), jnp.float32), zeros()),
  )


def state_shardings(state: DecodeState, mesh: jax.sharding.Mesh) -> DecodeState:
  """Rows over the mesh's ``data`` axis, kv heads over ``model`` where it divides them, else replicated.

  A tree like the state, which may be abstract (shapes only).
  """
  axes = dict(mesh.shape)
  data = "data" if "data" in axes and state.length.shape[0] % axes["data"] == 0 else None

  def place(leaf):
    spec = [data] + [None] * (leaf.ndim - 1)
    if leaf.ndim == 4 and "model" in axes and leaf.shape[1] % axes["model"] == 0:
      spec[1] = "model"
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

  return jax.tree.map(place, state)


def shard_state(state: DecodeState, mesh: jax.sharding.Mesh) -> DecodeState:
  """The state on the mesh, as `state_shardings` says."""
  return jax.tree.map(jax.device_put, state, state_shardings(state, mesh))


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
    mesh: shards the state; the weights must lie on the same mesh.

  Raises:
    ValueError: naming the field, the value and the limit, before anything compiles.
  """
  limit, stops = _check_prompts(config, prompts, max_new_tokens, stop_ids)
  batch = len(prompts)
  settings = Settings.create(batch) if settings is None else settings
  if settings.seed.shape != (batch,):
    raise ValueError(f"settings are for {settings.seed.shape[0]} rows; there are {batch} prompts")
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
  if mesh is not None:
    state = shard_state(state, mesh)
  for start, width in prefill_chunks(int(lengths.max()) - 1, config):
    state = prefill_chunk(weights, state, np.int32(start), config, width)
  return state


def insert(state: DecodeState, row: int, source: DecodeState, source_row: int = 0) -> DecodeState:
  """Puts row ``source_row`` of another state into row ``row``, in place; other rows recompile nothing.

  Raises:
    ValueError: a row that the state does not have.
  """
  for name, index, where in (("row", row, state), ("source_row", source_row, source)):
    rows = where.length.shape[0]
    if not 0 <= index < rows:
      raise ValueError(f"{name} = {index}; the state has rows 0 to {rows - 1}")
  return insert_row(state, np.int32(row), source, np.int32(source_row))


@functools.partial(jax.jit, donate_argnames="state")
def insert_row(state: DecodeState, row: Array, source: DecodeState, source_row: Array) -> DecodeState:
  """The program that `insert` calls; both rows are traced and must exist."""

  def put(into, leaf):
    one = jax.lax.dynamic_slice_in_dim(leaf, source_row, 1, axis=0)
    return jax.lax.dynamic_update_slice_in_dim(into, one, row, axis=0)

  return jax.tree.map(put, state, source)


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
  for it and a bonus token, and, in a deterministic draft, its id is real.
  """
  root = jnp.take_along_axis(state.tokens, jnp.maximum(state.length - 1, 0)[:, None], axis=1)[:, 0]
  context = DraftContext(state.tokens, state.length, root, state.active, state.settings)
  proposal, drafter, cache = config.drafter.propose(weights.drafter, state.drafter, context, state.cache)
  tree = proposal.tree
  _check_proposal(proposal, config)
  valid = proposal.valid
  if proposal.kind == "deterministic":
    # A sampled id must not be dropped for what it is: the target gives ids that are not real probability
    # 0, so they are rejected, and redrawn from the residual as the law asks.
    valid &= (proposal.tokens >= 0) & (proposal.tokens < config.num_real_tokens)
  valid &= state.active[:, None] & (tree.depths < (state.limit - state.length)[:, None])
  valid = valid.at[:, 0].set(True)
  valid = jnp.all(valid[:, None, :] | ~tree.ancestor_mask, axis=-1)
  return proposal.replace(valid=valid), state.replace(drafter=drafter, cache=cache)


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
  top, error = sampling.peak(logits)
  if config.rule.needs == "argmax":
    target = sampling.argmax(logits, top)
  else:
    target = sampling.processed_probs(logits, top, state.settings)
  verdict = config.rule(target, proposal, state.settings, state.length)

  # The block: tokens of the accepted path behind the root, then the rule's next token.
  width = verdict.path.shape[1]
  index = jnp.arange(width)
  path_tokens = jnp.take_along_axis(proposal.tokens, verdict.path, axis=1)
  accepted = verdict.accepted[:, None]
  block = jnp.where(index == accepted, verdict.next_token[:, None], jnp.roll(path_tokens, -1, axis=1))

  # Cut it, in order: at the first visited node with unusable logits, at a stop id, at the budget.
  wrong = jnp.take_along_axis(error, verdict.path, axis=1) & (index <= accepted)
  sound = jnp.where(wrong.any(axis=1), jnp.argmax(wrong, axis=1), width + 1)
  available = jnp.minimum(verdict.accepted + 1, sound)
  is_stop = (block[:, :, None] == state.stop_ids[:, None, :]).any(axis=-1)
  to_stop = jnp.where(is_stop.any(axis=1), jnp.argmax(is_stop, axis=1) + 1, width + 1)
  remaining = state.limit - state.length
  emitted = jnp.minimum(jnp.minimum(available, to_stop), remaining)
  emitted = jnp.where(state.active, emitted, 0).astype(jnp.int32)
  reason = jnp.select(
    [emitted == to_stop, emitted == remaining, emitted == sound],
    [Finish.STOP, Finish.LENGTH, Finish.ERROR],
    0,
  )

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
    log=_log(state, proposal, verdict, emitted),
  )


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


# --- results ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RowResult:
  """One row, on the host. Per-round lists have one entry a target call.

  Attributes:
    tokens: new token ids.
    finish: ``stop``, ``length``, ``error``, or None while running.
    proposed: drafts a round, all nodes of a tree but the root.
    depth: of the deepest of them; for chains the same number.
    reached: depths of a round at which drafts were judged: the accepted ones, and one more if something
      was proposed behind the last of them.
    accepted: drafts accepted a round.
    emitted: tokens a round, the bonus included; what stops cut away is not counted.
    overlap: mean Σ min(p, q) over judged positions (the expected acceptance there), None if unknown.
  """

  tokens: list[int]
  prompt_tokens: int
  finish: str | None
  proposed: list[int]
  depth: list[int]
  reached: list[int]
  accepted: list[int]
  emitted: list[int]
  overlap: float | None

  @property
  def rounds(self) -> int:
    return len(self.emitted)

  @property
  def tau(self) -> float:
    """τ: emitted tokens a round, bonus included; plain decoding has 1. 0 without rounds."""
    return sum(self.emitted) / self.rounds if self.rounds else 0.0

  @property
  def acceptance_rate(self) -> float:
    """Accepted drafts / proposed depth; 0 when nothing was proposed."""
    return sum(self.accepted) / sum(self.depth) if sum(self.depth) else 0.0

  @property
  def accept_counts(self) -> list[int]:
    """``[a]``: rounds that accepted a drafts, up to the largest a."""
    return np.bincount(self.accepted, minlength=1).tolist() if self.accepted else [0]

  @property
  def reach_counts(self) -> list[int]:
    """``[d - 1]``: rounds that reached depth d: d - 1 accepted, and something proposed behind them."""
    return [sum(reached >= d for reached in self.reached) for d in range(1, max(self.reached, default=0) + 1)]


def results(state: DecodeState) -> list[RowResult]:
  """Reads the rows back. Copies what it needs: the state stays usable (caches are not touched)."""
  small = state.replace(cache=None, drafter=None, settings=None)
  host = jax.device_get(small)
  rows = []
  for b in range(host.length.shape[0]):
    rounds, start, end = int(host.log.rounds[b]), int(host.prompt_length[b]), int(host.length[b])
    finish = Finish(int(host.finish[b]))
    judged = int(host.log.judged[b])
    rows.append(
      RowResult(
        tokens=host.tokens[b, start:end].tolist(),
        prompt_tokens=start,
        finish=None if finish is Finish.NONE else finish.name.lower(),
        proposed=host.log.proposed[b, :rounds].tolist(),
        depth=host.log.depth[b, :rounds].tolist(),
        reached=host.log.reached[b, :rounds].tolist(),
        accepted=host.log.accepted[b, :rounds].tolist(),
        emitted=host.log.emitted[b, :rounds].tolist(),
        overlap=float(host.log.overlap[b]) / judged if judged else None,
      )
    )
  return rows
