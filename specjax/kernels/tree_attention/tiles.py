"""Tile sizes and correctness records, one JSON file a device beside the kernels in ``tiles/``.

A file is written by a command (`experiments.compile_kernels`, `experiments.kernel_bench`), never by hand::

  {
    "device": "h100",                      # the target's name in experiments/devices.py
    "device_kinds": ["NVIDIA H100 80GB HBM3"],
    "kernel": "pallas_gpu",
    "source": "compiled" | "measured",     # chosen from compiler reports, or from times on the device
    "tiles": {"bfloat16/128/64": {"rows": 64, "slots": 64, "warps": 4, "stages": 3}, …},
    "verified": null | {"date": "2026-11-29", "jax": "0.10.2", "command": "…"}
  }

The key of a tile is type / head size / rows, where rows (query heads a kv head × nodes) is rounded up to
a power of two.
"""

from __future__ import annotations

import functools
import json
import pathlib
from typing import NamedTuple

FOLDER = pathlib.Path(__file__).parent / "tiles"


class Record(NamedTuple):
  """A correctness run of a kernel on a device kind."""

  kernel: str
  date: str
  jax: str
  command: str


@functools.cache
def files() -> tuple[dict, ...]:
  """Every file of the folder, by name."""
  return tuple(json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json")))


def verified(device_kind: str) -> Record | None:
  """The recorded correctness run on a device kind, if there is one."""
  for entry in files():
    if device_kind in entry["device_kinds"] and entry["verified"]:
      return Record(entry["kernel"], **entry["verified"])
  return None


def key(dtype: str, head_dim: int, rows: int) -> str:
  """The key of a tile: ``bfloat16/128/64``."""
  return f"{dtype}/{head_dim}/{1 << max(rows - 1, 0).bit_length()}"


def tile(kernel: str, device_kind: str | None, dtype: str, head_dim: int, rows: int) -> dict[str, int] | None:
  """The tile recorded for a device kind; None where none is."""
  for entry in files():
    if entry["kernel"] == kernel and device_kind in entry["device_kinds"]:
      return entry["tiles"].get(key(dtype, head_dim, rows))
  return None
