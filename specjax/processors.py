"""What changes logits before temperature: penalties, biases, least lengths, and masks of allowed tokens.

The same functions serve plain decoding, verification and drafting. They are evaluated a node, along the
node's own path: a token drafted on the way counts as said, one on another branch does not. Nothing here is
state that a rollback would have to undo: counts are taken from the committed tokens, and the state of a
`TokenProcessor` is advanced by tokens that were emitted, and nothing else.

Order: repetition penalty, presence and frequency penalty, bias, stop ids before ``min_new_tokens``, mask
of allowed tokens; then `sampling` with temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling
from specjax.sampling import Settings

Array = jax.Array


class TokenProcessor(Protocol):
  """Which tokens may come next: a pytree (its tables are weights), with pure functions of one row.

  The functions are mapped over rows and nodes. It may also have ``check(states)``, which raises ValueError
  for states ``[B, …]`` a caller should not begin with. A state says everything about the row's new text that
  matters; any token may be asked for, one that is not allowed, too (its node is never accepted).
  """

  def start(self) -> Any:
    """The state before the first new token, a pytree of arrays."""

  def advance(self, state: Any, token: Array) -> Any:
    """The state behind ``token``, int32 ``[]``."""

  def mask(self, state: Any) -> Array:
    """bool ``[V]``, the allowed tokens. If there is none the text is complete: the row ends with ``stop``."""


@flax.struct.dataclass(kw_only=True)
class History:
  """What stands before the next token of each row. Every leaf but the processor's has the row as axis 0.

  Attributes:
    tokens: int32 ``[B, C]``, committed tokens, then anything.
    length: int32 ``[B]``, n.
    prompt_length: int32 ``[B]``; new text starts there.
    stop_ids: int32 ``[B, …]``, -1 is unused.
    settings: of each row.
    processor: a `TokenProcessor`, or None.
    processor_state: its states, behind the last committed token.
  """

  tokens: Array
  length: Array
  prompt_length: Array
  stop_ids: Array
  settings: Settings
  processor: Any = None
  processor_state: Any = None


@flax.struct.dataclass
class Processed:
  """Logits ready for temperature, and where there is nothing to choose from.

  Attributes:
    logits: float32 ``[B, N, V]``; None of `most_likely`.
    top: float32 ``[B, N]``, their maximum.
    error: bool ``[B, N]``; the raw logits hold NaN or +inf or nothing above -inf, or processing left
      nothing of them.
    complete: bool ``[B, N]``; the processor allows no token.
    processor_state: states ``[B, N, …]`` behind each node, None without a processor.
  """

  logits: Array | None
  top: Array
  error: Array
  complete: Array
  processor_state: Any = None

  @property
  def unusable(self) -> Array:
    """bool ``[B, N]``: no token can be chosen here."""
    return self.error | self.complete

  def argmax(self) -> Array:
    """int32 ``[B, N]``: the most likely token, the lowest id of several; of unusable nodes any id."""
    return sampling.argmax(self.logits, self.top)

  def probs(self, settings: Settings) -> Array:
    """float32 ``[B, N, V]``: the processed distribution; all 0 at unusable nodes."""
    probs = sampling.processed_probs(self.logits, self.top, settings)
    return jnp.where(self.unusable[..., None], 0.0, probs)


def process(logits: Array, history: History, paths: Array) -> Processed:
  """Applies a row's settings and processor at each node.

  Args:
    logits: float32 ``[B, N, V]`` as the model gave them, padding ids masked.
    history: up to the root, the root included.
    paths: int32 ``[B, N, G]``, the tokens drafted behind the root on the way to each node, its own
      included; -1 behind them. G may be 0.
  """
  adjust = lambda logits: (_adjusted(logits, history, paths), sampling.peak(logits)[1])
  keep = lambda logits: (logits, _raw_error(logits, history))
  wanted = jnp.any(history.settings.adjusts_logits)
  return _masked(*jax.lax.cond(wanted, adjust, keep, logits), history, paths)


def most_likely(logits: Array, history: History, paths: Array) -> tuple[Array, Processed]:
  """The most likely token of each node, int32 ``[B, N]``, and the same as `process` but for the logits.

  The branch that does nothing hands nothing of the size of the logits on: copying them costs a third of
  what greedy decoding has to do here.
  """

  def adjust(logits):
    return of(_adjusted(logits, history, paths), sampling.peak(logits)[1])

  def of(logits, error):
    processed = _masked(logits, error, history, paths)
    return processed.argmax(), processed.replace(logits=None)

  keep = lambda logits: of(logits, _raw_error(logits, history))
  return jax.lax.cond(jnp.any(history.settings.adjusts_logits), adjust, keep, logits)


def _raw_error(logits: Array, history: History) -> Array:
  """Errors of logits that nothing has adjusted; without a mask either, `_masked` sees them by itself."""
  if history.processor is None:
    return jnp.zeros(logits.shape[:2], bool)
  return sampling.peak(logits)[1]


def _masked(logits: Array, error: Array, history: History, paths: Array) -> Processed:
  """Adjusted logits with what the processor does not allow at -inf."""
  complete, states = jnp.zeros_like(error), None
  if history.processor is not None:
    states = _states(history, paths)
    allowed = jax.vmap(jax.vmap(history.processor.mask))(states)
    if allowed.shape != logits.shape:
      raise ValueError(
        f"the processor masks {allowed.shape[-1]} tokens; the vocabulary has {logits.shape[-1]}"
      )
    complete = ~jnp.any(allowed, axis=-1) & ~error
    logits = jnp.where(allowed, logits, -jnp.inf)
  top, bad = sampling.peak(logits)
  return Processed(logits, top, error | (bad & ~complete), complete, states)


def advance(processor: TokenProcessor, states: Any, tokens: Array) -> Any:
  """States ``[B, …]`` behind one more token a row, ``tokens [B]``."""
  return jax.vmap(processor.advance)(states, tokens)


def _states(history: History, paths: Array) -> Any:
  """The processor's state behind each node, ``[B, N, …]``."""
  batch, nodes, depth = paths.shape
  spread = lambda leaf: jnp.broadcast_to(leaf[:, None], (batch, nodes, *leaf.shape[1:]))
  states = jax.tree.map(spread, history.processor_state)

  def one(states, tokens):
    ahead = jax.vmap(jax.vmap(history.processor.advance))(states, jnp.maximum(tokens, 0))
    there = lambda new, old: jnp.where((tokens >= 0).reshape(batch, nodes, *[1] * (old.ndim - 2)), new, old)
    return jax.tree.map(there, ahead, states), None

  return jax.lax.scan(one, states, jnp.moveaxis(paths, -1, 0))[0] if depth else states


def _adjusted(logits: Array, history: History, paths: Array) -> Array:
  """Penalties, bias and least length: one pass over the vocabulary, and one over the paths."""
  batch, nodes, vocab = logits.shape
  settings, tokens = history.settings, history.tokens
  rows = jnp.arange(batch)[:, None]
  place = lambda ids, where: jnp.where(where, ids, vocab)  # out of range: dropped
  at = jnp.arange(tokens.shape[1])
  said = at < history.length[:, None]
  new = said & (at >= history.prompt_length[:, None])
  count = jnp.zeros((batch, vocab), jnp.int32).at[rows, place(tokens, new)].add(1, mode="drop")
  seen = jnp.zeros((batch, vocab), bool).at[rows, place(tokens, said)].set(True, mode="drop")
  ids = settings.bias_ids
  bias = jnp.zeros((batch, vocab)).at[rows, place(ids, ids >= 0)].add(settings.bias_values, mode="drop")
  wide = lambda value: value[:, None, None]

  def changed(logits, seen, count, bias):
    repeated = jnp.where(
      logits > 0,
      logits / wide(settings.repetition_penalty),
      logits * wide(settings.repetition_penalty),
    )
    logits = jnp.where(seen, repeated, logits)
    logits -= wide(settings.presence_penalty) * (count > 0)
    return logits - wide(settings.frequency_penalty) * count + bias

  out = changed(logits, seen[:, None], count[:, None], bias[:, None])
  drafted = paths >= 0
  if paths.shape[-1]:
    # Tokens on the way are said, too: their entries are made anew, from the raw logits.
    here = (paths[..., :, None] == paths[..., None, :]).sum(axis=-1, dtype=jnp.int32)
    on_path = jnp.where(drafted, paths, 0)
    of = lambda dense: jnp.take_along_axis(dense[:, None], on_path, axis=-1)
    raw = jnp.take_along_axis(logits, on_path, axis=-1)
    entries = changed(raw, True, of(count) + here, of(bias))
    node = jnp.arange(nodes)[None, :, None]
    out = out.at[rows[..., None], node, place(paths, drafted)].set(entries, mode="drop")
  done = (history.length - history.prompt_length)[:, None] + drafted.sum(axis=-1)
  early = done < settings.min_new_tokens[:, None]
  ends = jnp.zeros((batch, vocab), bool)
  ends = ends.at[rows, place(history.stop_ids, history.stop_ids >= 0)].set(True, mode="drop")
  return jnp.where(early[..., None] & ends[:, None], -jnp.inf, out)


@flax.struct.dataclass
class TokenAutomaton:
  """A deterministic automaton over token ids, as grammars and choices compile to. States are numbers.

  A row in state `FREE` is not constrained: so batches mix, by the states given to `decode.prefill`.

  Attributes:
    table: int32 ``[S, V]``, the state behind each token, negative where it is not allowed.
  """

  table: Array

  FREE = -1
  DEAD = -2

  @classmethod
  def create(cls, transitions: Sequence[Sequence[int]] | Array) -> TokenAutomaton:
    """Checks a table ``[S, V]``; state 0 is the start. A state whose entries are all negative is an end.

    Raises:
      ValueError: another shape or type, or a state that does not exist.
    """
    table = np.asarray(transitions)
    if table.ndim != 2 or not table.size or table.dtype.kind not in "iu":
      raise ValueError(f"transitions have shape {table.shape} of {table.dtype}; they must be integers [S, V]")
    if table.max() >= len(table):
      raise ValueError(f"transitions lead to state {table.max()}; there are states 0 to {len(table) - 1}")
    return cls(jnp.asarray(np.where(table < 0, cls.DEAD, table), jnp.int32))

  def start(self) -> Array:
    return jnp.int32(0)

  def check(self, states: Array) -> None:
    states = np.asarray(states)
    bad = states[(states < self.DEAD) | (states >= len(self.table))]
    if bad.size:
      raise ValueError(f"processor_state = {bad[0]}; the automaton has states 0 to {len(self.table) - 1}")

  def advance(self, state: Array, token: Array) -> Array:
    behind = self.table[jnp.maximum(state, 0), jnp.clip(token, 0, self.table.shape[1] - 1)]
    return jnp.where(state < 0, state, behind)

  def mask(self, state: Array) -> Array:
    return jnp.where(state < 0, state == self.FREE, self.table[jnp.maximum(state, 0)] >= 0)
