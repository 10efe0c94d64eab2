"""Compiles the kernels for TPUs and GPUs that are not there, and says what the compilers made of them.

  python -m experiments.compile_kernels [--targets=v5e,h100] [--quick] [--output=runs/compiled]
  python -m experiments.compile_kernels --write_tiles

Needs the extra ``kernels`` (compilers, no devices); all of it takes some 15 to 20 minutes on two cores.
Every kernel × shape class is compiled for real, each kernel and target in processes of its own; a line a
compile:

- GPU: registers a thread, spilled bytes (stores / loads), shared memory, grid, and how many programs and
  warps a multiprocessor can hold;
- TPU: scoped VMEM, VLIW bundles of the program, the share of matrix unit slots in them, spilled registers.
  Counts are static: a loop's body counts once;
- both: bytes moved by the kernel's grid and index maps, their ratio to the bytes that have to be read and
  written once (live keys and values, queries, outputs), and the floor: the moved bytes at the published
  bandwidth of the device. No time here is measured: that is for `experiments.kernel_bench`.

Then whole decoding loops with abstract weights (--nowhole_rounds leaves them out): the compiler's memory
analysis, copies of whole caches, collectives. A model that does not fit reads as the compiler's error.

The exit code is 1 if anything did not compile, spilled, or overflowed a memory; a whole model that does
not fit a chip, and says so, is not a failure. With --output, answers are kept and not asked for again while
the kernel's source and the version of JAX are the same.

--write_tiles compiles candidate tiles in the kernel's own order, until one compiles for every case of its
class without spills, and writes it into the package.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

import jax
import tqdm
from absl import flags

from experiments import flags as shared
from experiments import results
from experiments.kernels import (
  attention_cases,
  compile_pool,
  compile_tables,
  compile_tiles,
  devices,
  kernel_modules,
  whole_round,
)
from experiments.kernels.compile_pool import Answer, Request
from experiments.kernels.devices import Target
from specjax.checkpoints.files import write_whole
from specjax.kernels.tree_attention.api import KERNELS

TARGET_NAMES = flags.DEFINE_list("targets", list(devices.TARGETS), "Devices to compile for.")
KERNEL_NAMES = flags.DEFINE_list("kernels", list(KERNELS), "Kernels to compile.")
# `decode_bench` has a flag of this name and type; one process may import both.
QUICK = flags.DEFINE_bool("quick", False, "One shape a target, no whole rounds.", allow_override=True)
WHOLE_ROUNDS = flags.DEFINE_bool(
  "whole_rounds", True, f"Also decoding loops, for {', '.join(whole_round.TARGETS)}."
)
WRITE_TILES = flags.DEFINE_bool("write_tiles", False, "Compile candidate tiles and write the best.")
JOBS = flags.DEFINE_integer("jobs", min(os.cpu_count() or 1, 8), "Processes that compile at once.", 1, 64)
TIMEOUT = flags.DEFINE_float("timeout", 300.0, "Seconds for one compile; then its process is ended.", 1.0)
TABLE_FILE, REPORT_FILE, ENTRIES_FILE = "report.md", "report.json", "entries.jsonl"


def kernel_requests(
  targets: Sequence[Target], kernels: Sequence[str], models: Sequence[str]
) -> list[Request]:
  """A request for each target, its kernel and each case, with the tile recorded for the target."""
  requests = []
  for target in targets:
    if target.kernel in kernels:
      cases = [attention_cases.quick_case(models)] if QUICK.value else attention_cases.default_cases(models)
      requests += [
        {
          "kernel": target.kernel,
          "target": target.name,
          "case": case.json(),
          "tile": kernel_modules.recorded_tile(target, case),
        }
        for case in cases
      ]
  return requests


def round_requests(targets: Sequence[Target], kernels: Sequence[str], models: Sequence[str]) -> list[Request]:
  """Whole rounds of the models and targets that have one; with kernels only where they are asked for."""
  if QUICK.value or not WHOLE_ROUNDS.value:
    return []
  return [
    {"target": target.name, "round": request.json()}
    for target in targets
    for request in whole_round.default_rounds(target, models)
    if request.implementation in ("reference", *kernels)
  ]


def ask(requests: Sequence[Request], store: compile_pool.Store, what: str) -> list[Answer]:
  """Answers in the order of the requests, with a bar on standard error."""
  answers: dict[str, Answer] = {}
  lock = threading.Lock()
  with tqdm.tqdm(total=len(requests), unit=what, file=sys.stderr) as bar:

    def done(request: Request, answer: Answer) -> None:
      with lock:
        answers[compile_pool.key(request)] = answer
        if answer["status"] not in ("ok", "refused"):
          bar.write(f"{compile_tables.label(request)}: {answer['error']}", file=sys.stderr)
        bar.update()

    compile_pool.run(requests, store, jobs=JOBS.value, timeout=TIMEOUT.value, done=done)
  return [answers[compile_pool.key(request)] for request in requests]


def failures(requests: Sequence[Request], answers: Sequence[Answer]) -> list[str]:
  """What makes the exit code 1, a line each."""
  found = []
  for request, answer in zip(requests, answers, strict=True):
    what = compile_tables.complaint(request, answer)
    if what:
      found.append(f"{compile_tables.label(request)}: {what}")
  return found


def compile_all(store, targets, kernels, models) -> list[str]:
  """Compiles, prints and writes the tables; returns what failed."""
  requests = kernel_requests(targets, kernels, models)
  answers = ask(requests, store, "kernel")
  rounds = round_requests(targets, kernels, models)
  round_answers = ask(rounds, store, "round") if rounds else []
  tables = compile_tables.tables(requests, answers) + compile_tables.round_tables(rounds, round_answers)
  for title, header, lines in tables:
    print(f"\n{title}\n")
    results.table(header, lines)
  print(f"\n{compile_tables.NOTES}")
  failed = failures([*requests, *rounds], [*answers, *round_answers])
  if shared.OUTPUT.value:
    _write(tables, [*requests, *rounds], [*answers, *round_answers], failed)
  return failed


def _write(tables, requests, answers, failed) -> None:
  folder = shared.OUTPUT.value
  entries: list[dict[str, Any]] = [r | {"answer": a} for r, a in zip(requests, answers, strict=True)]
  report = {"schema": results.SCHEMA, "jax": jax.__version__, "failed": failed, "entries": entries}
  write_whole(os.path.join(folder, REPORT_FILE), json.dumps(report, indent=1) + "\n")
  text = "\n".join(compile_tables.markdown(*table) for table in tables)
  write_whole(os.path.join(folder, TABLE_FILE), f"{text}\n{compile_tables.NOTES}\n")


def write_tiles(store, targets, kernels, models) -> list[str]:
  """Compiles candidates until one is clean, writes a tiles file a target; returns what failed."""
  chosen = [target for target in targets if target.kernel in kernels]
  plan = compile_tiles.plan(chosen, models, kernel_modules.MAX_CANDIDATES.value)
  while open_groups := [group for group in plan if not group.done]:
    asked = [group.requests() for group in open_groups]
    answers = iter(ask([request for requests in asked for request in requests], store, "tile"))
    for group, requests in zip(open_groups, asked, strict=True):
      group.take([next(answers) for _ in requests])
  results.table(compile_tiles.HEADER, [group.describe() for group in plan])
  for target in chosen:
    picks = {group.key: group.best for group in plan if group.target == target and group.best}
    if picks:
      print(f"wrote {compile_tiles.write(target, picks)}")
  return [
    f"{group.target.name} {group.key}: no candidate without spills" for group in plan if 0 not in group.spills
  ]


def main(_: list[str]) -> None:
  targets = devices.parse_targets(TARGET_NAMES.value)
  kernels = kernel_modules.parse_kernels(KERNEL_NAMES.value)
  models = attention_cases.parse_models(attention_cases.MODEL_NAMES.value)
  if not any(target.kernel in kernels for target in targets):
    raise ValueError(
      f"--kernels = {','.join(kernels)!r} is for none of --targets = {','.join(TARGET_NAMES.value)!r}"
    )
  if QUICK.value and WRITE_TILES.value:
    raise ValueError("--quick and --write_tiles do not go together: tiles come from every class of shapes")
  devices.check_compilers(targets)
  path = None
  if shared.OUTPUT.value:
    os.makedirs(shared.OUTPUT.value, exist_ok=True)
    path = os.path.join(shared.OUTPUT.value, ENTRIES_FILE)
  store = compile_pool.Store(path)
  failed = (write_tiles if WRITE_TILES.value else compile_all)(store, targets, kernels, models)
  if failed:
    print(f"\n{len(failed)} failed:", *failed, sep="\n  ", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
  shared.run(main)
