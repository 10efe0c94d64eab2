"""Question files of the benchmarks, by their fields: what is asked, what is refused, what a run records."""

import gzip
import hashlib
import json

import pytest

from experiments import questions
from tests.experiments.tiny import run_script


def conversation(number, category, turns=2):
  return {"question_id": number, "category": category, "turns": [f"turn {i}" for i in range(turns)]}


def humaneval(number):
  return {
    "task_id": f"HumanEval/{number}",
    "prompt": f"def f{number}(x):\n",
    "canonical_solution": "  return x\n",
    "test": "def check(f):\n  assert f(1) == 1\n",
    "entry_point": f"f{number}",
  }


def gsm8k(number):
  return {"question": f"What is {number} and {number}?", "answer": f"It is <<..>>\n#### {2 * number}"}


@pytest.fixture
def write(tmp_path):
  """Writes lines as a file and returns its path."""

  def write(*lines, packed=False):
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path = tmp_path / ("questions.jsonl.gz" if packed else "questions.jsonl")
    path.write_bytes(gzip.compress(data) if packed else data)
    return str(path)

  return write


@pytest.mark.parametrize(
  ("lines", "layout", "first", "published"),
  [
    (
      [conversation(81, "writing"), conversation(91, "roleplay")],
      "mt_bench",
      questions.Question(81, "writing", ("turn 0", "turn 1")),
      80,
    ),
    (
      [conversation(81, "writing"), conversation(161, "translation", 1)],
      "spec_bench",
      questions.Question(81, "writing", ("turn 0", "turn 1")),
      480,
    ),
    ([conversation(1, "cooking", 1)], "turns", questions.Question(1, "cooking", ("turn 0",)), None),
    (
      [humaneval(0), humaneval(1)],
      "humaneval",
      questions.Question("HumanEval/0", "humaneval", ("def f0(x):\n",)),
      164,
    ),
    (
      [gsm8k(1), gsm8k(2)],
      "gsm8k",
      questions.Question(1, "gsm8k", ("What is 1 and 1?",)),
      1319,
    ),
    ([{"prompt": "a"}], "prompts", questions.Question(1, "prompt", ("a",)), None),
  ],
)
@pytest.mark.parametrize("packed", (False, True))
def test_layouts_are_told_by_their_fields(write, lines, layout, first, published, packed):
  """And the record has the checksum of the bytes that lie there, packed or not."""
  path = write(*lines, packed=packed)
  file = questions.load_questions(path, limit=1)
  assert (file.layout, file.questions, file.total) == (layout, [first], len(lines))
  with open(path, "rb") as stream:
    digest = hashlib.sha256(stream.read()).hexdigest()
  assert file.record == {
    "file": path.rpartition("/")[2],
    "layout": layout,
    "sha256": digest,
    "questions": len(lines),
    "published": published,
  }


@pytest.mark.parametrize(
  ("lines", "words"),
  [
    ([humaneval(0) | {"test": ""}], "line 1: test = ''; HumanEval has a text"),
    ([{"task_id": "HumanEval/0", "prompt": "a"}], "line 1: canonical_solution = None"),
    ([gsm8k(1), {"question": "a", "answer": 3}], "line 2: answer = 3; GSM8K has a text"),
    ([gsm8k(1) | {"answer": "3"}], "line 1: answer has no '####'"),
    ([humaneval(0), gsm8k(1)], "line 2: its fields are of the layout gsm8k, those before of humaneval"),
    ([conversation(1, "qa"), conversation(1, "qa")], "question_id = 1 is there twice"),
    ([{"text": "a"}], "line 1: an object with the field turns or prompt is needed, or one of HumanEval"),
    ([[1]], "line 1: an object"),
    ([], "no questions"),
  ],
)
def test_a_damaged_file_names_the_line(write, lines, words):
  """Fails when a line that lacks a field is taken for another layout, or left out."""
  with pytest.raises(ValueError) as error:
    questions.load_questions(write(*lines))
  assert words in str(error.value)


def test_what_is_no_text_is_refused(tmp_path):
  path = tmp_path / "questions.jsonl"
  for data in (b"\xff\xfe{}", b"\x1f\x8bnothing packed"):
    path.write_bytes(data)
    with pytest.raises(ValueError, match="neither UTF-8 text nor such text packed"):
      questions.load_questions(str(path))


def test_a_missing_file_says_where_benchmarks_are(capsys):
  """One line with the official project of each."""
  assert run_script(questions, "--questions=/no/such/question.jsonl") == 2
  (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
  assert "/no/such/question.jsonl: no such file" in line
  for project in ("hemingkx/Spec-Bench", "lm-sys/FastChat", "openai/human-eval", "openai/grade-school-math"):
    assert f"https://github.com/{project}" in line


@pytest.mark.parametrize("bad", ("limit=0", "limit=few", "limit_per_category=0", "questions=/"))
def test_a_bad_value_is_one_line(capsys, bad):
  assert run_script(questions, f"--{bad}") == 2
  (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
  assert bad.partition("=")[2 if bad == "questions=/" else 0] in line


def test_the_command_says_what_a_file_holds(write, capsys):
  path = write(conversation(1, "qa", 1), conversation(2, "qa", 1), conversation(3, "math"))
  assert run_script(questions, f"--questions={path}", "--limit_per_category=1") == 0
  out = capsys.readouterr().out
  assert "layout spec_bench, 3 questions of the 480 of Spec-Bench, 2 asked" in out
  assert f"sha256 {questions.load_questions(path).sha256}" in out
  (math,) = [line.split() for line in out.splitlines() if line.startswith("math")]
  assert math == ["math", "1", "2", "6", "6"]
