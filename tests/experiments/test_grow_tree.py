"""The best tree for a head, from its log and a calibration; needs no model of the head."""

import json

import numpy as np
import pytest

from experiments import calibration, grow_tree
from specjax.analysis import best_tree, tree_tokens
from specjax.drafters import parse_drafter
from specjax.tree import TokenTree
from tests.experiments.test_bad_flags import error_of
from tests.experiments.test_choice import table
from tests.experiments.tiny import run_script

RANKS = [[0.5, 0.2, 0.1], [0.4, 0.1, 0.0], None]


def saved(path, head, ranks=RANKS):
  path.mkdir()
  (path / "config.json").write_text(json.dumps({"settings": {"--head": head}}))
  rows = [{"step": 0, "held_out": {"ranks": None}}, {"step": 1, "held_out": {"ranks": ranks}}]
  (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  return str(path)


def test_medusas_tree_is_written_by_its_paths(tmp_path):
  """What is read back has the topology and the expected tokens of the best tree. Fails for ranks by place."""
  drafter, acceptance = grow_tree.acceptance_by_rank(saved(tmp_path / "run", "medusa[heads=3]"))
  np.testing.assert_array_equal(acceptance, RANKS[:2])
  best = best_tree(acceptance, 6, max_depth=2)
  name, options = parse_drafter(grow_tree.option_of(drafter, best))
  read = TokenTree.from_paths(options["tree"])
  assert name == "medusa" and read.num_nodes == best.nodes == 6
  assert tree_tokens(read.parents, acceptance) == pytest.approx(best.tokens)
  assert grow_tree.option_of("eagle3", best).startswith("eagle3[nodes=6,beam=")


def test_costs_are_those_of_the_calibration():
  """Plain rounds of 10 ms, 14 ms for 4 nodes; drafts of 1 ms at depth 3: a level each, or all at once."""
  measured = table(eagle3=0.5, medusa=0.5)
  assert grow_tree.cost_of(measured, "eagle3", 256)(4, 2) == pytest.approx(1.4 + 2 / 3 * 0.1)
  assert grow_tree.cost_of(measured, "medusa", 256)(4, 2) == pytest.approx(1.4 + 0.1)
  assert grow_tree.cost_of(measured, "medusa", 256)(1, 0) == 1.0
  with pytest.raises(ValueError, match="the calibration lacks two_model"):
    grow_tree.cost_of(measured, "two_model", 256)


def test_the_script(models, tmp_path, monkeypatch, capsys):
  """A table by rank, one by nodes, and the best tree; without a calibration or a log one line says so."""
  run, model = saved(tmp_path / "run", "medusa[heads=3]"), f"--model={models[0]}"
  assert run_script(grow_tree, model, f"--run={run}") == 2
  assert "not calibrated" in error_of(capsys)
  monkeypatch.setattr(calibration, "load", lambda key: table(medusa=0.5))
  assert run_script(grow_tree, model, f"--run={run}", "--most_nodes=4") == 0
  shown = capsys.readouterr().out
  assert "0.50" in shown and "best: medusa[tree=(" in shown
  empty = saved(tmp_path / "empty", "medusa", ranks=None)
  bad = {empty: "no held-out acceptance by rank", str(tmp_path): "not a training run", "": "--run"}
  for path, words in bad.items():
    assert run_script(grow_tree, model, f"--run={path}") == 2
    assert words in error_of(capsys)
