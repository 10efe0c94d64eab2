"""specjax beside Hugging Face transformers in one run: plain, assisted and prompt-lookup generation.

  python -m experiments.compare_hf --questions=FILE.jsonl --limit=12 --max_new_tokens=64 --output=runs/peers

Needs the extra ``parity``. Both sides have the same weights, prompt ids, stop ids, budget, precision and
number of threads, one greedy row at a time, on the CPU. Within a question the methods take turns, an answer
each, and who goes first changes from question to question; everything is compiled and warmed up before.
transformers' assisted generation drafts with the model that ``two_model`` drafts with here. A row a question
and method; the same command goes on where it was stopped. Fewer threads for both: run it under ``taskset``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import tqdm
from absl import flags

from experiments import flags as shared
from experiments import measure, questions, results, runtime, summary
from experiments.methods import AUTO, parse_method
from experiments.summary import BASELINE, Row
from experiments.transformers_side import Answer, Mode, Transformers, parse_mode
from specjax import options, text
from specjax.checkpoints.shipped import shipped_heads

OURS = flags.DEFINE_string(
  "ours",
  "",
  "Methods of specjax beside plain decoding, with commas between, as for --drafter. Default: "
  f"prompt_lookup, two_model if there is a draft for --model, and {AUTO}.",
)
THEIRS = flags.DEFINE_string(
  "theirs",
  "",
  "Modes of transformers beside its plain one, with commas between: prompt_lookup[tokens=10,max_ngram=2], "
  "assisted[tokens=20,confidence=0.4,schedule=constant]; options that are left out have its own defaults. "
  "Default: both with its defaults and with tokens=4, assisted only if two_model is among --ours.",
)
QUICK = flags.DEFINE_bool("quick", False, "Two questions, at most 16 new tokens.", allow_override=True)

_QUICK_QUESTIONS, _QUICK_TOKENS = 2, 16
# How rows and tables call modes of transformers; specjax's methods have names without it.
PEER = "transformers:"
PEER_PLAIN = f"{PEER}plain"
# Flags that would make the sides unlike: neither has them.
_UNUSED = (
  "drafter",
  "window",
  "rule",
  "batch_size",
  "temperature",
  "top_k",
  "top_p",
  "min_p",
  "repetition_penalty",
  "presence_penalty",
  "frequency_penalty",
  "logit_bias",
  "min_new_tokens",
  "mesh",
)


def check_flags() -> None:
  """Raises ValueError for flags that would compare unlike things."""
  if not shared.OUTPUT.value:
    raise ValueError("--output is empty; a run directory is needed, e.g. --output=runs/peers")
  for name in _UNUSED:
    if flags.FLAGS[name].value != flags.FLAGS[name].default:
      raise ValueError(
        f"compare_hf compares one greedy row at a time, methods are named in --ours; leave --{name} alone"
      )
  if jax.default_backend() != "cpu":
    raise ValueError("compare_hf runs both sides on the CPU; set JAX_PLATFORMS=cpu")


def our_methods() -> list[str]:
  """Methods of specjax, plain decoding first, none twice.

  Raises:
    ValueError: one that does not exist.
  """
  has_draft = bool(shared.DRAFT_MODEL.value) or "draft" in shipped_heads(shared.MODEL.value)
  usual = ["prompt_lookup", *(["two_model"] if has_draft else []), AUTO]
  named = options.split(OURS.value) if OURS.value else usual
  for method in named:
    if not parse_method(method).is_known:
      raise ValueError(f"--ours: {method!r} is no method; see --drafter")
  return list(dict.fromkeys([BASELINE, *named]))


def their_modes(ours: Sequence[str]) -> list[Mode]:
  """Modes of transformers, its plain one first, none twice.

  Raises:
    ValueError: a mode that cannot be read, or an assisted one without a draft.
  """
  has_draft = any(parse_method(method).needs_draft_model for method in ours)
  usual = ["prompt_lookup", "prompt_lookup[tokens=4]"]
  if has_draft:
    usual += ["assisted", "assisted[tokens=4]"]
  modes = [parse_mode(mode) for mode in (options.split(THEIRS.value) if THEIRS.value else usual)]
  if not has_draft and any(mode.kind == "assisted" for mode in modes):
    raise ValueError("--theirs: assisted needs a draft model, that of two_model; name it in --ours, too")
  return list({mode.name: mode for mode in [parse_mode("plain"), *modes]}.values())


class Bench:
  """The run: both sides, questions and the directory."""

  def __init__(
    self,
    asked: list[questions.Question],
    directory: results.RunDirectory,
    job: runtime.Job,
    modes: Sequence[Mode],
  ):
    self.asked, self.directory, self.job = asked, directory, job
    self.budget = budget()
    encode = functools.partial(text.encode_prompt, job.target.tokenizer, chat=job.chat)
    self.prompts = {question.question_id: encode(question.turns[0]) for question in asked}
    self.lengths = [len(prompt) for prompt in self.prompts.values()]
    needed = max(self.lengths) + self.budget
    self.limit = runtime.length_limit(job, needed)
    if needed > self.limit:
      raise ValueError(f"the longest prompt and its answer need {needed} tokens; the limit is {self.limit}")
    self.methods = [runtime.make_method(job, name, self.limit) for name in dict.fromkeys(job.drafters)]
    self.modes = list(modes)
    self.differences: list[dict[str, Any]] = directory.info.get("differences", [])
    self.compiles = directory.info.get("compiles_while_timing", 0)

  @property
  def names(self) -> list[str]:
    """Of the methods of both sides, each side's plain decoding first."""
    return [method.name for method in self.methods] + [PEER + mode.name for mode in self.modes]

  def pending(self) -> Iterator[tuple[int, questions.Question, list[str]]]:
    """Questions with their number, and the methods whose rows are missing."""
    done = {(row["question_id"], row["drafter"]) for row in self.directory.rows}
    for number, question in enumerate(self.asked):
      missing = [name for name in self.names if (question.question_id, name) not in done]
      if missing:
        yield number, question, missing

  def compile(self) -> dict[str, float]:
    """Compiles every program of specjax's methods; seconds of each."""
    seconds: dict[str, float] = {}
    for method in self.methods:
      with runtime.progress(f"compiling {method.name}", seconds, method.name):
        measure.compile_method(self.job, method, self.lengths, 1)
    return seconds

  def runners(self, theirs: Transformers) -> dict[str, Callable[[list[int]], Answer]]:
    """Each method as a function of a prompt."""
    ours = {method.name: functools.partial(self._ours, method) for method in self.methods}
    their = lambda mode: lambda prompt: theirs.run(mode, prompt, self.budget)
    return ours | {PEER + mode.name: their(mode) for mode in self.modes}

  def _ours(self, method: runtime.Method, prompt: list[int]) -> Answer:
    timed = measure.run_timed(self.job, method, [prompt], self.budget)
    self.compiles += timed.compiles
    (row,) = timed.rows
    return Answer(row.tokens, row.rounds, 0, timed.prefill_s, timed.decode_s)

  def answer(
    self,
    number: int,
    question: questions.Question,
    names: Sequence[str],
    runners: dict[str, Callable[[list[int]], Answer]],
  ) -> None:
    """Runs methods on a question in turns, ``--repeats`` times, and stores their rows."""
    prompt = self.prompts[question.question_id]
    answers: dict[str, list[Answer]] = {name: [] for name in names}
    for repeat in range(shared.REPEATS.value):
      first = (number + repeat) % len(names)  # who goes first changes
      for name in (*names[first:], *names[:first]):
        answers[name].append(runners[name](prompt))
    for name, runs in answers.items():
      tokens = runs[0].tokens
      self.directory.append(
        {
          "question_id": question.question_id,
          "turn": 0,
          "category": question.category,
          "drafter": name,
          "prompt_tokens": len(prompt),
          "new_tokens": len(tokens),
          "rounds": runs[0].rounds,
          "first_tokens": runs[0].first_tokens,
          "prefill_s": results.median(run.prefill_s for run in runs),
          "decode_s": results.median(run.decode_s for run in runs),
          "token_ids": tokens,
          "text": self.job.target.tokenizer.decode(tokens),
        }
      )
    self._compare(question, prompt)

  def _compare(self, question: questions.Question, prompt: list[int]) -> None:
    """Notes where texts of a question part from plain decoding here, and by what margin."""
    found = {row["drafter"]: row for row in self.directory.rows if row["question_id"] == question.question_id}
    self.differences = [d for d in self.differences if d["question_id"] != question.question_id]
    model, plain = self.job.target.model, found[BASELINE]["token_ids"]
    for name in self.names:
      difference = measure.compare(model, prompt, plain, found[name]["token_ids"], margins=True)
      if difference is not None:
        where = {"question_id": question.question_id, "drafter": name}
        self.differences.append(where | {"position": difference.position, "margin": difference.margin})
    self.directory.update(differences=self.differences)


def budget() -> int:
  """Most new tokens of an answer."""
  return min(shared.MAX_NEW_TOKENS.value, _QUICK_TOKENS) if QUICK.value else shared.MAX_NEW_TOKENS.value


def draft_of(job: runtime.Job) -> Any:
  """The draft that both sides use, None without."""
  head = job.heads.get("draft")
  return head.module if head is not None else job.draft.model if job.draft is not None else None


def main(_: list[str]) -> None:
  check_flags()
  ours = our_methods()
  modes = their_modes(ours)
  file = questions.from_flags()
  asked = file.questions[: _QUICK_QUESTIONS if QUICK.value else None]
  directory = results.RunDirectory(
    shared.OUTPUT.value, "compare_hf", [shared, questions, sys.modules[__name__]]
  )
  job = runtime.load_job(ours)
  bench = Bench(asked, directory, job, modes)
  if next(bench.pending(), None) is not None:
    directory.update(questions=file.record)
    run(bench)
  show(directory)


def run(bench: Bench) -> None:
  """Answers what is missing."""
  job, directory = bench.job, bench.directory
  threads = directory.info["cpu_count"]  # as many as XLA uses
  draft = draft_of(job) if any(mode.kind == "assisted" for mode in bench.modes) else None
  with runtime.progress("handing the weights to transformers"):
    theirs = Transformers(
      job.target.model, draft, stop_ids=job.stop_ids, dtype=shared.DTYPE.value, threads=threads
    )
  directory.update(
    model=job.target.source,
    draft_model=None if draft is None else job.draft.source if job.draft else job.heads["draft"].source,
    dtype=shared.DTYPE.value,
    threads=threads,
    peer_versions=theirs.versions,
    prompts_sha256=questions.digest(bench.asked, 1, job.chat),
    stop_ids=list(job.stop_ids),
    max_new_tokens=bench.budget,
    length_limit=bench.limit,
    modes={PEER + mode.name: mode.settings for mode in bench.modes},
    compile_s=bench.compile(),
  )
  runners = bench.runners(theirs)
  for _ in range(shared.WARMUP.value):
    for runner in runners.values():
      runner(bench.prompts[bench.asked[0].question_id])
  bench.compiles = directory.info.get("compiles_while_timing", 0)  # those of the warm-up do not count
  total = len(bench.asked) * len(bench.names)
  with tqdm.tqdm(total=total, initial=len(directory.rows), unit="row", file=sys.stderr) as bar:
    for number, question, names in bench.pending():
      bench.answer(number, question, names, runners)
      bar.update(len(directory.rows) - bar.n)
  directory.finish(compiles_while_timing=bench.compiles)


def decode_rate(rows: Sequence[Row]) -> float:
  """Tokens a second behind the prompt's forward and what it gave."""
  tokens = sum(row["new_tokens"] - row["first_tokens"] for row in rows)
  return results.ratio(tokens, sum(row["decode_s"] for row in rows))


RATES = {"decode only": decode_rate, "with prefill": summary.whole_rate}
HEADER = (
  "method",
  "tokens",
  "τ",
  "tokens/s",
  "with prefill",
  "of transformers plain",
  "with prefill",
  "of specjax plain",
  "with prefill",
  "identical",
)


def answered_by_all(rows: Sequence[Row]) -> dict[str, list[Row]]:
  """Rows by method, on the questions that every method has answered, in one order."""
  methods = {name: found for name, found in summary.by_method(rows).items() if found}
  both = [key for key in methods[BASELINE] if all(key in found for found in methods.values())]
  return {name: [found[key] for key in both] for name, found in methods.items()}


def method_table(rows: Sequence[Row]) -> list[list[str | None]]:
  """Lines for `HEADER`. Identical: to plain decoding of specjax, token for token."""
  methods = answered_by_all(rows)
  lines = []
  for name, mine in methods.items():
    line = [
      name if name.startswith(PEER) else f"specjax:{'plain' if name == BASELINE else name}",
      str(sum(row["new_tokens"] for row in mine)),
      f"{summary.tau(mine):.2f}",
      *(f"{rate(mine):.1f}" for rate in RATES.values()),
    ]
    for plain in (PEER_PLAIN, BASELINE):
      line += [f"{results.ratio(rate(mine), rate(methods[plain])):.2f} x" for rate in RATES.values()]
    lines.append([*line, f"{summary.identical(mine, methods[BASELINE])} of {len(mine)}"])
  return lines


def verdicts(rows: Sequence[Row]) -> list[str]:
  """Plain against plain, and the best method here against transformers' plain and its best of each kind."""
  methods, lines = answered_by_all(rows), []
  for what, rate in RATES.items():
    speed = {name: rate(mine) for name, mine in methods.items()}
    ratio = lambda ours, theirs, speed=speed: f"{results.ratio(speed[ours], speed[theirs]):.2f} x"
    lines.append(f"{what}: specjax plain is {ratio(BASELINE, PEER_PLAIN)} transformers plain")
    ours = [name for name in speed if not name.startswith(PEER) and name != BASELINE]
    if ours:
      best = max(ours, key=speed.__getitem__)
      lines[-1] += f"; {best} is {ratio(best, PEER_PLAIN)} transformers plain"
      for kind in ("prompt_lookup", "assisted"):
        theirs = [name for name in speed if name.startswith(PEER + kind)]
        if theirs:
          peer = max(theirs, key=speed.__getitem__)
          lines[-1] += f", {ratio(best, peer)} its {peer.removeprefix(PEER)}"
  return lines


def show(directory: results.RunDirectory) -> None:
  """Prints the table, what it comes to, and where texts part."""
  rows, info = directory.rows, directory.info
  results.table(HEADER, method_table(rows))
  print()
  for line in verdicts(rows):
    print(line)
  for found in info.get("differences", ()):
    difference = measure.Difference(found["position"], found["margin"])
    print(f"{found['drafter']}, question {found['question_id']}: {difference}")
  versions = ", ".join(f"{name} {version}" for name, version in info["peer_versions"].items())
  count = len(answered_by_all(rows)[BASELINE])
  print(
    f"\n{count} questions, batch 1, greedy, at most {info['max_new_tokens']} new tokens, {info['dtype']}, "
    f"{info['threads']} threads on each side; {versions}; draft: {info['draft_model'] or 'none'}; "
    f"{info['compiles_while_timing']} programs compiled while timing"
  )


if __name__ == "__main__":
  shared.run(main)
