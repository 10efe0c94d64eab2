"""The calibration file: read and written, interpolated, and each malformed one named."""

import copy
import json

import numpy as np
import pytest

from specjax.analysis import CostTable
from specjax.analysis.costs import KEY_FIELDS

DRAFTER = "self_speculation[layers=4,window=4]"
FILE = {
  "schema": 1,
  "made": "2026-11-30T01:00:00+00:00",
  "key": dict.fromkeys(KEY_FIELDS, "x") | {"cpu_count": 2},
  "batches": [1, 4],
  "lives": [64, 256],
  "nodes": [1, 2, 4],
  "round_ms": [[[10.0, 12.0, 20.0], [14.0, 18.0, 30.0]], [[20.0, 24.0, 40.0], [28.0, 36.0, 60.0]]],
  "accept_ms": [0.1, 0.2, 0.3],
  "prefill_ms": {"16": 30.0, "64": 90.0},
  "call_ms": 0.4,
  "drafts": {
    DRAFTER: {"nodes": 4, "depth": 3, "draft_ms": [[3.0, 6.0], [5.0, 9.0]], "catch_up_ms": 1.5},
    "prompt_lookup": {"nodes": 6, "depth": 5, "draft_ms": [[0.1, 0.1], [0.2, 0.2]], "catch_up_ms": 0},
  },
  "acceptance": {"prompt_lookup": {"temperature": 0.0, "proposing": 0.4, "rates": [0.6, 0.7], "rounds": 300}},
}


@pytest.fixture
def table():
  return CostTable.from_json(copy.deepcopy(FILE))


def test_a_file_comes_back_as_it_was_written(table, tmp_path):
  """Through a new folder, no part file left. Fails when a field is lost, renamed or rounded."""
  path = tmp_path / "new" / "costs.json"
  table.write(str(path))
  assert json.loads(path.read_text()) == FILE
  assert CostTable.read(str(path)).to_json() == FILE
  assert [file.name for file in path.parent.iterdir()] == ["costs.json"]


def test_acceptance_is_optional():
  """Fails when a calibration without measured acceptance is refused."""
  data = {name: value for name, value in FILE.items() if name != "acceptance"}
  assert CostTable.from_json(data).acceptance == {}


@pytest.mark.parametrize(
  ("nodes", "batch", "live", "ms"),
  [
    (1, 1, 64, 10.0),  # grid points
    (4, 4, 256, 60.0),
    (3, 1, 64, 16.0),  # between nodes
    (2, 1, 160, 15.0),  # between lives
    (1, 2, 64, 10 + 10 / 3),  # between batches
    (3, 2.5, 160, 30.0),  # between all: (12 + 20)/2, (18 + 30)/2 → 20; twice that at batch 4 → 30
    (6, 1, 64, 28.0),  # beyond the last two
    (1, 1, 448, 18.0),
    (1, 7, 64, 30.0),
    (1, 1, 3, 10.0),  # before the first live length: held
  ],
)
def test_interpolation(table, nodes, batch, live, ms):
  """On, between and beyond grid points. Fails for another axis order, slope or end."""
  assert table.round_ms_at(nodes, batch=batch, live=live) == pytest.approx(ms)


def test_many_live_lengths_at_once(table):
  """As one by one. Fails when an axis of the array is taken for another, or an end is treated otherwise."""
  lives = np.array([3, 64, 100, 256, 900])
  for ms in (
    lambda live: table.round_ms_at(3, batch=2, live=live),
    lambda live: table.draft_ms_at(DRAFTER, batch=2, live=live),
  ):
    np.testing.assert_allclose(ms(lives), [ms(int(live)) for live in lives])
    assert type(ms(100)) is float


def test_one_point_is_constant_and_nothing_is_negative():
  """A single batch and live length hold everywhere; a falling curve ends at 0."""
  data = FILE | {
    "batches": [1],
    "lives": [64],
    "round_ms": [[[10.0, 6.0, 3.0]]],
    "drafts": {},
  }
  table = CostTable.from_json(data)
  assert table.round_ms_at(1, batch=9, live=5000) == 10.0
  assert table.round_ms_at(40, live=64) == 0.0


def test_costs_of_drafts(table):
  """c is a draft's step over a plain round. Fails when depth, nodes or the live length is left out."""
  assert table.draft_ms_at(DRAFTER, live=160) == pytest.approx(4.5)
  assert table.draft_cost(DRAFTER, live=64) == pytest.approx(3 / 3 / 10)
  assert table.draft_cost(DRAFTER, batch=4, live=256) == pytest.approx(9 / 3 / 28)
  assert table.relative(4, live=256) == pytest.approx(30 / 14)
  with pytest.raises(ValueError, match=r"drafter 'eagle' is not in the calibration, which has self_spec.*"):
    table.draft_ms_at("eagle", live=64)


def test_prefill_sums_its_chunks(table):
  """Measured widths, one between and one beyond. Fails when only the last chunk counts."""
  assert table.prefill_ms_of([64, 64, 16]) == pytest.approx(210)
  assert table.prefill_ms_of([40, 128]) == pytest.approx(60 + 170)
  assert table.prefill_ms_of([]) == 0


def test_matches_names_what_differs(table):
  """Fails when a differing, missing or additional field is passed over."""


def _with(path, value):
  """The file with one value replaced, or left out where the value is None."""
  data = copy.deepcopy(FILE)
  *way, last = path
  at = data
  for name in way:
    at = at[name]
  if value is None:
    del at[last]
  else:
    at[last] = value
  return data


MALFORMED = [
  (("schema",), 2, "schema = 2; this version reads 1"),
  (("schema",), None, "schema = None"),
  (("round_ms",), None, "round_ms is missing"),
  (("speed",), 3, "speed: unknown field"),
  (("made",), 5, "made = 5"),
  (("key", "model"), None, "key has no 'model'"),
  (("key",), [], r"key = \[\]; it must be an object"),
  (("batches",), [4, 1], "batches = .* must ascend"),
  (("lives",), [64, 64], "lives = .* must ascend"),
  (("lives",), [], "lives = .* with an entry"),
  (("nodes",), [2, 3, 4], r"nodes\[0\] = 2; it must be 1"),
  (("nodes",), [1, 2.5, 4], "nodes has 2.5; it must hold whole numbers"),
  (("nodes",), [1, 2], r"round_ms has the shape \(2, 2, 3\); it must be \(2, 2, 2\)"),
  (("round_ms", 0, 0), [1.0], "round_ms is ragged"),
  (("round_ms", 0, 1, 2), 0.0, "round_ms has 0; it must be finite and above 0"),
  (("round_ms", 1, 1, 2), float("nan"), "round_ms has nan"),
  (("round_ms", 0, 0, 0), "fast", "round_ms = .* numbers alone"),
  (("accept_ms",), [0.1], r"accept_ms has the shape \(1,\); it must be \(3,\)"),
  (("accept_ms", 1), float("inf"), "accept_ms has inf"),
  (("call_ms",), -0.1, "call_ms has -0.1"),
  (("prefill_ms",), {}, "prefill_ms has widths"),
  (("prefill_ms", "wide"), 3.0, "prefill_ms has widths .*'wide'"),
  (("prefill_ms", "16"), 0.0, r"prefill_ms\[16\] has 0; it must be finite and above 0"),
  (("drafts", DRAFTER, "depth"), None, r"drafts\['self_spec.*'\] has no 'depth'"),
  (("drafts", DRAFTER, "depth"), 4, "depth = 4; it must be below its nodes, 4"),
  (("drafts", DRAFTER, "nodes"), 0, "nodes = 0; it must be a whole number of at least 1"),
  (("drafts", DRAFTER, "draft_ms"), [[3.0, 6.0]], r"draft_ms has the shape \(1, 2\); it must be \(2, 2\)"),
  (("drafts", DRAFTER, "draft_ms"), [3.0, 6.0, 5.0, 9.0], r"draft_ms has the shape \(4,\)"),
  (("drafts", DRAFTER, "draft_ms", 0, 0), -1.0, "draft_ms has -1"),
  (("drafts", DRAFTER, "catch_up_ms"), -1.0, "catch_up_ms has -1"),
  (("acceptance", "prompt_lookup", "rates"), [1.2], "rates = .* each must be in .0, 1"),
  (("acceptance", "prompt_lookup", "proposing"), 1.2, "proposing = 1.2; each must be in"),
  (("acceptance", "prompt_lookup", "temperature"), -1.0, "temperature has -1"),
  (("acceptance", "prompt_lookup", "rounds"), None, "has no 'rounds'"),
]


@pytest.mark.parametrize(("path", "value", "words"), MALFORMED)
def test_a_malformed_file_is_named(tmp_path, path, value, words):
  """File, field, value and limit. Fails when such a file is read."""
  file = tmp_path / "costs.json"
  file.write_text(json.dumps(_with(path, value)))
  with pytest.raises(ValueError, match=f"costs.json: .*{words}"):
    CostTable.read(str(file))


def test_what_is_no_calibration_is_named(tmp_path):
  """No file, no JSON, no object. Fails when another error comes through."""
  with pytest.raises(ValueError, match=r"absent.json: No such file"):
    CostTable.read(str(tmp_path / "absent.json"))
  for text, words in (("{", "not JSON"), ("[]", "must be an object")):
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ValueError, match=rf"costs.json: .*{words}"):
      CostTable.read(str(tmp_path / "costs.json"))


@pytest.mark.parametrize(
  ("asked", "words"),
  [
    (dict(nodes=0, live=64), "nodes = 0"),
    (dict(nodes=1, live=-1), "live = -1"),
    (dict(nodes=1, live=64, batch=0), "batch = 0"),
    (dict(nodes=float("nan"), live=64), "nodes = nan"),
  ],
)
def test_a_question_out_of_range_is_refused(table, asked, words):
  """Fails when a round of no nodes or of a negative length has a cost."""
  with pytest.raises(ValueError, match=f"{words}; it must be"):
    table.round_ms_at(**asked)
  with pytest.raises(ValueError, match="prefill width = 0"):
    table.prefill_ms_of([0])


def test_arrays_are_numpy(table):
  """What a caller computes with. Fails when lists are kept."""
  assert table.round_ms.shape == (2, 2, 3) and table.drafts[DRAFTER]["draft_ms"].shape == (2, 2)
  assert isinstance(table.acceptance["prompt_lookup"]["rates"], np.ndarray)
  assert table.prefill_ms == {16: 30.0, 64: 90.0}
