"""Processes that compile, and what is kept of their answers.

A compiler may end its process or never come back; both cost one entry, and the next request gets a new
process. Answers are appended to a JSON-lines file, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from experiments.kernels import compile_reports as reports
from experiments.kernels import devices, kernel_modules

SCHEMA = 1
# What a later run need not ask again. A crash or a timeout may have been the machine's.
FINISHED = ("ok", "refused", "error")
GROUP = 16  # requests that a process answers before another takes its place

COMMAND = (sys.executable, "-m", "experiments.kernels.compile_worker")

Request = dict[str, Any]
Answer = dict[str, Any]


class Worker:
  """One process of `experiments.kernels.compile_worker`, started again behind a crash."""

  def __init__(self, *, dumps: bool, command: Sequence[str] = COMMAND):
    """
    Args:
      dumps: libtpu writes its reports.
      command: what to start; the folder for dumps is added.
    """
    self._folder = tempfile.mkdtemp(prefix="specjax-compile-")
    self._dumps = os.path.join(self._folder, "dumps")
    self._command = [*command, self._dumps]
    self._environment = devices.worker_environment(self._dumps if dumps else None)
    self._process: subprocess.Popen | None = None

  def ask(self, request: Request, timeout: float) -> Answer:
    """The answer, or what became of the process instead."""
    if self._process is None:
      self._start()
    process, start = self._process, time.perf_counter()
    try:
      process.stdin.write(json.dumps(request) + "\n")
      process.stdin.flush()
      line = self._line(start + timeout)
    except BrokenPipeError:
      line = ""
    if line is None:
      self._stop()
      return {"status": "timeout", "error": f"no answer in {timeout:g} s (--timeout)", "seconds": timeout}
    if not line:
      code = process.wait()
      with open(os.path.join(self._folder, "log"), encoding="utf-8", errors="replace") as log:
        message = reports.last_words(log.read(), code)
      self._stop()
      return {"status": "crash", "error": message, "seconds": time.perf_counter() - start}
    return json.loads(line)

  def _line(self, deadline: float) -> str | None:
    """The next line, empty when the process is gone, None past the deadline."""
    out = self._process.stdout
    while (left := deadline - time.perf_counter()) > 0:
      if select.select([out], [], [], left)[0]:
        return out.readline()
    return None

  def _start(self) -> None:
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    with open(os.path.join(self._folder, "log"), "w", encoding="utf-8") as log:
      self._process = subprocess.Popen(
        self._command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=self._environment | {"PYTHONPATH": path},
      )

  def _stop(self) -> None:
    if self._process is not None:
      self._process.kill()
      self._process.wait()
      for pipe in (self._process.stdin, self._process.stdout):
        with contextlib.suppress(BrokenPipeError):
          pipe.close()
      self._process = None

  def kill(self) -> None:
    """From another thread: whoever asks gets an answer now."""
    process = self._process
    if process is not None:
      process.kill()

  def close(self) -> None:
    self._stop()
    shutil.rmtree(self._folder, ignore_errors=True)


def key(request: Request) -> str:
  """What an answer depends on: the request, the kernel's (or the package's) source, the version of JAX."""
  whole = {
    "schema": SCHEMA,
    "request": request,
    "source": kernel_modules.source_hash(request.get("kernel")),
    "jax": jax.__version__,
  }
  return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:24]


class Store:
  """Answers by key; in a file where a path is given."""

  def __init__(self, path: str | None):
    self._path, self._answers = path, {}
    self._lock = threading.Lock()
    if path is not None and os.path.exists(path):
      with open(path, encoding="utf-8") as file:
        for line in file:
          with contextlib.suppress(ValueError):  # a line that a kill tore
            entry = json.loads(line)
            self._answers[entry["key"]] = entry["answer"]

  def get(self, request: Request) -> Answer | None:
    answer = self._answers.get(key(request))
    return answer if answer is not None and answer["status"] in FINISHED else None

  def put(self, request: Request, answer: Answer) -> None:
    entry = {"key": key(request), "request": request, "answer": answer}
    with self._lock:
      self._answers[entry["key"]] = answer
      if self._path is not None:
        with open(self._path, "a", encoding="utf-8") as file:
          file.write(json.dumps(entry) + "\n")
          file.flush()
          os.fsync(file.fileno())


def run(
  requests: Iterable[Request],
  store: Store,
  *,
  jobs: int,
  timeout: float,
  done: Callable[[Request, Answer], None],
  make_worker: Callable[..., Worker] = Worker,
) -> None:
  """Answers all requests, those in the store at once; ``done`` is called for each, from any thread.

  A process answers up to `GROUP` requests of one kernel and target, or one whole round.
  """
  groups: dict[tuple, list[Request]] = {}
  for request in requests:
    kept = store.get(request)
    if kept is not None:
      done(request, kept)
    else:
      name = json.dumps(request) if "round" in request else request["kernel"]
      groups.setdefault((name, request["target"]), []).append(request)
  pieces: queue.SimpleQueue = queue.SimpleQueue()
  for group in groups.values():
    for start in range(0, len(group), GROUP):
      pieces.put(group[start : start + GROUP])

  stop, failures, workers = threading.Event(), [], []

  def serve() -> None:
    while not stop.is_set():
      try:
        piece = pieces.get_nowait()
      except queue.Empty:
        return
      worker = make_worker(dumps="round" not in piece[0])
      workers.append(worker)
      try:
        for request in piece:
          answer = worker.ask(request, timeout)
          if stop.is_set():
            return
          store.put(request, answer)
          done(request, answer)
      except Exception as error:
        failures.append(error)
        stop.set()
      finally:
        worker.close()

  threads = [threading.Thread(target=serve) for _ in range(min(jobs, pieces.qsize()))]
  for thread in threads:
    thread.start()
  try:
    for thread in threads:
      thread.join()
  except KeyboardInterrupt:
    stop.set()
    for worker in workers:
      worker.kill()
    raise
  if failures:
    raise failures[0]
