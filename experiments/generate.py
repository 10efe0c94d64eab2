"""Decodes one prompt plainly and speculatively, and says what the speculation brought.

  python -m experiments.generate --prompt="…"

The text streams to standard output, then a table. Progress goes to standard error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from absl import flags

from experiments import STARTED, measure, results, runtime
from experiments import flags as shared
from experiments.methods import parse_method
from specjax import text
from specjax.decode import RowResult
from specjax.verify import describe

# Copying is what prompt lookup is good at, and what a small model is good at.
DEFAULT_PROMPT = """Copy the following text, word by word, without any changes:

The harbour wakes before the town does. At five the ice lorries come down the hill, and by half past five \
the first boats are back from the sound with cod, haddock and a few crates of crab. The crews talk little. \
They lift the crates onto the quay, the auctioneer walks along them, and within an hour everything is sold. \
Then the crews sit in the café above the ice house, drink their coffee, and look at the weather for the \
next day."""

PROMPT = flags.DEFINE_string("prompt", "", "The prompt. Default: a short copying task.")
PROMPT_FILE = flags.DEFINE_string("prompt_file", "", "A UTF-8 file with the prompt, instead of --prompt.")


def read_prompt() -> str:
  """The prompt of the flags, or the built-in one.

  Raises:
    ValueError: both flags are given, or the file is not UTF-8.
  """
  if PROMPT.present and PROMPT_FILE.value:
    raise ValueError("--prompt and --prompt_file are both given; one of them is enough")
  if PROMPT_FILE.value:
    with open(PROMPT_FILE.value, encoding="utf-8") as file:
      return file.read()
  return PROMPT.value if PROMPT.present else DEFAULT_PROMPT


def stream(job: runtime.Job, method: runtime.Method, ids: Sequence[int]) -> None:
  """Prints the text of the speculative run while it is decoded, the first row of the batch."""
  pieces = text.stream_text(
    method.weights,
    method.config,
    job.target.tokenizer,
    ids,
    settings=runtime.make_settings(1),
    max_new_tokens=shared.MAX_NEW_TOKENS.value,
    mesh=job.mesh,
  )
  first = None
  for piece in pieces:
    first = first or time.perf_counter() - STARTED
    print(piece, end="", flush=True)
  print("\n", flush=True)
  if first is not None:
    print(f"first text {first:.1f} s after the start", file=sys.stderr)


def _row(name: str, values: Sequence, form: str = "{:.1f}") -> list:
  return [name, *(form.format(value) for value in values)]


def accept_histogram(rows: Sequence[RowResult]) -> str:
  """``0: 12  1: 3 …``: rounds by how many drafts they accepted."""
  counts = [0] * max(len(row.accept_counts) for row in rows)
  for row in rows:
    for accepted, rounds in enumerate(row.accept_counts):
      counts[accepted] += rounds
  return "  ".join(f"{accepted}: {rounds}" for accepted, rounds in enumerate(counts))


def width_histogram(method: runtime.Method, rows: Sequence[RowResult]) -> str:
  """Rounds by what a controller chose."""
  names = ["plain", *parse_method(method.name).widths]
  counts = [sum(row.width.count(width) for row in rows) for width in range(len(names))]
  return ", ".join(f"{name}: {count}" for name, count in zip(names, counts, strict=True))


def faster(speedup: float) -> str:
  """A speedup in words; below 1 it says so."""
  return f"{speedup:.2f} x" + (" (slower)" if speedup < 1 else "")


def report(
  job: runtime.Job,
  methods: Sequence[runtime.Method],
  runs: dict[str, list[measure.Timed]],
  compile_s: dict[str, float],
  prompt: Sequence[int],
) -> None:
  """Prints the table and what follows from it."""
  plain, speculative = (runs[method.name] for method in methods)
  names = [method.name for method in methods]
  tokens = [runs[name][0].new_tokens for name in names]
  decode_s = [results.median(run.decode_s for run in runs[name]) for name in names]
  prefill_s = [results.median(run.prefill_s for run in runs[name]) for name in names]
  decode_rate = [results.ratio(n, s) for n, s in zip(tokens, decode_s, strict=True)]
  whole_rate = [results.ratio(n, d + p) for n, d, p in zip(tokens, decode_s, prefill_s, strict=True)]
  rounds = [sum(row.rounds for row in runs[name][0].rows) for name in names]
  rows = speculative[0].rows
  results.table(
    ["", "plain", names[1]],
    [
      _row("new tokens", tokens, "{}"),
      _row("target calls (rounds)", rounds, "{}"),
      _row(
        "tokens a round (τ, bonus included)",
        [results.ratio(n, r) for n, r in zip(tokens, rounds, strict=True)],
        "{:.2f}",
      ),
      _row("tokens/s, decode only", decode_rate),
      _row("tokens/s, with prefill", whole_rate),
      _row("decode, s", decode_s, "{:.2f}"),
      _row("prefill, s", prefill_s, "{:.3f}"),
      _row("compile, s", [compile_s[name] for name in names]),
    ],
  )
  print()
  depth, accepted = sum(sum(row.depth) for row in rows), sum(sum(row.accepted) for row in rows)
  proposed = sum(sum(row.proposed) for row in rows)
  speedup = faster(results.ratio(decode_rate[1], decode_rate[0]))
  with_prefill = faster(results.ratio(whole_rate[1], whole_rate[0]))
  print(f"speedup           {speedup} decode only, {with_prefill} with prefill")
  share = results.ratio(100 * accepted, depth)
  print(f"acceptance        {share:.1f} % of a depth of {depth}, {proposed} tokens proposed")
  print(f"accepted a round  {accept_histogram(rows)}")
  print(f"identical         {_identical(job, methods[1], plain[0].rows, rows, prompt)}")
  print(
    f"settings          {names[1]}, window {methods[1].window}, rule {describe(methods[1].config.rule)}, "
    f"{shared.DTYPE.value}, temperature {shared.TEMPERATURE.value:g}, prompt of {len(prompt)} tokens, "
    f"batch {len(rows)}, {len(plain)} timed run(s) each"
  )
  if job.why is not None:
    print(f"chosen            {job.why}")
  if methods[1].beliefs is not None:
    print(f"widths            {width_histogram(methods[1], rows)}; costs: {methods[1].beliefs}")
  print("attention         {}: {}".format(*runtime.attention(job, methods[1])))
  compiles = sum(run.compiles for name in names for run in runs[name])
  print(
    f"peak memory       {measure.peak_memory() / 2**30:.2f} GiB on the host; "
    f"{compiles} program(s) compiled while timing"
  )


def _identical(job, method, plain, speculative, prompt) -> str:
  rule = method.config.rule
  if not rule.lossless:
    return f"not compared: rule {rule.name} does not give the target's output"
  if not runtime.same_text(rule):
    return "not compared: the same law as plain sampling, with noise of its own"
  tokens = sum(len(row.tokens) for row in plain)
  found = [
    measure.compare(job.target.model, prompt, a.tokens, b.tokens, margins=runtime.greedy())
    for a, b in zip(plain, speculative, strict=True)
  ]
  differences = [f"row {i} {d}" if len(found) > 1 else str(d) for i, d in enumerate(found) if d is not None]
  return "; ".join(differences) or f"yes, all {tokens} tokens"


def main(_: list[str]) -> None:
  prompt_text = read_prompt()
  batch, drafter = shared.BATCH_SIZE.value, runtime.drafter_name()
  if parse_method(drafter).drafter == "none":
    raise ValueError("--drafter = 'none': the plain run is always made; name a drafter to compare it with")
  directory = None
  if shared.OUTPUT.value:
    directory = results.RunDirectory(shared.OUTPUT.value, "generate", [shared, sys.modules[__name__]])
    if directory.rows:
      raise ValueError(f"--output = {shared.OUTPUT.value!r} holds a finished run; name a new directory")
  job = runtime.load_job([drafter])
  prompt = text.encode_prompt(job.target.tokenizer, prompt_text, chat=job.chat)
  limit = runtime.length_limit(job, len(prompt) + shared.MAX_NEW_TOKENS.value)
  if len(prompt) >= limit:
    raise ValueError(f"the prompt has {len(prompt)} tokens; the length limit is {limit}")
  (drafter,) = job.drafters
  methods = [runtime.make_method(job, name, limit) for name in ("none", drafter)]

  def run(method):
    return measure.run_timed(job, method, [prompt] * batch, shared.MAX_NEW_TOKENS.value)

  def compiled(method):
    with runtime.progress(f"compiling {method.name}", compile_s, method.name):
      measure.compile_method(job, method, [len(prompt)], batch)

  compile_s: dict[str, float] = {}
  compiled(methods[1])
  if batch == 1:
    stream(job, methods[1], prompt)
  compiled(methods[0])
  with runtime.progress(f"timing {shared.REPEATS.value} run(s) each after {shared.WARMUP.value} to warm up"):
    for _ in range(shared.WARMUP.value):
      for method in methods:
        run(method)
    runs: dict[str, list[measure.Timed]] = {method.name: [] for method in methods}
    for _ in range(shared.REPEATS.value):
      for method in methods:
        runs[method.name].append(run(method))
  decoded = job.target.tokenizer.decode
  if batch > 1:
    print(decoded(runs[drafter][0].rows[0].tokens), end="\n\n")
  report(job, methods, runs, compile_s, prompt)
  if directory is not None:
    for method in methods:
      for repeat, timed in enumerate(runs[method.name]):
        for index, row in enumerate(timed.rows):
          directory.append(
            results.make_row(
              row,
              question_id=f"row {index}, run {repeat}",
              turn=0,
              category="prompt",
              drafter=method.name,
              rule=describe(method.config.rule),
              settings=runtime.describe_settings(job, method),
              prefill_s=timed.prefill_s / batch,
              decode_s=timed.decode_s / batch,
              text=decoded(row.tokens),
            )
          )
    directory.finish(model=job.target.source, times=job.times, compile_s=compile_s)


if __name__ == "__main__":
  shared.run(main)
