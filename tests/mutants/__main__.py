"""``python -m tests.mutants``: breaks the core in many ways, one at a time; every one must be noticed.

Exit code 0: all were noticed. 1: some survived, or gave no answer, or the tests fail without any fault.
2: a wrong flag, or a mutant whose text is not in the sources any more.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import pathlib
import queue
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence

from tests.mutants import Mutant, StaleMutant, apply, runner
from tests.mutants.catalogue import MUTANTS
from tests.mutants.runner import ROOT, Copy, Outcome, Results


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
  parser.add_argument("--only", default="", help="mutants whose name or file holds this text")
  parser.add_argument("--jobs", type=int, default=1, help="copies of the project worked on at once")
  parser.add_argument("--timeout", type=float, default=600, help="seconds a mutant may take; then it hangs")
  parser.add_argument("--fresh", action="store_true", help="forget earlier outcomes")
  parser.add_argument("--list", action="store_true", help="names the mutants and what they break")
  parser.add_argument(
    "--results", type=pathlib.Path, default=ROOT / "runs" / "mutants.json", help="file of outcomes"
  )
  flags = parser.parse_args(arguments)
  if flags.jobs < 1:
    parser.error(f"--jobs={flags.jobs}; it must be at least 1")
  if not flags.timeout > 0:
    parser.error(f"--timeout={flags.timeout:g}; it must be positive")
  return flags


def say(line: str) -> None:
  print(line, file=sys.stderr, flush=True)


class Progress:
  """One line an outcome; also keeps those that need not be asked again."""

  def __init__(self, total: int, results: Results, final: Sequence[str]):
    self._total, self._results, self._final = total, results, final
    self._lock, self._done = threading.Lock(), 0

  def tell(self, key: str, name: str, outcome: Outcome, *, kept: bool = False) -> None:
    with self._lock:
      self._done += 1
      if not kept and outcome.status in self._final:
        self._results.put(key, name, outcome)
      time_taken = "kept" if kept else f"{outcome.seconds:.0f} s"
      say(f"{self._done:3}/{self._total} {outcome.status:8} {time_taken:>6}  {name}  {outcome.by}")


def run(mutants: Sequence[Mutant], flags: argparse.Namespace, folder: pathlib.Path) -> dict[str, Outcome]:
  """Outcomes by name: first of the tests as they are, by file, then of the mutants."""
  results, cache = Results(flags.results, fresh=flags.fresh), folder / "compiled"
  made = [Copy(folder / f"copy{job}", cache) for job in range(flags.jobs)]
  copies: queue.Queue[Copy] = queue.Queue()
  for copy in made:
    copy.check_import()
    copies.put(copy)
  # Of the copy: the project may change while the tests run.
  sources = runner.hash_sources(folder / "copy0")

  def answers(asked, *final):
    """``[(name, key, what to do with a copy)] → {name: outcome}``, kept ones first."""
    progress, found, left = Progress(len(asked), results, final), {}, []
    for name, key, work in asked:
      found[name] = results.get(key)
      if found[name] is None:
        left.append((name, key, work))
      else:
        progress.tell(key, name, found[name], kept=True)

    def one(name, key, work):
      copy = copies.get()
      try:
        found[name] = work(copy)
      finally:
        copies.put(copy)
      progress.tell(key, name, found[name])

    with concurrent.futures.ThreadPoolExecutor(flags.jobs) as pool:
      try:
        for future in [pool.submit(one, *task) for task in left]:
          future.result()
      except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for copy in made:
          copy.stop()
        raise
    return found

  files = runner.by_file(test for mutant in mutants for test in mutant.tests)
  say(f"{len(files)} test files without a fault")
  whole = answers(
    [
      (file, runner.hash_of(sources, *ids), lambda copy, ids=ids: copy.run_tests(ids, 3 * flags.timeout))
      for file, ids in files.items()
    ],
    "survived",
  )
  failing = [f"{file}: {outcome.by}" for file, outcome in whole.items() if outcome.status != "survived"]
  if failing:
    raise RuntimeError("the tests fail without any fault: " + "; ".join(failing))
  say(f"{len(mutants)} mutants")
  return answers(
    [
      (mutant.name, runner.key_of(sources, mutant), lambda copy, m=mutant: copy.run_mutant(m, flags.timeout))
      for mutant in mutants
    ],
    "noticed",
    "survived",
  )


def main(arguments: Sequence[str] | None = None) -> int:
  flags = parse(arguments)
  mutants = [mutant for mutant in MUTANTS if flags.only in mutant.name or flags.only in mutant.file]
  if flags.list:
    print(runner.table([(mutant.name, mutant.file, mutant.breaks) for mutant in mutants]))
    return 0
  try:
    if not mutants:
      raise ValueError(f"--only={flags.only}: no mutant has it in its name or file")
    for mutant in mutants:
      apply(mutant, (ROOT / mutant.file).read_text(encoding="utf-8"))
  except (ValueError, OSError) as error:
    say(f"error: {error}")
    return 2
  began = time.monotonic()
  signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C: nothing is left behind
  try:
    with tempfile.TemporaryDirectory(prefix="specjax-mutants-") as folder:
      outcomes = run(mutants, flags, pathlib.Path(folder))
  except StaleMutant as error:
    say(f"error: {error}")
    return 2
  except (RuntimeError, OSError) as error:
    say(f"error: {error}")
    return 1
  except KeyboardInterrupt:
    say("interrupted; what is finished is kept")
    return 130
  print(
    runner.table(
      [("mutant", "outcome", "first test that failed")]
      + [(mutant.name, outcomes[mutant.name].status, outcomes[mutant.name].by) for mutant in mutants]
    )
  )
  noticed = sum(outcome.status == "noticed" for outcome in outcomes.values())
  print(f"{noticed} of {len(mutants)} noticed in {time.monotonic() - began:.0f} s")
  return 0 if noticed == len(mutants) else 1


if __name__ == "__main__":
  sys.exit(main())
