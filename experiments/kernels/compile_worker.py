"""A process that compiles for devices that are not there: requests in, answers out, a JSON line each.

A fatal error of a compiler ends the process; who asks (`experiments.kernels.compile_pool`) starts another
one behind the request that did it. ``python -m experiments.kernels.compile_worker FOLDER``; the folder takes
dumps.
"""

from __future__ import annotations

import functools
import glob
import json
import math
import os
import shutil
import subprocess
import sys
import time
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from experiments.kernels import attention_cases, devices, kernel_modules, whole_round
from experiments.kernels import compile_reports as reports
from experiments.kernels.attention_cases import Case
from experiments.kernels.devices import Target


def compile_kernel(target: Target, kernel: str, case: Case, tile: dict | None, dumps: str) -> dict[str, Any]:
  """Compiles a kernel for a case and reads the reports; raises what the compiler raises."""
  arguments = attention_cases.shapes(case, SingleDeviceSharding(_device(target.name)))
  refusal = kernel_modules.load(kernel).refusal(arguments.q, arguments.k)
  if refusal:
    return {"status": "refused", "error": refusal}
  attention = kernel_modules.attention(kernel, case, tile, target)
  start = time.perf_counter()
  lowered = jax.jit(attention).lower(*arguments)
  options = {"xla_dump_to": dumps} if target.platform == "cuda" else None
  compiled = lowered.compile(compiler_options=options)
  report = {"status": "ok", "compile_s": time.perf_counter() - start}
  read = gpu_report if target.platform == "cuda" else tpu_report
  report |= read(target, compiled.as_text(), dumps)
  return report | kernel_modules.cost(kernel, case, tile, target)._asdict()


@functools.cache
def _device(name: str):
  return devices.topology_devices(devices.TARGETS[name])[0]


def gpu_report(target: Target, hlo: str, dumps: str) -> dict[str, Any]:
  """Registers, spills, shared memory, grid and occupancy of the program's Pallas kernels.

  Where there are several (a second one puts parts together) spills are summed, and the rest is of the one
  with the most registers: it is the one that reads the keys.
  """
  names = reports.gpu_kernels(hlo)
  launches = []
  for path in glob.glob(os.path.join(dumps, "*thunk_sequence.txt")):
    launches += [launch for launch in reports.parse_launches(_read(path)) if launch.name in names]
  entries: dict[str, reports.PtxasEntry] = {}
  for path in sorted(glob.glob(os.path.join(dumps, "*.ptx"))):
    if os.path.getsize(path):
      command = [devices.ptxas(), "-v", f"-arch={target.gpu.arch}", path, "-o", os.devnull]
      done = subprocess.run(command, capture_output=True, text=True)
      if done.returncode:
        raise ValueError(f"ptxas: {reports.one_line(done.stderr)}")
      entries |= reports.parse_ptxas(done.stderr)
  ours = [(launch, entries[launch.name]) for launch in launches if launch.name in entries]
  if not ours:
    raise ValueError(f"no launch of a Pallas kernel (the program holds {names})")
  launch, entry = max(ours, key=lambda pair: pair[1].registers)
  threads = math.prod(launch.threads)
  resident = reports.occupancy(target.gpu, entry.registers, launch.shared + entry.shared, threads)
  return {
    "kernels": len(ours),
    "registers": entry.registers,
    "spill_stores": sum(e.spill_stores for _, e in ours),
    "spill_loads": sum(e.spill_loads for _, e in ours),
    "shared": launch.shared + entry.shared,
    "grid": list(launch.grid),
    "threads": threads,
    "programs": launch.programs,
    "resident_programs": resident.programs,
    "resident_warps": resident.warps,
    "limited_by": resident.limit,
  }


def tpu_report(target: Target, hlo: str, dumps: str) -> dict[str, Any]:
  """VMEM, bundles, use of the matrix units and spills of the program's Pallas kernels, summed."""
  names = reports.tpu_kernels(hlo)
  if not names:
    raise ValueError("no Pallas kernel in the program")
  vmem, schedules = [], []
  for name in names:
    files = os.path.join(dumps, f"*-{glob.escape(name)}-[0-9]*-")
    program = sorted(glob.glob(files + "original.txt"))
    schedule = sorted(glob.glob(files + "final_hlo-static-per-bundle-utilization.txt"))
    if not program or not schedule:
      raise ValueError(f"libtpu wrote no report of kernel {name}")
    vmem.append(reports.parse_vmem(_read(program[-1])))
    schedules.append(reports.parse_utilization(_read(schedule[-1])))
  bundles = sum(s.bundles for s in schedules)
  return {
    "kernels": len(names),
    "vmem": max(vmem),
    "bundles": bundles,
    "mxu": sum(s.mxu * s.bundles for s in schedules) / max(bundles, 1),
    "spill_stores": sum(s.spills for s in schedules),
    "spill_loads": sum(s.fills for s in schedules),
  }


def _read(path: str) -> str:
  with open(path, encoding="utf-8", errors="replace") as file:
    return file.read()


def answer(request: dict[str, Any], dumps: str) -> dict[str, Any]:
  """What came of a request; an error of the compiler is an answer too."""
  _empty(dumps)
  start = time.perf_counter()
  target = devices.TARGETS[request["target"]]
  try:
    if "round" in request:
      result = {"status": "ok"}
      result |= whole_round.compile_round(target, whole_round.Round(**request["round"]))
    else:
      case = Case(**request["case"])
      result = compile_kernel(target, request["kernel"], case, request["tile"], dumps)
  except Exception as error:  # compilers raise all kinds; each is one entry's result
    result = {"status": "error", "error": reports.one_line(str(error) or type(error).__name__)}
  return result | {"seconds": time.perf_counter() - start}


def _empty(folder: str) -> None:
  shutil.rmtree(folder, ignore_errors=True)
  os.makedirs(folder, exist_ok=True)


def main() -> None:
  # Compilers print to standard output; answers have a file of their own.
  answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
  os.dup2(2, 1)
  for line in sys.stdin:
    print(json.dumps(answer(json.loads(line), sys.argv[1])), file=answers, flush=True)


if __name__ == "__main__":
  main()
