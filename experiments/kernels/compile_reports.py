"""Numbers out of compiler reports: ptxas, XLA's launch list, libtpu's schedules; occupancy; HLO counts.

Everything takes text, so that it can be tested without the compilers.
"""

from __future__ import annotations

import collections
import math
import re
from typing import NamedTuple

from experiments.kernels.devices import Gpu

# --- GPU ---------------------------------------------------------------------------------------------


class PtxasEntry(NamedTuple):
  """What ptxas says about a kernel: bytes, and registers a thread."""

  registers: int
  stack: int
  spill_stores: int
  spill_loads: int
  shared: int  # static


_ENTRY = re.compile(
  r"Compiling entry function '(?P<name>[^']+)'.*?"
  r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
  r".*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
  re.DOTALL,
)


def parse_ptxas(text: str) -> dict[str, PtxasEntry]:
  """Kernels by name, from the output of ``ptxas -v``."""
  entries = {}
  for match in _ENTRY.finditer(text):
    shared = re.search(r"(\d+) bytes smem", match["rest"])
    entries[match["name"]] = PtxasEntry(
      int(match["registers"]),
      int(match["stack"]),
      int(match["stores"]),
      int(match["loads"]),
      int(shared[1]) if shared else 0,
    )
  return entries


class Launch(NamedTuple):
  """A kernel launch of an XLA GPU program."""

  name: str
  grid: tuple[int, ...]
  threads: tuple[int, ...]
  shared: int

  @property
  def programs(self) -> int:
    return math.prod(self.grid)


_LAUNCH = re.compile(
  r"(?P<name>\S+) grid: \[(?P<grid>[\d, ]+)\] threads: \[(?P<threads>[\d, ]+)\]\s+"
  r"shared_memory: (?P<shared>\d+)"
)


def parse_launches(text: str) -> list[Launch]:
  """Launches, from XLA's ``thunk_sequence`` dump."""
  numbers = lambda part: tuple(int(n) for n in part.split(","))
  return [
    Launch(m["name"], numbers(m["grid"]), numbers(m["threads"]), int(m["shared"]))
    for m in _LAUNCH.finditer(text)
  ]


class Occupancy(NamedTuple):
  """What can be resident on a multiprocessor at once, and what limits it."""

  programs: int
  warps: int
  limit: str


def occupancy(gpu: Gpu, registers: int, shared: int, threads: int) -> Occupancy:
  """The arithmetic of CUDA's occupancy calculator.

  Args:
    gpu: limits.
    registers: a thread.
    shared: bytes a program (block), static and dynamic.
    threads: a program.
  """
  up = lambda value, unit: -(-value // unit) * unit
  warps = -(-threads // gpu.warp)
  # Registers are given out by warps; the four schedulers each have a quarter of the file.
  by_registers = gpu.registers // up(max(registers, 1) * gpu.warp, gpu.register_unit) // 4 * 4
  limits = {
    "registers": by_registers // warps,
    "shared memory": gpu.shared_bytes // up(shared + gpu.reserved_shared, gpu.shared_unit),
    "warps": gpu.max_warps // warps,
    "blocks": gpu.max_blocks,
  }
  limit = min(limits, key=limits.get)
  return Occupancy(limits[limit], limits[limit] * warps, limit)


# --- TPU ---------------------------------------------------------------------------------------------


class Schedule(NamedTuple):
  """A kernel's static schedule: what is in the program, not how often a loop runs it."""

  bundles: int
  mxu: float  # share of the matrix unit slots of all bundles that are used
  fills: int  # loads of spilled registers
  spills: int  # stores of them


def parse_utilization(text: str) -> Schedule:
  """From ``final_hlo-static-per-bundle-utilization``: a header of slots, their capacity, a line a bundle.

  Raises:
    ValueError: a report of another form.
  """
  head, _, body = text.partition("UTILIZATION:")
  lines = [line for line in head.splitlines() if line.strip()]
  names = next((line.split(",") for line in lines if "MXU" in line), None)
  capacity = next((line.split() for line in lines if re.fullmatch(r"[\d\s]+", line)), None)
  if names is None or capacity is None or len(names) != len(capacity):
    raise ValueError("libtpu's utilization report has another form than this version reads")
  column = {name.strip(): i for i, name in enumerate(names)}
  used = collections.Counter()
  bundles = 0
  for line in body.splitlines():
    cells = line.split()
    if len(cells) == len(names) and all(cell.isdigit() for cell in cells):
      bundles += 1
      for name, i in column.items():
        used[name] += int(cells[i])
  total = bundles * int(capacity[column["MXU"]])
  return Schedule(bundles, used["MXU"] / max(total, 1), used["VLOAD:FILL"], used["VSTORE:SPILL"])


_ALLOCATION = re.compile(
  r"^\s*#allocation\d+ \[[^\n]*?space=vmem, size = (0x[0-9a-f]+), scoped", re.MULTILINE
)


def parse_vmem(text: str) -> int:
  """Bytes of a kernel's scoped VMEM allocations, from libtpu's ``original`` program.

  Windows of the pipeline count with their double buffers. Scopes that are never live together are added
  up too, so it is at most this.
  """
  return sum(int(size, 16) for size in _ALLOCATION.findall(text))


def tpu_kernels(hlo: str) -> list[str]:
  """Names of the Pallas kernels in an optimized TPU program; libtpu's files carry them."""
  return re.findall(r"%?([\w.-]+) = [^\n]*custom-call\([^\n]*custom_call_target=\"tpu_custom_call\"", hlo)


def gpu_kernels(hlo: str) -> list[str]:
  """Names of the Pallas-Triton kernels in an optimized GPU program."""
  return re.findall(r"custom_call_target=\"__gpu\$xla\.gpu\.triton\"[^\n]*?\bname = \"([^\"]+)\"", hlo)


# --- optimized HLO -----------------------------------------------------------------------------------


class Copies(NamedTuple):
  """Copies of whole arrays in an optimized program, where they stand."""

  in_loops: int  # each turn
  staged: int  # each turn, between device memory and VMEM, where XLA chose to keep an array that is small
  outside: int  # each call


_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) .*\{$")
_CALLED = re.compile(r"\b(body|condition|calls|to_apply|branch_computations)=(?:\{([^}]*)\}|%?([\w.-]+))")


def copies_of(hlo: str, shape: str) -> Copies:
  """Copies of arrays of a shape (``bf16[1,8,2304,128]``), into another layout or memory too."""
  found: dict[str, int] = collections.Counter()
  staged: dict[str, int] = collections.Counter()
  calls: dict[str, set[str]] = collections.defaultdict(set)
  bodies: set[str] = set()
  here = ""
  for line in hlo.splitlines():
    if match := _COMPUTATION.match(line):
      here = match[1]
    for match in _CALLED.finditer(line):
      names = {name.strip().lstrip("%") for name in (match[2] or match[3]).split(",")}
      calls[here] |= names
      if match[1] == "body":
        bodies |= names
    match = re.search(r"= (?P<type>\(?[^=]*?) (?:copy|copy-start)\(", line)
    if match and shape in match["type"]:
      # A started copy has both ends in its type; S(1) is VMEM.
      ends = re.findall(re.escape(shape) + r"\{([^}]*)\}", match["type"])
      (staged if len({"S(1)" in end for end in ends}) == 2 else found)[here] += 1
  looped, open_ = set(), list(bodies)
  while open_:
    name = open_.pop()
    if name not in looped:
      looped.add(name)
      open_ += calls[name]
  inside, via_vmem = (sum(c for name, c in counts.items() if name in looped) for counts in (found, staged))
  outside = sum(found.values()) + sum(staged.values()) - inside - via_vmem
  return Copies(inside, via_vmem, outside)


def collectives(hlo: str) -> dict[str, int]:
  """How often each collective stands in an optimized program; started ones count once."""
  names = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
  return {name: len(re.findall(rf" {name}(?:-start)?\(", hlo)) for name in names}


# --- errors ------------------------------------------------------------------------------------------

_NOISE = re.compile(r"^(\s|Traceback|File |E\d{4}|W\d{4}|I\d{4}|\[|-{3,}|={3,}|\*|#|@)")


def one_line(error: str, limit: int = 240) -> str:
  """The first line of a message that says something, shortened."""
  lines = [line.strip() for line in error.splitlines() if line.strip()]
  said = next((line for line in lines if not _NOISE.match(line)), lines[0] if lines else "no message")
  return said if len(said) <= limit else said[: limit - 1] + "…"


_FATAL = re.compile(r"LLVM ERROR|F\d{4} |Check failed|Fatal|terminate called")


def last_words(stderr: str, code: int | None) -> str:
  """Why a process that compiled went away: the fatal message in its log, or how it ended."""
  lines = [line.strip() for line in stderr.splitlines() if line.strip()]
  fatal = [
    line for line in lines if re.search(r"LLVM ERROR|F\d{4} |Check failed|Fatal|terminate called", line)
  ]
  what = one_line(fatal[0]) if fatal else (one_line(lines[-1]) if lines else "no message")
  how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
  return f"the compiler ended the process ({how}): {what}"
