"""The KV buffer: static shapes, one length per row, rollback by number.

Rows ``[0, length)`` are committed. A forward writes its T new rows at ``[length, length + T)``
(scratch); `commit` makes an accepted path of them contiguous and moves the length. Rejected rows
stay where they are and are masked: rolling back is a number, not a copy. A masked row may hold
anything, NaN included.

Heads come before slots (``[B, K, S, H]``): one head's block of slots is contiguous, which is a legal
tile on TPU and one stream on GPU and CPU.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

Array = jax.Array

SLOT_MULTIPLE = 128


@flax.struct.dataclass
class KVCache:
  """Keys and values of every layer.

  Attributes:
    k: one ``[B, K, S, H]`` array a layer.
    v: the same for values.
    length: int32 ``[B]``, committed rows.
  """

  k: tuple[Array, ...]
  v: tuple[Array, ...]
  length: Array

  @property
  def capacity(self) -> int:
    """S: slots a row, scratch included."""
    return self.k[0].shape[2]

  @property
  def num_layers(self) -> int:
    return len(self.k)


def create(
  num_layers: int, batch: int, num_kv_heads: int, slots: int, head_dim: int, dtype=jnp.float32
) -> KVCache:
  """An empty cache; ``slots`` is rounded up to a multiple of 128 (one TPU lane tile)."""
  slots = -(-slots // SLOT_MULTIPLE) * SLOT_MULTIPLE
  shape = (batch, num_kv_heads, slots, head_dim)
  return KVCache(
    k=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
    v=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
    length=jnp.zeros((batch,), jnp.int32),
  )


def check_fits(start, rows: int, capacity: int, *, what: str = "KV write") -> None:
  """Raises if a block would run over the end of the buffer.

  XLA clamps the start of an update that does not fit, which would destroy valid rows without an
  error. Inside a compiled program the capacity is guaranteed at construction (length limit + widest
  block); with concrete starts it is checked here.
  """
  if isinstance(start, jax.core.Tracer):
    return
  last = int(jnp.max(jnp.asarray(start)))
  if last + rows > capacity:
    raise ValueError(f"{what} of {rows} rows at slot {last} does not fit a buffer of {capacity} slots")


def write_rows(buffer: Array, rows: Array, start: Array) -> Array:
  """Writes ``rows [B, K, T, H]`` into ``buffer [B, K, S, H]`` at slots ``start[b] …``, in place.

  On CPU a row of the batch at a time: XLA walks a scatter there slot by slot. Elsewhere one scatter of
  whole blocks, a single kernel, which a mesh cuts along its batch dimension.
  """
  check_fits(start, rows.shape[2], buffer.shape[2])
  rows = rows.astype(buffer.dtype)
  if buffer.shape[0] == 1:
    return jax.lax.dynamic_update_slice(buffer, rows, (0, 0, start[0], 0))

  def row_by_row(buffer, rows, start):
    def write(b, buffer):
      row = jax.lax.dynamic_slice_in_dim(rows, b, 1, axis=0)
      return jax.lax.dynamic_update_slice(buffer, row, (b, 0, start[b], 0))

    return jax.lax.fori_loop(0, buffer.shape[0], write, buffer)

  def at_once(buffer, rows, start):
    put = lambda buffer, rows, at: jax.lax.dynamic_update_slice(buffer, rows, (0, at, 0))
    return jax.vmap(put)(buffer, rows, start)

  return jax.lax.platform_dependent(buffer, rows, start, cpu=row_by_row, default=at_once)


def gather_rows(buffer: Array, start: Array, path: Array, scratch: int) -> Array:
  """Reads rows ``start[b] + path[b, j]`` of ``buffer``, of ``scratch`` rows there: ``[B, K, P, H]``."""
  check_fits(start, scratch, buffer.shape[2], what="KV read")
  # The scratch rows first, a small block: to gather from a whole buffer a TPU copies it to another layout.
  cut = lambda buffer, at: jax.lax.dynamic_slice_in_dim(buffer, at, scratch, axis=1)
  block = jax.vmap(cut)(buffer, start)
  return jnp.take_along_axis(block, path[:, None, :, None], axis=2, mode="clip")


def commit(cache: KVCache, path: Array | None, accepted_rows: Array, *, scratch: int = 0) -> KVCache:
  """Keeps the accepted path of the scratch rows and moves the length.

  Args:
    cache: holds scratch rows from slot ``length`` on, as the forward returned it.
    path: int32 ``[B, P]`` node ids, root first, or None when the path is the scratch rows in order
      (a chain), where nothing has to move. Entries past ``accepted_rows`` may be any node id.
    accepted_rows: int32 ``[B]``, rows to keep, at most P.
    scratch: with a path, how many scratch rows there are; ids are below it.
  """
  if path is not None:
    move = lambda buffer: write_rows(buffer, gather_rows(buffer, cache.length, path, scratch), cache.length)
    cache = cache.replace(k=tuple(map(move, cache.k)), v=tuple(map(move, cache.v)))
  return cache.replace(length=cache.length + accepted_rows)


def rollback(cache: KVCache, length: Array) -> KVCache:
  """Forgets every row from ``length [B]`` on. Costs one ``[B]`` array."""
  return cache.replace(length=jnp.minimum(cache.length, length))
