"""The one result schema: a run directory, its rows, and aligned tables.

A run directory holds ``flags.txt`` (usable as ``--flagfile``), ``run.json`` (commit, versions, device,
times) and ``rows.jsonl``. Files are written aside and renamed; rows are appended one by one and flushed
to the disk, so a kill loses at most the row being written.
"""

from __future__ import annotations

import collections
import datetime
import importlib.metadata
import json
import math
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from absl import flags

from specjax.checkpoints.files import write_whole
from specjax.decode import RowResult

SCHEMA = 4
FLAGS_FILE, RUN_FILE, ROWS_FILE = "flags.txt", "run.json", "rows.jsonl"
_PACKAGES = ("jax", "jaxlib", "flax", "numpy")
# Flags of a run that another run of the same directory may change.
_FREE = frozenset({"output", "compilation_cache", "flagfile"})


def flag_lines(modules: Sequence[Any]) -> dict[str, str]:
  """``name → --name=value`` of every flag that the given modules define, set or not.

  Raises:
    ValueError: a value that a flag file cannot hold.
  """
  lines = {}
  for module in modules:
    for flag in flags.FLAGS.get_flags_for_module(module):
      if flag.name in _FREE or flag.value is None:
        continue
      text = flag.serialize()
      if "\n" in text or "\r" in text:
        raise ValueError(f"--{flag.name} holds a line break, which a flag file cannot; put it into a file")
      lines[flag.name] = text
  return lines


def environment() -> dict[str, Any]:
  """Commit, versions and the devices of this process."""
  device = jax.local_devices()[0]
  return {
    "commit": _commit(),
    "versions": {"python": platform.python_version()}
    | {name: importlib.metadata.version(name) for name in _PACKAGES},
    "platform": device.platform,
    "device_kind": device.device_kind,
    "device_count": jax.local_device_count(),
    "cpu": _cpu_model(),
    "cpu_count": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
  }


def _commit() -> str | None:
  """HEAD of the checkout this file lies in, None outside of one."""
  folder = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ".git")
  try:
    with open(os.path.join(folder, "HEAD"), encoding="utf-8") as file:
      head = file.read().strip()
    if not head.startswith("ref: "):
      return head
    name = head.removeprefix("ref: ")
    loose = os.path.join(folder, name)
    if os.path.exists(loose):
      with open(loose, encoding="utf-8") as file:
        return file.read().strip()
    with open(os.path.join(folder, "packed-refs"), encoding="utf-8") as file:
      return next((line.split()[0] for line in file if line.split()[1:] == [name]), None)
  except OSError:
    return None


def _cpu_model() -> str:
  try:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
      return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
  except (OSError, StopIteration):
    return platform.processor() or platform.machine()


class RunDirectory:
  """A run's files. Opening one that exists resumes it, if its flags are the same."""

  def __init__(self, path: str, script: str, flag_modules: Sequence[Any]):
    """
    Raises:
      ValueError: the directory holds a run with other flags, or files of something else.
    """
    self.path = path
    self._script = script
    self._lines = flag_lines(flag_modules)
    self._info: dict[str, Any] = {}
    if os.path.exists(self._file(FLAGS_FILE)):
      self._check_same()
      self._info = read_run(path)
    elif os.path.isdir(path) and any(not _unfinished(name) for name in os.listdir(path)):
      raise ValueError(f"--output = {path!r} is not empty and holds no run; name a new directory")
    else:
      os.makedirs(path, exist_ok=True)
      # run.json first: a directory with flags always has both.
      self.update(schema=SCHEMA, script=script, started=_now(), **environment())
      write_whole(self._file(FLAGS_FILE), "".join(f"{line}\n" for line in self._lines.values()))
    self.rows = read_rows(path, repair=True)

  def update(self, **info: Any) -> None:
    """Adds to ``run.json``."""
    self._info |= info
    write_whole(self._file(RUN_FILE), json.dumps(self._info, indent=2, ensure_ascii=False) + "\n")

  @property
  def info(self) -> dict[str, Any]:
    """What ``run.json`` holds."""
    return dict(self._info)

  def append(self, row: dict[str, Any]) -> None:
    """Adds a row; on the disk when this returns."""
    line = json.dumps(row, ensure_ascii=False)
    with open(self._file(ROWS_FILE), "a", encoding="utf-8") as file:
      file.write(line + "\n")
      file.flush()
      os.fsync(file.fileno())
    self.rows.append(row)

  def finish(self, **info: Any) -> None:
    """Marks the run as complete."""
    self.update(finished=_now(), **info)

  def _file(self, name: str) -> str:
    return os.path.join(self.path, name)

  def _check_same(self) -> None:
    script = read_run(self.path).get("script")
    if script != self._script:
      raise ValueError(f"--output = {self.path!r} holds a run of {script}; name a new directory")
    with open(self._file(FLAGS_FILE), encoding="utf-8") as file:
      theirs = {line.strip().split("=", 1)[0]: line.strip() for line in file if line.strip()}
    ours = {line.split("=", 1)[0]: line.strip() for line in self._lines.values()}
    for name in sorted(theirs.keys() | ours.keys()):
      if theirs.get(name) != ours.get(name):
        raise ValueError(
          f"--output = {self.path!r} holds a run with {theirs.get(name, name + ' not set')}; "
          f"now it is {ours.get(name, name + ' not set')}. Name a new directory"
        )


def _unfinished(name: str) -> bool:
  """What a kill can leave in a directory before its flags are there."""
  return name == RUN_FILE or name.endswith(".part")


def read_run(path: str) -> dict[str, Any]:
  """``run.json`` of a run directory.

  Raises:
    ValueError: no run there, or one of another schema.
  """
  file = os.path.join(path, RUN_FILE)
  if not os.path.exists(file):
    raise ValueError(f"{path}: no {RUN_FILE}; this is not a run directory")
  with open(file, encoding="utf-8") as stream:
    info = json.load(stream)
  if info.get("schema") != SCHEMA:
    raise ValueError(f"{file}: schema = {info.get('schema')!r}; this version reads {SCHEMA}")
  return info


def read_rows(path: str, *, repair: bool = False) -> list[dict[str, Any]]:
  """Rows of a run directory; a last line that a kill tore is left out (and cut off with ``repair``).

  Raises:
    ValueError: a damaged line before the last.
  """
  file = os.path.join(path, ROWS_FILE)
  if not os.path.exists(file):
    return []
  with open(file, "rb") as stream:
    data = stream.read()
  whole = data.rfind(b"\n") + 1
  rows = []
  for number, line in enumerate(data[:whole].splitlines(), start=1):
    try:
      rows.append(json.loads(line))
    except ValueError as error:
      raise ValueError(f"{file}, line {number}: not a row ({error})") from None
  if repair and whole < len(data):
    with open(file, "r+b") as stream:
      stream.truncate(whole)
      os.fsync(stream.fileno())
  return rows


def make_row(
  result: RowResult,
  *,
  question_id: Any,
  turn: int,
  category: str,
  drafter: str,
  rule: str,
  settings: dict[str, Any],
  prefill_s: float,
  decode_s: float,
  text: str,
) -> dict[str, Any]:
  """One row: a question, a turn and a method.

  ``proposed`` counts nodes, ``proposed_depth`` the deepest of each round, ``accept_counts[a]`` rounds that
  accepted a drafts, ``reach_counts[d - 1]`` rounds that reached depth d. ``accept_lengths`` are tokens
  emitted a round, bonus included; their sum is ``new_tokens``. ``overlap`` is the mean Σ min(p, q) over
  judged drafts, null where it is not known; ``node_counts`` is rounds by nodes the target ran over (1: plain
  decoding), ``width_counts`` rounds by the width that was asked for (0: none, then the method's drafters in
  order), ``missed`` tokens of rounds that asked none, before a later one that did; ``mean_logprob`` that of
  the new tokens, as --logprobs says. Seconds are the row's share of a batch.
  """
  logprobs = result.logprobs or []
  return {
    "question_id": question_id,
    "turn": turn,
    "category": category,
    "drafter": drafter,
    "rule": rule,
    "settings": settings,
    "prompt_tokens": result.prompt_tokens,
    "new_tokens": len(result.tokens),
    "rounds": result.rounds,
    "proposed": sum(result.proposed),
    "proposed_depth": sum(result.depth),
    "accepted": sum(result.accepted),
    "accept_counts": result.accept_counts,
    "reach_counts": result.reach_counts,
    "accept_lengths": result.emitted,
    "node_counts": _counts(result.nodes),
    "width_counts": _counts(result.width),
    "missed": _missed(result),
    "overlap": result.overlap,
    # A rule for cost experiments emits what the target gives no probability.
    "mean_logprob": statistics.fmean(logprobs) if logprobs and min(logprobs) > -math.inf else None,
    "prefill_s": prefill_s,
    "decode_s": decode_s,
    "finish_reason": result.finish,
    "token_ids": result.tokens,
    "text": text,
  }


def _counts(values: Sequence[int]) -> dict[str, int]:
  """How often each value is there, by the value as text."""
  return {str(value): count for value, count in sorted(collections.Counter(values).items())}


def _missed(result: RowResult) -> int:
  """Tokens committed in rounds that asked no drafter, behind which one was asked again."""
  missed = waiting = 0
  for width, emitted in zip(result.width, result.emitted, strict=True):
    if width:
      missed, waiting = missed + waiting, 0
    else:
      waiting += emitted
  return missed


def median(values: Iterable[float]) -> float:
  return statistics.median(values)


def ratio(over: float, under: float) -> float:
  """``over / under``, 0 where nothing was counted: never NaN."""
  return over / under if under else 0.0


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], write: Callable[[str], None] = print) -> None:
  """Prints an aligned table: first column to the left, the others to the right; None is a dash."""
  cells = [list(header)] + [["-" if cell is None else str(cell) for cell in row] for row in rows]
  widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
  for number, row in enumerate(cells):
    first, *rest = (
      cell.ljust(width) if column == 0 else cell.rjust(width)
      for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    write("  ".join([first, *rest]).rstrip())
    if number == 0:
      write("  ".join("-" * width for width in widths))


def _now() -> str:
  return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
