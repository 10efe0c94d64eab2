"""Tree attention on NVIDIA GPUs from sm_80 on: a Pallas-Triton kernel, split along the prefix.

A cell of the grid is (query tile, split, row × kv head). The query heads of a kv head and the nodes are
the rows of one product, node-major; a tile is a power of two of them, at least 16 for the tensor cores,
and loads what is not there under a mask. A cell walks its split's share of the row's live blocks with
traced bounds: other blocks are neither read nor computed. Query tiles are the fastest axis of the grid,
so tiles that read the same blocks run together and all but the first find them in L2.

Splits fill the chip when rows × kv heads × tiles do not. Each writes (max, sum, accumulator) in float32
and a second kernel adds up those in use. How many are in use is decided at run time, from the row's live
slots, so that short rows do not pay for the splits of long ones; a row with one split in use is written
by the first kernel, and the second leaves it alone.

Blocks whose slots are all prefix inside every node's window take a loop without mask work. In the others
values that are not finite become 0 and the scores of their slot NaN, which the mask hides from those that
must not see them. In the first kind of block everyone sees them: a row whose accumulator is not finite at
the end has seen one, and comes out as NaN.

No race and no load outside an array is possible, by construction (the interpreter would show neither: it
runs the cells in order and pads arrays). Every cell writes its own (row, kv head, tile) of the output or
its own (row, kv head, split, tile) of the partial results, and of the output only split 0 of rows with
one split in use; the second kernel writes the other rows, one cell a row. Loads of K and V stay below S,
which is a multiple of the block, and in masked blocks below ``end``; all others are masked by the number
of rows and the head size.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specjax.kernels.tree_attention import tiles
from specjax.kernels.tree_attention.masks import WORD_BITS, Mask

Array = jax.Array

HEAD_SIZES = (64, 96, 128, 256)
SLOT_MULTIPLE = 128
# Streaming multiprocessors, by what the name of a device kind holds; others count as an H100.
CORES = {"A100": 108, "H100": 132, "H200": 132}
# A cell of the second kernel holds all partial results of a row.
MAX_SPLITS = 64


class Tile(NamedTuple):
  """How the work is cut.

  Attributes:
    rows: query rows of a cell, a power of two from 16 on.
    slots: cache slots of a block, a power of two from 16 to 128.
    warps: warps of a cell.
    stages: as Triton counts them: the block that is worked on and those on their way.
    splits: parts of the prefix, at most `MAX_SPLITS`; 0: as many as fill the chip.
    share: what partial results may be, written and read, in percent of a row's live K and V bytes; 0: 50.
      They are written and read back at once, and stay in L2: what they cost is a second kernel's start.
  """

  rows: int
  slots: int
  warps: int
  stages: int
  splits: int = 0
  share: int = 0


def refusal(q, k) -> str | None:
  """Why arrays like ``q [B, N, Q, H]`` and ``k [B, K, S, H]`` are not taken, or None."""
  if q.shape[3] not in HEAD_SIZES:
    return f"takes head sizes 64, 96, 128 and 256, got {q.shape[3]}"
  if q.dtype not in (jnp.bfloat16, jnp.float32):
    return f"takes bfloat16 and float32, got {q.dtype}"
  if k.shape[2] % SLOT_MULTIPLE:
    return f"takes buffers of a multiple of {SLOT_MULTIPLE} slots, got {k.shape[2]}"
  return None


def _power_of_two(n: int) -> int:
  return 1 << max(n - 1, 0).bit_length()


def default_tile(head_dim: int, dtype, rows: int) -> Tile:
  """The tile where none is recorded. None of them spills a register on sm_80 or sm_90."""
  wide = head_dim > 128
  if jnp.dtype(dtype) == jnp.float32:
    # Full float32 products run beside the tensor cores: small tiles.
    return Tile(16, 16 if wide else 32, 4 if head_dim == 64 else 8, 2)
  rows = min(max(16, _power_of_two(rows)), 64 if wide else 128)
  if wide:
    return Tile(rows, 32, 4 if rows == 16 else 8, 3)
  return Tile(rows, 64 if rows < 64 else 32, 4 if rows < 128 else 8, 3)


def candidate_tiles(q, k) -> list[Tile]:
  """Tiles worth compiling and timing for arrays like ``q [B, N, Q, H]`` and ``k [B, K, S, H]``.

  The first is the default, the next are it with fewer and with more partial results: more cells where a
  small batch with many rows leaves most of the chip idle.
  """
  head_dim, dtype, rows = q.shape[3], q.dtype, q.shape[2] // k.shape[1] * q.shape[1]
  exact = jnp.dtype(dtype) == jnp.float32
  default = default_tile(head_dim, dtype, rows)
  found = [default, default._replace(share=10), default._replace(share=200)]
  sides = ((16, 32), (16, 32)) if exact else ((16, 32, 64, 128), (32, 64, 128))
  for tile in (Tile(*sizes) for sizes in itertools.product(*sides, (4, 8), (2, 3, 4))):
    buffers = 2 * (tile.stages - 1) * tile.slots * _power_of_two(head_dim) * jnp.dtype(dtype).itemsize
    # An A100 has 164 KiB of shared memory a core; queries and weights want some of it.
    if tile.rows <= max(16, _power_of_two(rows)) and buffers <= 128 * 1024 and tile not in found:
      found.append(tile)
  return found


# The next functions are arithmetic on Python integers, NumPy or JAX arrays (``xp`` is the library):
# the kernel's bounds and `cost` come from the same lines.


class _Plan(NamedTuple):
  tile: Tile
  count: int  # Query tiles.
  splits: int
  least: int  # Live slots from which on one more split is used.


def _plan(tile: Tile, q, k, cores: int) -> _Plan:
  """The static sizes of a call with arrays like ``q [B, N, Q, H]`` and ``k [B, K, S, H]``."""
  batch, nodes, heads, head_dim = q.shape
  rows = heads // k.shape[1] * nodes
  count = pl.cdiv(rows, tile.rows)
  share = tile.share or 50
  price = 2 * 4 * rows * (head_dim + 2)  # Partial results, written and read.
  least = max(tile.slots, pl.cdiv(100 * price, share * 2 * head_dim * q.dtype.itemsize))
  splits = tile.splits
  if not splits:
    # Two cells a core hide each other's waits.
    splits = max(1, min(2 * cores // (batch * k.shape[1] * count), k.shape[2] // least, MAX_SPLITS))
  return _Plan(tile, count, splits, least)


def _splits_in_use(begin, end, plan: _Plan, xp):
  return xp.clip((end - begin) // plan.least, 1, plan.splits)


def _block_range(split, in_use, begin, end, slots: int, xp):
  """The blocks ``[low, high)`` of a split; none where the split is not in use."""
  first = begin // slots
  count = (end + slots - 1) // slots - first
  low = first + count * split // in_use
  high = first + count * (split + 1) // in_use
  return low, xp.where(split < in_use, high, low)


class Cost(NamedTuple):
  """Bytes of a call. The mask, a few bytes a node, is left out.

  Attributes:
    cache: K and V, first reads: from memory.
    cache_again: K and V for the other query tiles, which run beside the first: from L2.
    queries: first reads, from memory.
    queries_again: for the other splits: from L2.
    out: written.
    partials: written by the first kernel and read by the second right behind it: in L2, which holds them
      many times over (at most two cells a core have any).
    least: live K and V, queries and output, each once.
  """

  cache: int
  cache_again: int
  queries: int
  queries_again: int
  out: int
  partials: int
  least: int

  @property
  def moved(self) -> int:
    """To and from memory."""
    return self.cache + self.queries + self.out


def cost(q, k, mask: Mask, tile: Tile | None = None, cores: int = CORES["H100"]) -> Cost:
  """What the grid and the index maps of `attend` read and write, for known lengths.

  Args:
    q: ``[B, N, Q, H]``; only shape and type are read.
    k: ``[B, K, S, H]``.
    mask: with values.
    tile, cores: as `attend` takes them.
  """
  _, nodes, heads, head_dim = q.shape
  kv_heads, size = k.shape[1], q.dtype.itemsize
  rows = heads // kv_heads * nodes
  plan = _plan(tile or default_tile(head_dim, q.dtype, rows), q, k, cores)
  slots = plan.tile.slots
  live = read = uses = partials = 0
  for begin, end in zip(np.asarray(mask.begin).tolist(), np.asarray(mask.end).tolist(), strict=True):
    in_use = int(_splits_in_use(begin, end, plan, np))
    for split in range(plan.splits):
      low, high = _block_range(split, in_use, begin, end, slots, np)
      # Blocks at the edges of the live slots are loaded under a mask.
      read += max(0, min(int(high) * slots, end) - max(int(low) * slots, begin))
    live, uses, partials = live + end - begin, uses + in_use, partials + (in_use if in_use > 1 else 0)
  batch = q.shape[0]
  slot, row = 2 * kv_heads * head_dim * size, kv_heads * rows
  queries = batch * row * head_dim * size
  return Cost(
    cache=read * slot,
    cache_again=read * slot * (plan.count - 1),
    queries=queries,
    queries_again=(uses - batch) * row * head_dim * size,
    out=queries,
    partials=partials * row * (head_dim + 2) * 4,
    least=live * slot + 2 * queries,
  )


# The backend: everything that is spelled differently elsewhere.


def _call(body, name: str, grid, in_specs, out_specs, out_shape, tile: Tile, interpret: bool, aliases=None):
  return pl.pallas_call(
    body,
    grid=grid,
    in_specs=in_specs,
    out_specs=out_specs,
    out_shape=out_shape,
    input_output_aliases=aliases or {},
    compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
    interpret=interpret,
    name=name,
  )


def _load(ref, mask=None):
  """What ``mask`` hides is not read and is 0."""
  return plgpu.load(ref) if mask is None else plgpu.load(ref, mask=mask, other=0)


def _store(ref, value, mask) -> None:
  plgpu.store(ref, value.astype(ref.dtype), mask=mask)


def _dot(a, b, contract: int):
  """``a [M, C]`` times ``b``, whose axis ``contract`` is C; float32 sums, full products of float32."""
  exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  dims = (((1,), (contract,)), ((), ()))
  return lax.dot_general(a, b, dims, precision=exact, preferred_element_type=jnp.float32)


def _attend_kernel(bounds, first, words, q, k, v, out, *partials, plan: _Plan, head_dim, scale, softcap):
  """One cell. ``bounds [8]``, ``first [N]``, ``words [N, W]`` or None, ``q, out [N, G, H]``, ``k, v
  [S, H]``, partials ``[splits, R, H]``, ``[splits, R]``, ``[splits, R]``; H is padded to a power of two."""
  tile = plan.tile
  nodes, group, width = q.shape
  split = pl.program_id(1)
  begin, open_begin, prefix, end, in_use = (bounds[i] for i in range(5))
  low, high = _block_range(split, in_use, begin, end, tile.slots, jnp)
  # Open blocks, whose slots all nodes see: prefix slots in every node's window.
  open_low = jnp.clip((open_begin + tile.slots - 1) // tile.slots, low, high)
  open_high = jnp.clip(prefix // tile.slots, open_low, high)

  row = pl.program_id(0) * tile.rows + lax.iota(jnp.int32, tile.rows)
  node = lax.div(row, jnp.int32(group))
  here = row < nodes * group
  box = (tile.rows, width)
  lane = lax.broadcasted_iota(jnp.int32, box, 1)
  spread = lambda x, shape: lax.broadcast_in_dim(x, shape, (0,))
  node_box, row_box = spread(node, box), spread(row, box)
  at = (node_box, row_box - node_box * group, lane)
  here_box = spread(here, box) & (lane < head_dim)
  queries = _load(q.at[at], here_box & (low < high))
  lanes_of_block = lax.broadcasted_iota(jnp.int32, (tile.slots, width), 1) < head_dim

  def step(block, carry, masked: bool):
    top, total, acc = carry
    start = block * tile.slots
    there = None if width == head_dim else lanes_of_block
    if masked:
      slot = start + lax.iota(jnp.int32, tile.slots)
      live = (slot >= begin) & (slot < end)
      there = lanes_of_block & live[:, None]
    rows = pl.ds(start, tile.slots)
    k_block = _load(k.at[rows, :], there)
    scores = _dot(queries, k_block, 1)
    v_block = _load(v.at[rows, :], there)
    if softcap is None:
      scores = scores * (scale * math.log2(math.e))
    else:
      scores = jnp.tanh(scores * (scale / softcap)) * (softcap * math.log2(math.e))
    if masked:
      # A probability of 0 does not hide a NaN.
      finite = jnp.abs(v_block.astype(jnp.float32)) < jnp.inf
      v_block = jnp.where(finite, v_block, jnp.zeros_like(v_block))
      broken = jnp.max(jnp.where(finite, 0.0, 1.0), axis=1) > 0
      scores = scores + jnp.where(broken, jnp.nan, 0.0)[None, :]
      scores = jnp.where(_seen(slot, node, here, first, words, prefix), scores, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(scores, axis=1))
    # Rows that have seen nothing yet have top = -inf; 0 keeps the exponents finite.
    base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
    weights = jnp.exp2(scores - base[:, None])
    rescale = jnp.exp2(top - base)
    total = total * rescale + jnp.sum(weights, axis=1)
    acc = acc * rescale[:, None] + _dot(weights.astype(v_block.dtype), v_block, 0)
    return new_top, total, acc

  def edge(i, carry):
    # The blocks before the open ones, then those behind.
    block = low + i
    return step(jnp.where(block < open_low, block, block + open_high - open_low), carry, True)

  zeros = jnp.zeros((tile.rows,), jnp.float32)
  carry = zeros - jnp.inf, zeros, jnp.zeros(box, jnp.float32)
  carry = lax.fori_loop(open_low, open_high, functools.partial(step, masked=False), carry)
  edges = (high - low) - (open_high - open_low)
  top, total, acc = lax.fori_loop(jnp.int32(0), edges, edge, carry)

  finite = jnp.max(jnp.where(jnp.abs(acc) < jnp.inf, 0.0, 1.0), axis=1) == 0
  total = jnp.where(finite, total, jnp.nan)
  alone = in_use == 1
  result = acc / jnp.where(total == 0, 1.0, total)[:, None]
  _store(out.at[at], result, here_box & alone & (split == 0))
  if partials:
    sums, tops, totals = partials
    mine = here & (split < in_use) & ~alone
    _store(sums.at[jnp.zeros_like(lane) + split, row_box, lane], acc, here_box & spread(mine, box))
    place = (jnp.zeros_like(row) + split, row)
    _store(tops.at[place], top, mine)
    _store(totals.at[place], total, mine)


def _seen(slot, node, here, first, words, prefix):
  """bool ``[rows, slots]``: `masks.visible_slots` for the rows of a tile and the slots of a block."""
  column = (slot - prefix)[None, :]
  inside = slot[None, :] >= _load(first.at[node], here)[:, None]
  if words is None:
    return inside & (column <= node[:, None])
  word = jnp.zeros((node.shape[0], slot.shape[0]), jnp.int32)
  for w in range(words.shape[1]):
    bits = _load(words.at[node, jnp.full_like(node, w)], here)[:, None]
    word = jnp.where(lax.shift_right_arithmetic(column, 5) == w, bits, word)
  bit = lax.shift_right_logical(word, jnp.broadcast_to(column & (WORD_BITS - 1), word.shape)) & 1
  return jnp.where(column < 0, inside, bit == 1)


def _combine_kernel(bounds, sums, tops, totals, _, out, *, head_dim: int):
  """One row: ``sums [splits, H]``, ``tops, totals [splits]``, ``out [H]``; both axes are padded to powers of
  two. Rows with one split in use are done already."""
  splits, width = sums.shape
  in_use = bounds[4]
  several = in_use > 1
  used = (lax.iota(jnp.int32, splits) < in_use) & several
  lanes = lax.iota(jnp.int32, width) < head_dim
  top = jnp.where(used, _load(tops.at[:], used), -jnp.inf)
  best = jnp.max(top)
  # A split that saw nothing has top = -inf and total 0.
  rescale = jnp.exp2(top - jnp.where(best == -jnp.inf, 0.0, best))
  total = jnp.sum(rescale * _load(totals.at[:], used))
  acc = jnp.sum(rescale[:, None] * _load(sums.at[:, :], used[:, None] & lanes[None, :]), axis=0)
  _store(out.at[:], acc / jnp.where(total == 0, 1.0, total), lanes & several)


def attend(
  q: Array,
  k: Array,
  v: Array,
  mask: Mask,
  *,
  scale: float,
  softcap: float | None,
  interpret: bool,
  tile: Tile | None = None,
  cores: int | None = None,
) -> Array:
  """`tree_attention` of arrays that `refusal` takes.

  Args:
    q: ``[B, N, Q, H]``.
    k, v: ``[B, K, S, H]``.
    mask: of B rows and N nodes.
    scale: of the float32 scores.
    softcap: of the scaled scores, or None.
    interpret: run in Pallas's interpreter.
    tile: None takes the one recorded for the device kind, else `default_tile`.
    cores: of the chip; None asks the default device.

  Returns:
    ``[B, N, Q, H]``.
  """
  batch, nodes, heads, head_dim = q.shape
  kv_heads, slots = k.shape[1], k.shape[2]
  group = heads // kv_heads
  rows, width = group * nodes, _power_of_two(head_dim)
  kind = jax.devices()[0].device_kind
  if cores is None:
    cores = next((n for name, n in CORES.items() if name in kind), CORES["H100"])
  if tile is None:
    recorded = tiles.tile("pallas_gpu", kind, str(q.dtype), head_dim, rows)
    tile = Tile(**recorded) if recorded else default_tile(head_dim, q.dtype, rows)
  plan = _plan(tile, q, k, cores)
  in_use = _splits_in_use(mask.begin, mask.end, plan, jnp)
  bounds = jnp.stack((mask.begin, mask.first.max(axis=1), mask.prefix, mask.end, in_use), axis=1)
  bounds = jnp.pad(bounds, ((0, 0), (0, 3)))
  words = None if mask.words is None else lax.bitcast_convert_type(mask.words, jnp.int32)
  grouped = jax.ShapeDtypeStruct((batch, nodes, kv_heads, group, head_dim), q.dtype)
  part = jax.ShapeDtypeStruct((batch, kv_heads, plan.splits, rows), jnp.float32)
  parts = [jax.ShapeDtypeStruct((*part.shape, head_dim), jnp.float32), part, part] if plan.splits > 1 else []

  def spec(shape, *at):
    """A block at the row ``b``, the kv head ``k`` and the query row ``n, g`` or ``r`` of a cell."""

    def place(i, _, cell):
      where = {"b": cell // kv_heads, "k": cell % kv_heads, "n": i // group, "g": i % group, "r": i}
      return tuple(where.get(axis, 0) for axis in at)

    return pl.BlockSpec(shape, place)

  bounds_spec = spec((None, 8), "b", 0)
  head = spec((None, nodes, None, group, width), "b", 0, "k", 0, 0)
  cache = spec((None, None, slots, width), "b", "k", 0, 0)
  words_spec = None if words is None else spec((None, *words.shape[1:]), "b", 0, 0)
  stats = spec((None, None, plan.splits, rows), "b", "k", 0, 0)
  sums = spec((None, None, plan.splits, rows, width), "b", "k", 0, 0, 0)
  out, *partials = _call(
    functools.partial(_attend_kernel, plan=plan, head_dim=head_dim, scale=scale, softcap=softcap),
    "tree_attention",
    (plan.count, plan.splits, batch * kv_heads),
    [bounds_spec, spec((None, nodes), "b", 0), words_spec, head, cache, cache],
    [head, sums, stats, stats][: 1 + len(parts)],
    [grouped, *parts],
    tile,
    interpret,
  )(bounds, mask.first, words, q.reshape(grouped.shape), k, v)
  if partials:
    column = _power_of_two(plan.splits)
    stat = spec((None, None, column, None), "b", "k", 0, "r")
    row_sums = spec((None, None, column, None, width), "b", "k", 0, "r", 0)
    one = spec((None, None, None, None, width), "b", "n", "k", "g", 0)
    out = _call(
      functools.partial(_combine_kernel, head_dim=head_dim),
      "tree_attention_combine",
      (rows, 1, batch * kv_heads),
      [bounds_spec, row_sums, stat, stat, one],
      one,
      grouped,
      tile._replace(warps=4, stages=1),
      interpret,
      aliases={4: 0},
    )(bounds, *partials, out)
  return out.reshape(q.shape)
