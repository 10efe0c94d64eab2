"""Copies the project, breaks the copy in one place, and asks its tests."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence

from tests.mutants import Mutant, apply

ROOT = pathlib.Path(__file__).resolve().parents[2]
COPIED = ("specjax", "experiments", "tests", "pyproject.toml", "setup.py")
# The list and its runner say what is asked, not what is answered.
NOT_HASHED = ("tests/mutants/", "tests/test_mutants.py")
# A test that dies of one of these has met code that does not run at all: a bad mutant, not a caught one.
NOT_A_FAULT = ("NameError", "SyntaxError", "IndentationError", "ImportError", "AttributeError", "TypeError")
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGBUS, signal.SIGILL)


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What a run of tests said.

  Attributes:
    status: ``noticed``, ``survived``, or ``broken`` (no answer: the mutant or the run is at fault).
    by: the first test that failed, or what else was noticed or went wrong.
    seconds: of the run.
  """

  status: str
  by: str
  seconds: float


def sources(root: pathlib.Path) -> list[str]:
  """Python files and package data whose change may change an outcome, relative to the root."""
  folders = [root / name for name in COPIED if (root / name).is_dir()]
  files = [
    path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".json", ".jsonl")
  ]
  names = [path.relative_to(root).as_posix() for path in files] + ["pyproject.toml"]
  return sorted(name for name in names if not name.startswith(NOT_HASHED))


def hash_of(*parts: str | bytes) -> str:
  total = hashlib.sha256()
  for part in parts:
    data = part.encode() if isinstance(part, str) else part
    total.update(f"{len(data)}:".encode() + data)
  return total.hexdigest()[:24]


def hash_sources(root: pathlib.Path) -> str:
  return hash_of(*(part for name in sources(root) for part in (name, (root / name).read_bytes())))


def key_of(sources_hash: str, mutant: Mutant) -> str:
  """Names an outcome: other sources, or another mutant, are asked anew."""
  return hash_of(sources_hash, json.dumps(dataclasses.asdict(mutant), sort_keys=True))


def by_file(tests: Iterable[str]) -> dict[str, tuple[str, ...]]:
  """Test file → what is asked of it; a file that is asked for whole swallows its node ids."""
  asked: dict[str, set[str]] = {}
  for test in tests:
    asked.setdefault(test.partition("::")[0], set()).add(test)
  return {file: (file,) if file in ids else tuple(sorted(ids)) for file, ids in sorted(asked.items())}


class Copy:
  """One copy of the project, one program at a time in it."""

  def __init__(self, folder: pathlib.Path, cache: pathlib.Path, root: pathlib.Path = ROOT):
    self.folder = folder
    self._running: subprocess.Popen | None = None
    folder.mkdir(parents=True)
    for name in COPIED:
      if (root / name).is_dir():
        shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
      else:
        shutil.copy2(root / name, folder / name)
    self._environment = {
      **os.environ,
      "PYTHONPATH": str(folder),
      "JAX_COMPILATION_CACHE_DIR": str(cache),
      # Old bytecode would hide a change of one character in the same second.
      "PYTHONDONTWRITEBYTECODE": "1",
      "COLUMNS": "300",
    }

  def check_import(self) -> None:
    """The copy must win over an installed package, else every mutant would survive."""
    code = "import specjax, tests; print(specjax.__file__); print(tests.__file__)"
    done = subprocess.run(
      [sys.executable, "-c", code], cwd=self.folder, env=self._environment, capture_output=True, text=True
    )
    where = [pathlib.Path(line).resolve() for line in done.stdout.split()]
    if done.returncode or any(self.folder.resolve() not in path.parents for path in where):
      raise RuntimeError(f"specjax is imported from {done.stdout or done.stderr}, not from {self.folder}")

  def run_tests(self, tests: Sequence[str], timeout: float) -> Outcome:
    """``-x`` over some tests: the first failure, or none."""
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "--strict-markers"]
    command += ["-x", "-q", "-rfE", "-p", "no:cacheprovider", *tests]
    began = time.monotonic()
    process = self._running = subprocess.Popen(
      command,
      cwd=self.folder,
      env=self._environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      start_new_session=True,
    )
    try:
      output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
      return Outcome("noticed", f"hang: no answer in {timeout:.0f} s", time.monotonic() - began)
    finally:
      self.stop()
    return read(process.returncode, output, time.monotonic() - began)

  def stop(self) -> None:
    """Ends the tests that run in this copy, and what they started."""
    if self._running is not None and self._running.poll() is None:
      os.killpg(self._running.pid, signal.SIGKILL)
      self._running.wait()

  def run_mutant(self, mutant: Mutant, timeout: float) -> Outcome:
    """Breaks the copy, asks the mutant's tests, and mends the copy."""
    path = self.folder / mutant.file
    source = path.read_text(encoding="utf-8")
    path.write_text(apply(mutant, source), encoding="utf-8")
    try:
      return self.run_tests(mutant.tests, timeout)
    finally:
      path.write_text(source, encoding="utf-8")


def read(code: int, output: str, seconds: float) -> Outcome:
  """Exit code and output of pytest → outcome."""
  if code == 0:
    return Outcome("survived", "", seconds)
  if code < 0:
    name = signal.Signals(-code).name
    crashed = -code in CRASHES
    return Outcome("noticed" if crashed else "broken", f"the process died of {name}", seconds)
  failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", output, re.MULTILINE)
  if failed is None or code != 1:
    tail = " | ".join(line for line in output.splitlines()[-3:] if line)
    return Outcome("broken", f"pytest ended with {code}: {tail}", seconds)
  test, why = failed[1], (failed[2] or "").strip()
  if why.partition(":")[0].rpartition(".")[2] in NOT_A_FAULT:
    return Outcome("broken", f"{test}: {why}", seconds)
  return Outcome("noticed", test, seconds)


class Results:
  """Outcomes on disk, written after each: a killed run goes on where it was."""

  def __init__(self, path: pathlib.Path, *, fresh: bool):
    self._path = path
    self._found = {} if fresh or not path.exists() else json.loads(path.read_text(encoding="utf-8"))

  def get(self, key: str) -> Outcome | None:
    found = self._found.get(key)
    return None if found is None else Outcome(found["status"], found["by"], found["seconds"])

  def put(self, key: str, name: str, outcome: Outcome) -> None:
    self._found[key] = {"name": name, **dataclasses.asdict(outcome)}
    self._path.parent.mkdir(parents=True, exist_ok=True)
    aside = self._path.with_name(self._path.name + ".new")
    aside.write_text(json.dumps(self._found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    aside.replace(self._path)


def table(rows: Sequence[tuple[str, str, str]]) -> str:
  """Aligned columns, the last one as long as it is."""
  widths = [max(len(row[i]) for row in rows) for i in range(2)]
  return "\n".join(f"{a:{widths[0]}}  {b:{widths[1]}}  {c}".rstrip() for a, b, c in rows)
