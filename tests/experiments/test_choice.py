"""Which method runs where none is named."""

import json

import pytest

from experiments import choice, runtime
from experiments.methods import AUTO, CHOICE, parse_method
from specjax.analysis import CostTable
from specjax.analysis.costs import KEY_FIELDS
from specjax.checkpoints import shipped
from tests.experiments.tiny import parsed

EAGLE, MEDUSA = "adaptive[of=eagle3]", "adaptive[of=medusa]"


def table(**rates):
  """Plain rounds of 10 ms, 14 ms for any draft's nodes, drafts of 1 ms; acceptance by drafter."""
  methods = {name: f"adaptive[of={name}]" for name in rates}
  widths = {width: rates[name] for name, method in methods.items() for width in parse_method(method).widths}
  draft = {"nodes": 4, "depth": 3, "draft_ms": [[1.0]], "catch_up_ms": 0.0}
  found = lambda rate: {"temperature": 0.0, "proposing": 1.0, "rates": [rate] * 3, "rounds": 9}
  return CostTable(
    made="today",
    key=dict.fromkeys(KEY_FIELDS, "x"),
    batches=[1],
    lives=[256],
    nodes=[1, 4],
    round_ms=[[[10.0, 14.0]]],
    accept_ms=[0.1, 0.1],
    prefill_ms={"64": 9.0},
    call_ms=0.1,
    drafts=dict.fromkeys(widths, draft),
    acceptance={width: found(rate) for width, rate in widths.items()},
  )


@pytest.fixture
def recorded(tmp_path, monkeypatch):
  """A target whose table says that Medusa was fastest."""
  monkeypatch.setattr(shipped, "FOLDER", str(tmp_path))
  for kind in ("eagle3", "medusa"):
    (tmp_path / "target" / kind).mkdir(parents=True)
  (tmp_path / "target" / "results.json").write_text(json.dumps({"best": MEDUSA, "device": "a chip"}))
  return "target"


def test_the_calibration_decides(recorded):
  """τ = 1 + r + r² + r³, 15 ms a round that drafts: 10 τ / 15, at least 1. Fails when costs are left out."""
  measured = table(prompt_lookup=0.2, eagle3=0.6)
  assert choice.predicted(measured, EAGLE) == pytest.approx(10 * (1 + 0.6 + 0.36 + 0.216) / 15)
  assert choice.predicted(measured, CHOICE) == 1.0 and choice.predicted(measured, MEDUSA) is None
  found = choice.choose(recorded, {"eagle3", "medusa"}, measured)
  assert found.method == EAGLE and "calibration of today: 1.45 x predicted" in found.why
  assert choice.choose(recorded, {"medusa"}, table(prompt_lookup=0.7, eagle3=0.9)).method == MEDUSA


def test_without_it_the_recorded_table_does(recorded):
  """A calibration of one method alone says nothing of the others. Fails when it is taken for the best."""
  for measured in (None, table(prompt_lookup=0.9)):
    found = choice.choose(recorded, {"eagle3", "medusa"}, measured)
    assert found.method == MEDUSA and "a chip" in found.why
  assert choice.choose(recorded, {"eagle3"}, None).method == CHOICE
  assert choice.choose("elsewhere", set(), None) == (CHOICE, "it needs no trained head")
  assert choice.choose("elsewhere", set(), table(prompt_lookup=0.3)).why.startswith("calibration")


def test_it_is_made_where_the_target_is_known(models):
  """`AUTO` stays a word until then. Fails when it is replaced before heads and calibration can be seen."""
  with parsed(f"--model={models[0]}"):
    assert runtime.drafter_name() == AUTO
    job = runtime.load_job(["none", runtime.drafter_name()])
  assert job.drafters == ("none", CHOICE) and job.why == "it needs no trained head"
