"""Layers of the decoder. Parameters only: caches and positions are arguments, nothing is mutated."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from specjax import cache as kv
from specjax.kernels import tree_attention as ta
from specjax.models.config import DecoderConfig, Llama3RopeScaling

Array = jax.Array

# Above this many rows a CPU's matrix product gains nothing from having the weight on the left.
_WEIGHT_FIRST_MAX_ROWS = 64


def precision(dtype) -> jax.lax.Precision:
  """float32 means float32: TPUs and GPUs would otherwise round the factors."""
  return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def matmul(x: Array, weight: Array) -> Array:
  """``x [..., I] · weight [O, I] → [..., O]``, accumulated in float32, in x's type.

  For a few rows (a verify of N nodes) XLA's CPU product spends most of its time packing the weight
  when it stands on the right. With the weight on the left it is read once, in order: 8 rows took
  33 ms instead of 52 ms for all of SmolLM2-135M. The barrier keeps XLA from swapping them back.
  """
  rows = math.prod(x.shape[:-1])
  flat = x.reshape(rows, x.shape[-1])
  kwargs = dict(precision=precision(weight.dtype), preferred_element_type=jnp.float32)

  def weight_last(flat, weight):
    return jax.lax.dot_general(flat, weight, (((1,), (1,)), ((), ())), **kwargs)

  def weight_first(flat, weight):
    out = jax.lax.dot_general(weight, flat, (((1,), (1,)), ((), ())), **kwargs)
    return jax.lax.optimization_barrier(out).T

  if 1 < rows <= _WEIGHT_FIRST_MAX_ROWS:
    out = jax.lax.platform_dependent(flat, weight, cpu=weight_first, default=weight_last)
  else:
    out = weight_last(flat, weight)
  return out.astype(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


class Linear(nnx.Module):
  """``weight [O, I]`` (rows are outputs, as checkpoints store them) and an optional ``bias [O]``."""

  def __init__(self, d_in: int, d_out: int, *, bias: bool = False, dtype, rngs: nnx.Rngs):
    init = jax.random.normal(rngs.params(), (d_out, d_in), jnp.float32) / math.sqrt(d_in)
    self.weight = nnx.Param(init.astype(dtype))
    self.bias = nnx.Param(jnp.zeros((d_out,), dtype)) if bias else None

  def __call__(self, x: Array) -> Array:
    y = matmul(x, self.weight[...])
    return y if self.bias is None else y + self.bias[...]


class RMSNorm(nnx.Module):
  """Root-mean-square norm over the last axis, computed in float32."""

  def __init__(self, size: int, *, eps: float, dtype):
    self.weight = nnx.Param(jnp.ones((size,), dtype))
    self.eps = eps

  def __call__(self, x: Array) -> Array:
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
    return self.weight[...] * x32.astype(x.dtype)


def rope_frequencies(head_dim: int, base: float, scaling: Llama3RopeScaling | None) -> Array:
  """Angles a position, float32 ``[H / 2]``."""
  freqs = base ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
  if scaling is None:
    return freqs
  wavelength = 2 * math.pi / freqs
  low = scaling.original_max_length / scaling.low_freq_factor
  high = scaling.original_max_length / scaling.high_freq_factor
  smooth = (scaling.original_max_length / wavelength - scaling.low_freq_factor) / (
    scaling.high_freq_factor - scaling.low_freq_factor
  )
  between = (1 - smooth) * freqs / scaling.factor + smooth * freqs
  return jnp.where(wavelength > low, freqs / scaling.factor, jnp.where(wavelength < high, freqs, between))


def rope_table(positions: Array, config: DecoderConfig) -> tuple[Array, Array]:
  """Cosines and sines for ``positions [B, T]``: two float32 ``[B, T, 1, H / 2]``, made once a forward."""
  freqs = rope_frequencies(config.head_dim, config.rope_base, config.rope_scaling)
  angles = positions.astype(jnp.float32)[:, :, None, None] * freqs
  return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Array, table: tuple[Array, Array]) -> Array:
  """Rotary embedding of ``x [B, T, heads, H]``; element i pairs with i + H/2 (the layout of HF files)."""
  cos, sin = table
  x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)


class Call(NamedTuple):
  """What the layers of one forward share.

  Attributes:
    rope: from `rope_table`.
    prefix_length: int32 ``[B]``, committed rows.
    start: int32 ``[B]``, slot of the first row this forward writes.
    ancestors: uint32 ``[T, W]`` or ``[B, T, W]``, or None (causal).
    implementation: of `tree_attention`.
    mesh: the devices that parameters and caches are spread over, or None.
  """

  rope: tuple[Array, Array]
  prefix_length: Array
  start: Array
  ancestors: Array | None
  implementation: str
  mesh: Mesh | None


def new_call(
  cache: kv.KVCache,
  width: int,
  config: DecoderConfig,
  depths: Array | None,
  ancestors: Array | None,
  scratch: Array | int,
  implementation: str,
  mesh: Mesh | None,
) -> Call:
  """The `Call` of a forward over ``width`` tokens a row; arguments as `Decoder.__call__` takes them.

  Raises:
    ValueError: ``scratch`` without ``ancestors`` or ``depths``.
  """
  if (ancestors is None or depths is None) and not _is_zero(scratch):
    raise ValueError("scratch rows are seen by bits and sit at depths; pass ancestors and depths")
  depths = jnp.arange(width, dtype=jnp.int32) if depths is None else jnp.asarray(depths, jnp.int32)
  return Call(
    rope=rope_table(cache.length[:, None] + depths, config),
    prefix_length=cache.length,
    start=cache.length + scratch,
    ancestors=ancestors,
    implementation=implementation,
    mesh=mesh,
  )


def _is_zero(x: Array | int) -> bool:
  """Whether x is known to be 0 while tracing."""
  return not isinstance(x, jax.core.Tracer) and int(x) == 0


class Attention(nnx.Module):
  """Grouped-query attention over the cache's prefix and the rows this call writes.

  Its inputs are ``d_in`` wide, D unless told otherwise; its outputs D.
  """

  def __init__(self, config: DecoderConfig, *, d_in: int | None = None, dtype, rngs: nnx.Rngs):
    c = self.config = config
    d_in = c.d_model if d_in is None else d_in
    linear = lambda i, o, bias=False: Linear(i, o, bias=bias, dtype=dtype, rngs=rngs)
    self.q = linear(d_in, c.num_heads * c.head_dim, c.qkv_bias)
    self.k = linear(d_in, c.num_kv_heads * c.head_dim, c.qkv_bias)
    self.v = linear(d_in, c.num_kv_heads * c.head_dim, c.qkv_bias)
    self.o = linear(c.num_heads * c.head_dim, c.d_model)
    norm = lambda: RMSNorm(c.head_dim, eps=c.norm_eps, dtype=dtype) if c.qk_norm else None
    self.q_norm, self.k_norm = norm(), norm()

  def qkv(self, x: Array) -> tuple[Array, Array, Array]:
    """``x [B, T, d_in]`` → q ``[B, T, Q, H]``, k and v ``[B, T, K, H]``, before rotation."""
    c = self.config
    batch, width, _ = x.shape
    q = self.q(x).reshape(batch, width, c.num_heads, c.head_dim)
    k = self.k(x).reshape(batch, width, c.num_kv_heads, c.head_dim)
    v = self.v(x).reshape(batch, width, c.num_kv_heads, c.head_dim)
    return (self.q_norm(q), self.k_norm(k), v) if c.qk_norm else (q, k, v)

  def __call__(self, x: Array, k_cache: Array, v_cache: Array, call: Call):
    """``x [B, T, d_in]`` → ``(y [B, T, D], k_cache, v_cache)`` with T rows written at ``call.start``."""
    y, k_cache, v_cache = rotate_and_attend(*self.qkv(x), k_cache, v_cache, call, self.config.sliding_window)
    return self.o(y.reshape(*x.shape[:2], -1)), k_cache, v_cache


def rotate_and_attend(q, k, v, k_cache, v_cache, call: Call, window: int | None):
  """`write_and_attend` with ``q [B, T, Q, H]`` and ``k [B, T, K, H]`` at their positions."""
  return write_and_attend(rotate(q, call.rope), rotate(k, call.rope), v, k_cache, v_cache, call, window)


def divided(mesh: Mesh, axis: str, size: int) -> str | None:
  """The mesh axis over which ``size`` rows or heads are cut; None where it does not divide them."""
  count = dict(mesh.shape).get(axis)
  return axis if count is not None and size % count == 0 else None


def write_and_attend(q, k, v, k_cache, v_cache, call: Call, window: int | None):
  """Writes the rows ``k, v [B, T, K, H]`` and attends with ``q [B, T, Q, H]``.

  On a mesh each device does this for its rows and heads alone (`jax.shard_map`): a Pallas call cannot be
  cut by the compiler, and neither heads nor rows need each other here.
  """

  def local(q, k, v, k_cache, v_cache, prefix_length, start, ancestors):
    k_cache = kv.write_rows(k_cache, k.swapaxes(1, 2), start)
    v_cache = kv.write_rows(v_cache, v.swapaxes(1, 2), start)
    return ta.tree_attention(
      q,
      k_cache,
      v_cache,
      prefix_length,
      ancestors,
      sliding_window=window,
      implementation=call.implementation,
    )

  if call.mesh is not None:
    data = divided(call.mesh, "data", q.shape[0])
    model = divided(call.mesh, "model", k.shape[2])
    heads, cache, row = P(data, None, model, None), P(data, model, None, None), P(data)
    bits = P() if call.ancestors is None or call.ancestors.ndim == 2 else row
    local = jax.shard_map(
      local,
      mesh=call.mesh,
      in_specs=(heads, heads, heads, cache, cache, row, row, bits),
      out_specs=(heads, cache, cache),
      check_vma=False,
    )
  return local(q, k, v, k_cache, v_cache, call.prefix_length, call.start, call.ancestors)


def write(k, v, k_cache, v_cache, call: Call):
  """Writes the rows ``k, v [B, T, K, H]``, nothing else: what `write_and_attend` does before it attends."""

  def local(k, v, k_cache, v_cache, start):
    k_cache = kv.write_rows(k_cache, k.swapaxes(1, 2), start)
    return k_cache, kv.write_rows(v_cache, v.swapaxes(1, 2), start)

  if call.mesh is not None:
    data, model = divided(call.mesh, "data", k.shape[0]), divided(call.mesh, "model", k.shape[2])
    heads, cache = P(data, None, model, None), P(data, model, None, None)
    local = jax.shard_map(
      local,
      mesh=call.mesh,
      in_specs=(heads, heads, cache, cache, P(data)),
      out_specs=(cache, cache),
      check_vma=False,
    )
  return local(k, v, k_cache, v_cache, call.start)


class FeedForward(nnx.Module):
  """Gated feed-forward: down(silu(gate x) · up x)."""

  def __init__(self, config: DecoderConfig, *, dtype, rngs: nnx.Rngs):
    self.gate = Linear(config.d_model, config.d_ff, dtype=dtype, rngs=rngs)
    self.up = Linear(config.d_model, config.d_ff, dtype=dtype, rngs=rngs)
    self.down = Linear(config.d_ff, config.d_model, dtype=dtype, rngs=rngs)

  def __call__(self, x: Array) -> Array:
    return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class DecoderLayer(nnx.Module):
  """Pre-norm attention and feed-forward, each added to the residual stream.

  Either may be None and is then left out: see `skipping`.
  """

  def __init__(self, config: DecoderConfig, *, dtype, rngs: nnx.Rngs):
    self.attention_norm = RMSNorm(config.d_model, eps=config.norm_eps, dtype=dtype)
    self.attention = Attention(config, dtype=dtype, rngs=rngs)
    self.ff_norm = RMSNorm(config.d_model, eps=config.norm_eps, dtype=dtype)
    self.ff = FeedForward(config, dtype=dtype, rngs=rngs)

  def __call__(self, x: Array, k_cache: Array, v_cache: Array, call: Call):
    if self.attention is not None:
      y, k_cache, v_cache = self.attention(self.attention_norm(x), k_cache, v_cache, call)
      x = x + y
    if self.ff is not None:
      x = x + self.ff(self.ff_norm(x))
    return x, k_cache, v_cache
