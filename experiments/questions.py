"""Questions of a benchmark: Spec-Bench's JSONL, or JSONL of plain prompts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections import Counter
from typing import Any

from absl import flags

# Prompts of our own, several kinds.
DEFAULT_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "prompts.jsonl")

QUESTIONS = flags.DEFINE_string(
  "questions", "", "JSONL of questions or prompts. Default: the dozen prompts shipped beside the scripts."
)
LIMIT = flags.DEFINE_integer("limit", None, "Ask the first so many questions.", 1)
LIMIT_PER_CATEGORY = flags.DEFINE_integer(
  "limit_per_category", None, "Ask the first so many questions of each category.", 1
)


@dataclasses.dataclass(frozen=True)
class Question:
  """One question; ``turns`` are the user's messages, asked one after the other."""

  question_id: int | str
  category: str
  turns: tuple[str, ...]


def from_flags() -> list[Question]:
  """What --questions, --limit and --limit_per_category ask for; errors as in `load_questions`."""
  return load_questions(
    QUESTIONS.value or DEFAULT_FILE, limit=LIMIT.value, limit_per_category=LIMIT_PER_CATEGORY.value
  )


def load_questions(
  path: str, *, limit: int | None = None, limit_per_category: int | None = None
) -> list[Question]:
  """Reads questions in the file's order.

  Args:
    path: JSONL with ``question_id``, ``category``, ``turns``, or with ``prompt`` (then the id is the
      line's number unless given, and the category ``prompt``).
    limit: keep the first so many, after ``limit_per_category``.
    limit_per_category: keep the first so many of each category.

  Raises:
    ValueError: naming file, line and field.
  """
  questions: list[Question] = []
  with open(path, encoding="utf-8") as file:
    for number, line in enumerate(file, start=1):
      if line.strip():
        questions.append(_parse(line, number, path))
  twice = [i for i, count in Counter(question.question_id for question in questions).items() if count > 1]
  if twice:
    raise ValueError(f"{path}: question_id = {twice[0]!r} is there twice")
  if limit_per_category is not None:
    seen: Counter[str] = Counter()
    kept = []
    for question in questions:
      seen[question.category] += 1
      if seen[question.category] <= limit_per_category:
        kept.append(question)
    questions = kept
  questions = questions[:limit]
  if not questions:
    raise ValueError(f"{path}: no questions")
  return questions


def _parse(line: str, number: int, path: str) -> Question:
  where = f"{path}, line {number}"
  try:
    fields: Any = json.loads(line)
  except ValueError as error:
    raise ValueError(f"{where}: not JSON ({error})") from None
  if not isinstance(fields, dict) or not ({"turns", "prompt"} & fields.keys()):
    raise ValueError(f"{where}: an object with the field turns or prompt is needed")
  turns = fields["turns"] if "turns" in fields else [fields["prompt"]]
  if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t for t in turns):
    raise ValueError(f"{where}: turns = {turns!r}; texts that are not empty are needed")
  question_id = fields.get("question_id", number)
  if not isinstance(question_id, int | str):
    raise ValueError(f"{where}: question_id = {question_id!r}; it must be a number or a text")
  return Question(question_id, str(fields.get("category", "prompt")), tuple(turns))


def digest(questions: list[Question], turns: int | None, chat: bool) -> str:
  """SHA-256 of what is asked, for comparing runs: ids, used turns, and whether it is chat."""
  asked = [[question.question_id, list(question.turns[:turns])] for question in questions]
  return hashlib.sha256(json.dumps([chat, asked]).encode()).hexdigest()
