"""What decoding carries: the static configuration, and the state with a row for each sequence."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax import cache as kv
from specjax.base import Controller, Drafter, Rule, Trees, Weights
from specjax.processors import TokenProcessor
from specjax.results import Finish, RoundLog
from specjax.sampling import Settings
from specjax.tree import alike

Array = jax.Array

MAX_STOP_IDS = 8


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
    control: chooses each round's width: plain decoding, one of ``alternatives``, or ``drafter``. A round in
      which no row proposes anything runs the target over the roots alone. None: every round has the
      drafter's width.
    alternatives: the same drafter at other widths, with the same weights and state. Each width is a copy of
      the target in the program.
    logprobs: of emitted tokens: under the ``processed`` distribution (a greedy row's is a point mass: 0),
      under the ``raw`` one (softmax of the target's own logits, a pass over the vocabulary more), or ``off``.
  """

  drafter: Drafter
  rule: Rule
  num_real_tokens: int
  length_limit: int
  prefill_widths: tuple[int, ...] = (16, 64, 128, 256)
  implementation: str = "auto"
  control: Controller | None = None
  alternatives: tuple[Drafter, ...] = ()
  logprobs: Literal["processed", "raw", "off"] = "processed"

  def __post_init__(self):
    for drafter in self.drafters:
      if drafter.kind not in self.rule.kinds:
        raise ValueError(
          f"rule {self.rule.name} takes {sorted(self.rule.kinds)} proposals; "
          f"drafter {drafter.name} makes {drafter.kind} ones"
        )
      if self.rule.chains_only and not drafter.tree.is_chain:
        raise ValueError(f"rule {self.rule.name} takes chains; drafter {drafter.name} proposes a tree")
      if (drafter.name, drafter.taps) != (self.drafter.name, self.drafter.taps):
        raise ValueError(f"alternatives holds {drafter.name}; it must be {self.drafter.name} at other widths")
      if self.control is not None and drafter.tree.max_depth < 1:
        raise ValueError(
          f"drafter {drafter.name} proposes nothing; control = {self.control.name} needs drafts"
        )
    if self.alternatives and self.control is None:
      raise ValueError("alternatives needs a control that chooses between them; it is None")
    if self.logprobs not in ("processed", "raw", "off"):
      raise ValueError(f"logprobs = {self.logprobs!r}; it must be processed, raw or off")
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
    needed = self.length_limit + max(tree.num_rows for tree in self.trees)
    return -(-needed // kv.SLOT_MULTIPLE) * kv.SLOT_MULTIPLE

  @property
  def drafters(self) -> tuple[Drafter, ...]:
    """Width i > 0 is ``drafters[i - 1]``; width 0 is plain decoding."""
    return (*self.alternatives, self.drafter)

  @property
  def trees(self) -> Trees:
    return tuple(drafter.tree for drafter in self.drafters)

  @property
  def groups(self) -> tuple[tuple[int, ...], ...]:
    """Widths whose drafts begin alike, see `tree.alike`."""
    return tuple(tuple(i + 1 for i in group) for group in alike(self.trees))

  def at_width(self, width: int) -> DecodeConfig:
    """As if the drafter of that width were the only one."""
    return dataclasses.replace(self, drafter=self.drafters[width - 1], alternatives=(), control=None)


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
  processor: Any  # states of a `TokenProcessor`, behind the last committed token
  log: RoundLog
  control: Any  # what the controller has seen of each row
  logprobs: Array | None  # float32 [B, C], of the tokens beside them; a prompt's are not known

  @property
  def active(self) -> Array:
    """bool ``[B]``: rows that take part in the next round."""
    return (self.finish == Finish.NONE) & (self.length > 0)


def init_state(weights: Weights, config: DecodeConfig, batch: int) -> DecodeState:
  """``batch`` empty rows."""
  slots = config.slots
  _check_alike(weights, config, batch)
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
    processor=_start(weights.processor, batch),
    logprobs=None if config.logprobs == "off" else jnp.zeros((batch, slots), jnp.float32),
    control=None if config.control is None else config.control.init(weights.beliefs, config.trees, batch),
    log=RoundLog(zeros(), *(rounds() for _ in range(7)), jnp.zeros((batch,), jnp.float32), zeros()),
  )


def _check_alike(weights: Weights, config: DecodeConfig, batch: int) -> None:
  """That drafters of all widths have one kind of state."""
  shapes = [
    jax.eval_shape(lambda of, drafter=drafter: drafter.init(of, batch, config.slots), weights.drafter)
    for drafter in config.drafters
  ]
  for drafter, shape in zip(config.drafters, shapes):
    if shape != shapes[-1]:
      raise ValueError(f"alternatives holds {drafter}, whose state is not that of {config.drafter}")


def _start(processor: TokenProcessor | None, batch: int) -> Any:
  if processor is None:
    return None
  return jax.tree.map(lambda leaf: jnp.repeat(jnp.asarray(leaf)[None], batch, axis=0), processor.start())


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


@partial(jax.jit, donate_argnames="state")
def insert_row(state: DecodeState, row: Array, source: DecodeState, source_row: Array) -> DecodeState:
  """The program that `insert` calls; both rows are traced and must exist."""

  def put(into, leaf):
    one = jax.lax.dynamic_slice_in_dim(leaf, source_row, 1, axis=0)
    return jax.lax.dynamic_update_slice_in_dim(into, one, row, axis=0)

  return jax.tree.map(put, state, source)
