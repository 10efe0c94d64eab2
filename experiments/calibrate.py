"""Measures what rounds cost on this device for a target and its drafters, and writes the calibration file.

  python -m experiments.calibrate [--quick] [--drafters="prompt_lookup,self_speculation[layers=4]"]
    [--output=runs/calibration]

Cost models, and the choice of a round's width, read the file (`specjax.analysis.CostTable`). Measured are

- whole rounds (verify, rule, commit, in the compiled loop) by nodes, batch and live length, with a draft that
  costs nothing; chains stand for trees, whose rounds of as many nodes were measured equal within 5 %;
- each drafter's draft, by batch and live length: rounds with it less rounds with a free one of as many
  nodes, one behind the other. So it holds what only a whole round shows: reading again weights that the
  target's have driven from the caches, the drafter's part of a commit, what a tree costs beyond a chain, and
  what verification saves where layers of the target drafted;
- what a drafter pays a token that it has not seen yet, from drafts alone;
- of the rounds: rule and commit, by nodes;
- prefill chunks by width, and the host's share of a call, which is taken off the rounds;
- each drafter's acceptance on --questions (the shipped prompts), at --temperature.

Figures are medians over passes in which the cases of a batch and live length alternate; everything is
compiled before. Live lengths are traced: a batch compiles once a number of nodes. Rounds begin at the live
length; free drafts are hardly ever accepted, so that they end --rounds_a_call tokens further on.

A killed run goes on where it was: its rows are in --output, or beside the calibration file until that is
written.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from absl import flags

from experiments import bench as timing
from experiments import calibration, calibration_tables, choice, loops, measure, questions, results, runtime
from experiments import flags as shared
from experiments.methods import parse_method
from specjax import decode, options, text
from specjax.checkpoints.shipped import shipped_heads
from specjax.tree import MAX_NODES, TokenTree
from specjax.verify import make_rule

# Flags that other scripts have too, of the same type and default; one process may import both.
DRAFTERS = flags.DEFINE_string(
  "drafters",
  "",
  "Drafters to measure, with commas between, options in brackets; of adaptive[of=…] all widths. "
  "Default: adaptive[of=…] of prompt lookup and of the trained heads that are shipped for --model.",
  allow_override=True,
)
BATCHES = flags.DEFINE_list("batches", None, "Numbers of rows. Default: 1,4, quick 1.", allow_override=True)
LIVES = flags.DEFINE_list("lives", None, "Tokens in each row. Default: 64,256,1024, quick 64,512.")
NODES = flags.DEFINE_list(
  "nodes",
  None,
  "Nodes a round, the root included. Default: 1,2,3,4,6,8,12,16,32, quick 1,4,8.",
  allow_override=True,
)
PASSES = flags.DEFINE_integer(
  "passes", None, "Passes over the cases. Default: 5, quick 3.", 1, allow_override=True
)
TURNS = flags.DEFINE_integer("rounds_a_call", 8, "Rounds in each timed call.", 1)
TOKENS = flags.DEFINE_integer(
  "acceptance_tokens", None, "New tokens a prompt to measure acceptance on. Default: 48, quick 24.", 1
)
QUICK = flags.DEFINE_bool("quick", False, "Fewer cases, passes and prompts.", allow_override=True)

NOT_USED = ("drafter", "rule", "batch_size", "max_new_tokens", "max_length", "warmup", "repeats")
# Blocks of committed tokens that a drafter is kept from seeing, to time how it catches up.
_BLOCKS = 16


class Case(NamedTuple):
  """What a row is of: nodes, a drafter or a chunk width, at a batch and live length (0: none)."""

  part: str
  batch: int
  live: int
  of: int | str


@dataclasses.dataclass(frozen=True)
class Plan:
  """The flags, checked."""

  drafters: tuple[str, ...]
  batches: tuple[int, ...]
  lives: tuple[int, ...]
  nodes: tuple[int, ...]
  passes: int
  turns: int
  tokens: int

  def room(self, deepest: int = 0) -> int:
    """Tokens of a row when every draft of a call is accepted, the drafters' of ``deepest`` tokens too."""
    return self.lives[-1] + self.turns * max(self.nodes[-1], deepest + 1)

  def groups(self, widths: Sequence[int]) -> Iterator[list[Case]]:
    """All cases, those together that alternate.

    Args:
      widths: of prefill chunks.
    """
    first, longest = self.batches[0], self.lives[-1]
    yield [Case("call", first, self.lives[0], 0)]
    for batch in self.batches:
      for live in self.lives:
        rounds = [Case("round", batch, live, nodes) for nodes in self.nodes]
        yield rounds + [Case("draft", batch, live, drafter) for drafter in self.drafters]
      if batch == first:
        yield [Case("accept", first, self.lives[0], nodes) for nodes in self.nodes]
        yield from ([Case("catch_up", first, longest, drafter)] for drafter in self.drafters)
        yield [Case("prefill", first, 0, width) for width in widths]
    yield from ([Case("acceptance", 1, 0, drafter)] for drafter in self.drafters)

  def pending(self, widths: Sequence[int], rows: Sequence[Mapping[str, Any]]) -> list[list[Case]]:
    """Groups without the cases that have a row."""
    done = {Case(row["part"], row["batch"], row["live"], row["of"]) for row in rows}
    left = [[case for case in group if case not in done] for group in self.groups(widths)]
    return [group for group in left if group]


def plan_from_flags() -> Plan:
  """Raises ValueError for what can be known to be wrong before a model is there."""
  shared.refuse(NOT_USED, "calibrate", "--drafters, --batches, --lives and --nodes")
  named, usual = DRAFTERS.value, choice.candidates(shipped_heads(shared.MODEL.value))
  methods = options.split(named) if named else usual
  drafters = tuple(dict.fromkeys(width for method in methods for width in parse_method(method).widths))
  for drafter in drafters:
    if not parse_method(drafter).is_known or drafter == "none":
      raise ValueError(
        f"--drafters: {drafter!r}; a drafter other than none is needed, plain rounds are always measured"
      )
  quick = QUICK.value
  plan = Plan(
    drafters=drafters,
    batches=shared.ascending(BATCHES, (1,) if quick else (1, 4)),
    lives=shared.ascending(LIVES, (64, 512) if quick else (64, 256, 1024)),
    nodes=shared.ascending(NODES, (1, 4, 8) if quick else (1, 2, 3, 4, 6, 8, 12, 16, 32)),
    passes=PASSES.value or (3 if quick else 5),
    turns=TURNS.value,
    tokens=TOKENS.value or (24 if quick else 48),
  )
  if plan.nodes[0] != 1 or plan.nodes[-1] > MAX_NODES:
    raise ValueError(
      f"--nodes = {','.join(map(str, plan.nodes))!r}; they must begin with 1 and end by {MAX_NODES}"
    )
  if plan.lives[0] < 2:
    raise ValueError(f"--lives = {','.join(map(str, plan.lives))!r}; a row needs at least 2 tokens")
  return plan


# --- cases -----------------------------------------------------------------------------------------


class Calibration:
  """The models, the states that cases share, and how each case is timed."""

  def __init__(self, plan: Plan, asked: list[questions.Question], job: runtime.Job):
    self.plan, self.asked, self.job = plan, asked, job
    deepest = max(runtime.make_method(job, name, plan.room()).window for name in plan.drafters)
    self.room, most = plan.room(deepest), job.target.config.max_length
    if self.room > most:
      raise ValueError(
        f"--lives = {plan.lives[-1]} needs room for {self.room} tokens with {plan.turns} rounds of "
        f"{plan.nodes[-1]} nodes and drafts of {deepest}; the model was made for {most} positions"
      )
    self.bench = timing.Bench(job, None, passes=plan.passes, rounds=plan.turns, live=plan.lives[-1])
    self.plain = runtime.make_method(job, "none", self.room)
    self.methods = {name: runtime.make_method(job, name, self.room) for name in plan.drafters}
    drafted = {method.config.drafter.tree.num_nodes for method in self.methods.values()}
    sizes = sorted({*plan.nodes, *drafted})
    self.free = {nodes: self.free_method(nodes, self.room + sizes[-1]) for nodes in sizes}
    self.boxes: dict[tuple[str, int], list[decode.DecodeState]] = {}

  def free_method(self, nodes: int, slots: int) -> runtime.Method:
    """Rounds of a chain of this many nodes whose draft costs nothing, in a buffer that all of them share."""
    method = timing.fixed(self.plain, TokenTree.chain(nodes - 1), slots=slots)
    rule = make_rule("greedy" if runtime.greedy() else "draw_and_follow")
    return dataclasses.replace(method, config=dataclasses.replace(method.config, rule=rule))

  @property
  def widths(self) -> tuple[int, ...]:
    """Prefill chunks that the buffer holds."""
    return tuple(width for width in self.plain.config.prefill_widths if width <= self.plain.config.slots)

  def box(self, drafter: str, batch: int) -> list[decode.DecodeState]:
    """A state with the longest text; ``""`` is the one of all free drafts. Those of other batches go."""
    for key in [key for key in self.boxes if key[1] != batch]:
      del self.boxes[key]
    if (drafter, batch) not in self.boxes:
      method = self.methods[drafter] if drafter else self.free[self.plan.nodes[-1]]
      self.boxes[drafter, batch] = [self.bench.state(method, batch)]
    return self.boxes[drafter, batch]

  def measure(self, group: list[Case]) -> Iterator[dict[str, Any]]:
    """The rows of cases that alternate."""
    part = group[0].part
    if part == "acceptance":
      yield from (row_of(case, **self.acceptance(case.of)) for case in group)
    elif part == "catch_up":
      yield from (row_of(case, **self.catch_up(case)) for case in group)
    else:
      names = {f"{case.part} {case.of}": case for case in group}
      once = {name: 1 for name, case in names.items() if case.part in ("call", "prefill")}
      label = f"batch {group[0].batch}, {group[0].live} live" if part in ("round", "draft") else part
      times = self.bench.times(label, {name: self.case(case) for name, case in names.items()}, once)
      for name, samples in times.items():
        yield row_of(names[name], **summary(samples), **self.shape_of(names[name]))

  def shape_of(self, case: Case) -> dict[str, Any]:
    """What a row says beside its times: a draft's size and head, or how many rounds other calls have."""
    if case.part == "call":
      return {"turns": self.plan.turns}
    if case.part != "draft":
      return {}
    tree = self.methods[case.of].config.drafter.tree
    head = runtime.head_digest(self.job, case.of)
    return {"nodes": tree.num_nodes, "depth": tree.max_depth, "head": head}

  def case(self, case: Case) -> timing.Case:
    """Raises KeyError for a part that is not timed by cases."""
    make = {
      "round": self.round_case,
      "draft": self.draft_case,
      "accept": self.accept_case,
      "prefill": self.prefill_case,
      "call": self.call_case,
    }
    return make[case.part](case)

  def round_case(self, case: Case) -> timing.Case:
    return self.bench.shared_rounds_case(self.free[case.of], self.box("", case.batch), case.live)

  def draft_case(self, case: Case) -> timing.Case:
    """What rounds take longer with this draft than with a free one; noise may make it less than nothing."""
    method = self.methods[case.of]
    free = self.free[method.config.drafter.tree.num_nodes]
    real = self.bench.shared_rounds_case(method, self.box(case.of, case.batch), case.live)
    bare = self.bench.shared_rounds_case(free, self.box("", case.batch), case.live)
    return lambda: real() - bare()

  def alone_case(self, case: Case, unseen: int = 0) -> timing.Case:
    """Drafts alone; the drafter's cache lacks the last ``unseen`` tokens before each of them."""
    method, box = self.methods[case.of], self.box(case.of, case.batch)

    def run() -> float:
      state = loops.rewind(box[0], case.live)
      if unseen:
        cache = state.drafter.cache
        state = state.replace(
          drafter=state.drafter.replace(cache=cache.replace(length=cache.length - np.int32(unseen)))
        )
      box[0] = jax.block_until_ready(state)
      start = time.perf_counter()
      box[0] = jax.block_until_ready(loops.draft(box[0], method.weights, method.config, self.plan.turns))
      return time.perf_counter() - start

    return run

  def catch_up(self, case: Case) -> dict[str, Any]:
    """Milliseconds a committed token that the drafter has not seen, 0 for one without a cache."""
    if not hasattr(self.box(case.of, case.batch)[0].drafter, "cache"):
      return {"ms": 0.0, "samples_ms": []}
    block = self.methods[case.of].window + 1
    unseen = min(_BLOCKS, max(1, (case.live - 1) // block)) * block
    cases = {"all seen": self.alone_case(case), f"{unseen} unseen": self.alone_case(case, unseen)}
    seen, late = self.bench.times(f"catch-up of {case.of}", cases).values()
    found = summary([(b - a) / unseen for a, b in zip(seen, late, strict=True)])
    return found | {"ms": max(found["ms"], 0.0), "unseen": unseen}

  def accept_case(self, case: Case) -> timing.Case:
    """Rule and commit of a chain that is not accepted; what the logits hold costs nothing."""
    method, box = self.free[case.of], self.box("", case.batch)
    box[0] = loops.rewind(box[0], case.live)
    root = jnp.full((case.batch,), 7, jnp.int32)
    context = SimpleNamespace(root=root, length=box[0].length)
    proposal, _, _ = method.config.drafter.propose(None, (), context, None)
    logits = jnp.zeros((case.batch, case.of, self.job.target.config.vocab_size), jnp.float32)
    verification = decode.Verification(logits, None)

    def run() -> float:
      box[0] = jax.block_until_ready(loops.rewind(box[0], case.live))
      start = time.perf_counter()
      box[0] = loops.accept(box[0], method.weights, proposal, verification, method.config, self.plan.turns)
      jax.block_until_ready(box[0])
      return time.perf_counter() - start

    return run

  def prefill_case(self, case: Case) -> timing.Case:
    method, box = self.free[self.plan.nodes[-1]], self.box("", case.batch)

    def run() -> float:
      state = loops.rewind(box[0], self.plan.lives[-1])
      cache = state.cache.replace(length=jnp.zeros_like(state.cache.length))
      box[0] = jax.block_until_ready(state.replace(cache=cache))
      start = time.perf_counter()
      box[0] = decode.prefill_chunk(method.weights, box[0], np.int32(0), method.config, case.of)
      jax.block_until_ready(box[0])
      return time.perf_counter() - start

    return run

  def call_case(self, case: Case) -> timing.Case:
    method, box = self.free[self.plan.nodes[0]], self.box("", case.batch)

    def run() -> float:
      start = time.perf_counter()
      box[0] = jax.block_until_ready(decode.generate(method.weights, box[0], method.config, 0))
      return time.perf_counter() - start

    return run

  def acceptance(self, drafter: str) -> dict[str, Any]:
    """What the drafter's drafts are worth on the prompts, in a run of a few tokens each."""
    encode = lambda question: text.encode_prompt(
      self.job.target.tokenizer, question.turns[0], chat=self.job.chat
    )
    prompts = [encode(question) for question in self.asked]
    limit = runtime.length_limit(self.job, max(map(len, prompts)) + self.plan.tokens)
    # Where the prompts fit the buffers of the other cases, their prefill is compiled already.
    limit = max(limit, self.room)
    method = runtime.make_method(self.job, drafter, limit)
    rows = []
    for prompt in tqdm.tqdm(prompts, desc=f"acceptance of {drafter}", unit="prompt", file=sys.stderr):
      rows += measure.run_timed(self.job, method, [prompt], self.plan.tokens).rows
    return {"temperature": shared.TEMPERATURE.value} | calibration_tables.acceptance_of(rows)


def row_of(case: Case, **found: Any) -> dict[str, Any]:
  return case._asdict() | found


def summary(seconds: Sequence[float]) -> dict[str, Any]:
  samples = [1e3 * value for value in seconds]
  return {"ms": results.median(samples), "samples_ms": samples}


# --- the run ---------------------------------------------------------------------------------------


def temporary_rows(path: str, modules: Sequence[Any]) -> results.RunDirectory:
  """Rows that are there until ``path`` is written."""
  # Another set of flags is another measurement: it has rows of its own.
  lines = "\n".join(sorted(results.flag_lines(modules).values()))
  folder = f"{path}.{hashlib.sha256(lines.encode()).hexdigest()[:8]}.unfinished"
  return results.RunDirectory(folder, "calibrate", modules)


def measure_all(
  plan: Plan,
  asked: list[questions.Question],
  directory: results.RunDirectory | None,
  modules: Sequence[Any],
) -> results.RunDirectory:
  """Measures what is missing; the directory with all rows."""
  job = runtime.load_job(plan.drafters)
  key = runtime.calibration_key(job)
  path = shared.CALIBRATION.value or calibration.path_of(key)
  os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
  costs = Calibration(plan, asked, job)
  directory = temporary_rows(path, modules) if directory is None else directory
  calibration.check_key(directory.path, directory.info.get("key", key), key)
  directory.update(key=key, file=path)
  pending = plan.pending(costs.widths, directory.rows)
  total = sum(map(len, plan.groups(costs.widths)))
  with tqdm.tqdm(total=total, initial=total - sum(map(len, pending)), unit="case", file=sys.stderr) as bar:
    for group in pending:
      for row in costs.measure(group):
        directory.append(row)
        bar.update()
      compiles, costs.bench.compiles = costs.bench.compiles, 0
      directory.update(compiles_while_timing=compiles + directory.info.get("compiles_while_timing", 0))
  directory.finish(rows=len(directory.rows))
  return directory


def main(_: list[str]) -> None:
  plan = plan_from_flags()
  asked = questions.from_flags().questions[: 4 if QUICK.value else None]
  modules = [shared, questions, sys.modules[__name__]]
  kept = results.RunDirectory(shared.OUTPUT.value, "calibrate", modules) if shared.OUTPUT.value else None
  directory = kept
  if directory is None or directory.info.get("rows") != len(directory.rows):
    directory = measure_all(plan, asked, kept, modules)
  info = directory.info
  table = calibration_tables.table_of(directory.rows, info["key"], info["finished"])
  table.write(info["file"])
  calibration_tables.show(table)
  compiles = info["compiles_while_timing"]
  print(f"\n{info['file']}: medians of {plan.passes} passes; {compiles} programs compiled while timing")
  if kept is None:
    shutil.rmtree(directory.path)


if __name__ == "__main__":
  shared.run(main)
