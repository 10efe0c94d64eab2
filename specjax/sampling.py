"""From logits to the processed distribution, and from a distribution to a token.

One set of functions serves plain decoding, verification and drafting, so that p and q are processed
alike. Settings are per-row arrays: changing them compiles nothing.

**Noise.** Draws of the target are keyed by (seed, absolute position), so they do not depend on how
the text was cut into rounds. Draft, accept and residual noise is keyed by (seed, committed length at
the start of the round, purpose, node): a rejected position is drawn again, and drawing it with the
noise that rejected it would bias the law. No two purposes share a key, and no key depends on a row's
neighbours, slot or padding.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array

# Below this a temperature is 0: the most likely token. Dividing by less would leave float32's range.
MIN_TEMPERATURE = 1e-5
# Draws walk the vocabulary in two levels of this width.
_DRAW_BLOCK = 256
# Cut-offs of top-k and top-p are looked for among this many of the most likely tokens first.
_HEAD = 128
MAX_LOGIT_BIAS = 64
MAX_BIAS = 1e4


class Purpose(enum.IntEnum):
  """What a random number is for; part of its key."""

  TARGET = 0
  DRAFT = 1
  ACCEPT = 2
  RESIDUAL = 3


@flax.struct.dataclass
class Settings:
  """Sampling settings of each row.

  Attributes:
    temperature: float32 ``[B]``; 0 is greedy.
    top_k: int32 ``[B]``; keep the k most likely tokens (ties with the k-th stay), 0 is off.
    top_p: float32 ``[B]``; then keep the smallest set of most likely tokens with at least this mass
      (ties with the last stay), 1 is off.
    min_p: float32 ``[B]``; then drop tokens below this share of the most likely one, 0 is off.
    seed: uint32 ``[B]``.
    repetition_penalty: float32 ``[B]``; logits of tokens in the prompt or the text so far are divided by
      it where positive, else multiplied; 1 is off.
    presence_penalty: float32 ``[B]``; taken from the logits of tokens in the new text, 0 is off.
    frequency_penalty: float32 ``[B]``; taken once for each time they are in it, 0 is off.
    min_new_tokens: int32 ``[B]``; stop ids are impossible before. (Where a processor allows nothing else,
      nothing is left: the row ends with an error.)
    bias_ids, bias_values: int32 and float32 ``[B, MAX_LOGIT_BIAS]``, added to the logits of these ids;
      -1 is unused.
  """

  temperature: Array
  top_k: Array
  top_p: Array
  min_p: Array
  seed: Array
  repetition_penalty: Array
  presence_penalty: Array
  frequency_penalty: Array
  min_new_tokens: Array
  bias_ids: Array
  bias_values: Array

  @classmethod
  def create(cls, batch: int, **options: Any) -> Settings:
    """Arrays on the device of what `on_host` takes."""
    return jax.tree.map(jnp.asarray, cls.on_host(batch, **options))

  @classmethod
  def on_host(
    cls,
    batch: int,
    *,
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    seed=0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    min_new_tokens=0,
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float]] = MappingProxyType({}),
  ) -> Settings:
    """Checks and broadcasts numbers or length-``batch`` sequences; the arrays are numpy's.

    Args:
      batch: rows.
      logit_bias: what is added to the logits of which ids, for all rows or one mapping a row.
      **others: fields of this class.

    Raises:
      ValueError: naming the field, the value and the limit.
    """

    def column(name, value, low, high, dtype):
      kind = np.float64 if dtype == np.float32 else np.int64
      array = np.asarray(value)
      if array.dtype.kind not in "iuf" or (kind is np.int64 and array.dtype.kind == "f"):
        raise ValueError(f"{name} = {value!r}; it must be {'an integer' if kind is np.int64 else 'a number'}")
      if array.ndim > 1 or (array.ndim == 1 and array.shape[0] != batch):
        raise ValueError(f"{name} has shape {array.shape}; it must be a number or have {batch} rows")
      bad = ~((array >= low) & (array <= high))  # NaN fails both comparisons
      if bad.any():
        raise ValueError(
          f"{name} = {array[bad].flat[0] if array.ndim else value}; it must be in [{low}, {high}]"
        )
      return np.broadcast_to(array.astype(dtype), (batch,))

    bias_ids, bias_values = _bias_columns(logit_bias, batch)
    return cls(
      temperature=column("temperature", temperature, 0.0, 1e4, np.float32),
      top_k=column("top_k", top_k, 0, 2**31 - 1, np.int32),
      top_p=column("top_p", top_p, 0.0, 1.0, np.float32),
      min_p=column("min_p", min_p, 0.0, 1.0, np.float32),
      seed=column("seed", seed, 0, 2**32 - 1, np.uint32),
      repetition_penalty=column("repetition_penalty", repetition_penalty, 1e-2, 1e2, np.float32),
      presence_penalty=column("presence_penalty", presence_penalty, -1e2, 1e2, np.float32),
      frequency_penalty=column("frequency_penalty", frequency_penalty, -1e2, 1e2, np.float32),
      min_new_tokens=column("min_new_tokens", min_new_tokens, 0, 2**31 - 1, np.int32),
      bias_ids=bias_ids,
      bias_values=bias_values,
    )

  @property
  def greedy(self) -> Array:
    """bool ``[B]``."""
    return self.temperature < MIN_TEMPERATURE

  @property
  def adjusts_logits(self) -> Array:
    """bool ``[B]``: something but temperature and truncation is on."""
    return (
      (self.repetition_penalty != 1.0)
      | (self.presence_penalty != 0.0)
      | (self.frequency_penalty != 0.0)
      | (self.min_new_tokens > 0)
      | jnp.any(self.bias_ids >= 0, axis=1)
    )


def _bias_columns(logit_bias, batch: int) -> tuple[np.ndarray, np.ndarray]:
  """``bias_ids, bias_values`` of mappings, checked."""
  rows = [logit_bias] * batch if isinstance(logit_bias, Mapping) else list(logit_bias)
  if len(rows) != batch or not all(isinstance(row, Mapping) for row in rows):
    raise ValueError(
      f"logit_bias = {logit_bias!r}; it must map ids to numbers, once or for each of {batch} rows"
    )
  ids = np.full((batch, MAX_LOGIT_BIAS), -1, np.int32)
  values = np.zeros((batch, MAX_LOGIT_BIAS), np.float32)
  for b, row in enumerate(rows):
    if len(row) > MAX_LOGIT_BIAS:
      raise ValueError(f"logit_bias has {len(row)} ids; the limit is {MAX_LOGIT_BIAS} a row")
    for i, (token, value) in enumerate(row.items()):
      if not isinstance(token, (int, np.integer)) or not 0 <= token < 2**31:
        raise ValueError(f"logit_bias holds the id {token!r}; ids are integers of at least 0")
      if not isinstance(value, (int, float, np.number)) or not abs(value) <= MAX_BIAS:
        raise ValueError(
          f"logit_bias = {value!r} for id {token}; it must be a number in [{-MAX_BIAS:g}, {MAX_BIAS:g}]"
        )
      ids[b, i], values[b, i] = token, value
  return ids, values


def mask_padding(logits: Array, num_real_tokens: int) -> Array:
  """Sets the logits of ids that only pad the vocabulary to -inf."""
  if num_real_tokens == logits.shape[-1]:
    return logits
  return jnp.where(jnp.arange(logits.shape[-1]) < num_real_tokens, logits, -jnp.inf)


def peak(logits: Array) -> tuple[Array, Array]:
  """Largest logit, and whether the row is an error: ``[..., V]`` → float32 ``[...]``, bool ``[...]``.

  A row is an error when it holds NaN or +inf, or nothing above -inf. One pass over the vocabulary.
  """
  top = jnp.max(jnp.where(jnp.isnan(logits), jnp.inf, logits), axis=-1)
  return top, jnp.isinf(top)


def argmax(logits: Array, top: Array) -> Array:
  """Lowest id among the largest logits, int32 ``[...]``; id 0 when the row holds NaN.

  A maximum and a compare: XLA's argmax on CPU is several times slower over a vocabulary.
  """
  vocab = logits.shape[-1]
  ids = jnp.where(logits == top[..., None], jnp.arange(vocab, dtype=jnp.int32), vocab)
  first = jnp.min(ids, axis=-1)
  return jnp.where(first == vocab, 0, first)


def _nucleus_by_search(weights: Array, goal: Array) -> Array:
  """A t such that the weights of at least t are the smallest set of largest ones with mass ``goal [B, N]``.

  Bisection over the bits of a float, a pass over the vocabulary each, until one weight at most is left
  between the bounds: exact for any distribution.
  """
  bits = lambda x: jax.lax.bitcast_convert_type(x, jnp.int32)
  value = lambda x: jax.lax.bitcast_convert_type(x, jnp.float32)
  total = jnp.sum(weights, axis=-1)
  # Weights below a share 1 / V of what may go cannot reach it together. None is above 1.
  low = jnp.maximum(bits(0.99 * (total - goal) / weights.shape[-1]), 0)
  high = jnp.full(goal.shape, bits(jnp.float32(1.0)) + 1)

  def open_(bounds):
    low, high, mass_low, mass_high = bounds
    alone = mass_low - mass_high + 1e-6 * total < 2 * value(low)
    return jnp.any((high - low > 1) & ~alone)

  def halve(bounds):
    low, high, mass_low, mass_high = bounds
    middle = low + (high - low) // 2
    mass = jnp.sum(jnp.where(weights >= value(middle)[..., None], weights, 0.0), axis=-1)
    enough = mass >= goal
    choose = lambda yes, no: jnp.where(enough, yes, no)
    return choose(middle, low), choose(high, middle), choose(mass, mass_low), choose(mass_high, mass)

  return value(jax.lax.while_loop(open_, halve, (low, high, total, jnp.zeros_like(total)))[0])


def _kth_by_search(z: Array, k: Array) -> Array:
  """A t such that ``z [B, N, V]`` (<= 0) of at least t are the ``k [B, N]`` largest and their ties."""
  keys = jax.lax.bitcast_convert_type(jnp.abs(z), jnp.int32)  # the bits of |z| order tokens by likelihood
  low = jnp.full(k.shape, -1, jnp.int32)
  high = jnp.full(k.shape, 0x7F800000, jnp.int32)  # inf: everything

  def halve(bounds):
    low, high, count = bounds
    middle = low + (high - low) // 2
    kept = jnp.sum(keys <= middle[..., None], axis=-1, dtype=jnp.int32)
    enough = kept >= k
    return jnp.where(enough, low, middle), jnp.where(enough, middle, high), jnp.where(enough, kept, count)

  open_ = lambda bounds: jnp.any((bounds[1] - bounds[0] > 1) & (bounds[2] != k))
  start = (low, high, jnp.full(k.shape, z.shape[-1], jnp.int32))
  return -jax.lax.bitcast_convert_type(jax.lax.while_loop(open_, halve, start)[1], jnp.float32)


def _truncate(z: Array, weights: Array, settings: Settings) -> Array:
  """Weights ``[B, N, V]`` with what top-k, top-p and min-p drop set to 0.

  Both cut-offs nearly always lie among the `_HEAD` most likely tokens, which a partial sort finds for the
  price of a few passes; only if that does not settle every row are they searched for.
  """
  vocab = z.shape[-1]
  head = min(_HEAD, vocab)
  shape = z.shape[:-1]
  rows = lambda value: jnp.broadcast_to(value[:, None], shape)
  top_k = rows(jnp.where(settings.top_k == 0, vocab, jnp.minimum(settings.top_k, vocab)))
  top_p = rows(settings.top_p)
  limited, nucleus = top_k < vocab, top_p < 1.0
  best = jax.lax.top_k(z, head)[0]

  kth = jnp.take_along_axis(best, jnp.minimum(top_k, head)[..., None] - 1, axis=-1)[..., 0]
  kth = jax.lax.cond(
    jnp.any(limited & (top_k > head)),
    lambda: jnp.where(top_k > head, _kth_by_search(z, top_k), kth),
    lambda: kth,
  )
  kth = jnp.where(limited, kth, -jnp.inf)
  weights = jnp.where(z >= kth[..., None], weights, 0.0)

  goal = top_p * jnp.sum(weights, axis=-1)
  mass = jnp.cumsum(jnp.where(best >= kth[..., None], jnp.exp(best), 0.0), axis=-1)
  reached = mass >= goal[..., None]
  found = reached[..., -1]
  # The head's cut-off is compared as a logit: another exponential of it could round in another way.
  last = jnp.take_along_axis(best, jnp.argmax(reached, axis=-1)[..., None], axis=-1)[..., 0]
  last = jnp.where(nucleus & found, last, -jnp.inf)
  least = jax.lax.cond(
    jnp.any(nucleus & ~found),
    lambda: jnp.where(nucleus & ~found, _nucleus_by_search(weights, goal), 0.0),
    lambda: jnp.zeros(shape),
  )
  least = jnp.maximum(least, rows(settings.min_p))
  return jnp.where((z >= last[..., None]) & (weights >= least[..., None]), weights, 0.0)


def processed_probs(logits: Array, top: Array, settings: Settings) -> Array:
  """The distribution tokens are drawn from, float32 ``[B, N, V]``.

  Order: temperature, top-k, top-p, min-p. Greedy rows are a point mass on the most likely token.

  Args:
    logits: float32 ``[B, N, V]``, padding masked.
    top: their maximum, ``[B, N]``, from `peak`.
    settings: per row.
  """
  greedy = settings.greedy[:, None, None]
  temperature = jnp.where(settings.greedy, 1.0, settings.temperature)[:, None, None]
  z = jnp.minimum((logits - top[..., None]) / temperature, 0.0)
  weights = jnp.exp(z)
  truncated = (settings.top_k > 0) | (settings.top_p < 1.0) | (settings.min_p > 0.0)
  weights = jax.lax.cond(
    jnp.any(truncated & ~settings.greedy),
    _truncate,
    lambda z, weights, settings: weights,
    z,
    weights,
    settings,
  )
  probs = weights / jnp.sum(weights, axis=-1, keepdims=True)
  ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
  point = ids == argmax(logits, top)[..., None]
  return jnp.where(greedy, point.astype(jnp.float32), probs)


def uniform(seed: Array, purpose: Purpose, position: Array, node: Array | int = 0) -> Array:
  """Uniform float32 in [0, 1) for ``seed [B]`` and ``position [B, …]``, ``node`` broadcast against it."""
  position = jnp.asarray(position, jnp.uint32)
  node = jnp.broadcast_to(jnp.asarray(node, jnp.uint32), position.shape)
  seed = jnp.broadcast_to(seed.reshape(seed.shape + (1,) * (position.ndim - 1)), position.shape)

  def one(seed, position, node):
    key = jax.random.fold_in(jax.random.key(seed), int(purpose))
    return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, position), node))

  draw = jax.vmap(one)(seed.ravel(), position.ravel(), node.ravel())
  return draw.reshape(position.shape)


def draw(weights: Array, u: Array) -> Array:
  """Inverse-CDF draw from unnormalised ``weights [..., V]`` with ``u [...]`` in [0, 1): int32 ``[...]``.

  Never a token of weight 0 (unless all are, then id 0). Two levels: one pass over the vocabulary for
  block sums, then one block.
  """
  vocab = weights.shape[-1]
  block = min(_DRAW_BLOCK, vocab)
  count = math.ceil(vocab / block)
  padding = [(0, 0)] * (weights.ndim - 1) + [(0, count * block - vocab)]
  blocks = jnp.pad(weights, padding).reshape(*weights.shape[:-1], count, block)

  def pick(masses, goal):
    """First positive entry whose cumulative mass exceeds the goal, and the mass before it."""
    cumulative = jnp.cumsum(masses, axis=-1)
    index = jnp.arange(masses.shape[-1], dtype=jnp.int32)
    positive = masses > 0
    first = jnp.min(jnp.where(positive & (cumulative > goal[..., None]), index, masses.shape[-1]), axis=-1)
    last = jnp.max(jnp.where(positive, index, 0), axis=-1)  # rounding left nothing above the goal
    index = jnp.where(first == masses.shape[-1], last, first)
    before = jnp.take_along_axis(cumulative - masses, index[..., None], axis=-1)[..., 0]
    return index, before

  sums = blocks.sum(axis=-1)
  goal = u * sums.sum(axis=-1)
  which, before = pick(sums, goal)
  inner = jnp.take_along_axis(blocks, which[..., None, None], axis=-2)[..., 0, :]
  within, _ = pick(inner, goal - before)
  return which * block + within
