"""Training data for drafters: text that the target writes itself, or conversations from a file.

  python -m experiments.distill_data [--tokens=1000000] [--evaluation=QUESTIONS.jsonl] [--quick]
  python -m experiments.distill_data --conversations=FILE.jsonl [--rewrite_answers]
  python -m experiments.distill_data --conversations=TEXTS.jsonl --base
  python -m experiments.distill_data --overlap_of=FOLDER --evaluation=QUESTIONS.jsonl

Without a file the target writes questions, from the chat template up to the user's turn and one of many
``--openings``, and answers them.
With ``--conversations`` answers are those of the file (ShareGPT's layout, or messages with roles). With
``--rewrite_answers`` the target answers the first question of each line (Spec-Bench's layout will do), and
with ``--base`` it continues each line's text without a chat template. Layouts are listed in
`specjax.training.conversations`.

The data set lies in the cache folder, by model and settings, or in ``--output``: shards, a manifest with
their provenance, and ``log.jsonl`` with times. A killed run goes on with the shard that is missing, to the
same bits; more ``--tokens`` add shards to those that are there. `specjax.training.data.Dataset` reads it.

Questions and answers that are there already are dropped, and so are questions that share 13 tokens in a row
with one of ``--evaluation``; how many of its questions share 8 or 13 with any text is in the manifest.
``--overlap_of`` counts the same of a data set that is there, and changes nothing.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

import tqdm
from absl import flags

from experiments import flags as shared
from experiments import measure, results, runtime, summary
from specjax.checkpoints import package
from specjax.training import conversations, distill, openings, overlap
from specjax.training.conversations import Conversation
from specjax.training.data import Dataset, digest_of, read_manifest
from specjax.training.distill import Conversations, Distillation, Recipe
from specjax.training.features import usual_taps
from specjax.training.openings import Opening
from specjax.training.overlap import Evaluation, Filter
from specjax.training.writer import ShardWriter

TOKENS = flags.DEFINE_integer("tokens", None, "Answer tokens wanted in all. Default: 1000000, quick 500.", 1)
SHARD_SAMPLES = flags.DEFINE_integer(
  "shard_samples",
  None,
  "Samples of a shard, which a kill loses at most. At a shard's end rows run empty, so short ones are slow. "
  "Default: 1024, quick 16.",
  1,
)
FEATURES = flags.DEFINE_bool(
  "features",
  True,
  "Store the target's hidden states, four layers in bfloat16: for smollm2-135m 4.6 KB a token, question and "
  "template included, about 7 GB a million answer tokens. --nofeatures: training makes them on the fly.",
)
QUESTION_TOKENS = flags.DEFINE_integer(
  "question_tokens",
  None,
  "Most tokens of a question beside its opening; longer ones are dropped, and documents cut. With --base, of "
  "the text that is continued, which is cut. Default: 160, quick 48.",
  1,
)
OPENINGS = flags.DEFINE_string(
  "openings",
  "own",
  "How the questions that the target writes begin: own, with one of the project's openings (stories, sums, "
  "documents to sum up, …); none; or a text file, each line words around {text}, which the target writes, or "
  "around {document}, which may be cut at the end of a sentence.",
)
ANSWER_TOKENS = flags.DEFINE_integer(
  "answer_tokens", None, "Most tokens of an answer. Default: 192, quick 32.", 1
)
QUESTIONS_TEMPERATURE = flags.DEFINE_float(
  "questions_temperature", 0.9, "At which the target writes questions.", 0.0, 100.0
)
ANSWER_TEMPERATURES = flags.DEFINE_list(
  "answer_temperatures", ["0", "0.7"], "At which it answers, sample by sample in turn; 0 is greedy."
)
CONVERSATIONS = flags.DEFINE_string("conversations", "", "JSONL of conversations, questions or texts.")
REWRITE = flags.DEFINE_bool(
  "rewrite_answers", False, "The target answers the first question of each line of --conversations anew."
)
BASE = flags.DEFINE_bool(
  "base", False, "A base model: continue each line of --conversations, without a chat template."
)
EVALUATION = flags.DEFINE_string(
  "evaluation",
  "",
  "JSONL of questions that models will be evaluated on: overlap with them is reported, and questions that "
  "share 13 tokens in a row with one are dropped.",
)
OVERLAP_OF = flags.DEFINE_string(
  "overlap_of", "", "Folder of a data set: report what it shares with --evaluation, and write nothing."
)
QUICK = flags.DEFINE_bool("quick", False, "Few and short samples.", allow_override=True)

# A comparison with a bound says nothing about NaN.
flags.register_validator("questions_temperature", lambda value: value == value, "it must be a number")

NOT_USED = (
  "draft_model",
  "drafter_path",
  "drafter",
  "window",
  "rule",
  "draft_policy",
  "temperature",
  "top_k",
  "top_p",
  "min_p",
  "repetition_penalty",
  "presence_penalty",
  "frequency_penalty",
  "logit_bias",
  "min_new_tokens",
  "logprobs",
  "mesh",
  "max_new_tokens",
  "warmup",
  "repeats",
  "chat",
  "calibration",
)
# What only a kind that writes uses, and most tokens of a conversation that is kept.
_WRITING = ("question_tokens", "answer_tokens", "answer_temperatures", "batch_size")
_LENGTH_LIMIT = 1024
# Tokens stored for one of an answer, template and question included: roughly, to ask for disk space.
_STORED = 1.5
LOG = "log.jsonl"


@dataclasses.dataclass(frozen=True)
class Plan:
  """The flags, checked; the recipe's taps come with the model."""

  kind: str
  recipe: Recipe
  tokens: int


def plan_from_flags() -> Plan:
  """Raises ValueError for what can be known to be wrong before a model is there."""
  shared.refuse(NOT_USED, "distill_data", "--answer_temperatures, --base and --question_tokens")
  if (REWRITE.value or BASE.value) and not CONVERSATIONS.value:
    name = REWRITE.name if REWRITE.value else BASE.name
    raise ValueError(f"--{name} needs --conversations, a file to take texts from")
  if REWRITE.value and BASE.value:
    raise ValueError("--rewrite_answers and --base do not go together: one asks in a chat, one continues")
  kept = bool(CONVERSATIONS.value) and not (REWRITE.value or BASE.value)
  kind = "self" if not CONVERSATIONS.value else "conversations" if kept else "questions"
  kind = "continuations" if BASE.value else kind
  if kept:
    shared.refuse(_WRITING, "distill_data --conversations", "--rewrite_answers, where the target writes")
  else:
    shared.refuse(["max_length"], f"distill_data for {kind}", "--question_tokens and --answer_tokens")
  if kind != "self":
    instead = "the file, which has the questions"
    shared.refuse(["questions_temperature", "openings"], "distill_data --conversations", instead)
  quick = QUICK.value
  batch = shared.BATCH_SIZE.value if _given("batch_size") else 16 if quick else 64
  recipe = Recipe(
    question_tokens=QUESTION_TOKENS.value or (48 if quick else 160),
    answer_tokens=ANSWER_TOKENS.value or (32 if quick else 192),
    question_temperature=QUESTIONS_TEMPERATURE.value,
    answer_temperatures=_temperatures(),
    seed=shared.SEED.value,
    batch_size=batch,
    shard_samples=SHARD_SAMPLES.value or (16 if quick else 1024),
    openings=_openings() if kind == "self" else (Opening(),),
  )
  return Plan(kind, recipe, TOKENS.value or (500 if quick else 1_000_000))


def _given(name: str) -> bool:
  return not flags.FLAGS[name].using_default_value


def _temperatures() -> tuple[float, ...]:
  texts = ANSWER_TEMPERATURES.value
  try:
    found = tuple(float(text) for text in texts)
  except ValueError:
    found = ()
  if not found or not all(0 <= value <= 100 for value in found):
    raise ValueError(f"--answer_temperatures = {','.join(texts)!r}; numbers in [0, 100] are needed")
  return found


def _openings() -> tuple[Opening, ...]:
  if OPENINGS.value == "none":
    return (Opening(),)
  try:
    return openings.read(openings.OWN if OPENINGS.value == "own" else OPENINGS.value)
  except ValueError as error:
    raise ValueError(f"--openings = {OPENINGS.value!r}: {error}; own, none or a file is needed") from error


def _messages_of_users(path: str) -> list[str]:
  """What users say in a file, each message a question."""
  said = [m["content"] for c in conversations.read(path) for m in c.messages if m["role"] == "user"]
  if not said:
    raise ValueError(f"--evaluation = {path!r}: no message of a user in it")
  return said


# --- the run ---------------------------------------------------------------------------------------


class Progress:
  """A bar of answer tokens, with the rate at which tokens of any kind are written."""

  written = 0

  def begin(self, done: int, wanted: int) -> None:
    """Starts the clock: everything is compiled."""
    self._bar = tqdm.tqdm(
      # The mean rate: questions come before answers in each shard, and the last rate says little.
      smoothing=0,
      total=wanted,
      initial=done,
      unit="token",
      desc="answers",
      file=sys.stderr,
      dynamic_ncols=True,
    )
    self._start = time.perf_counter()

  def __call__(self, stage: str, tokens: int) -> None:
    self.written += tokens
    rate = self.written / max(time.perf_counter() - self._start, 1e-9)
    self._bar.set_postfix_str(f"{stage}, {rate:.0f} tokens/s written", refresh=False)
    self._bar.update(tokens if stage == "answers" else 0)
    self._bar.refresh()

  def correct(self, done: int) -> None:
    """What was dropped does not count."""
    self._bar.n = done
    self._bar.refresh()

  def close(self) -> None:
    self._bar.close()


def check_space(path: str, plan: Plan, width: int, done: int) -> None:
  """Raises ValueError where the disk cannot hold what is still to be written."""
  each = 5 + 2 * width * len(plan.recipe.taps)
  needed = int(max(plan.tokens - done, 0) * _STORED * each)
  free = shutil.disk_usage(path).free
  if needed > free:
    hint = "; --nofeatures needs far less" if plan.recipe.taps else ""
    raise ValueError(
      f"{path}: --tokens={plan.tokens} needs {needed / 1e9:.1f} GB more, {free / 1e9:.1f} GB are free{hint}"
    )


def open_writer(job: runtime.Job, plan: Plan, provenance: dict[str, Any]) -> ShardWriter:
  """The data set that the flags ask for, with the shards it has."""
  path = shared.OUTPUT.value
  if not path:
    name = re.sub(r"[^\w.-]+", "-", os.path.basename(job.target.source.rstrip("/")))
    folder = os.path.join(package.cache_folder(), "distill")
    path = os.path.join(folder, f"{name}-{digest_of(provenance)[:12]}")
  with runtime.progress(f"opening {path}"):
    writer = ShardWriter(path, provenance)
  check_space(path, plan, job.target.config.d_model, writer.answer_tokens)
  return writer


def make_source(job: runtime.Job, plan: Plan, found: Sequence[Conversation] | None, progress: Progress):
  """What makes the samples. Nothing is compiled yet, and settings that do not fit the model are errors."""
  common = dict(implementation=shared.ATTENTION.value, progress=progress)
  if plan.kind == "conversations":
    return Conversations(job.target, plan.recipe, found, length_limit=length_limit(job), **common)
  texts = None if found is None else [conversation.question for conversation in found]
  return Distillation(job.target, plan.recipe, texts=texts, chat=plan.kind != "continuations", **common)


def length_limit(job: runtime.Job) -> int:
  """Most tokens of a conversation that is kept."""
  return shared.MAX_LENGTH.value or min(_LENGTH_LIMIT, job.target.config.max_length)


def write(job: runtime.Job, plan: Plan, writer: ShardWriter, source, progress: Progress, **kwargs) -> None:
  """Writes the shards that are missing; further arguments are those of `distill.write_shards`."""
  if isinstance(source, Distillation):
    with runtime.progress("compiling"):
      source.slots.compile()
  progress.begin(writer.answer_tokens, plan.tokens)
  about = results.environment()
  made_with = {name: about[name] for name in ("commit", "versions", "platform", "device_kind", "cpu")}
  made_with["model"] = job.target.source
  last = {"time": time.perf_counter(), "written": 0}

  def on_shard(entry: dict[str, Any]) -> None:
    now, before = time.perf_counter(), dict(last)
    last.update(time=now, written=progress.written)
    row = {
      "shard": entry["file"],
      "samples": entry["samples"],
      "answer_tokens": entry["answer_tokens"],
      "written_tokens": progress.written - before["written"],
      "seconds": round(now - before["time"], 2),
      "peak_memory_bytes": measure.peak_memory(),
    }
    with open(os.path.join(writer.path, LOG), "a", encoding="utf-8") as file:
      file.write(json.dumps(row) + "\n")
    progress.correct(writer.answer_tokens)

  try:
    distill.write_shards(
      writer,
      source,
      tokens=plan.tokens,
      shard_samples=plan.recipe.shard_samples,
      made_with=made_with,
      on_shard=on_shard,
      **kwargs,
    )
  finally:
    progress.close()


def show(path: str) -> None:
  """What is in the data set, from its files alone."""
  manifest = read_manifest(path)
  counts, report = manifest["counts"], manifest["report"]
  lines = [[name.replace("_", " "), f"{value:,}"] for name, value in counts.items()]
  lines += [[f"answer tokens, {name}", f"{value:g}"] for name, value in manifest["answer_lengths"].items()]
  lines += [["answers cut at the limit", report.get("answers_cut")]]
  lines += [
    [f"dropped: {name.replace('_', ' ')}", count] for name, count in report.get("dropped", {}).items()
  ]
  checked = report.get("evaluation")
  lines += _overlap_lines(checked) if checked else []
  rows = _log(path)
  seconds = sum(row["seconds"] for row in rows)
  if seconds:
    lines += [
      ["minutes, as logged", f"{seconds / 60:.1f}"],
      ["answer tokens/s", f"{sum(row['answer_tokens'] for row in rows) / seconds:.1f}"],
      ["tokens/s of any kind", f"{sum(row['written_tokens'] for row in rows) / seconds:.1f}"],
      ["peak memory, GB", f"{max(row['peak_memory_bytes'] for row in rows) / 1e9:.2f}"],
    ]
  results.table([f"{len(manifest['shards'])} shards", ""], lines)
  if checked is None:
    print("\noverlap with evaluation questions was not checked: no --evaluation")
  print(f"\n{path}: digest {manifest['digest']}")


def _overlap_lines(checked: dict[str, Any]) -> list[list[Any]]:
  """What `overlap.report` found, as lines of a table."""
  lines = []
  for size, found in checked["sharing_n_grams"].items():
    lines.append([f"of {checked['questions']} evaluation questions share {size} tokens", found["questions"]])
    lines.append([f"samples that share {size} tokens with one", found["samples"]])
  return lines


def show_overlap(path: str, asked: Sequence[str]) -> None:
  """What the texts of a data set that is there share with evaluation questions.

  Raises:
    ValueError: a data set that another model's tokens are in.
  """
  data, job = Dataset.open(path), runtime.load_job([summary.BASELINE])
  tokenizer = job.target.tokenizer
  here, there = distill.model_digest(job.target.model), data.manifest["provenance"]["model"]["sha256"]
  if here != there:
    raise ValueError(
      f"--overlap_of = {path!r} is of a model with sha256 = {there[:12]}…; --model has {here[:12]}…"
    )
  evaluation = Evaluation(asked, lambda text: tokenizer.encode(text, add_bos=False))
  keep = Filter([], evaluation)
  for i in tqdm.tqdm(range(len(data)), desc="overlap", unit="sample", file=sys.stderr):
    sample = data[i]
    keep.count(*(tokenizer.decode(sample.tokens[part]) for part in (~sample.mask, sample.mask)))
  checked = overlap.report([keep.info()], evaluation)["evaluation"]
  results.table([f"{len(data)} samples", ""], _overlap_lines(checked))
  print(f"\n{path}: digest {data.manifest['digest']}")


def _log(path: str) -> list[dict[str, Any]]:
  """Whole lines of the log; times are for reading, nothing depends on them."""
  file = os.path.join(path, LOG)
  if not os.path.exists(file):
    return []
  with open(file, encoding="utf-8") as stream:
    return [json.loads(line) for line in stream if line.endswith("\n")]


def main(_: Sequence[str]) -> None:
  if OVERLAP_OF.value:
    if not EVALUATION.value:
      raise ValueError("--overlap_of needs --evaluation, the questions to compare with")
    show_overlap(OVERLAP_OF.value, _messages_of_users(EVALUATION.value))
    return
  plan = plan_from_flags()
  found = conversations.read(CONVERSATIONS.value) if CONVERSATIONS.value else None
  asked = _messages_of_users(EVALUATION.value) if EVALUATION.value else None
  job = runtime.load_job([summary.BASELINE])
  if not job.chat and plan.kind != "continuations":
    raise ValueError(
      f"--model = {shared.MODEL.value!r} has no chat template; continue texts: --conversations and --base"
    )
  taps = usual_taps(job.target.config.num_layers) if FEATURES.value else ()
  plan = dataclasses.replace(plan, recipe=dataclasses.replace(plan.recipe, taps=taps))
  evaluation = None
  if asked is not None:
    encode = lambda text: job.target.tokenizer.encode(text, add_bos=False)
    evaluation = Evaluation(asked, encode, digest=conversations.file_digest(EVALUATION.value))
  provenance = distill.provenance(
    job.target,
    plan.recipe,
    plan.kind,
    file_sha256=conversations.file_digest(CONVERSATIONS.value) if found is not None else None,
    length_limit=length_limit(job) if plan.kind == "conversations" else None,
    evaluation=evaluation,
  )
  progress = Progress()
  source = make_source(job, plan, found, progress)
  writer = open_writer(job, plan, provenance)
  size = None if found is None else len(found)
  left = size is None or len(writer.shards) * plan.recipe.shard_samples < size
  if left and writer.answer_tokens < plan.tokens:
    write(job, plan, writer, source, progress, size=size, evaluation=evaluation)
  show(writer.path)


if __name__ == "__main__":
  shared.run(main)
