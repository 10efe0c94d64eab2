"""The target's hidden states, which heads are trained on: recorded while it writes, or by a prefill."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax import cache as kv
from specjax import decode
from specjax.base import Committed, DraftContext, Proposal
from specjax.models import Decoder
from specjax.tree import TokenTree
from specjax.verify import DrawAndFollow

Array = jax.Array


def usual_taps(num_layers: int) -> tuple[int, ...]:
  """Layers whose input heads are trained on: EAGLE-3's three, and the last layer's output.

  ``(2, L // 2, L - 3, L)``; in a model of fewer than five layers the numbers are kept within it.
  """
  return tuple(min(max(i, 0), num_layers) for i in (2, num_layers // 2, num_layers - 3, num_layers))


def usual_sizes(features: Iterable[np.ndarray]) -> np.ndarray:
  """How large each number of the hidden states usually is: float32 ``[taps, D]``.

  The median of |x| over all positions, over that of a normal distribution: a text's first token, whose
  hidden states may be a thousand times as large, does not count. At least a hundredth of a tap's mean.

  Args:
    features: ``[T, taps, D]`` each.
  """
  sizes = np.median(np.abs(np.concatenate([np.asarray(x, np.float32) for x in features])), axis=0) / 0.6745
  return np.maximum(sizes, sizes.mean(axis=1, keepdims=True) / 100 + 1e-6).astype(np.float32)


@flax.struct.dataclass
class Record:
  """Hidden states of committed tokens.

  Attributes:
    buffer: ``[B, 1, S, taps · D]``, bits of row t those of position t; laid out as a cache, so that
      `cache.write_rows` writes it. Rows from ``length`` on may hold anything.
    length: int32 ``[B]``, rows that count: one fewer than there are tokens.
  """

  buffer: Array
  length: Array


@dataclasses.dataclass(frozen=True)
class Recorder:
  """Proposes nothing and keeps what it is shown: features cost a write while the target decodes plainly.

  Attributes:
    taps: layers whose input is kept, in this order.
    width: D of the target.
    dtype: in which they are kept.
  """

  taps: tuple[int, ...]
  width: int
  dtype: str = "bfloat16"

  name: ClassVar[str] = "recorder"
  kind: ClassVar[str] = "deterministic"

  def __post_init__(self):
    if not self.taps or min(self.taps) < 0:
      raise ValueError(f"taps = {self.taps}; at least one layer is needed, numbered from 0")
    if self.width < 1:
      raise ValueError(f"width = {self.width}; it must be at least 1")

  @property
  def tree(self) -> TokenTree:
    return TokenTree.chain(0)

  def init(self, weights, batch, slots):
    buffer = jnp.zeros((batch, 1, slots, len(self.taps) * self.width), self.dtype)
    return Record(_bits(buffer), jnp.zeros((batch,), jnp.int32))

  def prefill(self, weights, state, chunk):
    return self._append(state, chunk)

  def propose(self, weights, state, context: DraftContext, target_cache):
    tokens = context.root[:, None]
    proposal = Proposal(tokens, jnp.ones_like(tokens, bool), q=None, tree=self.tree, kind=self.kind)
    return proposal, state, target_cache

  def extend(self, weights, state, committed):
    return self._append(state, committed)

  def _append(self, state: Record, new: Committed) -> Record:
    """All rows of a block are written; those that do not belong to the text are behind its length."""
    rows = _bits(new.taps.reshape(*new.tokens.shape, -1)[:, None].astype(self.dtype))
    count = new.valid.sum(axis=1, dtype=jnp.int32)
    return Record(kv.write_rows(state.buffer, rows, state.length), state.length + count)

  def read(self, state: Record, row: int, count: int) -> np.ndarray:
    """The first ``count`` rows of one text, ``[count, taps, D]`` on the host."""
    kept = np.asarray(_row(state.buffer, np.int32(row)))[:count]
    return kept.reshape(count, len(self.taps), self.width).view(jnp.dtype(self.dtype)).copy()


def _bits(values: Array) -> Array:
  """The same bits as unsigned integers: XLA on CPU writes into bfloat16 through a float32 copy of it all."""
  return jax.lax.bitcast_convert_type(values, f"uint{8 * values.dtype.itemsize}")


@jax.jit
def _row(buffer: Array, row: Array) -> Array:
  return jax.lax.dynamic_index_in_dim(buffer, row, axis=0, keepdims=False)[0]


def features_of(
  model: Decoder,
  sequences: Iterable[Sequence[int]],
  taps: tuple[int, ...],
  *,
  length_limit: int,
  batch_size: int = 8,
  implementation: str = "auto",
  dtype: str = "bfloat16",
) -> Iterator[np.ndarray]:
  """Features of texts that are there already, by prefilling them.

  Args:
    model: the target.
    sequences: token ids, T of them a text.
    taps: layers whose input is wanted.
    length_limit: most tokens of a text; a new one compiles.
    batch_size: texts of a forward.
    implementation: of `tree_attention`.
    dtype: of the result.

  Yields:
    ``[T - 1, taps, D]`` for each text in order, row t that of position t.

  Raises:
    ValueError: a text that is empty, too long, or holds an id that is none.
  """
  recorder = Recorder(taps, model.config.d_model, dtype)
  config = decode.DecodeConfig(
    drafter=recorder,
    rule=DrawAndFollow(),
    num_real_tokens=model.config.num_real_tokens,
    length_limit=length_limit,
    implementation=implementation,
    logprobs="off",
  )
  weights = decode.Weights(model)
  sequences = iter(sequences)
  while group := list(islice(sequences, batch_size)):
    prompts = [*group, *[group[-1][:1]] * (batch_size - len(group))]
    state = decode.prefill(weights, config, prompts, max_new_tokens=1)
    for row, sequence in enumerate(group):
      yield recorder.read(state.drafter, row, len(sequence) - 1)
