"""Answer files against a reader of their own, written from what Spec-Bench documents of its speed report."""

import json
import os
import statistics

import pytest

from experiments import spec_bench

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


def words(text):
  """A tokenizer that puts a BOS token before the words, as Vicuna's does."""
  return ["<s>", *text.split()]


def read(path, task):
  """``choices[0]`` of the lines of a task; ``mt_bench`` is eight categories, ``overall`` is all."""
  with open(path, encoding="utf-8") as file:
    lines = [json.loads(line) for line in file]
  wanted = lambda category: task in (category, "overall") or (task == "mt_bench" and category in MT_BENCH)
  return [line["choices"][0] for line in lines if wanted(line["category"])]


def speed_report(path, baseline, task):
  """Mean accepted tokens, tokens a second, that of the baseline, and their ratio, as Spec-Bench reports them.

  Speeds are means over questions of Σ tokens of the turns / Σ wall time. A method's tokens are its
  ``new_tokens``; the baseline's are counted in its text, without the BOS token.
  """
  mine, plain = read(path, task), read(baseline, task)
  accepted = statistics.fmean(length for choice in mine for length in choice["accept_lengths"])
  speed = statistics.fmean(sum(choice["new_tokens"]) / sum(choice["wall_time"]) for choice in mine)
  count = lambda choice: sum(len(words(turn)) - 1 for turn in choice["turns"])
  base = statistics.fmean(count(choice) / sum(choice["wall_time"]) for choice in plain)
  return accepted, speed, base, speed / base


def row(question, turn, category, drafter, emitted, prefill_s, decode_s):
  count = sum(emitted)
  return {
    "question_id": question,
    "turn": turn,
    "category": category,
    "drafter": drafter,
    "rounds": len(emitted),
    "new_tokens": count,
    "accept_lengths": emitted,
    "prefill_s": prefill_s,
    "decode_s": decode_s,
    "text": " ".join(["wörd"] * count),
  }


# Two turns of a question of MT-bench and one of translation; the rows are not in the order of the turns.
ROWS = [
  row(81, 1, "writing", "none", [1] * 4, 0.5, 1.5),
  row(81, 0, "writing", "none", [1] * 6, 1.0, 2.0),
  row(81, 0, "writing", "eagle3[window=3]", [3, 3], 1.0, 0.5),
  row(81, 1, "writing", "eagle3[window=3]", [1, 2, 1], 0.5, 0.5),
  row(161, 0, "translation", "none", [1] * 8, 1.0, 3.0),
  row(161, 0, "translation", "eagle3[window=3]", [4, 4], 1.0, 1.0),
]


@pytest.fixture
def files(tmp_path):
  """Paths of the method's answers and of plain decoding's."""
  spec_bench.write_answers(str(tmp_path), ROWS, "tiny")
  return [os.path.join(tmp_path, "answers", f"{name}.jsonl") for name in ("eagle3_window_3_", "none")]


@pytest.mark.parametrize(
  ("task", "accepted", "speed", "baseline"),
  [
    ("mt_bench", 10 / 5, 10 / 2.5, 10 / 5),
    ("translation", 8 / 2, 8 / 2, 8 / 4),
    ("overall", 18 / 7, (4 + 4) / 2, (2 + 2) / 2),
  ],
)
def test_spec_bench_computes_the_speeds_from_them(files, task, accepted, speed, baseline):
  """Fails when prefill is left out of the wall time, turns are apart or out of order, or a round is lost."""
  found = speed_report(*files, task)
  assert found == pytest.approx((accepted, speed, baseline, speed / baseline))


def test_lines_are_as_it_writes_them(files):
  """Every field that its own answer files have, one value a turn, one accepted length a decoding step."""
  for path in files:
    with open(path, encoding="utf-8") as file:
      lines = [json.loads(line) for line in file]
    assert [line["question_id"] for line in lines] == [81, 161]
    for line in lines:
      assert list(line) == ["question_id", "category", "answer_id", "model_id", "choices", "tstamp"]
      (choice,) = line["choices"]
      assert choice["index"] == 0
      turns = len(choice["turns"])
      assert [len(choice[name]) for name in ("decoding_steps", "new_tokens", "wall_time")] == [turns] * 3
      assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
      assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"])
  assert [len(turn.split()) for turn in read(files[1], "mt_bench")[0]["turns"]] == [6, 4]
