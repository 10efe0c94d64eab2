"""Shipping heads: what lies in the package afterwards, its size, and the recorded table."""

import json
import os

import pytest

from experiments import run_files, ship_heads
from specjax.checkpoints import package, shipped
from tests.experiments.test_bad_flags import error_of
from tests.experiments.test_paper_tables import bench_row, save_run
from tests.experiments.tiny import run_script

(MODEL,) = package.PACKAGED


@pytest.fixture
def home(tmp_path, monkeypatch):
  """An empty folder in place of the package's."""
  monkeypatch.setattr(shipped, "FOLDER", str(tmp_path / "shipped"))
  return tmp_path / "shipped" / MODEL


def trained(path, head, size=1000, **result):
  """The folder of a training run, as far as it is read."""
  (path / "head").mkdir(parents=True)
  (path / "head" / "model.safetensors").write_bytes(bytes(size))
  config = {"settings": {"--head": head, "--seed": 0}, "about": {}} | result
  (path / "config.json").write_text(json.dumps(config))
  (path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"torn')
  return str(path)


def ship(*arguments):
  return run_script(ship_heads, *arguments)


def test_heads_lie_in_the_package_with_what_made_them(home, tmp_path):
  """One folder a kind, its training beside it; a newer head takes the place of the older."""
  eagle = trained(tmp_path / "a", "eagle3[steps=4]", result={"tokens": 7})
  draft = trained(tmp_path / "b", "distilled", result={})
  assert shipped.shipped_heads(MODEL) == {}
  assert ship(f"--trained={eagle},{draft}") == 0
  assert shipped.shipped_heads(MODEL) == {kind: str(home / kind) for kind in ("eagle3", "draft")}
  assert shipped.shipped_heads("somewhere/model.gguf") == {}
  made = json.loads((home / "eagle3" / shipped.TRAINING).read_text())
  assert made["settings"]["--head"] == "eagle3[steps=4]" and made["result"] == {"tokens": 7}
  assert (home / "eagle3" / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
  newer = trained(tmp_path / "c", "eagle3[steps=5]", result={"tokens": 8})
  assert ship(f"--trained={newer}") == 0
  assert json.loads((home / "eagle3" / shipped.TRAINING).read_text())["result"] == {"tokens": 8}
  assert sorted(os.listdir(home)) == ["draft", "eagle3"]


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    (["--model=other"], "--model = 'other'; heads are shipped for"),
    ([], "--trained or --measured is needed"),
    (["--trained={eagle},{again}"], "--trained are of eagle3, eagle3; one of a kind"),
    (["--trained={open}"], "this run is not finished"),
    (["--trained={eagle},{large}", "--most_megabytes=0.01"], "--most_megabytes = 0.01; the heads would be"),
    (["--trained={joint}"], "medusa2 changed the target; its head is not for the packaged one"),
    (["--measured={one}"], "no heads there"),
    (["--measured={one},{two}"], "another run has temperature 0 too"),
  ],
)
def test_what_cannot_be_shipped(arguments, words, home, tmp_path, capsys):
  done = dict(result={})
  rows = [bench_row(1, drafter, 2.0, 30) for drafter in ("none", "adaptive[of=eagle3]")]
  rows = [row | {"settings": row["settings"] | {"temperature": 0.0}} for row in rows]
  places = {
    "eagle": trained(tmp_path / "a", "eagle3", **done),
    "again": trained(tmp_path / "b", "eagle3", **done),
    "open": trained(tmp_path / "c", "eagle3"),
    "joint": trained(tmp_path / "e", "medusa2", **done),
    "large": trained(tmp_path / "d", "medusa", size=20_000, **done),
    "one": save_run(tmp_path / "one", rows, versions={}),
    "two": save_run(tmp_path / "two", rows, versions={}),
  }
  assert ship(*(argument.format(**places) for argument in arguments)) == 2
  assert words in error_of(capsys)
  assert not home.exists() or not os.listdir(home)


def test_the_recorded_table_names_the_best(home, tmp_path, capsys):
  """τ and speedup are sums over sums of the questions that plain has too; best is by geometric mean.

  A: 1.5 and 1.2, B: 2 and 0.8: A is best (1.8 > 1.6), though B has the highest figure.
  """

  def rows(temperature, seconds):
    each = [bench_row(1, "none", 6.0, 60), bench_row(2, "none", 6.0, 60)]
    each += [bench_row(q, name, s, 30) for name, s in seconds.items() for q in (1, 2, 3)]
    return [row | {"settings": row["settings"] | {"temperature": temperature}} for row in each]

  greedy = save_run(tmp_path / "t0", rows(0.0, {"A": 4.0, "B": 3.0}), versions={"jax": "1"})
  sampled = save_run(tmp_path / "t1", rows(1.0, {"A": 5.0, "B": 7.5}), versions={"jax": "1"})
  ship(f"--trained={trained(tmp_path / 'a', 'eagle3', result={})}")
  assert ship(f"--measured={greedy},{sampled}") == 0
  table = shipped.shipped_results(MODEL)
  assert table["best"] == "A" and table["versions"] == {"jax": "1"}
  assert table["methods"]["A"] == {"0": {"tau": 2.0, "speedup": 1.5}, "1": {"tau": 2.0, "speedup": 1.2}}
  assert table["methods"]["B"]["1"]["speedup"] == 0.8 and len(table["commands"]) == 2
  folders = ["--questions=/a/b.jsonl", "--drafter_path=/a/x,/b/y,z", "--drafters=A,B[path=/c]"]
  cut = ["--questions=b.jsonl", "--drafter_path=x,y,z", "--drafters=A,B[path=/c]"]
  assert [run_files._without_folders(line) for line in folders] == cut
  assert "best: A" in capsys.readouterr().err
