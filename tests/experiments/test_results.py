"""Figures and files: definitions of τ and acceptance, run directories, tables."""

import dataclasses
import json
import os
import types

import jax
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from experiments import compare_runs, measure, results, runtime, summary
from experiments import flags as shared
from experiments.compare_runs import interval
from specjax import decode
from specjax.decode import RowResult
from tests import contract


def row(accepted, proposed, emitted, *, question=1, drafter="prompt_lookup", category="a", seconds=1.0):
  """A row of results with tokens to match."""
  reached = [min(a + 1, p) for a, p in zip(accepted, proposed)]  # of chains
  tokens = list(range(sum(emitted)))
  nodes = [p + 1 for p in proposed]
  result = RowResult(
    tokens, 4, "length", proposed, proposed, reached, accepted, emitted, nodes, [1] * len(nodes), None, None
  )
  return results.make_row(
    result,
    question_id=question,
    turn=0,
    category=category,
    drafter=drafter,
    rule="greedy",
    settings={},
    prefill_s=0.5,
    decode_s=seconds,
    text="",
  )


def test_tau_counts_what_was_emitted():
  """Case P1: accepted 2, then 5 with the end as third token: 3.0 tokens a round, not 4.5."""
  found = row([2, 5], [5, 5], [3, 3])
  assert summary.tau([found]) == 3.0
  assert sum(found["accept_lengths"]) == found["new_tokens"] == len(found["token_ids"])


def test_all_rejected_is_one_token_a_round():
  """Case P3: the bonus is included."""
  found = row([0, 0, 0], [4, 4, 4], [1, 1, 1])
  assert summary.tau([found]) == 1.0 and summary.acceptance([found]) == 0.0
  assert found["accept_counts"] == [3]


def test_acceptance_falls_with_the_window_but_tau_does_not():
  """Case P4: that is why the proposed count stands beside the rate."""
  short, long = row([2] * 3, [3] * 3, [3] * 3), row([2] * 3, [7] * 3, [3] * 3)
  assert summary.acceptance([short]) == pytest.approx(0.667, abs=1e-3)
  assert summary.acceptance([long]) == pytest.approx(0.286, abs=1e-3)
  assert summary.tau([short]) == summary.tau([long]) == 3.0


def test_acceptance_by_position_asks_only_rounds_that_got_there():
  """Three rounds of depth 3, 3, 1 accept 2, 0, 1: 2 of 3 at depth 1, 1 of 1 at depth 2, 0 of 1 at depth 3.

  Fails when rounds that proposed nothing at a depth, or never came that far, are counted there.
  """
  found = row([2, 0, 1], [3, 3, 1], [3, 1, 2])
  assert found["reach_counts"] == [3, 1, 1]
  assert summary.acceptance_by_position([found]) == pytest.approx([2 / 3, 1.0, 0.0])
  assert summary.position_table([found]) == [["prompt_lookup", "2.33", "0.67", "1.00", "0.00"]]


def test_no_tokens_give_no_nan():
  """Case K7."""
  empty = row([], [], [], seconds=0.0)
  assert (summary.tau([empty]), summary.acceptance([empty]), summary.decode_rate([empty])) == (0.0, None, 0.0)
  assert "nan" not in json.dumps(empty).lower()
  assert not any("nan" in str(cell) for line in summary.method_table([empty]) for cell in line)


def test_table_says_slower_and_sums_over_rows():
  """Speedups are ratios of Σ tokens / Σ seconds on the same prompts; below 1 is called slower (case P8)."""
  rows = [
    row([0] * 10, [0] * 10, [1] * 10, drafter="none", seconds=1.0),
    row([4, 4], [4, 4], [5, 5], seconds=0.5),
    row([0] * 10, [0] * 10, [1] * 10, drafter="none", question=2, category="b", seconds=1.0),
    row([0] * 10, [4] * 10, [1] * 10, question=2, category="b", seconds=4.0),
    row([1], [1], [2], question=3, category="b"),  # the baseline has not answered this one
  ]
  lines = {(line[0], line[1]): line for line in summary.method_table(rows)}
  speedup = summary.HEADER.index("speedup")
  assert lines["prompt_lookup", "a"][speedup] == "2.00 x"
  assert lines["prompt_lookup", "b"][speedup] == "0.25 x slower"
  assert lines["prompt_lookup", "overall"][speedup] == "0.44 x slower"
  assert lines["prompt_lookup", "overall"][4] == f"{20 / 12:.2f}"
  assert lines["prompt_lookup", "b"][-1] == "1 of 1" and lines["none", "b"][2] == "1"


def test_first_difference():
  assert measure.first_difference([1, 2], [1, 2]) is None
  assert measure.first_difference([1, 2, 3], [1, 5, 3]) == 1
  assert measure.first_difference([1, 2], [1, 2, 3]) == 2
  assert str(measure.Difference(3, 2e-5)).endswith("a tie")
  assert "not a tie" in str(measure.Difference(3, 2e-3))


def test_bootstrap_interval():
  values = np.random.default_rng(0).normal(2.0, 1.0, 400)
  value, low, high = interval(range(400), lambda w: w @ values / 400, 2000)
  assert value == pytest.approx(values.mean()) and low < value < high
  assert high - low == pytest.approx(2 * 1.96 / 20, rel=0.15)  # the standard error is 1 / sqrt(400)
  again = interval(range(400), lambda w: w @ values / 400, 2000)
  assert again == (value, low, high)


def test_table_is_aligned():
  lines = []
  results.table(["name", "ms"], [["a", 1], ["longer", None]], lines.append)
  assert lines == ["name    ms", "------  --", "a        1", "longer   -"]


# --- run directories -------------------------------------------------------------------------------


@pytest.fixture
def opened(tmp_path):
  """Opens the same directory again and again, with the flags as they are."""
  shared.parse(["script"])
  return lambda: results.RunDirectory(str(tmp_path / "run"), "test", [shared])


def test_rows_survive_a_kill(opened):
  directory = opened()
  for number in range(3):
    directory.append({"number": number, "text": "é\n"})
  path = os.path.join(directory.path, results.ROWS_FILE)
  with open(path, "r+b") as file:
    file.truncate(os.path.getsize(path) - 5)
  assert [row["number"] for row in results.read_rows(directory.path)] == [0, 1]
  resumed = opened()
  resumed.append({"number": 9})
  assert [row["number"] for row in results.read_rows(directory.path)] == [0, 1, 9]


def test_a_damaged_row_is_an_error(opened):
  directory = opened()
  directory.append({"number": 0})
  path = os.path.join(directory.path, results.ROWS_FILE)
  with open(path, "a", encoding="utf-8") as file:
    file.write('{"number\n{"number": 2}\n')
  with pytest.raises(ValueError, match=r"rows\.jsonl, line 2"):
    results.read_rows(directory.path)


def test_run_directory_keeps_flags_and_environment(opened, tmp_path):
  directory = opened()
  info = results.read_run(directory.path)
  assert info["schema"] == results.SCHEMA and info["script"] == "test"
  assert {"python", "jax", "jaxlib", "flax", "numpy"} <= info["versions"].keys()
  assert {"commit", "device_kind", "device_count", "cpu"} <= info.keys()
  # flags.txt is a flag file: reading it gives the same flags.
  file = os.path.join(directory.path, results.FLAGS_FILE)
  shared.parse(["script", f"--flagfile={file}"])
  opened()
  assert sorted(os.listdir(directory.path)) == [results.FLAGS_FILE, results.RUN_FILE]


def test_other_flags_are_refused_by_name(opened):
  opened()
  shared.parse(["script", "--max_new_tokens=7"])
  with pytest.raises(ValueError, match="--max_new_tokens=128; now it is --max_new_tokens=7"):
    opened()
  shared.parse(["script", "--max_new_tokens=128"])


def test_foreign_directories_are_refused(opened, tmp_path):
  os.makedirs(tmp_path / "run")
  (tmp_path / "run" / "precious.txt").write_text("mine")
  with pytest.raises(ValueError, match="is not empty and holds no run"):
    opened()
  with pytest.raises(ValueError, match="not a run directory"):
    results.read_run(str(tmp_path))


# --- comparisons and times -------------------------------------------------------------------------


def test_n5_runs_are_compared_by_ids_under_one_stop_rule():
  """Unlike stop ids, budgets, seeds or prompts are refused by name; what is counted is identical ids.

  Fails when a run that stops elsewhere looks better, or equal lengths count as equal texts.
  """
  fields = dict.fromkeys(compare_runs.SETTINGS_FIELDS, 0)
  info = {"script": "spec_bench", **dict.fromkeys(compare_runs.RUN_FIELDS, 1)}
  mine = [{**row([2], [3], [3]), "settings": fields}]
  compare_runs.check_alike("ab", [info, info], [mine, mine])
  for field in ("stop_ids", "max_new_tokens", "prompts_sha256"):
    with pytest.raises(ValueError, match=f"{field} differs: 1 in a, 2 in b"):
      compare_runs.check_alike("ab", [info, info | {field: 2}], [mine, mine])
  other = [{**mine[0], "settings": fields | {"seed": 5}}]
  with pytest.raises(ValueError, match="seed differs"):
    compare_runs.check_alike("ab", [info, info], [mine, other])
  changed = [{**mine[0], "token_ids": [0, 1, 3]}]
  assert compare_runs.pair(mine, mine, 100)[-1] == "1 of 1"
  assert compare_runs.pair(mine, changed, 100)[-1] == "0 of 1"


def test_p7_times_are_of_finished_work(monkeypatch):
  """Nothing compiles in a timed run, each time is taken behind a wait for the result, and twice the tokens
  are twice the rounds.

  Fails when the clock is read while the device still works, which makes later calls look free.
  """
  method = runtime.Method("none", contract.static("none", "greedy"), contract.built("none")[1])
  job = types.SimpleNamespace(stop_ids=(), mesh=None)
  prompts = [list(prompt) for prompt in contract.PROMPTS]
  events, wait = [], jax.block_until_ready
  noted = lambda event, value: (events.append(event), value)[1]
  with flagsaver.flagsaver():
    flags.FLAGS.unparse_flags()
    shared.parse(["script"])
    measure.run_timed(job, method, prompts, 6)  # warms up
    monkeypatch.setattr(jax, "block_until_ready", lambda x: noted("wait", wait(x)))
    clock = lambda: noted("clock", float(len(events)))
    monkeypatch.setattr(measure, "time", types.SimpleNamespace(perf_counter=clock))
    short, long = (measure.run_timed(job, method, prompts, budget) for budget in (6, 12))
  assert events == ["clock", "wait", "clock", "wait", "clock"] * 2
  assert (short.prefill_s, short.decode_s, short.compiles, long.compiles) == (2.0, 2.0, 0, 0)
  assert (short.new_tokens, long.new_tokens) == (24, 48)
  assert [row.rounds for row in short.rows + long.rows] == [6] * 4 + [12] * 4


def test_p7_methods_in_turns_say_and_cost_what_they_do_alone(monkeypatch):
  """Two methods, 3 rounds of each in turn, rows are those of runs of their
  own, each method's clock counts its own calls only, and every other cycle goes backwards.
  """
  method = runtime.Method("none", contract.static("none", "greedy"), contract.built("none")[1])
  twin = dataclasses.replace(method, name="twin", weights=decode.Weights(contract.target()))
  job = types.SimpleNamespace(stop_ids=(), mesh=None)
  prompts = [list(prompt) for prompt in contract.PROMPTS]
  calls, generate, clock = [], decode.generate, iter(range(10**6))
  with flagsaver.flagsaver():
    flags.FLAGS.unparse_flags()
    shared.parse(["script"])
    alone = measure.run_timed(job, method, prompts, 8)
    measure.run_in_turns(job, [method], prompts, 8, rounds=3)  # warms up

    def noted(weights, state, config, rounds):
      calls.append((int(np.asarray(state.log.rounds)[0]), weights is twin.weights))
      return generate(weights, state, config, rounds)

    monkeypatch.setattr(decode, "generate", noted)
    monkeypatch.setattr(measure, "time", types.SimpleNamespace(perf_counter=lambda: float(next(clock))))
    both = measure.run_in_turns(job, [method, twin], prompts, 8, rounds=3)
  assert [run.rows for run in both] == [alone.rows] * 2
  assert calls == [(0, False), (0, True), (3, True), (3, False), (6, False), (6, True)]
  # The clock moves by 1 a look: one a prefill, one a turn.
  assert [(run.prefill_s, run.decode_s, run.compiles) for run in both] == [(1.0, 3.0, 0)] * 2


@pytest.mark.parametrize(
  ("given", "policy"),
  [
    (["--temperature=0.8"], "sample"),
    ([], "top_k"),
    (["--temperature=0.8", "--draft_policy=top_k"], "top_k"),
  ],
)
def test_l6_the_draft_policy_follows_the_flags_and_is_stated(given, policy):
  """T = 0.8 with the default policy: drafts are sampled from q with the row's settings, the rule fits them
  (E1 and E3 hold it to the law), and the result says which policy it was.

  Fails when the draft takes settings from elsewhere, as a model's own generation config, unnoticed.
  """
  sizes = types.SimpleNamespace(**vars(contract.target().config), num_real_tokens=contract.VOCAB)
  model = types.SimpleNamespace(config=sizes, model=contract.target())
  job = types.SimpleNamespace(target=model, draft=model, heads={})
  with flagsaver.flagsaver():
    flags.FLAGS.unparse_flags()
    shared.parse(["script", "--drafter=two_model", "--draft_model=x", *given])
    method = runtime.make_method(job, "two_model", 64)
    assert method.config.drafter.policy == policy and method.config.rule.lossless
    assert runtime.describe_settings(job, method)["draft_policy"] == policy
