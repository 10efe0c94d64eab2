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

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array

# Below this a temperature is 0: the most likely token. Dividing by less would leave float32's range.
MIN_TEMPERATURE = 1e-5
# Draws walk the vocabulary in two levels of this width.
_DRAW_BLOCK = 256


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
  """

  temperature: Array
  top_k: Array
  top_p: Array
  min_p: Array
  seed: Array

  @classmethod
  def create(cls, batch: int, *, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0) -> Settings:
    """Checks and broadcasts numbers or length-``batch`` sequences.

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
      return jnp.asarray(np.broadcast_to(array.astype(dtype), (batch,)))

    return cls(
      temperature=column("temperature", temperature, 0.0, 1e4, np.float32),
      top_k=column("top_k", top_k, 0, 2**31 - 1, np.int32),
      top_p=column("top_p", top_p, 0.0, 1.0, np.float32),
      min_p=column("min_p", min_p, 0.0, 1.0, np.float32),
      seed=column("seed", seed, 0, 2**32 - 1, np.uint32),
    )

  @property
  def greedy(self) -> Array:
    """bool ``[B]``."""
    return self.temperature < MIN_TEMPERATURE


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


def _threshold(keys: Array, enough) -> Array:
  """Smallest int32 key t with ``enough(keys <= t)``, by bisection over the bits of a float."""
  low = jnp.full(keys.shape[:-1], -1, jnp.int32)
  high = jnp.full(keys.shape[:-1], 0x7F800000, jnp.int32)  # +inf: everything

  def halve(_, bounds):
    low, high = bounds
    middle = low + (high - low) // 2
    ok = enough(keys <= middle[..., None])
    return jnp.where(ok, low, middle), jnp.where(ok, middle, high)

  return jax.lax.fori_loop(0, 31, halve, (low, high))[1]


def _truncate(z: Array, weights: Array, settings: Settings) -> Array:
  """Weights ``[B, N, V]`` with what top-k, top-p and min-p drop set to 0."""
  # z <= 0, so the bits of |z| order tokens from likely to unlikely.
  keys = jax.lax.bitcast_convert_type(jnp.abs(z), jnp.int32)
  top_k = jnp.where(settings.top_k == 0, z.shape[-1], settings.top_k)[:, None]
  last = _threshold(
    keys, lambda kept: jnp.sum(kept, axis=-1, dtype=jnp.int32) >= jnp.minimum(top_k, z.shape[-1])
  )
  weights = jnp.where(keys <= last[..., None], weights, 0.0)
  mass = settings.top_p[:, None] * jnp.sum(weights, axis=-1)
  last = _threshold(keys, lambda kept: jnp.sum(jnp.where(kept, weights, 0.0), axis=-1) >= mass)
  # Rounding must not drop anything when top-p is off; the most likely token always stays.
  off = (settings.top_p >= 1.0)[:, None, None]
  weights = jnp.where(off | (keys <= jnp.maximum(last, 0)[..., None]), weights, 0.0)
  return jnp.where(weights >= settings.min_p[:, None, None], weights, 0.0)


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
