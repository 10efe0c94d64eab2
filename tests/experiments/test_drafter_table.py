"""The table of all drafters: cells by hand, one-line errors, a figure that opens."""

import json
import os

import matplotlib.image
import pytest

from experiments import drafter_table
from experiments.run_files import Run
from specjax.drafters import DRAFTERS
from tests.experiments.test_bad_flags import error_of
from tests.experiments.test_paper_tables import DRAFTER, bench_row, calibration, save_run
from tests.experiments.tiny import run_script

HEAD = {"digest": "abc", "trained_parameters": 5_400_000, "tokens": 1_250_000, "seconds": 600.0}
SIZES = {
  "weight_bytes": 25_000_000,
  "parameters": 6_250_000,
  "token_bytes": 1536,
  "row_bytes": 40_000,
  "target_bytes": 500_000_000,
  "target_token_bytes": 46_080,
  "head": HEAD,
}


def rows(temperature, drafter=DRAFTER, decode_s=(2.0, 3.0)):
  """Two questions of 60 tokens, plain in 4 s each; 30 rounds accept 30 + 20 of 30 + 30 drafts."""
  settings = {"window": 2, "nodes": 3, "temperature": temperature, "batch_size": 1, "widths": [drafter]}
  plain = settings | {"window": 0, "nodes": 1, "widths": []}
  common = dict(category="qa", token_ids=[1, 2], missed=0)
  drafted = dict(
    accept_counts=[10, 10, 10], reach_counts=[30, 20], node_counts={"3": 30}, width_counts={"1": 30}
  )
  alone = dict(node_counts={"1": 60}, width_counts={"0": 60}, accept_counts=[60])
  found = [bench_row(i, "none", 4.0, 60, **common | alone | {"settings": plain}) for i in (1, 2)]
  for i, seconds in zip((1, 2), decode_s):
    found.append(bench_row(i, drafter, seconds, 30, **common | drafted | {"settings": settings}))
  return found


def run(path, temperature, **more):
  return save_run(path, rows(temperature), methods={"none": SIZES, DRAFTER: SIZES}, **more)


def inputs_of(paths, costs):
  return drafter_table.Inputs([Run.read(path, i) for i, path in enumerate(paths, 1)], costs)


def costs_of(path, head, **key):
  """The calibration by hand, its draft measured with a head."""
  file = calibration(path / "c.json", draft_model=None, **key)
  data = json.loads((path / "c.json").read_text())
  data["drafts"][DRAFTER]["head"] = head
  (path / "c.json").write_text(json.dumps(data))
  return drafter_table.CostTable.read(file)


def test_cells_by_hand(tmp_path):
  """Speed 8 / 5, τ 120 / 60, 5 % of the weights. Fails for another ratio or column."""
  paths = [run(tmp_path / "t0", 0.0), run(tmp_path / "t1", 1.0)]
  inputs = inputs_of(paths, costs_of(tmp_path, head="abc"))
  (line,) = drafter_table.lines_of(inputs, 100)
  assert line.weights == 0.05 and line.cache == pytest.approx(1 / 30)
  assert {t: cell.tau for t, cell in line.cells.items()} == {0.0: 2.0, 1.0: 2.0}
  assert line.cells[0.0].speedup[0] == 1.6 and line.cells[0.0].positions == (20 / 30, 10 / 20)
  made = drafter_table.table([line], inputs)
  cells = dict(zip(made.header, made.rows[0], strict=True))
  assert cells["own weights"] == "25.0 MB (5.0 %)" and cells["own cache a token"] == "1536 B (3.3 %)"
  assert cells["family"] == "two models" and cells["minutes"] == "10" and cells["tokens trained"] == "1.25 M"
  assert cells["τ, T=1"] == "2.00" and cells["by position, T=0"] == ".67 .50"
  assert cells["decode ×, T=0"].startswith("1.60 [1.33, 2.00]")
  # A round: 5 ms for three nodes, 1.6 ms for the draft, against 2 plain rounds of 4 ms for as many tokens.
  assert float(cells["predicted ×, T=0"]) == pytest.approx(8 / 6.6, abs=0.02)
  assert float(cells["draft of a round"]) == pytest.approx(0.4, abs=0.01)
  assert any("at T=0: 2 of 2" in note for note in made.notes)


@pytest.mark.parametrize("given", [None, {"head": "another"}, {"head": "abc", "cpu": "another"}])
def test_what_a_calibration_does_not_fit_is_not_predicted(tmp_path, given):
  """Fails when costs of another head, or of another machine, stand beside what was measured."""
  costs = None if given is None else costs_of(tmp_path, **given)
  (line,) = drafter_table.lines_of(inputs_of([run(tmp_path / "t0", 0.0)], costs), 100)
  assert line.cells[0.0].draft is None and line.cells[0.0].predicted is None
  assert line.cells[0.0].tau == 2.0


def test_every_drafter_has_a_family():
  """A drafter that is added says what it needs."""
  assert set(drafter_table.FAMILIES) == set(DRAFTERS) - {"none"}


def test_flags_of_other_tables_are_refused(tmp_path, capsys):
  arguments = f"--runs={run(tmp_path / 't0', 0.0)}", f"--output={tmp_path / 'out'}", "--tables=chen"
  assert run_script(drafter_table, *arguments) == 2
  assert "--tables is not used by drafter_table" in error_of(capsys)


def test_the_script_writes_table_and_figure(tmp_path):
  out = tmp_path / "tables"
  runs = ",".join([run(tmp_path / "t0", 0.0), run(tmp_path / "t1", 1.0)])
  assert run_script(drafter_table, f"--runs={runs}", f"--output={out}", "--bootstrap_samples=100") == 0
  assert sorted(os.listdir(out)) == ["drafters.csv", "drafters.md", "drafters.png", "drafters.tex"]
  assert matplotlib.image.imread(out / "drafters.png").shape[1] > 1000


@pytest.mark.parametrize(
  ("prepare", "words"),
  [
    (lambda at: "", "--runs is empty"),
    (lambda at: str(at / "nowhere"), "nowhere"),
    (lambda at: save_run(at / "old", rows(0.0)), "run.json has no field methods"),
    (lambda at: run(at / "a", 0.0) + "," + run(at / "b", 0.0), "another run has temperature 0 too"),
    (lambda at: save_run(at / "two", rows(0.0) + rows(1.0), methods={}), "rows have temperatures [0.0, 1.0]"),
    (lambda at: save_run(at / "rules", rows(0.0), script="rule_bench"), "is no finished run of spec_bench"),
  ],
)
def test_what_cannot_be_compared_is_one_line(tmp_path, capsys, prepare, words):
  arguments = f"--runs={prepare(tmp_path)}", f"--output={tmp_path / 'out'}"
  assert run_script(drafter_table, *arguments) == 2
  assert words in error_of(capsys)
  assert not (tmp_path / "out").exists()
