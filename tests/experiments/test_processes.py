"""Questions shared by several processes: shares, wrong flags, merging, and two real processes."""

import json
import os
import socket
import subprocess
import sys

import pytest
from absl import flags

from experiments import compare_runs, processes, results, runtime, spec_bench
from experiments import flags as shared
from experiments.processes import Processes
from tests.experiments.tiny import run_script


@pytest.mark.parametrize("count", (1, 2, 3, 5))
def test_every_question_goes_to_one_process(count):
  """Shares are of nearly one size. Fails when a question is asked twice or by nobody."""
  items = list(range(11))
  shares = [Processes(index, count).share(items) for index in range(count)]
  assert sorted(item for share in shares for item in share) == items
  assert max(map(len, shares)) - min(map(len, shares)) <= 1
  assert len({Processes(index, count).directory("run") for index in range(count)}) == count
  assert Processes().directory("run") == "run" and Processes().gather([1]) == [[1]]


def test_nobody_is_left_without_a_question():
  with pytest.raises(ValueError, match="3 processes share 2 questions"):
    Processes(0, 3).share([1, 2])


BAD = {
  "coordinator": (
    "here|--coordinator = 'here'; it must be HOST:PORT or auto",
    ":1234|must be HOST:PORT",
    "here:port|must be HOST:PORT",
    "here:65536|must be HOST:PORT",
    "here:1234|needs --num_processes and --process_id",
  ),
  "num_processes": (
    "0|num_processes",
    "two|num_processes",
    "2|--num_processes needs --coordinator=HOST:PORT",
  ),
  "process_id": ("-1|process_id", "0|--process_id needs --coordinator=HOST:PORT"),
}
CASES = [(flag, *value.partition("|")[::2]) for flag, values in BAD.items() for value in values]


@pytest.mark.parametrize(("flag", "value", "words"), CASES)
def test_a_bad_value_is_one_line(monkeypatch, capsys, tmp_path, flag, value, words):
  monkeypatch.setattr(runtime, "_load", lambda *_: pytest.fail("a model was loaded"))
  assert run_script(spec_bench, f"--output={tmp_path / 'run'}", f"--{flag}={value}") == 2
  (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
  assert words in line


def test_flags_that_do_not_fit_each_other(capsys, tmp_path):
  given = ["--coordinator=here:1234", "--num_processes=2", "--process_id=2"]
  assert run_script(spec_bench, f"--output={tmp_path / 'run'}", *given) == 2
  assert "--process_id = 2; it must be below --num_processes = 2" in capsys.readouterr().err


def test_every_flag_is_here():
  assert {flag.name for flag in flags.FLAGS.get_flags_for_module(processes)} == set(BAD)


def test_a_cluster_that_is_not_found_is_one_line(monkeypatch, capsys, tmp_path):
  """What JAX says, and what to give instead."""

  def initialize(*_, **__):
    raise RuntimeError("nobody answers")

  monkeypatch.setattr(processes.jax.distributed, "initialize", initialize)
  assert run_script(spec_bench, f"--output={tmp_path / 'run'}", "--coordinator=auto") == 2
  (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
  assert "--coordinator = 'auto': nobody answers; name it: HOST:PORT" in line


def part_of(rows, peak, difference):
  info = {"schema": 4, "script": "spec_bench", "started": "b", "finished": f"c{peak}", "model": "tiny"}
  info |= {"compile_count": 3, "compiles_while_timing": peak, "peak_memory_bytes": peak}
  info |= {"differences": [difference], "platform": "cpu", "device_kind": "cpu", "device_count": 1}
  return {"info": info | {"cpu": f"cpu{peak}", "cpu_count": 2}, "rows": rows}


def test_rows_merge_in_the_order_of_the_questions(tmp_path):
  """A second merge adds what is missing. Fails when rows are doubled, lost, or counts are of one process."""
  shared.parse(["script"])
  rows = lambda *asked: [{"question_id": q, "turn": t, "drafter": d} for q, t, d in asked]
  first = rows(("a", 0, "none"), ("a", 0, "x"), ("a", 1, "none"), ("c", 0, "none"))
  second = rows(("b", 0, "none"), ("b", 0, "x"))
  whole = results.RunDirectory(str(tmp_path / "run"), "spec_bench", [shared])
  started = whole.info["started"]
  processes.merge(whole, [part_of(first[:2], 1, "d"), part_of(second, 2, "e")], "abc")
  processes.merge(whole, [part_of(first, 1, "d"), part_of(second, 2, "e")], "abc")
  assert results.read_rows(whole.path) == [*first[:2], *second, *first[2:]]
  info = results.read_run(whole.path)
  assert info["started"] == started and info["finished"] == "c2" and info["model"] == "tiny"
  counts = [info[name] for name in ("compile_count", "compiles_while_timing", "peak_memory_bytes")]
  assert counts == [6, 3, 2] and info["differences"] == ["d", "e"]
  assert [found["cpu"] for found in info["processes"]] == ["cpu1", "cpu2"]


def free_port():
  with socket.socket() as listening:
    listening.bind(("127.0.0.1", 0))
    return listening.getsockname()[1]


@pytest.mark.slow
def test_two_processes_answer_as_one_does(models, tmp_path):
  """Real processes, joined by jax.distributed: rows of one run, questions in order, again after a kill."""
  asked = tmp_path / "questions.jsonl"
  prompts = ["the hen and the hen", "abcabc abcabc", "so", "oh the hen", "x" * 70]
  lines = [{"question_id": i, "category": "ab"[i % 2], "turns": [p, "more"]} for i, p in enumerate(prompts)]
  asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
  given = [f"--model={models[0]}", f"--questions={asked}", "--turns=all", "--drafters=prompt_lookup"]
  given += ["--max_new_tokens=10", "--compilation_cache="]
  alone, both = str(tmp_path / "alone"), str(tmp_path / "both")
  assert run_script(spec_bench, *given, f"--output={alone}") == 0

  def run_both():
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "experiments.spec_bench", *given, f"--output={both}"]
    command += [f"--coordinator={address}", "--num_processes=2"]
    clean = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    started = [
      subprocess.Popen(
        [*command, f"--process_id={index}"],
        env=clean,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
      )
      for index in range(2)
    ]
    try:
      ended = [process.communicate(timeout=300) for process in started]
    finally:
      for process in started:
        process.kill()
    assert [process.returncode for process in started] == [0, 0], [error[-2000:] for _, error in ended]
    return [out for out, _ in ended]

  first, second = run_both()
  assert "prompt_lookup" in first and "prompt_lookup" not in second  # tables come from process 0
  ids = lambda path: {
    (r["question_id"], r["turn"], r["drafter"]): r["token_ids"] for r in results.read_rows(path)
  }
  assert ids(both) == ids(alone) and len(ids(both)) == 20
  order = [row["question_id"] for row in results.read_rows(both)]
  assert order == sorted(order)
  parts = [f"{both}.process{index}of2" for index in range(2)]
  assert [{q for q, _, _ in ids(path)} for path in parts] == [{0, 2, 4}, {1, 3}]
  info = results.read_run(both)
  assert len(info["processes"]) == 2 and info["compiles_while_timing"] == 0
  assert run_script(compare_runs, alone, both, takes_arguments=True) == 0
  # One process lost its last rows: it alone answers them again, and the merged run is what it was.
  path = os.path.join(parts[1], results.ROWS_FILE)
  with open(path, "rb") as file:
    kept = file.read().splitlines(keepends=True)[:-3]
  with open(path, "wb") as file:
    file.write(b"".join(kept))
  whole = results.read_rows(both)
  run_both()
  assert results.read_rows(both) == whole and len(ids(parts[1])) == 8
