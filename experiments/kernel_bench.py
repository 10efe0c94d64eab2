"""Is the tree attention kernel right on this device, and how close to its memory's speed?

  python -m experiments.kernel_bench [--output=runs/kernel] [--record]      # one GPU or TPU, within 5 minutes
  python -m experiments.kernel_bench --tune [--record]
  JAX_PLATFORMS=cpu python -m experiments.kernel_bench --interpret          # any machine: correctness, tiny

1. Correctness against a float64 oracle (`experiments.kernels.kernel_checks`): every class of shapes that
   `experiments.compile_kernels` compiles, ragged rows, trees and causal, windows, soft-caps, NaN in slots
   that are masked (bit for bit).
2. Times (`experiments.kernels.kernel_paths` says how) of the kernel, of XLA's ways and of the best library
   path, by prefix, nodes and batch; GB/s are bytes that must be moved over time, the share is of a copy
   measured here.

--tune measures candidate tiles first and writes them into the package. --record writes the correctness run
into the tiles file of the device kind, from where on ``implementation="auto"`` takes the kernel there; it
is refused unless every check ran and passed. The exit code is 1 if anything is wrong.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags

from experiments import flags as shared
from experiments import results
from experiments.kernels import (
  attention_cases,
  compile_reports,
  devices,
  kernel_checks,
  kernel_modules,
  kernel_paths,
)
from experiments.kernels.attention_cases import Case
from experiments.kernels.kernel_checks import Check, Verdict
from specjax.checkpoints.files import write_whole
from specjax.kernels.tree_attention import tiles
from specjax.kernels.tree_attention.api import INTERPRETED, KERNELS

TIMED_MODEL = flags.DEFINE_enum(
  "timed_model", "llama-3.1-8b", list(attention_cases.MODELS), "Whose head shapes are timed."
)
BUDGET = flags.DEFINE_float("budget", 280.0, "Seconds; what is not done by then is left out.", 1.0)
TUNE = flags.DEFINE_bool("tune", False, "Measure candidate tiles first, and write the best.")
RECORD = flags.DEFINE_bool("record", False, "Record the correctness run, if all of it is right.")
INTERPRET = flags.DEFINE_bool("interpret", False, "Tiny correctness checks in Pallas's interpreters.")
REPORT_FILE, PLOT_FILE = "report.json", "bandwidth.png"
PREFIXES = (1024, 2048, 4096, 8192, 16384, 32768)
NODES, BATCHES = (8, 1, 16, 64), (4, 16, 64)
Row = dict[str, Any]


class Clock:
  """Seconds of the budget."""

  def __init__(self, budget: float):
    self._end = time.perf_counter() + budget

  def left(self) -> float:
    return self._end - time.perf_counter()


def platform_kernel() -> str:
  """The kernel of the default device's platform.

  Raises:
    ValueError: it has none.
  """
  platform = jax.devices()[0].platform
  kernel = {"tpu": "pallas_tpu", "gpu": "pallas_gpu", "cuda": "pallas_gpu"}.get(platform)
  if kernel is None:
    raise ValueError(
      f"kernel_bench measures on a GPU or a TPU; the default device is a {platform}. "
      "--interpret checks the kernels on any machine"
    )
  return kernel


def check_all(implementation: str, checks: Sequence[Check], clock: Clock) -> list[Row]:
  """Runs and prints the checks; those past the budget have the status ``not run``."""
  attend = kernel_checks.kernel_attention(implementation)
  rows, lines = [], []
  for check in checks:
    row: Row = {"implementation": implementation, "check": check.label, "error": None, "wrong": []}
    if clock.left() <= 0:
      row["status"] = "not run"
    else:
      verdict = _verdict(attend, check)
      row |= dataclasses.asdict(verdict) | {"status": "wrong" if verdict.wrong else "right"}
      print(f"{implementation} {check.label}: {row['status']}", file=sys.stderr, flush=True)
    rows.append(row)
    error = None if row["error"] is None else f"{row['error']:.1e}"
    tolerance = f"{kernel_checks.TOLERANCE[check.case.dtype]:.1e}"
    lines.append([check.label, row["status"], error, tolerance, "; ".join(row["wrong"]) or None])
  print(f"\nCorrectness of {implementation} (largest error as a share of Σ w·|v|)\n")
  results.table(("check", "result", "error", "allowed", "what"), lines)
  return rows


def _verdict(attend: kernel_checks.Attention, check: Check) -> Verdict:
  try:
    return kernel_checks.run_check(attend, check)
  except Exception as error:  # a compiler's or a device's: the next check may do
    return Verdict(None, (compile_reports.one_line(str(error) or type(error).__name__),))


def sweeps(model: str) -> list[tuple[Case, int, tuple[int, ...]]]:
  """``(case, slots, prefixes)`` to time, in the order of interest."""
  longest = PREFIXES[-1] + attention_cases.SLOT_MULTIPLE
  nodes = [(Case(model, n, 0), longest, PREFIXES if n == NODES[0] else (8192,)) for n in NODES]
  batches = [(Case(model, 8, 0, batch=b), 8192 + attention_cases.SLOT_MULTIPLE, (8192,)) for b in BATCHES]
  return [nodes[0], *batches, *nodes[1:]]


def time_all(kernel: str, model: str, copy: float, clock: Clock) -> list[Row]:
  """Times every path of every sweep; what cannot run says why."""
  rows: list[Row] = []
  for case, slots, prefixes in sweeps(model):
    for path in kernel_paths.paths(case, kernel):
      base = {"path": path.name, "note": path.note, "nodes": case.nodes, "batch": case.batch, "slots": slots}
      times, why = _times(path, case, slots, prefixes, clock)
      for prefix in prefixes:
        row = base | {"model": model, "prefix": prefix, "us": None, "gbps": None, "share": None, "why": why}
        if prefix in times:
          rate = dataclasses.replace(case, prefix=prefix).least_bytes / times[prefix]
          row |= {"us": 1e6 * times[prefix], "gbps": rate / 1e9, "share": rate / copy}
        rows.append(row)
      said = why or f"{len(times)} of {len(prefixes)} timed"
      print(f"{case.label} {path.name}: {said}", file=sys.stderr, flush=True)
  return rows


def _times(path, case: Case, slots: int, prefixes, clock: Clock) -> tuple[dict[int, float], str | None]:
  if clock.left() <= 0:
    return {}, "budget"
  slots = kernel_paths.timed_slots(path, case, slots)
  free, needed = kernel_paths.free_bytes(), 2 * kernel_paths.buffer_bytes(case, slots)
  if free is not None and needed > free:
    return {}, f"needs {needed / 2**30:.1f} GiB with its temporaries, {free / 2**30:.1f} are free"
  try:
    times = kernel_paths.time_path(path, case, slots, prefixes, clock.left)
  except Exception as error:  # a path that does not take the shapes, or memory that is full
    return {}, compile_reports.one_line(str(error) or type(error).__name__)
  return times, None if len(times) == len(prefixes) else "budget"


def print_times(rows: Sequence[Row], copy: float) -> None:
  reference = {_where(row): row["us"] for row in rows if row["path"] == "reference"}
  lines = []
  for row in rows:
    base = reference.get(_where(row))
    lines.append(
      [
        f"B{row['batch']} N{row['nodes']} prefix {row['prefix']}",
        row["path"],
        None if row["us"] is None else f"{row['us']:.1f}",
        None if row["us"] is None else f"{row['gbps']:.0f}",
        None if row["us"] is None else f"{100 * row['share']:.1f} %",
        None if row["us"] is None or base is None else f"{base / row['us']:.2f} x",
        row["why"] or row["note"] or None,
      ]
    )
  print(f"\nTimes, {rows[0]['model']} bf16; a copy moves {copy / 1e9:.0f} GB/s on this device\n")
  results.table(("shape", "path", "us", "GB/s", "of a copy", "over reference", "note"), lines)


def _where(row: Row) -> tuple[int, int, int]:
  return row["batch"], row["nodes"], row["prefix"]


def tune(kernel: str, models: Sequence[str], clock: Clock) -> dict[str, dict[str, int]]:
  """The fastest candidate of each tile key, as far as the budget goes."""
  picks, lines = {}, []
  by_key: dict[str, Case] = {}
  for case in attention_cases.default_cases(models):
    by_key.setdefault(case.tile_key, case)
  for key, case in by_key.items():
    words = None if case.causal else kernel_paths.tree_words(case)
    best = None
    candidates = kernel_modules.shortlist(kernel, case, kernel_modules.MAX_CANDIDATES.value)
    for tile in candidates:
      path = kernel_paths.kernel_path(case, kernel, words, tile)
      times, why = _times(path, case, case.slots, (case.prefix,), clock)
      seconds = times.get(case.prefix)
      if seconds is not None and (best is None or seconds < best[0]):
        best = seconds, tile
      if why == "budget":
        break
    if clock.left() <= 0:
      print(f"budget: tiles from {key} on are not measured", file=sys.stderr, flush=True)
      break
    if best is not None:
      picks[key] = best[1]
      sizes = " ".join(f"{name}={value}" for name, value in best[1].items())
      lines.append([key, case.label, sizes, f"{1e6 * best[0]:.1f}", len(candidates)])
      print(f"{key}: {sizes}", file=sys.stderr, flush=True)
  print("\nTiles\n")
  results.table(("key", "case", "fastest", "us", "tried"), lines)
  return picks


def write_tiles(kernel: str, picks: dict[str, dict[str, int]]) -> None:
  """Measured tiles into the file of this device; others are kept, a record is not."""
  entry = device_entry(kernel)
  found = {"source": "measured", "tiles": entry["tiles"] | picks, "verified": None}
  print(f"wrote {tiles.write(entry | found)}")


def device_entry(kernel: str) -> dict[str, Any]:
  """The tiles file of this device kind, or what a new one starts from."""
  kind = jax.devices()[0].device_kind
  for entry in tiles.files():
    if kind in entry["device_kinds"] and entry["kernel"] == kernel:
      return dict(entry)
  target = devices.target_of_kind(kind)
  name = target.name if target else "".join(c if c.isalnum() else "-" for c in kind.lower())
  fields = {"device": name, "device_kinds": [kind], "kernel": kernel, "source": "compiled", "tiles": {}}
  return fields | {"verified": None}


def record(kernel: str, rows: Sequence[Row]) -> None:
  """Writes the correctness run into the tiles file.

  Raises:
    ValueError: a check was wrong or did not run.
  """
  bad = [row for row in rows if row["status"] != "right"]
  if bad or not rows:
    first = f"; the first: {bad[0]['check']} ({bad[0]['status']})" if bad else ""
    raise ValueError(f"--record: {len(bad)} of {len(rows)} checks are not right{first}. Nothing was recorded")
  verified = {
    "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    "jax": jax.__version__,
    "command": " ".join(["python -m experiments.kernel_bench", *sys.argv[1:]]),
  }
  print(f"recorded in {tiles.write(device_entry(kernel) | {'verified': verified})}")


def plot(rows: Sequence[Row], path: str) -> str | None:
  """Share of the copy's bandwidth against the prefix; returns why there is no plot."""
  try:
    import matplotlib
  except ImportError:
    return "no plot: matplotlib is not installed (pip install 'specjax[plot]')"
  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  figure, axes = plt.subplots(figsize=(7, 4.5))
  for name in dict.fromkeys(row["path"] for row in rows):
    line = [r for r in rows if r["path"] == name and (r["batch"], r["nodes"]) == (1, NODES[0]) and r["us"]]
    if line:
      axes.plot([r["prefix"] for r in line], [100 * r["share"] for r in line], marker="o", label=name)
  axes.set_xscale("log", base=2)
  axes.set_xlabel("prefix, tokens")
  axes.set_ylabel("bytes that must move / time, % of a copy")
  axes.set_title(f"{jax.devices()[0].device_kind}, {rows[0]['model']}, bf16, N = {NODES[0]}, batch 1")
  axes.set_ylim(bottom=0)
  axes.grid(alpha=0.3)
  axes.legend()
  figure.savefig(path, dpi=150, bbox_inches="tight")
  plt.close(figure)
  return None


def save(report: dict[str, Any]) -> None:
  if shared.OUTPUT.value:
    whole = {"schema": results.SCHEMA, **results.environment(), **report}
    path = os.path.join(shared.OUTPUT.value, REPORT_FILE)
    write_whole(path, json.dumps(whole, indent=1) + "\n")


def main(_: list[str]) -> None:
  clock = Clock(BUDGET.value)
  models = attention_cases.parse_models(attention_cases.MODEL_NAMES.value)
  if INTERPRET.value and (TUNE.value or RECORD.value):
    raise ValueError("--interpret measures nothing on a device: it goes with neither --tune nor --record")
  if RECORD.value and len(models) < len(attention_cases.MODELS):
    raise ValueError("--record needs all --models: the record speaks for every shape")
  if INTERPRET.value:
    kernels = [kernel + INTERPRETED for kernel in KERNELS]
    checks = kernel_checks.tiny_grid()
  else:
    kernels, checks = [platform_kernel()], kernel_checks.grid(models)
  if shared.OUTPUT.value:
    os.makedirs(shared.OUTPUT.value, exist_ok=True)
  if TUNE.value:
    picks = tune(kernels[0], models, Clock(min(clock.left(), BUDGET.value / 2)))
    if picks:
      write_tiles(kernels[0], picks)
  rows = [row for kernel in kernels for row in check_all(kernel, checks, clock)]
  report: dict[str, Any] = {"checks": rows}
  save(report)
  if RECORD.value:
    record(kernels[0], rows)
  if not INTERPRET.value:
    copy = kernel_paths.copy_bandwidth()
    times = time_all(kernels[0], TIMED_MODEL.value, copy, clock)
    print_times(times, copy)
    save(report | {"copy_gbps": copy / 1e9, "times": times})
    if shared.OUTPUT.value:
      why = plot(times, os.path.join(shared.OUTPUT.value, PLOT_FILE))
      print(why or f"plot: {os.path.join(shared.OUTPUT.value, PLOT_FILE)}", file=sys.stderr)
  if any(row["status"] == "wrong" for row in rows):
    sys.exit(1)


if __name__ == "__main__":
  shared.run(main)
