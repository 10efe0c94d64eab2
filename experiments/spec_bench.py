"""Benchmarks methods over questions: one row per question, turn and method, resumable.

  python -m experiments.spec_bench --questions=FILE.jsonl --drafters=prompt_lookup --output=runs/first

Plain decoding (``none``) always runs as the baseline. Within a question the methods take turns of a few
rounds, so that a machine whose speed drifts is the same for all of them. Everything is compiled before the
timed part, and the number of programs compiled while timing is stored (0). Later turns continue the
baseline's answer, so that all methods get the same prompts. Several processes can share the questions, see
`experiments.processes`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import tqdm
from absl import flags

from experiments import calibration, measure, predictions, processes, questions, results, runtime, summary
from experiments import flags as shared
from experiments.footprint import footprint
from specjax import options, text
from specjax.analysis import CostTable
from specjax.checkpoints.files import write_whole
from specjax.verify import describe

TURNS = flags.DEFINE_enum("turns", "first", ["first", "all"], "Turns of each question to answer.")
DRAFTERS = flags.DEFINE_string(
  "drafters",
  "",
  "Methods beside plain decoding, with commas between, options in brackets as for --drafter. "
  "Default: the one of --drafter.",
)

# Room for an earlier answer that takes more tokens when it is read again as text.
_SLACK = 16


def drafter_names() -> list[str]:
  """Methods in order, the baseline first, none twice."""
  names = options.split(DRAFTERS.value or runtime.drafter_name())
  return list(dict.fromkeys([summary.BASELINE, *names]))


class Bench:
  """The run: models, methods, questions and the directory.

  Args of the constructor:
    asked: all questions: they say how long rows can get.
    directory: where rows go.
    job: what was loaded.
    mine: those of the questions that are answered here; None is all.
  """

  def __init__(
    self,
    asked: list[questions.Question],
    directory: results.RunDirectory,
    job: runtime.Job,
    mine: list[questions.Question] | None = None,
  ):
    self.asked, self.directory, self.job = asked, directory, job
    self.mine = asked if mine is None else mine
    self.turns = None if TURNS.value == "all" else 1
    self.batch, self.budget = shared.BATCH_SIZE.value, shared.MAX_NEW_TOKENS.value
    if self.turns != 1 and not job.chat and any(len(question.turns) > 1 for question in asked):
      raise ValueError("--turns=all needs the chat template; this run has --nochat")
    needed = {question.question_id: self._needed(question) for question in asked}
    limit = runtime.length_limit(job, max(needed.values()))
    for question_id, tokens in needed.items():
      least = max(shared.MIN_NEW_TOKENS.value, 1)
      if tokens - self.budget + least > limit:
        raise ValueError(
          f"question {question_id} needs {tokens - self.budget + least} tokens; the length limit is {limit}"
        )
    self.shortest = min(len(self.prompt(question, 0)) for question in asked)
    self.longest = min(max(needed.values()) - self.budget, limit)
    self.methods = [runtime.make_method(job, name, limit) for name in dict.fromkeys(job.drafters)]
    self.compiles = 0
    self.differences: list[dict[str, Any]] = directory.info.get("differences", [])

  def prompt(self, question: questions.Question, turn: int) -> list[int]:
    """Ids of a turn; later ones continue the baseline's answers, which must be there."""
    tokenizer, chat = self.job.target.tokenizer, self.job.chat
    if not turn:
      return text.encode_prompt(tokenizer, question.turns[0], chat=chat)
    plain = summary.by_method(self.directory.rows)[summary.BASELINE]
    answers = [plain[question.question_id, earlier]["text"] for earlier in range(turn)]
    return text.encode_prompt(tokenizer, conversation(question, turn, answers), chat=chat)

  def _needed(self, question: questions.Question) -> int:
    """Most tokens that the question's last turn can take, answer included."""
    last = len(question.turns[: self.turns]) - 1
    if not last:
      return len(self.prompt(question, 0)) + self.budget
    messages = conversation(question, last, [""] * last)
    fixed = len(text.encode_prompt(self.job.target.tokenizer, messages, chat=True))
    return fixed + last * (self.budget + _SLACK) + self.budget

  def compile(self) -> dict[str, float]:
    """Compiles every program of every method; seconds of each."""
    last = self.longest if self.turns is None else max(len(self.prompt(q, 0)) for q in self.asked)
    lengths = range(self.shortest, last + 1)
    seconds: dict[str, float] = {}
    for method in self.methods:
      with runtime.progress(f"compiling {method.name}", seconds, method.name):
        measure.compile_method(self.job, method, lengths, self.batch)
    return seconds

  def warm_up(self) -> None:
    prompts = [self.prompt(self.asked[0], 0)] * self.batch
    for _ in range(shared.WARMUP.value):
      measure.run_in_turns(self.job, self.methods, prompts, self.budget)

  def pending(self) -> Iterator[tuple[list[questions.Question], int, list[runtime.Method]]]:
    """Groups of up to a batch of questions, the turn, and the methods whose rows are not all there."""
    for start in range(0, len(self.mine), self.batch):
      group = self.mine[start : start + self.batch]
      for turn in range(max(len(question.turns[: self.turns]) for question in group)):
        asked = [question for question in group if turn < len(question.turns)]
        done = {(row["question_id"], row["turn"], row["drafter"]) for row in self.directory.rows}
        methods = [
          method
          for method in self.methods
          if any((question.question_id, turn, method.name) not in done for question in asked)
        ]
        if methods:
          # Who goes first changes from group to group.
          yield asked, turn, methods if start // self.batch % 2 else methods[::-1]

  def answer(self, asked: Sequence[questions.Question], turn: int, methods: Sequence[runtime.Method]) -> None:
    """Runs the methods on a group in turns, `--repeats` times, and stores the rows that are missing."""
    prompts = [self.prompt(question, turn) for question in asked]
    # A short last group is filled up with rows that end after one token, so that nothing recompiles.
    filler = self.batch - len(asked)
    padded = prompts + [prompts[0][:1]] * filler
    budgets = [self.budget] * len(asked) + [1] * filler
    runs: dict[str, list[measure.Timed]] = {method.name: [] for method in methods}
    for _ in range(shared.REPEATS.value):
      together = measure.run_in_turns(self.job, methods, padded, budgets)
      self.compiles += together[0].compiles
      for method, run in zip(methods, together, strict=True):
        runs[method.name].append(run)
    # The baseline's row goes first: later turns and comparisons need it.
    for method in sorted(methods, key=self.methods.index):
      self._store(method, asked, turn, prompts, runs[method.name])

  def _store(self, method, asked, turn, prompts, runs) -> None:
    prefill_s = results.median(run.prefill_s for run in runs) / len(asked)
    decode_s = results.median(run.decode_s for run in runs) / len(asked)
    stored = summary.by_method(self.directory.rows)
    for question, prompt, result in zip(asked, prompts, runs[0].rows, strict=False):
      if (question.question_id, turn) in stored.get(method.name, {}):
        continue
      row = results.make_row(
        result,
        question_id=question.question_id,
        turn=turn,
        category=question.category,
        drafter=method.name,
        rule=describe(method.config.rule),
        settings=runtime.describe_settings(self.job, method),
        prefill_s=prefill_s,
        decode_s=decode_s,
        text=self.job.target.tokenizer.decode(result.tokens),
      )
      if method.name != summary.BASELINE:
        self._compare(method, prompt, stored[summary.BASELINE][question.question_id, turn], row)
      self.directory.append(row)

  def _compare(self, method, prompt, plain, row) -> None:
    if not runtime.same_text(method.config.rule):
      return
    difference = measure.compare(
      self.job.target.model, prompt, plain["token_ids"], row["token_ids"], margins=runtime.greedy()
    )
    if difference is not None:
      place = {name: row[name] for name in ("question_id", "turn", "drafter")}
      found = {"position": difference.position, "margin": difference.margin, "tie": difference.tie}
      self.differences.append(place | found)


def conversation(question: questions.Question, turn: int, answers: Sequence[str]) -> list[dict[str, str]]:
  """Messages up to the user's message of ``turn``."""
  messages = []
  for earlier, answer in zip(question.turns[:turn], answers, strict=True):
    messages += [{"role": "user", "content": earlier}, {"role": "assistant", "content": answer}]
  return [*messages, {"role": "user", "content": question.turns[turn]}]


def write_answers(path: str, rows: Sequence[dict[str, Any]], model: str) -> None:
  """``answers/METHOD.jsonl`` in Spec-Bench's own layout, one line a question.

  Its ``evaluation/speed.py`` reads them (``--file-path``: a method's, ``--base-path``: that of ``none``). It
  counts plain decoding's tokens anew, from the text and without the first id, which it takes for a BOS token.
  """
  folder = os.path.join(path, "answers")
  os.makedirs(folder, exist_ok=True)
  for method, answered in summary.by_method(rows).items():
    by_question: dict[Any, list[dict[str, Any]]] = {}
    for row in sorted(answered.values(), key=lambda row: row["turn"]):
      by_question.setdefault(row["question_id"], []).append(row)
    lines = [_answer(method, model, turns) for turns in by_question.values()]
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in method)
    write_whole(os.path.join(folder, f"{name}.jsonl"), "".join(f"{line}\n" for line in lines))


def _answer(method: str, model: str, turns: Sequence[dict[str, Any]]) -> str:
  choice = {
    "index": 0,
    "turns": [row["text"] for row in turns],
    "decoding_steps": [row["rounds"] for row in turns],
    "new_tokens": [row["new_tokens"] for row in turns],
    "wall_time": [row["prefill_s"] + row["decode_s"] for row in turns],
    "accept_lengths": [emitted for row in turns for emitted in row["accept_lengths"]],
  }
  question_id = turns[0]["question_id"]
  line = {
    "question_id": question_id,
    "category": turns[0]["category"],
    "answer_id": f"{question_id}-{method}",
    "model_id": f"{model}-{method}",
    "choices": [choice],
    "tstamp": time.time(),
  }
  return json.dumps(line, ensure_ascii=False)


def main(_: list[str]) -> None:
  if not shared.OUTPUT.value:
    raise ValueError("--output is empty; a run directory is needed, e.g. --output=runs/first")
  file = questions.from_flags()
  asked = file.questions
  everyone = processes.join()
  mine = everyone.share(asked)
  modules = [shared, questions, sys.modules[__name__]]
  directory = results.RunDirectory(everyone.directory(shared.OUTPUT.value), "spec_bench", modules)
  job = runtime.load_job(drafter_names())
  table = calibration.load(runtime.calibration_key(job))
  bench = Bench(asked, directory, job, mine)
  directory.update(
    model=job.target.source,
    draft_model=job.draft.source if job.draft else None,
    dtype=shared.DTYPE.value,
    questions=file.record,
    prompts_sha256=questions.digest(asked, bench.turns, job.chat),
    stop_ids=list(job.stop_ids),
    max_new_tokens=bench.budget,
    length_limit=bench.methods[0].config.length_limit,
    methods={method.name: footprint(job, method) for method in bench.methods},
    times=job.times,
  )
  if next(bench.pending(), None) is not None:
    compile_s = bench.compile()
    before = measure.compile_count()
    bench.warm_up()
    total = sum(len(question.turns[: bench.turns]) for question in mine) * len(bench.methods)
    with tqdm.tqdm(total=total, initial=len(directory.rows), unit="row", file=sys.stderr) as bar:
      for group, turn, methods in bench.pending():
        bench.answer(group, turn, methods)
        bar.update(len(directory.rows) - bar.n)
    directory.finish(
      compile_s=compile_s,
      compile_count=before,
      compiles_while_timing=bench.compiles + directory.info.get("compiles_while_timing", 0),
      peak_memory_bytes=measure.peak_memory(),
      differences=bench.differences,
    )
  parts = everyone.gather(processes.part(directory))
  if not everyone.is_first:
    return
  if everyone.count > 1:
    directory = results.RunDirectory(shared.OUTPUT.value, "spec_bench", modules)
    processes.merge(directory, parts, [question.question_id for question in asked])
  write_answers(directory.path, directory.rows, job.target.source)
  show(directory, table)


def show_predictions(rows: Sequence[dict[str, Any]], table: CostTable) -> None:
  left_out = predictions.unknown(table, rows)
  if left_out:
    print(f"\nNot predicted: the calibration has no drafts of {', '.join(left_out)} (experiments.calibrate).")
  found = predictions.lines(table, rows)
  if not found:
    return
  print("\nPredicted from the calibration and the rounds that were run; draft and verify in plain rounds.")
  results.table(predictions.HEADER, predictions.cells(found))
  error = 100 * predictions.mean_error(found)
  print(f"mean absolute error {error:.1f} % over method x category; calibration of {table.made}")


def show(directory: results.RunDirectory, table: CostTable | None) -> None:
  """Prints method × category, what differs from plain decoding, predictions, and the compile counts."""
  results.table(summary.HEADER, summary.method_table(directory.rows))
  positions = summary.position_table(directory.rows)
  if positions:
    depths = [f"depth {d}" for d in range(1, len(positions[0]) - 1)]
    print("\nAcceptance by position: of the rounds that reached a depth, the share that accepted there.")
    results.table(["method", "nodes", *depths], positions)
  if table is not None:
    show_predictions(directory.rows, table)
  info = directory.info
  for found in info.get("differences", ()):
    difference = measure.Difference(found["position"], found["margin"])
    print(f"{found['drafter']}, question {found['question_id']}, turn {found['turn']}: {difference}")
  lengths = {row["prompt_tokens"] for row in directory.rows}
  print(
    f"\n{len(lengths)} prompt lengths; {info['compile_count']} programs compiled before timing, "
    f"{info['compiles_while_timing']} while timing"
  )


if __name__ == "__main__":
  shared.run(main)
