"""Ways to compute one attention call on a device, and how they are timed.

A path is a function ``(q, k, v, prefix) → (out, k, v)`` over caches as the model holds them. It is timed
as a loop inside one compiled program, whose trip count is static: each turn's queries depend on the
output of the turn before, through a comparison that is never true, so that no turn can be left out or
start early. A host clock around the blocking call, divided by the turns, is then device time but for one
dispatch in all turns; profiler events would be exacter by that, but are read differently on every platform
and version. (A traced trip count would cost a GPU a host round trip a turn.)

A GPU's second-level cache would keep the keys and values of a short prefix from turn to turn, which a model
of many layers never finds there: each turn also reads a buffer larger than the cache. The same loop without
attention is timed as well and taken off. On a TPU it is XLA that would keep a small cache in VMEM for the
whole loop: there the buffers are made larger than VMEM, for the paths that do not read all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.kernels import kernel_modules
from experiments.kernels.attention_cases import ITEM_BYTES, SLOT_MULTIPLE, Case, bushy_tree
from experiments.kernels.kernel_modules import Tile
from specjax.kernels.tree_attention import tree_attention

TURNS = 100
VMEM_BYTES = 2**27  # the most a TPU has
EVICT_BYTES = 2**27  # more than twice the second-level cache of an H100 or H200
SAMPLES = 7
COPY_BYTES = 2**29

Step = Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Path:
  """
  Attributes:
    name: for the table.
    step: ``(q, k, v, prefix) → (out, k, v)``.
    prepare: caches ``k, v [B, K, S, H]`` as the path wants them.
    note: what it does not do that tree attention does.
    reads_all: the whole buffer is read, whatever the prefix.
  """

  name: str
  step: Step
  prepare: Callable[..., tuple[jax.Array, jax.Array]] = lambda k, v: (k, v)
  note: str = ""
  reads_all: bool = False


def paths(case: Case, kernel: str, tile: Tile | None = None) -> list[Path]:
  """The kernel, XLA's ways, and the library's best. Some may refuse the shapes when traced."""
  words = None if case.causal else tree_words(case)
  library = cudnn_path(case) if kernel == "pallas_gpu" else ragged_paged_path(case)
  return [
    kernel_path(case, kernel, words, tile),
    Path("reference", functools.partial(_tree, case, "reference", words)),
    dense_path(case, words),
    library,
  ]


def tree_words(case: Case) -> jax.Array:
  """Ancestors uint32 ``[N, W]`` of a random tree."""
  return jnp.asarray(np.asarray(bushy_tree(case.nodes, np.random.default_rng(0)).ancestors, np.uint32))


def _tree(case: Case, implementation: str, words, q, k, v, prefix):
  return tree_attention(
    q,
    k,
    v,
    prefix,
    words,
    sliding_window=case.window,
    logit_softcap=case.softcap,
    implementation=implementation,
  )


def kernel_path(case: Case, kernel: str, words, tile: Tile | None) -> Path:
  """The kernel through `tree_attention`, with the recorded tile; or with a given one."""
  if tile is None:
    return Path(kernel, functools.partial(_tree, case, kernel, words))
  attend = kernel_modules.attention(kernel, case, tile)

  def step(q, k, v, prefix):
    ancestors = None if words is None else jnp.broadcast_to(words, (case.batch, *words.shape))
    return attend(q, k, v, prefix, ancestors), k, v

  return Path(kernel, step)


def dense_path(case: Case, words) -> Path:
  """`jax.nn.dot_product_attention` in XLA under a dense N × S mask, over the whole buffer."""
  sees = np.tri(case.nodes, dtype=bool) if words is None else _bits(np.asarray(words), case.nodes)

  def step(q, k, v, prefix):
    slot = jnp.arange(k.shape[2])[None, :]
    column = slot - prefix[:, None]  # [B, S]
    at = jnp.clip(column, 0, case.nodes - 1)
    scratch = (
      jnp.asarray(sees)[:, at].swapaxes(0, 1) & (column >= 0)[:, None] & (column < case.nodes)[:, None]
    )
    mask = (column < 0)[:, None] | scratch  # [B, N, S]
    out = jax.nn.dot_product_attention(
      q, k.swapaxes(1, 2), v.swapaxes(1, 2), mask=mask[:, None], implementation="xla"
    )
    return out, k, v

  return Path("dense XLA", step, note="reads the whole buffer", reads_all=True)


def _bits(words: np.ndarray, nodes: int) -> np.ndarray:
  """bool ``[N, N]`` of ``words [N, W]``."""
  column = np.arange(nodes)
  return (words[:, column // 32] >> (column % 32).astype(np.uint32)) & 1 == 1


def cudnn_path(case: Case) -> Path:
  """cuDNN's flash attention by lengths only: its causal mask starts at slot 0, not behind the prefix."""

  def step(q, k, v, prefix):
    out = jax.nn.dot_product_attention(
      q,
      k,
      v,
      query_seq_lengths=jnp.full_like(prefix, case.nodes),
      key_value_seq_lengths=prefix + case.nodes,
      implementation="cudnn",
    )
    return out, k, v

  swap = lambda k, v: (k.swapaxes(1, 2), v.swapaxes(1, 2))
  note = "" if case.nodes == 1 else "lengths only: nodes see each other"
  return Path("cuDNN", step, swap, note)


def ragged_paged_path(case: Case, page: int = 128) -> Path:
  """JAX's ragged paged attention for TPU: causal behind the prefix, so a chain only."""
  heads = case.heads

  def prepare(k, v):
    pages = lambda x: x.swapaxes(1, 2).reshape(-1, page, heads.kv, heads.size)
    return jnp.stack([pages(k), pages(v)], axis=3).reshape(-1, page, 2 * heads.kv, heads.size), v[:0]

  def step(q, k, v, prefix):
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    rows = jnp.arange(case.batch + 1, dtype=jnp.int32)
    out = ragged_paged_attention(
      q.reshape(-1, heads.q, heads.size),
      k,
      prefix + case.nodes,
      jnp.arange(k.shape[0], dtype=jnp.int32).reshape(case.batch, -1),
      rows * case.nodes,
      jnp.array([case.batch], jnp.int32),
      sm_scale=1 / math.sqrt(heads.size),
    )
    return out.reshape(q.shape), k, v

  return Path("ragged paged", step, prepare, "a chain, other cache layout")


# --- timing ------------------------------------------------------------------------------------------


def make_caches(case: Case, slots: int) -> tuple[jax.Array, jax.Array]:
  """Random caches ``[B, K, S, H]``."""
  shape = (case.batch, case.heads.kv, slots, case.heads.size)
  make = jax.jit(lambda key: jax.random.normal(key, shape, jnp.dtype(case.dtype)))
  return make(jax.random.key(0)), make(jax.random.key(1))


def looped(step: Step):
  """``(q, k, v, prefix, other) → (q, k, v)``, compiled: `TURNS` calls, one after the other; ``other`` is read
  in each turn, and q, k, v are donated."""

  @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
  def run(q, k, v, prefix, other):
    def turn(_, carry):
      q, k, v = carry
      out, k, v = step(q, k, v, prefix)
      never = (jnp.max(out) > 1e9).astype(q.dtype)
      if other.size:
        never += (jnp.max(other + never) > 1e9).astype(q.dtype)
      return q + never, k, v

    return jax.lax.fori_loop(0, TURNS, turn, (q, k, v))

  return run


@functools.cache
def other_data() -> jax.Array:
  """What is read between two calls: nothing where there is no cache that XLA does not manage."""
  size = 0 if jax.devices()[0].platform in ("cpu", "tpu") else EVICT_BYTES // 2
  return jnp.zeros((size,), jnp.bfloat16)


def _medians(step: Step, q, k, v, prefixes: Sequence[jax.Array], left: Callable[[], float]) -> list[float]:
  """Median seconds a turn with each prefix, as far as the time goes."""
  run, other = looped(step), other_data()
  # The donated buffers come back, so the second call has the layout that all later ones have.
  q, k, v = jax.block_until_ready(run(q, k, v, prefixes[0], other))
  medians = []
  for prefix in prefixes:
    if left() <= 0:
      break
    samples = []
    for number in range(SAMPLES + 1):
      start = time.perf_counter()
      q, k, v = jax.block_until_ready(run(q, k, v, prefix, other))
      if number:  # the first one warms up
        samples.append((time.perf_counter() - start) / TURNS)
      if number > 2 and sum(samples) * TURNS > 1.0:
        break
    medians.append(statistics.median(samples))
  return medians


@functools.cache
def empty_turn() -> float:
  """Seconds of a turn without attention."""
  q = jnp.zeros((1, 8, 32, 128), jnp.bfloat16)
  small, prefix = jnp.zeros((8,), jnp.bfloat16), jnp.zeros((1,), jnp.int32)
  step = lambda q, k, v, prefix: (q, k, v)
  return _medians(step, q, small, small + 0, [prefix], lambda: 1.0)[0]


def timed_slots(path: Path, case: Case, slots: int) -> int:
  """Slots of the buffer to time a path with, at least ``slots``."""
  if path.reads_all or jax.devices()[0].platform != "tpu":
    return slots
  lanes = -(-case.heads.size // 128) * 128
  slot = case.batch * case.heads.kv * lanes * ITEM_BYTES[case.dtype]
  return max(slots, -(-(VMEM_BYTES + 1) // (slot * SLOT_MULTIPLE)) * SLOT_MULTIPLE)


def queries(case: Case) -> jax.Array:
  shape = (case.batch, case.nodes, case.heads.q, case.heads.size)
  return jax.random.normal(jax.random.key(2), shape, jnp.dtype(case.dtype))


def time_path(
  path: Path, case: Case, slots: int, prefixes: Sequence[int], left: Callable[[], float]
) -> dict[int, float]:
  """Median seconds a call by prefix length; one buffer and one program for all of them.

  Args:
    path: what to time.
    case: its prefix is not used.
    slots: of the buffer.
    prefixes: to measure, each within the buffer.
    left: seconds of the budget that are left; no new prefix is begun behind its end.

  Raises:
    Exception: what the path, the compiler or the device's memory has against it.
  """
  k, v = path.prepare(*make_caches(case, slots))
  lengths = [jnp.full((case.batch,), prefix, jnp.int32) for prefix in prefixes]
  medians = _medians(path.step, queries(case), k, v, lengths, left)
  return {prefix: max(s - empty_turn(), 1e-9) for prefix, s in zip(prefixes, medians, strict=False)}


def copy_bandwidth() -> float:
  """Bytes a second, read and written, of a large elementwise copy in a loop."""
  x = jnp.zeros((COPY_BYTES // 2,), jnp.bfloat16)

  @functools.partial(jax.jit, donate_argnums=0)
  def run(x):
    return jax.lax.fori_loop(0, TURNS, lambda _, x: x + 1, x)

  x, samples = jax.block_until_ready(run(x)), []
  for _ in range(SAMPLES):
    start = time.perf_counter()
    x = jax.block_until_ready(run(x))
    samples.append(time.perf_counter() - start)
  return 2 * COPY_BYTES * TURNS / statistics.median(samples)


def buffer_bytes(case: Case, slots: int) -> int:
  """Keys and values of a buffer."""
  return 2 * case.batch * case.heads.kv * slots * case.heads.size * ITEM_BYTES[case.dtype]


def free_bytes() -> int | None:
  """Device memory that is not in use; None where the platform does not say."""
  stats: dict[str, Any] = jax.devices()[0].memory_stats() or {}
  if "bytes_limit" not in stats:
    return None
  return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
