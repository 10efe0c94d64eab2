"""The scripts end to end on tiny models: rows, resuming, comparing, one-line errors."""

import hashlib
import json
import os
import re

import pytest

from experiments import compare_runs, decode_bench, generate, measure, questions, results, spec_bench
from specjax.checkpoints.files import write_whole
from tests.experiments.tiny import run_script

FIELDS = (
  "question_id turn category drafter rule settings prompt_tokens new_tokens rounds proposed proposed_depth "
  "accepted accept_counts reach_counts accept_lengths node_counts width_counts missed overlap "
  "mean_logprob prefill_s decode_s finish_reason token_ids text"
).split()
TREE = "prompt_lookup[matches=4,nodes=9,min_ngram=1]"
QUESTIONS = [
  {"question_id": 7, "category": "copy", "turns": ["the hen and the hen", "again the hen"]},
  {"question_id": 8, "category": "copy", "turns": ["abcabcabc " * 3]},
  {"question_id": 9, "category": "other", "turns": ["x" * 70]},
]


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
  path = tmp_path_factory.mktemp("questions") / "questions.jsonl"
  path.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
  return str(path)


@pytest.fixture(scope="module")
def bench(models, asked):
  """Runs spec_bench with some flags; returns the exit code."""
  target, draft = models

  def run(output, *more):
    return run_script(
      spec_bench,
      f"--model={target}",
      f"--draft_model={draft}",
      f"--questions={asked}",
      "--drafters=prompt_lookup,two_model,experiments.my_drafter:make",
      "--turns=all",
      "--max_new_tokens=12",
      f"--output={output}",
      *more,
    )

  return run


@pytest.fixture(scope="module")
def first(bench, tmp_path_factory):
  path = str(tmp_path_factory.mktemp("runs") / "first")
  assert bench(path) == 0
  return path


def test_one_row_per_question_turn_and_method(first):
  rows = results.read_rows(first)
  methods = ["none", "prompt_lookup", "two_model", "experiments.my_drafter:make"]
  asked = [(7, 0), (7, 1), (8, 0), (9, 0)]
  assert sorted((r["question_id"], r["turn"], r["drafter"]) for r in rows) == sorted(
    (*k, method) for k in asked for method in methods
  )
  plain = {(r["question_id"], r["turn"]): r for r in rows if r["drafter"] == "none"}
  for r in rows:
    assert list(r) == FIELDS
    assert sum(r["accept_lengths"]) == r["new_tokens"] == len(r["token_ids"]) <= 12
    assert sum(r["accept_counts"]) == r["rounds"] == len(r["accept_lengths"])
    assert sum(r["node_counts"].values()) == sum(r["width_counts"].values()) == r["rounds"]
    baseline = plain[r["question_id"], r["turn"]]
    assert r["token_ids"] == baseline["token_ids"] and r["text"] == baseline["text"]
    assert r["prompt_tokens"] == baseline["prompt_tokens"]
  assert all(r["accept_lengths"] == [1] * r["new_tokens"] for r in plain.values())


def test_p9_every_drafter_proposes(first):
  """Case P9."""
  for drafter in ("prompt_lookup", "two_model", "experiments.my_drafter:make"):
    assert sum(r["proposed"] for r in results.read_rows(first) if r["drafter"] == drafter) > 0


def test_the_record_says_what_was_read(first, asked):
  """Fails when a run does not say which file its questions are of."""
  with open(asked, "rb") as file:
    digest = hashlib.sha256(file.read()).hexdigest()
  record = results.read_run(first)["questions"]
  assert record == {
    "file": "questions.jsonl",
    "layout": "turns",
    "sha256": digest,
    "questions": 3,
    "published": None,
  }


def test_o6_compiles_are_counted_and_none_is_timed(first):
  """Case O6: several prompt lengths, compile count stored."""
  info = results.read_run(first)
  assert len({r["prompt_tokens"] for r in results.read_rows(first)}) >= 3
  assert info["compile_count"] > 0 and info["compiles_while_timing"] == 0
  assert info["differences"] == [] and info["peak_memory_bytes"] > 0
  assert info["compile_s"].keys() == {r["drafter"] for r in results.read_rows(first)}


def test_answers_have_spec_bench_layout(first):
  folder = os.path.join(first, "answers")
  names = ["experiments.my_drafter_make", "none", "prompt_lookup", "two_model"]
  assert sorted(os.listdir(folder)) == [f"{name}.jsonl" for name in names]
  with open(os.path.join(folder, "two_model.jsonl"), encoding="utf-8") as file:
    lines = [json.loads(line) for line in file]
  assert [line["question_id"] for line in lines] == [7, 8, 9]
  assert {"question_id", "category", "answer_id", "model_id", "tstamp", "choices"} == lines[0].keys()
  (choice,) = lines[0]["choices"]
  assert choice.keys() == {"index", "turns", "decoding_steps", "new_tokens", "wall_time", "accept_lengths"}
  assert len(choice["turns"]) == len(choice["wall_time"]) == 2
  assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"])


def test_resumes_after_a_kill(bench, first, tmp_path, capsys):
  """Finished rows stay as they are, the torn one and what follows are run again."""
  output = str(tmp_path / "killed")
  assert bench(output) == 0
  whole = results.read_rows(output)
  path = os.path.join(output, results.ROWS_FILE)
  with open(path, "rb") as file:
    lines = file.read().splitlines(keepends=True)
  with open(path, "wb") as file:
    file.write(b"".join(lines[:6]) + lines[6][:40])
  assert bench(output) == 0
  rows = results.read_rows(output)
  ids = lambda rows: {(r["question_id"], r["turn"], r["drafter"]): r["token_ids"] for r in rows}
  assert len(rows) == len(whole) and ids(rows) == ids(whole)
  assert rows[:6] == whole[:6]
  capsys.readouterr()
  assert bench(output) == 0  # nothing left to do: only the tables
  captured = capsys.readouterr()
  assert "compiling" not in captured.err and "prompt_lookup" in captured.out
  assert bench(output, "--max_new_tokens=13") == 2
  assert "--max_new_tokens=12; now it is --max_new_tokens=13" in capsys.readouterr().err


@pytest.mark.slow
def test_batches_give_the_same_tokens(bench, first, tmp_path):
  """Three questions in batches of two: the last one is filled up, rows stay independent; a tree joins in."""
  output = str(tmp_path / "batched")
  assert (
    bench(output, "--batch_size=2", "--repeats=2", f"--drafters=prompt_lookup,{TREE}", "--draft_model=") == 0
  )
  ids = lambda path: {
    (r["question_id"], r["turn"], r["drafter"]): r["token_ids"]
    for r in results.read_rows(path)
    if r["drafter"] in ("none", "prompt_lookup")
  }
  assert ids(output) == ids(first) and len(ids(output)) == 8
  found = {r["question_id"]: r for r in results.read_rows(output) if r["drafter"] == TREE}
  plain = {r["question_id"]: r for r in results.read_rows(output) if r["drafter"] == "none"}
  assert {q: r["token_ids"] for q, r in found.items()} == {q: r["token_ids"] for q, r in plain.items()}
  assert any(r["proposed"] > r["proposed_depth"] for r in found.values())
  assert results.read_run(output)["compiles_while_timing"] == 0
  assert run_script(compare_runs, first, output, takes_arguments=True) == 0


def test_compare_refuses_unlike_runs(bench, first, tmp_path, capsys):
  other = str(tmp_path / "other")
  assert bench(other, "--max_new_tokens=5", "--limit=1", "--turns=first") == 0
  capsys.readouterr()
  assert run_script(compare_runs, first, other, takes_arguments=True) == 2
  assert "prompts_sha256 differs" in capsys.readouterr().err
  info = results.read_run(other)
  info["prompts_sha256"] = results.read_run(first)["prompts_sha256"]
  write_whole(os.path.join(other, results.RUN_FILE), json.dumps(info))
  assert run_script(compare_runs, first, other, takes_arguments=True) == 2
  assert "max_new_tokens differs: 12 in" in capsys.readouterr().err
  assert run_script(compare_runs, takes_arguments=True) == 2
  assert run_script(compare_runs, str(tmp_path), takes_arguments=True) == 2


def test_compare_prints_ratios(first, capsys):
  assert run_script(compare_runs, first, first, takes_arguments=True) == 0
  out = capsys.readouterr().out
  assert "4 of 4" in out and "method by method" in out and "nan" not in out


# --- generate --------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["prompt_lookup", "two_model"])
def test_p6_generate_streams_and_reports(models, capsys, drafter, tmp_path):
  target, draft = models
  flags = [f"--draft_model={draft}"] if drafter == "two_model" else []
  output = str(tmp_path / "run")
  flags += [f"--model={target}", f"--drafter={drafter}", "--repeats=2"]
  flags.append("--prompt=so the hen and the hen and the hen")
  assert run_script(generate, *flags, "--max_new_tokens=16", f"--output={output}") == 0
  out = capsys.readouterr().out
  rows = results.read_rows(output)
  assert out.startswith(rows[0]["text"])
  assert "identical         yes, all" in out and "0 program(s) compiled while timing" in out
  assert "nan" not in out
  # Case P6: the second run drafts as much as the first.
  assert len(rows) == 4 and rows[2]["proposed"] == rows[3]["proposed"] > 0


@pytest.mark.slow
def test_generate_samples_in_a_batch(models, capsys):
  """With deterministic drafts sampling equals plain sampling token for token."""
  flags = [f"--model={models[0]}", "--prompt=the hen", "--temperature=0.8", "--batch_size=2", "--top_k=20"]
  assert run_script(generate, *flags, "--max_new_tokens=16", "--seed=3") == 0
  out = capsys.readouterr().out
  assert "rule draw_and_follow" in out and "identical         yes, all 32 tokens" in out
  # Without --drafter a controller chooses; no calibration is there, and the report says so.
  assert re.search(r"widths +plain: \d+, prompt_lookup\[window=3\]: \d+, ", out)
  assert "costs: assumed: no calibration" in out


def test_least_lengths_hold_in_short_last_groups(models, tmp_path):
  """Three questions in batches of two: neither compiling nor the filling row asks for a least length."""
  asked = tmp_path / "questions.jsonl"
  asked.write_text("".join(json.dumps({"prompt": f"the hen {i}"}) + "\n" for i in range(3)))
  output = str(tmp_path / "run")
  flags = [f"--model={models[0]}", f"--questions={asked}", f"--output={output}", "--batch_size=2", "--nochat"]
  flags += ["--drafter=prompt_lookup"]
  assert run_script(spec_bench, *flags, "--max_new_tokens=6", "--min_new_tokens=4", "--warmup=0") == 0
  rows = results.read_rows(output)
  assert len(rows) == 6 and all(4 <= row["new_tokens"] <= 6 for row in rows)
  assert all(row["mean_logprob"] == 0 for row in rows)


def test_generate_marks_what_is_not_the_targets_output(models, capsys):
  flags = [f"--model={models[0]}", "--prompt=the hen the hen", "--rule=synthetic[rates=(1.0,)]"]
  flags += ["--drafter=prompt_lookup"]
  assert run_script(generate, *flags, "--max_new_tokens=8") == 0
  assert "not compared: rule synthetic does not give the target's output" in capsys.readouterr().out


@pytest.mark.parametrize(
  "flags, message",
  [
    (["--temperature=-1"], "temperature"),
    (["--top_p=nan"], "top_p"),
    (["--window=0", "--drafter=prompt_lookup"], "--window=0 does not fit --drafter=prompt_lookup"),
    (["--window=128"], "window"),
    (["--drafter=magic"], "drafter"),
    (["--drafter=two_model"], "--drafter=two_model needs --draft_model"),
    (["--drafter=no.such.module:make"], "cannot be imported"),
    (["--rule=greedy", "--temperature=0.5"], "--rule=greedy needs --temperature=0"),
    (["--rule=synthetic[rates=(0.5,2)]"], "rates"),
    (["--rule=magic"], "magic"),
    (["--logit_bias=7"], "7"),
    (["--min_new_tokens=9", "--max_new_tokens=8"], "--min_new_tokens=9 is more than --max_new_tokens=8"),
    (["--mesh=data"], "data:2,model:4"),
    (["--mesh=data:512"], "needs 512 devices"),
    (["--max_length=100000"], "100000"),
    (["--max_length=8"], "length limit is 8"),
    (["--model=nowhere"], "nowhere"),
    (["--prompt_file=/no/such/file"], "/no/such/file"),
    (["--no_such_flag=1"], "no_such_flag"),
    (["stray"], "unexpected argument 'stray'"),
  ],
)
def test_wrong_flags_are_one_line(models, capsys, flags, message):
  assert run_script(generate, f"--model={models[0]}", *flags) == 2
  err = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
  assert len(err) == 1 and message in err[0]


# --- the rest --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "line, message",
  [
    ("{", "line 1: not JSON"),
    ('{"text": "a"}', "line 1: an object with the field turns or prompt"),
    ('{"turns": [""]}', "line 1: turns = "),
    (
      '{"prompt": "a", "question_id": 1}\n{"prompt": "b", "question_id": 1}',
      "question_id = 1 is there twice",
    ),
    ("", "no questions"),
  ],
)
def test_bad_questions_name_the_line(tmp_path, line, message):
  path = tmp_path / "questions.jsonl"
  path.write_text(line)
  with pytest.raises(ValueError, match=message):
    questions.load_questions(str(path))


def test_shipped_and_plain_prompts(tmp_path):
  shipped = questions.load_questions(questions.DEFAULT_FILE).questions
  assert len(shipped) >= 10 and len({question.category for question in shipped}) >= 5
  one_each = questions.load_questions(questions.DEFAULT_FILE, limit_per_category=1).questions
  assert len(one_each) == len({question.category for question in shipped})
  path = tmp_path / "prompts.jsonl"
  path.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
  assert [q.question_id for q in questions.load_questions(str(path)).questions] == [1, 3]


@pytest.mark.parametrize("parts", (("floor",), pytest.param(decode_bench.PARTS, marks=pytest.mark.slow)))
def test_decode_bench_measures_every_part(models, tmp_path, capsys, parts):
  """Structure, not times (case P7): each case does its work, and nothing compiles while timing."""
  output = str(tmp_path / "cost")
  flags = [f"--model={models[0]}", "--quick", "--passes=2", "--rounds=4", "--live=20", "--nodes=4"]
  flags += [f"--parts={','.join(parts)}", "--buffer_slots=512", "--batches=1,2", "--layers=2"]
  assert run_script(decode_bench, *flags, f"--output={output}") == 0
  rows = results.read_rows(output)
  assert {row["part"].split(",")[0] for row in rows} == set(parts)
  assert all(row["compile_s"] > 0 for row in rows if row["part"] == "compile")
  assert all(
    row["ms"] > 0 and len(row["samples_ms"]) == 2 for row in rows if row["part"] not in ("compile", "memory")
  )
  assert results.read_run(output)["compiles_while_timing"] == 0
  assert "relative" in capsys.readouterr().out
  assert run_script(decode_bench, f"--model={models[0]}", "--parts=all") == 2


def test_margin_is_relative_to_the_logit_scale(models):
  from specjax.checkpoints import load_model

  model = load_model(models[0]).model
  tokens = list(range(40))
  margins = {measure.logit_margin(model, tokens, 5, other) for other in range(5, 9)}
  assert 0.0 in margins and all(0.0 <= margin <= 2.0 for margin in margins) and len(margins) > 1
