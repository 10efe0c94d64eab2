"""Questions from a file that the user has: Spec-Bench, MT-bench, HumanEval, GSM8K, others, or prompts.

  python -m experiments.questions --questions=FILE.jsonl

prints what a file was recognised as, its checksum, and what is asked by category. The layout is told by the
fields of the lines; ``.jsonl`` may be packed with gzip. What was read stands in the records of runs.
HumanEval's functions and GSM8K's problems are asked as they stand, in the chat template if there is one.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

from absl import flags

from experiments import flags as shared
from experiments import results

# Prompts of our own, several kinds.
DEFAULT_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "prompts.jsonl")

QUESTIONS = flags.DEFINE_string(
  "questions",
  "",
  "JSONL of questions: Spec-Bench, MT-bench, HumanEval, GSM8K as their projects have them, or prompts. "
  "Default: the dozen prompts shipped beside the scripts.",
)
LIMIT = flags.DEFINE_integer("limit", None, "Ask the first so many questions.", 1)
LIMIT_PER_CATEGORY = flags.DEFINE_integer(
  "limit_per_category", None, "Ask the first so many questions of each category.", 1
)


@dataclasses.dataclass(frozen=True)
class Benchmark:
  """A published set of questions.

  Attributes:
    title: as its authors call it.
    home: the official project, and the file there.
    size: questions of the whole set.
  """

  title: str
  home: str
  size: int


BENCHMARKS = {
  "spec_bench": Benchmark(
    "Spec-Bench", "https://github.com/hemingkx/Spec-Bench (data/spec_bench/question.jsonl)", 480
  ),
  "mt_bench": Benchmark(
    "MT-bench",
    "https://github.com/lm-sys/FastChat (fastchat/llm_judge/data/mt_bench/question.jsonl)",
    80,
  ),
  "humaneval": Benchmark("HumanEval", "https://github.com/openai/human-eval (data/HumanEval.jsonl.gz)", 164),
  "gsm8k": Benchmark(
    "GSM8K",
    "https://github.com/openai/grade-school-math (grade_school_math/data/test.jsonl)",
    1319,
  ),
}
MT_BENCH = frozenset("writing roleplay reasoning math coding extraction stem humanities".split())
SPEC_BENCH = MT_BENCH | frozenset("translation summarization qa math_reasoning rag".split())
_GZIP = b"\x1f\x8b"


@dataclasses.dataclass(frozen=True)
class Question:
  """One question; ``turns`` are the user's messages, asked one after the other."""

  question_id: int | str
  category: str
  turns: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class QuestionFile:
  """What was read, and what of it is asked.

  Attributes:
    path: of the file.
    layout: one of `BENCHMARKS`, ``turns`` for other questions with turns, or ``prompts``.
    sha256: of the file's bytes.
    total: questions in the file.
    questions: those that are asked, in the file's order.
  """

  path: str
  layout: str
  sha256: str
  total: int
  questions: list[Question]

  @property
  def record(self) -> dict[str, Any]:
    """For ``run.json``: the file's name, layout, checksum and size, and that of the whole set."""
    known = BENCHMARKS.get(self.layout)
    return {
      "file": os.path.basename(self.path),
      "layout": self.layout,
      "sha256": self.sha256,
      "questions": self.total,
      "published": known.size if known else None,
    }


def from_flags() -> QuestionFile:
  """What --questions, --limit and --limit_per_category ask for; errors as in `load_questions`."""
  return load_questions(
    QUESTIONS.value or DEFAULT_FILE, limit=LIMIT.value, limit_per_category=LIMIT_PER_CATEGORY.value
  )


def load_questions(
  path: str, *, limit: int | None = None, limit_per_category: int | None = None
) -> QuestionFile:
  """Reads questions in the file's order.

  Args:
    path: JSONL, perhaps packed with gzip, whose lines all have the fields of one layout:
      ``turns``, and ``question_id`` and ``category`` (Spec-Bench, MT-bench, and others);
      ``task_id``, ``prompt``, ``canonical_solution``, ``test`` and ``entry_point`` (HumanEval);
      ``question`` and ``answer`` (GSM8K);
      or ``prompt``. An id that is not there is the line's number, a category ``prompt``.
    limit: keep the first so many, after ``limit_per_category``.
    limit_per_category: keep the first so many of each category.

  Raises:
    ValueError: naming file, line and field; for a file that is missing, where benchmarks are found.
  """
  data = _read(path)
  layouts: dict[str, None] = {}
  questions: list[Question] = []
  for number, line in enumerate(_text(path, data).split("\n"), start=1):
    if not line.strip():
      continue
    where = f"{path}, line {number}"
    layout, fields = _layout(line, where)
    layouts[layout] = None
    if len(layouts) > 1:
      raise ValueError(
        f"{where}: its fields are of the layout {layout}, those before of {next(iter(layouts))}"
      )
    questions.append(_LAYOUTS[layout](fields, number, where))
  if not questions:
    raise ValueError(f"{path}: no questions")
  twice = [i for i, count in Counter(question.question_id for question in questions).items() if count > 1]
  if twice:
    raise ValueError(f"{path}: question_id = {twice[0]!r} is there twice")
  (layout,) = layouts
  chosen = _chosen(questions, limit, limit_per_category)
  name = _conversations(questions) if layout == "turns" else layout
  return QuestionFile(path, name, hashlib.sha256(data).hexdigest(), len(questions), chosen)


def _read(path: str) -> bytes:
  try:
    with open(path, "rb") as file:
      return file.read()
  except FileNotFoundError:
    places = "; ".join(f"{known.title}: {known.home}" for known in BENCHMARKS.values())
    raise ValueError(f"{path}: no such file; benchmarks come from their own projects. {places}") from None


def _text(path: str, data: bytes) -> str:
  try:
    return (gzip.decompress(data) if data.startswith(_GZIP) else data).decode("utf-8")
  except (ValueError, EOFError, OSError) as error:
    raise ValueError(f"{path}: neither UTF-8 text nor such text packed with gzip ({error})") from None


def _layout(line: str, where: str) -> tuple[str, dict[str, Any]]:
  """Which layout a line has, by its fields, and these."""
  try:
    fields: Any = json.loads(line)
  except ValueError as error:
    raise ValueError(f"{where}: not JSON ({error})") from None
  names = fields.keys() if isinstance(fields, dict) else set()
  for layout, marks in _MARKS.items():
    if marks & names:
      return layout, fields
  raise ValueError(
    f"{where}: an object with the field turns or prompt is needed, or one of HumanEval (task_id, prompt, …) "
    "or GSM8K (question, answer)"
  )


def _turns(fields: dict[str, Any], number: int, where: str) -> Question:
  turns = fields["turns"] if "turns" in fields else [fields["prompt"]]
  if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t for t in turns):
    raise ValueError(f"{where}: turns = {turns!r}; texts that are not empty are needed")
  question_id = fields.get("question_id", number)
  if not isinstance(question_id, int | str):
    raise ValueError(f"{where}: question_id = {question_id!r}; it must be a number or a text")
  return Question(question_id, str(fields.get("category", "prompt")), tuple(turns))


def _texts(fields: dict[str, Any], names: tuple[str, ...], title: str, where: str) -> None:
  """Raises ValueError unless each field is a text that is not empty."""
  for name in names:
    value = fields.get(name)
    if not isinstance(value, str) or not value:
      raise ValueError(f"{where}: {name} = {value!r}; {title} has a text there that is not empty")


def _humaneval(fields: dict[str, Any], number: int, where: str) -> Question:
  del number
  needed = ("task_id", "prompt", "canonical_solution", "test", "entry_point")
  _texts(fields, needed, "HumanEval", where)
  return Question(fields["task_id"], "humaneval", (fields["prompt"],))


def _gsm8k(fields: dict[str, Any], number: int, where: str) -> Question:
  _texts(fields, ("question", "answer"), "GSM8K", where)
  if "####" not in fields["answer"]:
    raise ValueError(f"{where}: answer has no '####' before the result, as GSM8K's have")
  return Question(number, "gsm8k", (fields["question"],))


# Fields that tell a layout from the others; the first that fits.
_MARKS = {
  "turns": frozenset({"turns"}),
  "humaneval": frozenset({"task_id", "canonical_solution", "entry_point"}),
  "gsm8k": frozenset({"question"}),
  "prompts": frozenset({"prompt"}),
}
_LAYOUTS: dict[str, Callable[[dict[str, Any], int, str], Question]] = {
  "turns": _turns,
  "humaneval": _humaneval,
  "gsm8k": _gsm8k,
  "prompts": _turns,
}


def _conversations(questions: list[Question]) -> str:
  """Which set questions with turns are of, or a part of: by their categories."""
  categories = {question.category for question in questions}
  if categories <= MT_BENCH and all(len(question.turns) == 2 for question in questions):
    return "mt_bench"
  return "spec_bench" if categories <= SPEC_BENCH else "turns"


def _chosen(questions: list[Question], limit: int | None, limit_per_category: int | None) -> list[Question]:
  kept, seen = [], Counter()
  for question in questions:
    seen[question.category] += 1
    if limit_per_category is None or seen[question.category] <= limit_per_category:
      kept.append(question)
  return kept[:limit]


def digest(questions: list[Question], turns: int | None, chat: bool) -> str:
  """SHA-256 of what is asked, for comparing runs: ids, used turns, and whether it is chat."""
  asked = [[question.question_id, list(question.turns[:turns])] for question in questions]
  return hashlib.sha256(json.dumps([chat, asked]).encode()).hexdigest()


def main(_: list[str]) -> None:
  file = from_flags()
  known = BENCHMARKS.get(file.layout)
  lines = []
  for category in dict.fromkeys(question.category for question in file.questions):
    mine = [question for question in file.questions if question.category == category]
    lengths = [len(turn) for question in mine for turn in question.turns]
    lines.append([category, len(mine), len(lengths), round(sum(lengths) / len(lengths)), max(lengths)])
  results.table(["category", "questions", "turns", "characters a turn", "most"], lines)
  whole = f" of the {known.size} of {known.title}" if known else ""
  print(f"\n{file.path}: layout {file.layout}, {file.total} questions{whole}, {len(file.questions)} asked")
  print(f"sha256 {file.sha256}")


if __name__ == "__main__":
  shared.run(main)
