"""The map of gain: grid, resuming, prediction, the border, the figure; runs to limits one after the other."""

import dataclasses
import itertools
import os
import struct
from types import SimpleNamespace

import numpy as np
import pytest

from experiments import calibration, gain_figures, gain_map, measure, results, runtime
from specjax import decode
from specjax.analysis import CostTable
from specjax.checkpoints import load_model
from tests.experiments.test_calibrate import KEY
from tests.experiments.tiny import parsed, run_script

OWN = "self_speculation[layers=1,window=2]"
PLAN = gain_map.Plan((0.2, 0.9), (0, 1), (4, 8), window=2, prompt=6, least_tokens=12)
AXES = ["--acceptances=0.2,0.9", "--layers=1", "--responses=4,8", "--window=2", "--prompt_tokens=6"]


def cost_table(**others) -> CostTable:
  """Plain rounds of 10 ms and 1 more for each further node, drafts of 6 ms in all, calls of 2 ms."""
  fields = dict(
    made="now",
    key=KEY,
    batches=[1],
    lives=[8],
    nodes=[1, 3],
    round_ms=[[[10.0, 12.0]]],
    accept_ms=[1.0, 1.0],
    prefill_ms={16: 5.0},
    call_ms=2.0,
    drafts={OWN: {"nodes": 3, "depth": 2, "draft_ms": [[6.0]], "catch_up_ms": 0.0}},
    acceptance={OWN: {"temperature": 0.0, "proposing": 1.0, "rates": [0.5, 0.25], "rounds": 9}},
  )
  return CostTable(**(fields | others))


def made_up(speedups, responses=(16, 64), costs=((0.0, 0), (0.25, 1), (0.5, 10))):
  """Rows whose speedup at a cost and acceptance is ``speedups[cost][acceptance]``; predicted 10 % more."""
  rows = []
  for response in responses:
    for (c, layers), line in zip(costs, speedups, strict=True):
      for acceptance, speedup in zip((0.2, 0.6, 0.9), line, strict=True):
        rows.append(
          dict(layers=layers, c=c, acceptance=acceptance, response=response, window=4, speedup=speedup)
          | dict(speedup_with_prefill=speedup, predicted=1.1 * speedup, compiles=0)
        )
  return rows


class Scripted(gain_map.GainMap):
  """Scripted seconds instead of models; ends after some cells, as a kill does."""

  killed_after = None
  measured = []

  def __init__(self, plan, directory, job):
    self.plan, self.table = plan, cost_table()
    self.prefill_ms = {None: 4.0, 0: 4.0, 1: 5.0}
    self.plain_ms = iter(range(100, 1000, 10))  # of one group after the other

  def prepare(self, cells):
    return len(cells)

  def timed(self, few):
    if len(self.measured) == self.killed_after:
      raise KeyboardInterrupt
    self.measured.extend(few)
    base = next(self.plain_ms)
    costs = [(base, 1.0), *[(50.0, 3.0)] * len(few)]
    return [{response: (ms * response, rounds) for response in self.plan.responses} for ms, rounds in costs]


@pytest.fixture
def script(monkeypatch):
  """Runs gain_map with scripted times; returns the exit code."""
  monkeypatch.setattr(gain_map, "GainMap", Scripted)
  monkeypatch.setattr(runtime, "load_job", lambda _: SimpleNamespace(target=SimpleNamespace(source="tiny")))
  monkeypatch.setattr(Scripted, "killed_after", None)
  monkeypatch.setattr(Scripted, "measured", [])
  return lambda output, *more: run_script(gain_map, *AXES, f"--output={output}", *more)


# --- the grid, and resuming ------------------------------------------------------------------------


def test_cells_and_runs():
  assert PLAN.cells() == [(0, 0.2), (0, 0.9), (1, 0.2), (1, 0.9)]
  assert list(PLAN.runs()) == [(4, 8), (4, 8), (4,)]  # 12 tokens: three responses of 4, two of 8
  assert list(dataclasses.replace(PLAN, least_tokens=1).runs()) == [(4, 8)]
  row = lambda layers, acceptance, response: dict(layers=layers, acceptance=acceptance, response=response)
  rows = [row(0, 0.2, 4), row(0, 0.2, 8), row(1, 0.9, 4)]
  assert PLAN.pending(rows) == [(0, 0.9), (1, 0.2), (1, 0.9)]


def test_plain_decoding_of_its_own_group_is_a_cells_baseline(script, tmp_path, capsys):
  """The cells of a draft run together with plain decoding, which slows from group to group."""
  output = str(tmp_path / "run")
  assert script(output) == 0
  rows = results.read_rows(output)
  assert len(rows) == 8 and Scripted.measured == PLAN.cells()
  for row in rows:
    plain = 110 if row["layers"] else 100
    response = row["response"]
    assert row["plain_ms"] == plain * response
    assert row["speedup"] == pytest.approx(plain / 50)
    own = 5.0 if row["layers"] else 4.0
    whole = (plain * response + 4.0) / (50 * response + own)
    assert row["speedup_with_prefill"] == pytest.approx(whole)
    assert row["c"] == (0.3 if row["layers"] else 0.0)
  out = capsys.readouterr().out
  assert "mean |error|" in out and "With 2 drafts a round and responses of 8 tokens" in out
  assert results.read_run(output)["points"] == [{"drafter": OWN, "acceptance": 0.625 / 1.5, "c": 0.3}]


def test_a_killed_run_goes_on_and_may_be_drawn_anew(script, tmp_path, monkeypatch):
  output = str(tmp_path / "run")
  Scripted.killed_after = 2
  assert script(output) == 130
  assert len(results.read_rows(output)) == 4
  Scripted.killed_after, Scripted.measured[:] = None, []
  assert script(output) == 0
  assert Scripted.measured == PLAN.cells()[2:] and len(results.read_rows(output)) == 8
  monkeypatch.setattr(runtime, "load_job", lambda *_: pytest.fail("a model was loaded"))
  assert script(output, f"--plot={tmp_path / 'again.png'}") == 0
  assert size_of(tmp_path / "again.png") == size_of(os.path.join(output, "gain_map.png"))
  assert script(output, "--responses=4") == 2


# --- prediction ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("acceptance", "window"), [(0.0, 3), (0.6, 1), (0.7, 4), (1.0, 2)])
def test_visits_are_those_of_simulated_rounds(acceptance, window):
  responses, runs = (5, 12, 40), 1500
  rng = np.random.default_rng(0)
  seen = np.zeros(responses[-1])
  for _ in range(runs):
    at = 0
    for limit in responses:
      while at < limit:
        seen[at] += 1
        draws = rng.random(window) < acceptance
        at = min(at + 1 + int(np.argmin([*draws, False])), limit)
  expected = gain_map.visits(acceptance, window, responses)
  np.testing.assert_allclose(expected, seen / runs, atol=0.055)
  assert expected[0] == expected[5] == pytest.approx(1) and expected[12] == pytest.approx(1)


def test_rounds_far_from_limits_are_the_papers():
  """1 / expected tokens: (1 - α) / (1 - α^(G+1)), Leviathan et al. 2023."""
  starts = gain_map.visits(0.8, 4, (400,))
  assert starts[200] == pytest.approx((1 - 0.8) / (1 - 0.8**5), rel=1e-6)


def test_predicted_times():
  """By hand: nothing is accepted, or all; the length's price is what the rounds pay where they start."""
  table = cost_table()
  assert gain_map.predicted_ms(table, None, 0.0, 0, 6, (4, 8)) == [4 * 10 + 2, 8 * 10 + 2]
  assert gain_map.predicted_ms(table, OWN, 0.0, 2, 6, (4, 32)) == pytest.approx([4 * 18 + 2, 32 * 18 + 4])
  # All accepted: rounds of 3 tokens, cut at 4 and at 8.
  assert gain_map.predicted_ms(table, None, 1.0, 2, 6, (4, 8)) == pytest.approx([2 * 12 + 2, 4 * 12 + 2])
  growing = cost_table(lives=[6, 106], round_ms=[[[10.0, 12.0], [110.0, 112.0]]], drafts={}, acceptance={})
  assert gain_map.predicted_ms(growing, None, 0.0, 0, 6, (4,)) == pytest.approx([10 + 11 + 12 + 13 + 2])
  long = gain_map.predicted_ms(growing, None, 0.0, 0, 6, (1000,))
  assert long == pytest.approx([sum(10 + n for n in range(1000)) + 2 * 1000 / measure.TURN])


def test_a_missing_calibration_names_the_command(monkeypatch):
  with parsed("--dtype=bfloat16"):
    monkeypatch.setattr(runtime, "calibration_key", lambda job: {})
    monkeypatch.setattr(calibration, "load", lambda key: None)
    with pytest.raises(ValueError, match="no calibration of this device") as error:
      gain_map.needed_calibration(PLAN, None)
    command = f'python -m experiments.calibrate --dtype=bfloat16 --drafters="prompt_lookup,{OWN}"'
    assert command in str(error.value)
    other = OWN.replace("window=2", "window=3")
    monkeypatch.setattr(calibration, "load", lambda key: cost_table())
    with pytest.raises(ValueError, match="it lacks") as error:
      gain_map.needed_calibration(dataclasses.replace(PLAN, window=3), None)
    assert f"lacks {other}; " in str(error.value) and f'--drafters="{OWN},{other}"' in str(error.value)
    assert gain_map.needed_calibration(PLAN, None).key == KEY


# --- the border and the figure ---------------------------------------------------------------------


def test_crossings():
  acceptances = (0.2, 0.6, 0.9)
  assert gain_figures.crossing(acceptances, (0.5, 1.5, 2.0)) == pytest.approx(0.4)
  assert gain_figures.crossing(acceptances, (1.1, 1.5, 2.0)) == 0.2
  assert gain_figures.crossing(acceptances, (0.1, 0.5, 0.9)) is None
  assert gain_figures.crossing(acceptances, (1.1, 0.8, 1.2)) == pytest.approx(0.75)  # the last one counts
  assert gain_figures.crossing(acceptances, (0.5, float("nan"), 1.5)) == pytest.approx(0.55)


def test_the_sentence_says_where_the_border_runs():
  rows = made_up([(1.1, 1.5, 2.0), (0.5, 1.5, 1.8), (0.3, 0.5, 0.9)])
  assert gain_figures.sentence(rows) == (
    "With 4 drafts a round and responses of 64 tokens, speculation gains here if acceptance is from 0.2 on, "
    "the least that was run, for a free draft, above 0.40 for a draft of 1 layer (c = 0.25); at c = 0.50 and "
    "more it does not, up to 0.9."
  )
  never = made_up([(0.1, 0.5, 0.9)] * 3)
  assert "never gains here: acceptance up to 0.9" in gain_figures.sentence(never)
  hole = made_up([(0.5, 1.5, 2.0), (0.1, 0.5, 0.9), (0.5, 1.5, 2.0)])
  assert "never enough for a draft of 1 layer" in gain_figures.sentence(hole)
  assert gain_figures.prediction_error(rows) == pytest.approx(0.1)


def size_of(path) -> tuple[int, int]:
  """Width and height of a PNG."""
  with open(path, "rb") as file:
    head = file.read(24)
  assert head.startswith(b"\x89PNG")
  return struct.unpack(">II", head[16:24])


@pytest.mark.parametrize("responses", [(16,), (16, 64, 256)])
def test_the_figure_is_a_png_of_a_page(tmp_path, responses):
  rows = made_up([(1.1, 1.5, 2.0), (0.5, 1.5, 1.8), (0.3, 0.5, 0.9)], responses)
  points = [dict(drafter="prompt_lookup", acceptance=0.7, c=0.0)]
  gain_figures.plot(rows[:-1], points, str(tmp_path / "map.png"), KEY)
  width, height = size_of(tmp_path / "map.png")
  assert 800 < width < 3000 and 400 < height < 2000


# --- the model -------------------------------------------------------------------------------------


def test_one_run_stops_at_every_limit(models, monkeypatch):
  """All drafts are accepted: 4 tokens are rounds of 3 and 1, and so are the next 4; plain has 4 and 4.

  Fails when a limit is not moved, a row that has ended stays ended, or times do not add up.
  """
  plan = dataclasses.replace(PLAN, acceptances=(1.0,), layers=(0,))
  monkeypatch.setattr(gain_map, "needed_calibration", lambda *_: cost_table())
  with parsed():
    job = runtime.Job(load_model(models[0]), None, None, True, {})
    gain = gain_map.GainMap(plan, None, job)
    clock = itertools.count()
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    expected = [{4: (1000.0, 4), 8: (2000.0, 8)}, {4: (1000.0, 2), 8: (2000.0, 4)}]
    assert gain.run([(0, 1.0)], 0, (4, 8)) == expected
    plain, drafted = gain.states[None, 0], gain.states[0, 0]
    (row,) = decode.results(drafted)
    assert row.emitted == [3, 1, 3, 1] and len(row.tokens) == 8
    assert decode.results(plain)[0].emitted == [1] * 8
    gain.run([(0, 1.0)], 5, (4, 8))  # a state that came back compiles once more
    compiles = measure.compile_count()
    assert gain.run([(0, 1.0)], 6, (4, 8)) == expected  # and again, from the prompt
    assert measure.compile_count() == compiles


@pytest.mark.slow
def test_measures_a_tiny_model(models, tmp_path, monkeypatch, capsys):
  output, path = str(tmp_path / "run"), str(tmp_path / "costs.json")
  job = runtime.Job(load_model(models[0]), None, None, True, {})
  with parsed():
    cost_table(key=runtime.calibration_key(job)).write(path)
  asked = [f"--model={models[0]}", *AXES, "--responses=4,32", "--least_tokens=8", f"--calibration={path}"]
  assert run_script(gain_map, *asked, f"--output={output}") == 0
  rows = results.read_rows(output)
  assert len(rows) == 8 and all(row["compiles"] == 0 for row in rows)
  rounds = {(row["layers"], row["acceptance"], row["response"]): row["rounds"] for row in rows}
  assert rounds[1, 0.2, 32] > rounds[1, 0.9, 32] and rounds[1, 0.2, 32] > rounds[1, 0.2, 4]
  assert size_of(os.path.join(output, "gain_map.png"))
  assert "programs compiled before timing, 4 loops of cells" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("flag", "words"),
  [
    ("--acceptances=0.5,0.2", "--acceptances = '0.5,0.2'; rates in [0, 1] that ascend"),
    ("--acceptances=1.2", "--acceptances = '1.2'"),
    ("--acceptances=nan", "--acceptances = 'nan'"),
    ("--acceptances=", "--acceptances"),
    ("--layers=0", "--layers = '0'"),
    ("--layers=9", "layers = 9; it must be in [1, 1]"),
    ("--responses=64,16", "--responses = '64,16'"),
    ("--responses=5000", "--responses = 5000 need 5006 tokens"),
    ("--prompt_tokens=1", "prompt_tokens"),
    ("--least_tokens=0", "least_tokens"),
    ("--window=0", "--window"),
    ("--rule=greedy", "--rule is not used"),
    ("--temperature=1", "--temperature is not used"),
    ("--plot=/no/such/folder/map.png", "/no/such/folder"),
    ("--output=", "--output is empty"),
    ("--seed=0", "no calibration of this device and target"),
  ],
)
def test_a_bad_flag_is_one_line(models, tmp_path, monkeypatch, capsys, flag, words):
  monkeypatch.setattr(gain_map.GainMap, "prepare", lambda *_: pytest.fail("something was compiled"))
  monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path))
  assert run_script(gain_map, f"--model={models[0]}", *AXES, f"--output={tmp_path / 'run'}", flag) == 2
  (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
  assert words in line
