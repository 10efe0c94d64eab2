"""Tile sizes and correctness records, one JSON file a device beside the kernels in ``tiles/``.

A file is written by a command (`experiments.compile_kernels`, `experiments.kernel_bench`), never by hand::

  {
    "device": "h100",                      # the target's name in experiments/kernels/devices.py
    "device_kinds": ["NVIDIA H100 80GB HBM3"],
    "kernel": "pallas_gpu",
    "source": "compiled" | "measured",     # chosen from compiler reports, or from times on the device
    "tiles": {"bfloat16/128/64": {"rows": 64, "slots": 64, "warps": 4, "stages": 3}, …},
    "verified": null | {"date": "2026-11-29", "jax": "0.10.2", "command": "…"}
  }

The key of a tile is type / head size / rows, where rows (query heads a kv head × nodes) is rounded up to
a power of two. New tiles take the record away: what was verified was the kernel with the old ones.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
from typing import Any, NamedTuple

FOLDER = pathlib.Path(__file__).parent / "tiles"
SOURCES = ("compiled", "measured")
_FIELDS = ("device", "device_kinds", "kernel", "source", "tiles", "verified")


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


def read(device: str) -> dict[str, Any] | None:
  """The file of a device, by the target's name; None where there is none."""
  return next((entry for entry in files() if entry["device"] == device), None)


def write(entry: dict[str, Any]) -> pathlib.Path:
  """Writes a device's file, whole or not at all, and returns its path.

  Raises:
    ValueError: fields that are missing, unknown or of no use.
  """
  if sorted(entry) != sorted(_FIELDS):
    raise ValueError(f"a tiles file has the fields {', '.join(_FIELDS)}; got {', '.join(entry)}")
  if entry["source"] not in SOURCES:
    raise ValueError(f"tiles of {entry['device']}: source = {entry['source']!r}; possible: {SOURCES}")
  for name, sizes in entry["tiles"].items():
    parts = name.split("/")
    if len(parts) != 3 or not all(isinstance(size, int) for size in sizes.values()):
      raise ValueError(
        f"tiles of {entry['device']}: {name!r}: {sizes!r} is not type/head size/rows and sizes"
      )
  if entry["verified"] is not None and sorted(entry["verified"]) != ["command", "date", "jax"]:
    raise ValueError(f"verified of {entry['device']} = {entry['verified']!r}; it needs date, jax, command")
  FOLDER.mkdir(exist_ok=True)
  path = FOLDER / f"{entry['device']}.json"
  part = path.with_suffix(".json.part")
  ordered = {name: entry[name] for name in _FIELDS}
  with open(part, "w", encoding="utf-8") as file:
    file.write(_text(ordered) + "\n")
    file.flush()
    os.fsync(file.fileno())
  os.replace(part, path)
  files.cache_clear()
  return path


def _order(name: str) -> tuple[str, int, int]:
  dtype, head_dim, rows = name.split("/")
  return dtype, int(head_dim), int(rows)


def _text(entry: dict[str, Any]) -> str:
  """JSON with one line a tile."""
  names = sorted(entry["tiles"], key=_order)
  lines = [f"    {json.dumps(name)}: {json.dumps(entry['tiles'][name])}" for name in names]
  table = "{\n" + ",\n".join(lines) + "\n  }" if lines else "{}"
  fields = [f"  {json.dumps(n)}: {table if n == 'tiles' else json.dumps(v)}" for n, v in entry.items()]
  return "{\n" + ",\n".join(fields) + "\n}"
