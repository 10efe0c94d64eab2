"""Cases that are timed in turn: what `decode_bench` and `calibrate` measure with.

A case is a call that blocks until its work is done and returns the seconds it took. The cases of a group
alternate pass by pass, so that what else the machine does falls on all of them; what they compile is
compiled before.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from experiments import loops, measure, results, runtime
from specjax import decode
from specjax.tree import TokenTree
from specjax.verify import make_rule

Case = Callable[[], Any]


class Bench:
  """The model, and how cases are timed and stored.

  Attributes:
    passes: over the cases of a group.
    rounds: turns of the loop in each timed call.
    live: tokens in each row before the first round.
    compiles: programs compiled while timing; anything but 0 spoils the times.
  """

  def __init__(
    self,
    job: runtime.Job,
    directory: results.RunDirectory | None,
    *,
    passes: int,
    rounds: int,
    live: int,
  ):
    self.job, self.directory = job, directory
    self.passes, self.rounds, self.live = passes, rounds, live
    self.compiles = 0
    # Any text will do; a period of a few dozen tokens gives the drafter something to find.
    self.prompt = [int(i) % job.target.config.num_real_tokens for i in 100 + np.arange(live) % 37]

  def times(
    self, part: str, cases: Mapping[str, Case], turns: Mapping[str, int] | None = None
  ) -> dict[str, list[float]]:
    """Seconds a turn of each case, one a pass; compiled before, alternating.

    Args:
      part: what the progress is of.
      cases: each call blocks until its work is done and returns the seconds it took.
      turns: loop turns a call where they are not `rounds`.
    """
    with runtime.progress(f"{part}: compiling {len(cases)} case(s)"):
      for case in cases.values():
        case()
        case()  # a carry that came back may lie on its device in another way and compile once more
    compiles = measure.compile_count()
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    with runtime.progress(f"{part}: {self.passes} passes"):
      for number in range(self.passes):
        order = list(cases) if number % 2 else list(cases)[::-1]
        for name in order:
          seconds[name].append(cases[name]() / (turns or {}).get(name, self.rounds))
    self.compiles += measure.compile_count() - compiles
    return seconds

  def measure(self, part: str, cases: Mapping[str, Case], turns: Mapping[str, int] | None = None) -> None:
    """Times the cases as `times` does, stores a row of each and prints a table.

    The first case is what the others are relative to, pass by pass.
    """
    seconds = self.times(part, cases, turns)
    base = np.array(seconds[next(iter(cases))])
    lines = []
    for name, samples in seconds.items():
      ratios = np.array(samples) / base
      low, high = np.percentile(ratios, [25, 75])
      row = {
        "part": part,
        "case": name,
        "ms": 1e3 * float(np.median(samples)),
        "relative": float(np.median(ratios)),
        "iqr": [float(low), float(high)],
        "samples_ms": [1e3 * sample for sample in samples],
      }
      lines.append([name, f"{row['ms']:.2f}", f"{row['relative']:.3f}", f"{low:.3f} … {high:.3f}"])
      if self.directory is not None:
        self.directory.append(row)
    results.table((part, "ms", "relative", "IQR"), lines)
    print(flush=True)

  def method(self, name: str, slots: int = 512) -> runtime.Method:
    """A method whose buffer has this many slots."""
    method = runtime.make_method(self.job, name, slots // 2)
    limit = slots - method.config.drafter.tree.num_nodes
    return runtime.make_method(self.job, name, limit)

  def state(self, method: runtime.Method, batch: int = 1) -> decode.DecodeState:
    """Rows that no stop id and no budget ends."""
    prompts = [self.prompt] * batch
    return decode.prefill(
      method.weights,
      method.config,
      prompts,
      settings=runtime.make_settings(batch),
      max_new_tokens=method.config.length_limit,
      mesh=self.job.mesh,
    )

  def rounds_case(self, method: runtime.Method, batch: int = 1) -> Case:
    """Whole rounds of `decode.generate`, from the same prompt each time."""
    return self.shared_rounds_case(method, [self.state(method, batch)], self.live)

  def shared_rounds_case(self, method: runtime.Method, box: list[decode.DecodeState], live: int) -> Case:
    """Whole rounds from ``live`` tokens on, in the state that ``box`` holds and other cases use too.

    The length is traced, so that cases which differ only in it share one compiled program.
    """

    def case() -> float:
      box[0] = jax.block_until_ready(loops.rewind(box[0], live))
      start = time.perf_counter()
      box[0] = jax.block_until_ready(decode.generate(method.weights, box[0], method.config, self.rounds))
      return time.perf_counter() - start

    return case

  def loop_case(self, loop: Callable[..., Any], *args: Any) -> Case:
    """``loop(carry, *rest, rounds)``; the carry is donated and comes back."""
    carry, *rest = args
    box = [carry]

    def case() -> float:
      start = time.perf_counter()
      box[0] = jax.block_until_ready(loop(box[0], *rest, self.rounds))
      return time.perf_counter() - start

    return case


def blocked(function: Callable[[], Any]) -> Case:
  """A case that calls ``function`` once and waits for it."""

  def case() -> float:
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start

  return case


def fixed(plain: runtime.Method, shape: TokenTree, *, dynamic: bool = False, slots: int = 512):
  """A method whose every round has this topology and hardly ever accepts."""
  drafter = loops.FixedDrafter(shape, dynamic)
  limit = slots - shape.num_nodes
  config = dataclasses.replace(plain.config, drafter=drafter, rule=make_rule("greedy"), length_limit=limit)
  return runtime.Method("fixed", config, plain.weights)


def tree_of(nodes: int) -> TokenTree:
  """A tree of this many nodes with two children at every node, level by level."""
  return TokenTree(tuple((node - 1) // 2 if node else -1 for node in range(nodes)))
