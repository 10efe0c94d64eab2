"""The kernels' modules seen alike: their tiles, what they cost, which source they are."""

from __future__ import annotations

import functools
import hashlib
import importlib
import math
import pathlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import specjax
from experiments.kernels.attention_cases import Case, bushy_tree, shapes
from experiments.kernels.devices import Target
from specjax.kernels.tree_attention import masks, tiles
from specjax.kernels.tree_attention.api import KERNELS

MAX_CANDIDATES = flags.DEFINE_integer("max_candidates", 4, "Tiles to try for each class of shapes.", 1)
Tile = dict[str, int]


class Cost(NamedTuple):
  """Bytes of a call: ``moved`` to and from device memory, ``least`` that must be; ``padding`` is what an
  array of the caches takes up for each of its bytes (a TPU pads head sizes to 128 lanes)."""

  moved: int
  least: int
  padding: float


_FOLDER = pathlib.Path(masks.__file__).parent


def load(kernel: str) -> ModuleType:
  return importlib.import_module(f"specjax.kernels.tree_attention.{kernel}")


def parse_kernels(names: Sequence[str]) -> list[str]:
  """
  Raises:
    ValueError: an unknown name, or none.
  """
  unknown = [name for name in names if name not in KERNELS]
  if unknown or not names:
    raise ValueError(f"--kernels = {','.join(names)!r}; possible: {','.join(KERNELS)}")
  return list(dict.fromkeys(names))


@functools.cache
def source_hash(kernel: str | None) -> str:
  """Of what a kernel is compiled from; None is the whole package, for whole rounds."""
  if kernel is None:
    paths = sorted(pathlib.Path(specjax.__file__).parent.rglob("*.py"))
  else:
    paths = [_FOLDER / f"{kernel}.py", _FOLDER / "masks.py"]
  digest = hashlib.sha256()
  for path in paths:
    digest.update(path.read_bytes())
  return digest.hexdigest()[:16]


def recorded_tile(target: Target, case: Case) -> Tile | None:
  """What ``tiles/`` holds for the target; None takes the kernel's default."""
  return tiles.tile(target.kernel, target.device_kinds[0], case.dtype, case.heads.size, case.rows)


def _options(target: Target | None) -> dict[str, Any]:
  """Facts of a GPU that its kernel would otherwise ask the default device for."""
  return {} if target is None or target.gpu is None else {"cores": target.gpu.processors}


def attention(kernel: str, case: Case, tile: Tile | None, target: Target | None = None, interpret=False):
  """``(q, k, v, prefix, ancestors) → out`` with one tile."""
  module = load(kernel)
  options = _options(target)
  chosen = None if tile is None else module.Tile(**tile)

  def attend(q, k, v, prefix, ancestors):
    mask = masks.make_mask(prefix, ancestors, case.nodes, k.shape[2], case.window)
    scale = 1 / math.sqrt(case.heads.size)
    return module.attend(
      q, k, v, mask, scale=scale, softcap=case.softcap, interpret=interpret, tile=chosen, **options
    )

  return attend


def candidates(kernel: str, case: Case) -> list[Tile]:
  """Tiles worth a try, the kernel's default first."""
  arguments = shapes(case)
  return [tile._asdict() for tile in load(kernel).candidate_tiles(arguments.q, arguments.k)]


def passes(case: Case, tile: Tile) -> int:
  """How often the kernel goes over a block of keys, for parts of the query rows."""
  return -(-case.rows // tile["rows"])


def shortlist(kernel: str, case: Case, most: int) -> list[Tile]:
  """Up to ``most`` candidates that go over the keys no more often than the default."""
  found = candidates(kernel, case)
  return spread([tile for tile in found if passes(case, tile) <= passes(case, found[0])], most)


def spread(candidates: Sequence[Tile], most: int) -> list[Tile]:
  """The first candidates, but no two that differ in one field only, until there are no others.

  Neighbours differ little; a few tries should cover the list.
  """
  chosen: list[Tile] = []
  for least in (2, 1):
    for tile in candidates:
      differs = [sum(tile[name] != other[name] for name in tile) >= least for other in chosen]
      if len(chosen) < most and all(differs):
        chosen.append(tile)
  return chosen


def cost(kernel: str, case: Case, tile: Tile | None, target: Target | None = None) -> Cost:
  """What a call moves by the kernel's own grid and index maps."""
  module, arguments = load(kernel), shapes(case)
  chosen = None if tile is None else module.Tile(**tile)
  found = module.cost(arguments.q, arguments.k, example_mask(case), chosen, **_options(target))
  return Cost(found.moved, found.least, getattr(found, "lanes", 1.0))


def example_mask(case: Case) -> masks.Mask:
  """A case's mask with values: NumPy arrays, and a random tree."""
  ancestors = None
  if not case.causal:
    tree = bushy_tree(case.nodes, np.random.default_rng(0))
    words = jnp.asarray(np.asarray(tree.ancestors, np.uint32))
    ancestors = jnp.broadcast_to(words, (case.batch, *words.shape[-2:]))
  prefix = jnp.full((case.batch,), case.prefix, jnp.int32)
  return jax.tree.map(np.asarray, masks.make_mask(prefix, ancestors, case.nodes, case.slots, case.window))
