"""Tree attention for TPUs: a row's live prefix comes from HBM once, for all heads of a group and all nodes.

The grid is (tiles of kv heads, steps). The steps walk a flat list of the blocks that hold live slots, row
after row; its length is traced, so a block outside a row's bounds costs nothing, and short rows do not wait
for long ones. K and V stay in HBM; a step waits for its block in one half of a double buffer while the next
one, of this row or the next, is copied into the other. A row's last block is copied in power-of-two pieces
down to `GRAIN` slots: what is read beyond the live slots is less than 2 · `GRAIN` a row, however large the
blocks are. Softmax is online; queries, outputs and the words of the mask come through Pallas's own pipeline.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specjax.kernels.tree_attention import tiles
from specjax.kernels.tree_attention.masks import WORD_BITS, Mask

Array = jax.Array

HEAD_SIZES = (64, 96, 128, 256)
LANES = 128
SUBLANES = 8
SLOT_MULTIPLE = 128  # of the buffer, as `cache.create` makes it
GRAIN = 32  # slots; whole tiles of 8 × 128 for every type
MAX_ROWS = 2048  # query rows a kv head in one call; more nodes than that are attended in turns
VMEM = 14 * 2**20  # what a tile may use: v4, v5e and v5p give a kernel 16 MiB
UNROLLED_ROWS = 128  # more rows than that side by side do not fit the registers of any TPU
# Larger values are infinite to the matrix unit, whose products are of bfloat16 parts.
LARGEST = float(jnp.finfo(jnp.bfloat16).max)


class Tile(NamedTuple):
  """What one step works on.

  Attributes:
    heads: kv heads, a divisor of K.
    slots: slots of a block of K and V, a power of two.
    rows: query rows (heads of the group × nodes) of one product, at most.
    chunk: slots of one product, a multiple of 128 that divides ``slots``.
    unroll: 1: one kv head after the other; ``heads``: side by side, so that one's waits are another's work.
  """

  heads: int
  slots: int
  rows: int
  chunk: int
  unroll: int = 1


class Cost(NamedTuple):
  """What one call moves between HBM and VMEM, in bytes of the arrays' own elements.

  Attributes:
    read: by the copies of K and V and the pipeline of queries and masks.
    written: outputs.
    least: live slots of K and V, queries, outputs and words of the mask, once each.
    steps: of the grid.
    lanes: bytes HBM holds for one byte of K or V: head sizes below 128 are padded to the 128 lanes. XLA
      keeps such arrays compact outside of a program, and copies them at its borders, not within a loop.
  """

  read: int
  written: int
  least: int
  steps: int
  lanes: float

  @property
  def moved(self) -> int:
    return self.read + self.written


def refusal(q, k) -> str | None:
  """Why arrays like ``q [B, N, Q, H]`` and ``k [B, K, S, H]`` are not taken, or None."""
  if q.shape[3] not in HEAD_SIZES:
    return f"takes head sizes 64, 96, 128 and 256, got {q.shape[3]}"
  if q.dtype not in (jnp.bfloat16, jnp.float32):
    return f"takes bfloat16 and float32, got {q.dtype}"
  if k.shape[2] % SLOT_MULTIPLE or not k.shape[2]:
    return f"takes buffers of a multiple of {SLOT_MULTIPLE} slots, got {k.shape[2]}"
  group = q.shape[2] // k.shape[1]
  if group > MAX_ROWS:
    return f"takes up to {MAX_ROWS} query heads a kv head, got {group}"
  return None


def attend(
  q: Array,
  k: Array,
  v: Array,
  mask: Mask,
  *,
  scale: float,
  softcap: float | None,
  interpret: bool = False,
  tile: Tile | None = None,
) -> Array:
  """See `tree_attention`; ``out [B, N, Q, H]``.

  Args:
    q: ``[B, N, Q, H]``.
    k: ``[B, K, S, H]``.
    v: ``[B, K, S, H]``.
    mask: who sees what.
    scale: of the scores.
    softcap: of the scaled scores, or None.
    interpret: run in Pallas's TPU interpreter, which looks for races and fills memory with NaN.
    tile: None is the recorded one of the device kind, or else a default for every TPU.
  """
  call = functools.partial(_attend, scale=scale, softcap=softcap, interpret=interpret, tile=tile)
  outs = []
  for part in _turns(q, k):
    words = None if mask.words is None else mask.words[:, part]
    turn = mask._replace(first=mask.first[:, part], words=words)
    outs.append(call(q[:, part], k, v, turn, part.start))
  return outs[0] if len(outs) == 1 else jnp.concatenate(outs, axis=1)


def _turns(q, k) -> list[slice]:
  """The nodes that each call of the kernel takes. Only long prompts need a second turn, which reads the
  prefix again: 128 nodes are one up to 16 query heads a kv head, 256 up to 8."""
  nodes, group = q.shape[1], q.shape[2] // k.shape[1]
  each = min(nodes, MAX_ROWS // group)
  return [slice(start, min(start + each, nodes)) for start in range(0, nodes, each)]


class _Plan(NamedTuple):
  """Blocks of each row; arrays of numpy or of jax, ``[B]``. Kernel and `cost` both go by it."""

  start: Array  # first slot that is copied
  stop: Array  # one past the last
  blocks: Array


def _plan(begin, end, slots: int) -> _Plan:
  start = begin // GRAIN * GRAIN
  stop = start + (_round_up(end, GRAIN) - start) * (end > begin)
  return _Plan(start, stop, _ceil(stop - start, slots))


class _Shape(NamedTuple):
  """Everything static about a call."""

  batch: int
  nodes: int
  group: int
  kv_heads: int
  slots: int
  head_dim: int
  height: int  # query rows of one product
  rows: int  # group · nodes, padded to whole products
  info: int  # lines of the mask's array: first, then words or the node's number
  tile: Tile


def _shape(q, k, words: int, tile: Tile | None) -> _Shape:
  batch, nodes, heads, head_dim = q.shape
  kv_heads, slots = k.shape[1], k.shape[2]
  group = heads // kv_heads
  if tile is None:
    kind = jax.devices()[0].device_kind
    found = tiles.tile("pallas_tpu", kind, jnp.dtype(q.dtype).name, head_dim, group * nodes)
    tile = Tile(**found) if found else candidate_tiles(q, k)[0]
  # A recorded tile is of a class of shapes: this one may have fewer kv heads or slots.
  largest = 1 << (slots.bit_length() - 1)
  fit = min(tile.slots, largest)
  heads = _divisor(kv_heads, tile.heads)
  unroll = heads if tile.unroll > 1 else 1
  tile = Tile(heads, fit, tile.rows, min(tile.chunk, fit), unroll)
  height, rows = _heights(group * nodes, tile.rows, jnp.dtype(q.dtype).itemsize)
  info = _round_up(1 + words, SUBLANES)
  return _Shape(batch, nodes, group, kv_heads, slots, head_dim, height, rows, info, tile)


def _heights(rows: int, most: int, size: int) -> tuple[int, int]:
  """Rows of each of the equal products that take ``rows``, ``most`` at a time; and of all of them."""
  products = _ceil(rows, most)
  height = _round_up(_ceil(rows, products), SUBLANES * 4 // size)
  return height, products * height


def _info_lanes(shape: _Shape) -> int:
  """Last axis of the mask's array: the rows of each product, padded to whole registers."""
  return shape.rows // shape.height * _round_up(shape.height, LANES)


def _ceil(x, y):
  return (x + y - 1) // y


def _round_up(x, multiple):
  return _ceil(x, multiple) * multiple


def _divisor(x: int, most: int) -> int:
  return next(d for d in range(min(x, most), 0, -1) if x % d == 0)


def candidate_tiles(q, k) -> list[Tile]:
  """Tiles worth a try that fit every TPU's VMEM: the default, then it with ever fewer registers, then others.

  Args:
    q: ``[B, N, Q, H]``; only shape and type are read.
    k: ``[B, K, S, H]``.
  """
  kv_heads, head_dim = k.shape[1], k.shape[3]
  rows = min(q.shape[2] // kv_heads * q.shape[1], MAX_ROWS)
  size, lanes = jnp.dtype(q.dtype).itemsize, _round_up(head_dim, LANES)
  # Products that stay in registers and are long enough to hide what one waits for.
  best = (2**14 if rows <= 64 else 2**15) * LANES // lanes * (1 if size == 2 else 0.25)
  found = []
  for heads in sorted({_divisor(kv_heads, most) for most in (1, 2, 4, 8, kv_heads // 2 or 1)}):
    for slots in (256, 512, 1024, 2048):
      for height, chunk in itertools.product((32, 64, 128), (128, 256, 512, 1024)):
        one, high = _heights(rows, height, size)
        step = 2 * heads * slots * lanes * size
        state = heads * high * (lanes * (4 + 4 * size) + 2 * LANES * 4)
        product = one * chunk
        if chunk <= slots and product <= 2**16 and 2 * step + state + 16 * product <= VMEM:
          # Two tiles of heads, for chips whose two cores share a grid; steps of about 2 MiB, so that
          # what a step costs by itself does not show.
          rank = (heads * 2 > kv_heads > 1, abs(np.log2(step / 2**21)), abs(np.log2(product / best)), -height)
          for unroll in {1, heads} if one * heads <= UNROLLED_ROWS else {1}:
            found.append(((*rank, -heads, -unroll), Tile(heads, slots, height, chunk, unroll)))
  ordered = [tile for _, tile in sorted(found)]
  smaller = ordered[:1]
  for changes in (
    dict(unroll=1),
    dict(chunk=256),
    dict(chunk=128),
    *(dict(rows=rows) for rows in (64, 32, 16, 8)),
  ):
    last = smaller[-1]
    smaller.append(
      last._replace(**{name: min(getattr(last, name), value) for name, value in changes.items()})
    )
  few = _divisor(kv_heads, 4)
  if few > smaller[-1].heads:
    smaller += [tile._replace(heads=few, slots=512) for tile in smaller[-2:]]
  return list(dict.fromkeys([*smaller, *ordered]))


def cost(q, k, mask: Mask, tile: Tile | None = None) -> Cost:
  """What a call moves, for known lengths; from the same plan as the kernel's copies.

  K and V: ``stop - start`` slots a row, both for every kv head. Queries and outputs: the padded rows of
  each batch row that has blocks, once; the lines of the mask once a tile of heads.

  Args:
    q: ``[B, N, Q, H]``; only shape and type are read.
    k: ``[B, K, S, H]``.
    mask: with values.
    tile: as for `attend`.
  """
  words = 1 if mask.words is None else mask.words.shape[-1]
  begin, end = np.asarray(mask.begin, np.int64), np.asarray(mask.end, np.int64)
  size, head_dim, kv_heads = jnp.dtype(q.dtype).itemsize, q.shape[3], k.shape[1]
  slot = 2 * kv_heads * head_dim * size  # bytes of K and V
  read = written = steps = 0
  for part in _turns(q, k):
    turn = jax.ShapeDtypeStruct((q.shape[0], part.stop - part.start, *q.shape[2:]), q.dtype)
    shape = _shape(turn, k, words, tile)
    plan = _plan(begin, end, shape.tile.slots)
    live, head_tiles = int((plan.blocks > 0).sum()), kv_heads // shape.tile.heads
    queries = live * kv_heads * shape.rows * head_dim * size
    info = live * head_tiles * shape.info * _info_lanes(shape) * 4
    read += int((plan.stop - plan.start).sum()) * slot + queries + info
    written += queries
    steps += head_tiles * max(int(plan.blocks.sum()), 1)
  least = int((end - begin).clip(0).sum()) * slot + 2 * math.prod(q.shape) * size
  least += 0 if mask.words is None else math.prod(mask.words.shape) * 4
  return Cost(read, written, least, steps, _round_up(head_dim, LANES) / head_dim)


@functools.partial(jax.jit, static_argnames=("scale", "softcap", "interpret", "tile"))
def _attend(q, k, v, mask, first_node, *, scale, softcap, interpret, tile):
  """One call of the kernel; ``first_node`` is the number of the first query, for causal masks."""
  causal = mask.words is None
  shape = _shape(q, k, 1 if causal else mask.words.shape[-1], tile)
  batch, nodes, group, kv_heads, slots, head_dim, height, rows, lines, tile = shape
  real = group * nodes

  # [B, K, group · N, H]: the heads that share keys and the nodes are rows of one product.
  queries = q.reshape(batch, nodes, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
  queries = queries.reshape(batch, kv_heads, real, head_dim)
  queries = jnp.pad(queries, ((0, 0), (0, 0), (0, rows - real), (0, 0)))
  # The mask of each row lies along lanes, 32 bytes a row: as columns it would be padded to 512. The rows of
  # one product are whole registers.
  if causal:
    seen = jnp.broadcast_to(first_node + jnp.arange(nodes, dtype=jnp.int32), (batch, 1, nodes))
  else:
    seen = jax.lax.bitcast_convert_type(mask.words, jnp.int32).transpose(0, 2, 1)
  info = jnp.tile(jnp.concatenate([mask.first[:, None], seen], axis=1), (1, 1, group))
  info = jnp.pad(info, ((0, 0), (0, lines - info.shape[1]), (0, rows - real)))
  info = info.reshape(batch, lines, rows // height, height)
  info = jnp.pad(info, ((0, 0), (0, 0), (0, 0), (0, -height % LANES))).reshape(batch, lines, -1)

  plan = _plan(mask.begin, mask.end, tile.slots)
  after = jnp.cumsum(plan.blocks)
  most = batch * _ceil(slots, tile.slots)
  row_of_step = jnp.minimum(
    (after[None, :] <= jnp.arange(most)[:, None]).sum(axis=1, dtype=jnp.int32), batch - 1
  )
  offsets = jnp.concatenate([jnp.zeros_like(after[:1]), after])
  bare_from, bare_to = mask.first.max(axis=1), jnp.minimum(mask.prefix, mask.end)
  scalars = (row_of_step, offsets, plan.start, plan.stop, bare_from, bare_to, mask.prefix, mask.end)

  at_row = lambda head, step, row_of_step, *_: (row_of_step[step], head, 0, 0)
  block = pl.BlockSpec((1, tile.heads, rows, head_dim), at_row)
  state = lambda width: pltpu.VMEM((tile.heads, rows, width), jnp.float32)
  buffer = pltpu.VMEM((2, tile.heads, tile.slots, head_dim), k.dtype)
  full = 2 * batch * kv_heads * slots * head_dim * k.dtype.itemsize
  out = pl.pallas_call(
    functools.partial(_kernel, shape=shape, causal=causal, scale=scale, softcap=softcap),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(scalars),
      # Without any block there is one step, of an empty block.
      grid=(kv_heads // tile.heads, jnp.maximum(after[-1], 1)),
      in_specs=[
        block,
        pl.BlockSpec((1, *info.shape[1:]), lambda head, step, row_of_step, *_: (row_of_step[step], 0, 0)),
        pl.BlockSpec(memory_space=pl.ANY),
        pl.BlockSpec(memory_space=pl.ANY),
      ],
      out_specs=block,
      scratch_shapes=[
        *(buffer, buffer, pltpu.SemaphoreType.DMA((2, 2))),
        *(state(LANES), state(LANES), state(head_dim)),
        *(pltpu.VMEM((height, LANES), jnp.int32), pltpu.VMEM((height, LANES), jnp.int32)),
      ],
    ),
    out_shape=jax.ShapeDtypeStruct(queries.shape, q.dtype),
    # XLA schedules before lengths are known: this is a full buffer.
    cost_estimate=pl.CostEstimate(
      flops=4 * q.size * slots,
      transcendentals=q.size // head_dim * slots,
      bytes_accessed=full + 2 * q.size * q.dtype.itemsize,
    ),
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
    interpret=pltpu.InterpretParams(detect_races=True, dma_execution_mode="on_wait") if interpret else False,
    name="tree_attention",
  )(*scalars, queries, info, k, v)
  # A row without blocks has no step that would write its output.
  out = jnp.where((plan.blocks > 0)[:, None, None, None], out, 0)[:, :, :real]
  out = out.reshape(batch, kv_heads, group, nodes, head_dim).transpose(0, 3, 1, 2, 4)
  return out.reshape(q.shape)


def _kernel(*refs, shape: _Shape, causal: bool, scale: float, softcap: float | None):
  """One step: the scalars, queries, mask and caches, the output, then what lives from step to step."""
  row_of_step, offsets, starts, stops, bare_from, bare_to, prefixes, ends = refs[:8]
  q, info, k_hbm, v_hbm, out, k_buffer, v_buffer, arrived, top, total, acc, marks, shown = refs[8:]
  tile, height = shape.tile, shape.height
  few = math.gcd(height, 4 * SUBLANES)
  head_tile, step, steps = pl.program_id(0), pl.program_id(1), offsets[shape.batch]
  exact = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else jax.lax.Precision.DEFAULT

  def place(step):
    """Row, first slot and number of slots of a step's block."""
    row = row_of_step[step]
    first = starts[row] + (step - offsets[row]) * tile.slots
    return row, first, jnp.minimum(stops[row] - first, tile.slots)

  def copies(step, act):
    """Starts or waits for the copies of a step's block: the same pieces either way."""
    row, first, length = place(step)
    half = jax.lax.rem(step, 2)

    def piece(at, size):
      source = pl.ds(pl.multiple_of(first + at, GRAIN), size)
      target = pl.ds(pl.multiple_of(at, GRAIN), size)
      heads = pl.ds(head_tile * tile.heads, tile.heads)
      for which, (hbm, buffer) in enumerate(((k_hbm, k_buffer), (v_hbm, v_buffer))):
        act(
          pltpu.make_async_copy(
            hbm.at[row, heads, source], buffer.at[half, :, target], arrived.at[half, which]
          )
        )

    size = tile.slots
    while size >= GRAIN:
      # Bit by bit from the highest: a piece begins where the longer ones end.
      at = length & -(2 * size)
      pl.when((length & size) != 0)(functools.partial(piece, at, size))
      size //= 2

  @pl.when(step == 0)
  def _():
    copies(step, lambda copy: copy.start())

  @pl.when(step + 1 < steps)
  def _():
    copies(step + 1, lambda copy: copy.start())

  row, first, length = place(step)
  half = jax.lax.rem(step, 2)

  def over_heads(body):
    """Calls ``body`` with each kv head."""
    if tile.unroll == tile.heads:
      for head in range(tile.heads):
        body(head)
    else:
      pl.loop(0, tile.heads)(body)

  def over_rows(body):
    """Calls ``body`` with the query rows that each product takes, and the lanes of their masks."""
    if height == shape.rows:
      body(pl.ds(0, height), pl.ds(0, _info_lanes(shape)))
    else:
      wide = _round_up(height, LANES)

      @pl.loop(0, shape.rows // height)
      def _(i):
        body(
          pl.ds(pl.multiple_of(i * height, SUBLANES), height), pl.ds(pl.multiple_of(i * wide, LANES), wide)
        )

  @pl.when(step == offsets[row])
  def _():
    def clear(rows, head):
      top[head, rows] = jnp.full((height, LANES), -jnp.inf)
      total[head, rows] = jnp.zeros((height, LANES))
      acc[head, rows] = jnp.zeros((height, shape.head_dim))

    over_rows(lambda rows, _: over_heads(functools.partial(clear, rows)))

  copies(step, lambda copy: copy.wait())

  def look(lanes, first_slot):
    """Writes into ``shown [height, LANES]`` which rows see which of the slots from ``first_slot`` on.

    A few rows at a time, and by way of memory: the whole mask beside a product does not fit the registers.
    """
    marks[:, : shape.info] = info[0, :, lanes].T[:height]

    @pl.loop(0, height // few)
    def _(i):
      rows = pl.ds(pl.multiple_of(i * few, few), few)
      slot = first_slot + jax.lax.broadcasted_iota(jnp.int32, (few, LANES), 1)
      column = slot - prefixes[row]
      first_seen = marks[rows, :1]
      if causal:
        seen = (slot >= first_seen) & (column <= marks[rows, 1:2]) & (slot < ends[row])
        shown[rows] = seen.astype(jnp.int32)
        return
      word = jnp.zeros((few, LANES), jnp.int32)
      for w in range(shape.info - 1):
        word = jnp.where(jax.lax.shift_right_arithmetic(column, 5) == w, marks[rows, w + 1 : w + 2], word)
      bit = jax.lax.shift_right_logical(word, column & (WORD_BITS - 1)) & 1
      shown[rows] = jnp.where(column < 0, (slot >= first_seen).astype(jnp.int32), bit * (slot < ends[row]))

  def clean(head, slots):
    """Makes some slots of the block safe to weight with 0.

    That does not hide a NaN, and a buffer's rest holds anything. Values that are not finite become 0, and
    their slot's key NaN: so are then the scores of the slot, which the mask hides from all but those who
    see it.
    """
    k, v = (buffer[half, head, slots].astype(jnp.float32) for buffer in (k_buffer, v_buffer))
    good = jnp.abs(v) <= LARGEST
    whole = jnp.min(jnp.where(good, 1.0, 0.0), axis=1, keepdims=True) > 0
    k_buffer[half, head, slots] = jnp.where(whole, k, jnp.nan).astype(k_buffer.dtype)
    v_buffer[half, head, slots] = jnp.where(good, v, 0).astype(v_buffer.dtype)

  def product(head, rows, slots, seen):
    """Adds some slots of the block to the sums of some rows. ``seen`` None: every row sees every slot."""
    k, v = k_buffer[half, head, slots], v_buffer[half, head, slots]
    scores = scale * jax.lax.dot_general(
      q[0, head, rows], k, (((1,), (1,)), ((), ())), precision=exact, preferred_element_type=jnp.float32
    )
    if softcap is not None:
      scores = softcap * jnp.tanh(scores / softcap)
    if seen is not None:
      scores = jnp.where(seen[...] != 0, scores, -jnp.inf)
    old = top[head, rows]  # [height, 128], every lane the same
    new = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
    # Rows that have seen nothing yet have -inf; 0 keeps the exponents finite.
    base = new if seen is None else jnp.where(new == -jnp.inf, 0.0, new)
    weights = jnp.exp(scores - _lanes(base, slots.size))
    rescale = jnp.exp(old - base)
    top[head, rows] = new
    total[head, rows] = total[head, rows] * rescale + jnp.sum(weights, axis=1, keepdims=True)
    acc[head, rows] = acc[head, rows] * _lanes(rescale, shape.head_dim) + jax.lax.dot_general(
      *(weights.astype(v.dtype), v, (((1,), (0,)), ((), ()))),
      precision=exact,
      preferred_element_type=jnp.float32,
    )

  @pl.loop(0, jax.lax.div(length + tile.chunk - 1, tile.chunk))
  def _(chunk):
    at = pl.multiple_of(chunk * tile.chunk, tile.chunk)
    bare = (first + at >= bare_from[row]) & (first + at + tile.chunk <= bare_to[row])

    @pl.when(bare)
    def _():
      part = pl.ds(at, tile.chunk)
      over_rows(lambda rows, _: over_heads(lambda head: product(head, rows, part, None)))

    # Rare, and heavy in registers: in small pieces, and only the live ones.
    @pl.when(jnp.logical_not(bare))
    def _():
      @pl.loop(0, jax.lax.div(jnp.minimum(length - at, tile.chunk) + LANES - 1, LANES))
      def _(part):
        slots = pl.ds(pl.multiple_of(at + part * LANES, LANES), LANES)

        @pl.loop(0, tile.heads * (LANES // GRAIN))
        def _(i):
          piece = jax.lax.rem(i, LANES // GRAIN) * GRAIN
          clean(jax.lax.div(i, LANES // GRAIN), pl.ds(pl.multiple_of(slots.start + piece, GRAIN), GRAIN))

        def masked(rows, lanes):
          look(lanes, first + slots.start)
          pl.loop(0, tile.heads)(lambda head: product(head, rows, slots, shown))

        over_rows(masked)

  @pl.when(step + 1 == offsets[row + 1])
  def _():
    @pl.loop(0, tile.heads * (shape.rows // few))
    def _(i):
      head = jax.lax.div(i, shape.rows // few)
      rows = pl.ds(pl.multiple_of(jax.lax.rem(i, shape.rows // few) * few, few), few)
      sums, weight = acc[head, rows], total[head, rows]
      # Without a mask an infinite value stays in its lane, or infinite: NaN for all, as elsewhere.
      whole = jnp.min(jnp.where(jnp.abs(sums) <= LARGEST, 1.0, 0.0), axis=1, keepdims=True) > 0
      weight = _lanes(jnp.where(weight == 0, 1.0, weight), shape.head_dim)
      out[0, head, rows] = (jnp.where(whole, sums, jnp.nan) / weight).astype(out.dtype)


def _lanes(x: Array, width: int) -> Array:
  """``x [height, 128]``, whose lanes are all the same, at another width."""
  return x[:, :width] if width <= LANES else jnp.concatenate([x] * (width // LANES), axis=1)
