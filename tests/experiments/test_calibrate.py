"""The calibration: what is measured, resumed and written; its key; drafts of the target's own layers."""

import dataclasses
import json
import os
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments import bench as timing
from experiments import calibrate, calibration, calibration_tables, loops, results, runtime
from experiments.methods import parse_method
from specjax.analysis import CostTable
from specjax.checkpoints import load_model
from specjax.decode import RowResult
from tests.experiments.tiny import parsed, run_script

KEY = {
  "platform": "cpu",
  "device_kind": "cpu",
  "cpu": "A chip",
  "cpu_count": 2,
  "device_count": 1,
  "model": "some/folder/small model",
  "draft_model": None,
  "parameters": 1000,
  "dtype": "float32",
  "attention": "reference",
  "specjax": "0",
  "jax": "0",
  "jaxlib": "0",
}
OWN = "self_speculation[layers=1,window=2]"
PLAN = calibrate.Plan(("prompt_lookup", OWN), (1, 2), (8, 20), (1, 3), passes=2, turns=4, tokens=6)
WIDTHS = (16, 64)


@pytest.fixture
def job(models):
  """The tiny target alone."""
  return runtime.Job(load_model(models[0]), None, None, True, {})


def scripted_ms(case: calibrate.Case) -> float:
  """A time that says which case it is of; a call of no rounds takes 4 ms, 1 ms of each of its rounds."""
  base = {"call": 4.0, "round": 100.0 * case.batch + case.live, "draft": 40.0, "accept": 6.0, "prefill": 5.0}
  if case.part == "catch_up":
    return 0.0 if case.of == "prompt_lookup" else 0.5
  return base.get(case.part, 0.0) + (case.of if isinstance(case.of, int) else len(case.of))


class Scripted:
  """Stands for `calibrate.Calibration`: the same cases, scripted times; ends after some, as a kill does."""

  widths = WIDTHS
  killed_after = None
  groups = []

  def __init__(self, plan, asked, job):
    self.plan, self.bench = plan, SimpleNamespace(compiles=0)

  def measure(self, group):
    self.groups.append(group)
    for case in group:
      if Scripted.killed_after == 0:
        raise KeyboardInterrupt
      if Scripted.killed_after:
        Scripted.killed_after -= 1
      found = {"ms": scripted_ms(case)}
      if case.part == "acceptance":
        found = {"temperature": 0.0, "proposing": 0.5, "rates": [0.6, 0.5], "rounds": 10}
      yield calibrate.row_of(case, **found, turns=self.plan.turns, nodes=3, depth=2)


@pytest.fixture
def script(monkeypatch, tmp_path):
  """Runs calibrate with scripted times; returns the exit code."""
  monkeypatch.setattr(calibrate, "Calibration", Scripted)
  monkeypatch.setattr(runtime, "load_job", lambda drafters: None)
  monkeypatch.setattr(runtime, "calibration_key", lambda job: KEY)
  monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
  monkeypatch.setattr(Scripted, "killed_after", None)
  monkeypatch.setattr(Scripted, "groups", [])
  axes = ["--batches=1,2", "--lives=8,20", "--nodes=1,3", "--rounds_a_call=4"]
  return lambda *more: run_script(calibrate, f"--drafters=prompt_lookup,{OWN}", *axes, *more)


# --- what is measured, and resuming ----------------------------------------------------------------


def test_every_case_once_and_those_that_are_compared_together():
  groups = list(PLAN.groups(WIDTHS))
  cases = [case for group in groups for case in group]
  assert len(set(cases)) == len(cases)
  for batch in PLAN.batches:
    for live in PLAN.lives:
      (group,) = [g for g in groups if calibrate.Case("round", batch, live, 1) in g]
      assert {(case.part, case.of) for case in group} == {
        ("round", 1),
        ("round", 3),
        ("draft", "prompt_lookup"),
        ("draft", OWN),
      }
  of = lambda part: [case[1:] for case in cases if case.part == part]
  assert of("accept") == [(1, 8, 1), (1, 8, 3)] and of("prefill") == [(1, 0, 16), (1, 0, 64)]
  assert of("catch_up") == [(1, 20, "prompt_lookup"), (1, 20, OWN)] and len(of("call")) == 1
  done = [case._asdict() for case in cases[:4]]
  assert [c for g in PLAN.pending(WIDTHS, done) for c in g] == cases[4:]
  assert PLAN.pending(WIDTHS, [case._asdict() for case in cases]) == []


def test_the_file_holds_what_was_measured(script, capsys):
  """Each figure at its place, the host's share taken off; the rows beside the file are gone."""
  assert script() == 0
  path = calibration.path_of(KEY)
  table = CostTable.read(path)
  assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]
  assert table.key == KEY and table.call_ms == 4.0
  for b, batch in enumerate((1, 2)):
    for i, live in enumerate((8, 20)):
      assert table.round_ms[b, i].tolist() == [100 * batch + live + nodes - 1 for nodes in (1, 3)]
      assert table.drafts[OWN]["draft_ms"][b, i] == 40 + len(OWN)
  assert table.accept_ms.tolist() == [6.0, 8.0] and table.prefill_ms == {16: 21.0, 64: 69.0}
  assert table.drafts[OWN]["catch_up_ms"] == 0.5 and table.drafts["prompt_lookup"]["catch_up_ms"] == 0
  assert table.acceptance[OWN]["rates"].tolist() == [0.6, 0.5]
  out = capsys.readouterr().out
  assert "50% of 10 rounds" in out and "0 programs compiled while timing" in out


@pytest.mark.parametrize("kept", (True, False))
def test_a_killed_run_measures_what_is_missing(script, tmp_path, kept, capsys):
  """With a run directory, and without: then the rows lie beside the file until it is written."""
  more = [f"--output={tmp_path / 'run'}"] if kept else []
  Scripted.killed_after = 6
  assert script(*more) == 130
  assert not os.path.exists(calibration.path_of(KEY))
  Scripted.killed_after, Scripted.groups[:] = None, []
  assert script(*more) == 0
  total = sum(map(len, PLAN.groups(WIDTHS)))
  assert sum(map(len, Scripted.groups)) == total - 6
  table = CostTable.read(calibration.path_of(KEY))
  assert table.round_ms[0, 0].tolist() == [108, 110]
  folder = os.path.dirname(calibration.path_of(KEY))
  assert len(os.listdir(folder)) == 1
  if kept:  # a run that is complete prints its tables and writes the file, without a model
    os.remove(calibration.path_of(KEY))
    Scripted.groups[:] = []
    assert script(*more) == 0 and not Scripted.groups
    assert os.path.exists(calibration.path_of(KEY))


def test_rows_of_another_device_are_not_mixed(script, tmp_path, monkeypatch, capsys):
  Scripted.killed_after = 3
  assert script(f"--output={tmp_path / 'run'}") == 130
  monkeypatch.setattr(runtime, "calibration_key", lambda job: KEY | {"cpu": "Another chip"})
  capsys.readouterr()
  assert script(f"--output={tmp_path / 'run'}") == 2
  err = capsys.readouterr().err
  assert "cpu = 'A chip' (here 'Another chip')" in err and "cpu_count" not in err


# --- the key and the file --------------------------------------------------------------------------


def test_a_path_is_readable_and_of_the_whole_key(monkeypatch):
  monkeypatch.setenv("SPECJAX_CACHE", "/cache")
  path = calibration.path_of(KEY)
  assert path.startswith("/cache/calibration/cpu2-small_model-float32-") and path.endswith(".json")
  others = [calibration.path_of(KEY | {name: f"{KEY[name]}x"}) for name in KEY]
  assert len({path, *others}) == len(KEY) + 1
  assert calibration.path_of(dict(reversed(KEY.items()))) == path
  chip = calibration.path_of(KEY | {"device_kind": "TPU v5 lite", "platform": "tpu"})
  assert os.path.basename(chip).startswith("TPU_v5_lite-small_model-float32-")


def test_loading_checks_the_key(script, tmp_path, monkeypatch):
  """Fails when a file of another device is used, or a named one that is not there passed over."""
  assert calibration.load(KEY) is None
  assert script() == 0
  assert calibration.load(KEY).key == KEY
  named = str(tmp_path / "named.json")
  CostTable.read(calibration.path_of(KEY)).write(named)
  other = KEY | {"jax": "9", "dtype": "bfloat16"}
  assert calibration.load(other) is None
  with parsed(f"--calibration={named}"):
    with pytest.raises(
      ValueError, match=r"named\.json: measured with dtype = 'float32'.*, jax = '0' \(here '9'\)"
    ):
      calibration.load(other)
  with parsed(f"--calibration={named}.gone"):
    with pytest.raises(ValueError, match=r"named\.json\.gone: No such file"):
      calibration.load(KEY)


def test_the_key_is_of_this_device_and_target(job, monkeypatch, models):
  with parsed():
    key = runtime.calibration_key(job)
  size = sum(leaf.size for leaf in jax.tree.leaves(job.target.model))
  assert key["model"] == models[0] and key["parameters"] == size
  assert key["platform"] == "cpu" and key["attention"] == "reference" and key["dtype"] == "float32"
  assert set(key) == set(KEY) and json.loads(json.dumps(key)) == key


# --- parts -----------------------------------------------------------------------------------------


def test_cases_alternate_and_are_warmed_up(capsys):
  """Fails when a case runs its passes in one piece, or what it compiles is timed."""
  called = []
  seconds = iter(range(100))

  def case(name):
    return lambda: called.append(name) or float(next(seconds))

  bench = timing.Bench(
    SimpleNamespace(target=SimpleNamespace(config=SimpleNamespace(num_real_tokens=9))),
    None,
    passes=3,
    rounds=2,
    live=4,
  )
  times = bench.times("part", {"a": case("a"), "b": case("b")}, {"b": 1})
  assert "".join(called) == "aabb" + "ba" + "ab" + "ba"
  assert times == {"a": [5 / 2, 6 / 2, 9 / 2], "b": [4.0, 7.0, 8.0]} and bench.compiles == 0


def test_acceptance_by_position():
  row = lambda **fields: RowResult(
    [1], 3, "length", logprobs=None, overlap=None, nodes=[], width=[], **fields
  )
  one = row(proposed=[2, 0, 2], depth=[2, 0, 2], reached=[2, 0, 1], accepted=[1, 0, 0], emitted=[2, 1, 1])
  two = row(proposed=[1], depth=[1], reached=[1], accepted=[1], emitted=[2])
  found = calibration_tables.acceptance_of([one, two])
  assert found == {"rounds": 4, "proposing": 0.75, "rates": [2 / 3, 0.0]}
  assert calibration_tables.expected_tokens(found) == pytest.approx(1 + 0.75 * 2 / 3)
  assert calibration_tables.mean_acceptance({"rates": [0.5, 0.25]}) == pytest.approx(0.625 / 1.5)
  nothing = calibration_tables.acceptance_of([])
  assert nothing == {"rounds": 0, "proposing": 0.0, "rates": []}
  assert calibration_tables.mean_acceptance(nothing) == 0


# --- drafts of the target's own layers -------------------------------------------------------------


def test_own_layers_are_read_from_the_brackets():
  method = parse_method("self_speculation[layers=4,branching=(2,2)]")
  assert method.drafters == ("self_speculation[branching=(2,2)]",) and method.own == {"layers": 4}
  assert parse_method("self_speculation[skips=a/b.json]").own == {"skips": "a/b.json"}
  assert parse_method("prompt_lookup[layers=4]").own == {}
  needed = ["two_model", "two_model[window=2]", OWN, "prompt_lookup", "a.b:c"]
  assert [parse_method(text).needs_draft_model for text in needed] == [True, True, False, False, False]
  assert [parse_method(text).uses_draft_model for text in needed] == [True, True, False, False, True]
  for wrong in ("0", "-1", "some", "2.5", "True"):
    with pytest.raises(ValueError, match=r"layers = .*at least 1"):
      parse_method(f"self_speculation[layers={wrong}]")
  for wrong in ("window=2", "layers=2,skips=a.json"):
    with pytest.raises(ValueError, match="it needs layers=N or skips=FILE, one of them"):
      parse_method(f"self_speculation[{wrong}]")
  with pytest.raises(ValueError, match="skips = 3; it must be a file"):
    parse_method("self_speculation[skips=3]")
  with pytest.raises(ValueError, match="all widths must draft with the same layers"):
    parse_method("adaptive[of=self_speculation[layers=1]|self_speculation[layers=2]]")


def test_a_run_may_hold_drafts_of_several_sizes(job):
  """They share the target's arrays; a size that the target does not have is named."""
  with parsed():
    method = runtime.make_method(job, OWN, 128)
    plain = runtime.make_method(job, "prompt_lookup", 128)
    with pytest.raises(ValueError, match=r"layers = 9; it must be in \[1, 1\]"):
      runtime.make_method(job, "self_speculation[layers=9]", 128)
  assert method.name == OWN and method.window == 2 and plain.weights.drafter is None
  assert method.config.drafter.max_length == job.target.config.max_length
  draft = method.weights.drafter
  assert draft.config.num_layers == 1 and draft.embed[...] is job.target.model.embed[...]


def test_a_draft_model_that_nobody_uses_is_named(models, capsys):
  asked = [f"--model={models[0]}", f"--draft_model={models[1]}", f"--drafters={OWN}"]
  assert run_script(calibrate, *asked) == 2
  assert "--draft_model is not used by self_speculation[layers=1,window=2]" in capsys.readouterr().err


# --- the script ------------------------------------------------------------------------------------

SMALL = ["--batches=1", "--lives=8,20", "--nodes=1,3", "--passes=2", "--rounds_a_call=2", "--limit=1"]


def test_an_unseen_token_is_one_that_only_the_drafter_lacks(job, models, monkeypatch):
  """Fails when the text or the target's cache goes back too, or the drafter's does not."""
  seen = []

  def draft(state, *_):
    seen.append(
      [int(np.asarray(x)[0]) for x in (state.length, state.cache.length, state.drafter.cache.length)]
    )
    return state

  monkeypatch.setattr(loops, "draft", draft)
  other = "two_model[window=2]"
  plan = calibrate.Plan((other,), (1,), (8, 20), (1,), passes=1, turns=1, tokens=1)
  with parsed():
    costs = calibrate.Calibration(plan, [], dataclasses.replace(job, draft=load_model(models[1])))
    case = calibrate.Case("draft", 1, 8, other)
    costs.alone_case(case)()
    costs.alone_case(case, 6)()
    costs.alone_case(case._replace(live=20))()
    found = costs.catch_up(calibrate.Case("catch_up", 1, 20, other))
  assert seen[:3] == [[8, 7, 7], [8, 7, 1], [20, 19, 19]]
  assert found["unseen"] == 18 and [20, 19, 1] in seen and found["ms"] >= 0


@pytest.mark.slow
def test_measures_a_tiny_model(models, tmp_path, capsys):
  path = str(tmp_path / "costs.json")
  asked = [f"--model={models[0]}", f"--drafters=prompt_lookup,{OWN}", *SMALL, "--acceptance_tokens=6"]
  assert run_script(calibrate, *asked, f"--calibration={path}", f"--output={tmp_path / 'run'}") == 0
  table = CostTable.read(path)
  assert (table.round_ms > 0).all() and (table.drafts[OWN]["draft_ms"] >= 0).all()
  assert table.drafts[OWN]["nodes"] == 3 and table.drafts[OWN]["depth"] == 2
  assert set(table.acceptance) == set(table.drafts) == {"prompt_lookup", OWN}
  rows = results.read_rows(str(tmp_path / "run"))
  assert all(len(row["samples_ms"]) == 2 for row in rows if row["part"] == "round")
  assert results.read_run(str(tmp_path / "run"))["compiles_while_timing"] == 0
  assert "Rounds with a free draft" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("flag", "words"),
  [
    ("--nodes=2,3", "--nodes = '2,3'; they must begin with 1"),
    ("--nodes=1,4,4", "--nodes = '1,4,4'; whole numbers that ascend"),
    ("--nodes=1,129", "end by 128"),
    ("--lives=0", "--lives = '0'"),
    ("--lives=1", "a row needs at least 2 tokens"),
    ("--lives=9000", "--lives = 9000 needs room"),
    ("--batches=", "--batches"),
    ("--batches=two", "--batches = 'two'"),
    ("--drafters=none", "'none'; a drafter other than none"),
    ("--drafters=magic", "'magic'"),
    ("--drafters=two_model", "needs --draft_model"),
    ("--drafters=self_speculation[layers=0]", "layers = 0"),
    ("--drafters=self_speculation[layers=99]", "layers = 99; it must be in [1, 1]"),
    ("--passes=0", "passes"),
    ("--rounds_a_call=0", "rounds_a_call"),
    ("--acceptance_tokens=0", "acceptance_tokens"),
    ("--max_new_tokens=3", "--max_new_tokens is not used"),
    ("--calibration=/", "--calibration = '/' is a folder"),
    ("--calibration=/dev/null/x.json", "/dev/null"),
  ],
)
def test_a_bad_flag_is_one_line(models, tmp_path, monkeypatch, capsys, flag, words):
  monkeypatch.setattr(timing.Bench, "state", lambda *_: pytest.fail("something was run"))
  monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path))
  assert run_script(calibrate, f"--model={models[0]}", f"--drafters={OWN}", "--lives=64", flag) == 2
  (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
  assert words in line
