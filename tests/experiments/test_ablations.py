"""Tables of training runs that differ in the head alone; the runs themselves are test_train_drafter's."""

import json
import os

import pytest
from absl import flags

from experiments import ablations
from specjax.training.recipes import make_recipe
from tests.experiments.test_bad_flags import error_of
from tests.experiments.tiny import run_script


def held_out(tau):
  lists = {name: [0.5, 0.25] for name in ("acceptance", "agreement", "overlap")}
  return lists | {"tau": tau, "coverage": 0.9}


def finished(folder, tau):
  """A run's folder as train_drafter leaves it."""
  os.makedirs(folder)
  with open(os.path.join(folder, "config.json"), "w") as file:
    json.dump({"settings": {"--data": "d" * 64}}, file)
  rows = [
    {"step": 1, "tokens": 10, "seconds": 6.0, "loss": 2.0},
    {"step": 1, "tokens": 10, "seconds": 6.0, "held_out": held_out(tau)},
  ]
  with open(os.path.join(folder, "metrics.jsonl"), "w") as file:
    file.write("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("name", ablations.TABLES)
def test_rows_differ_in_the_head_alone(name):
  """Every head is one that can be trained, and no two are the same."""
  heads = ablations.TABLES[name].heads
  assert len({make_recipe(head) for head in heads.values()}) == len(heads) > 1


def test_the_script(tmp_path, monkeypatch, capsys):
  """One run a row, with the same settings, and a table and a plot of what their logs say."""
  taken = []

  def train(head, folder):
    taken.append(
      [part for part in ablations.command(head, folder) if head not in part and folder not in part]
    )
    finished(folder, 1.0 + len(taken) / 8)

  monkeypatch.setattr(ablations, "train", train)
  arguments = ["--data=a,b", f"--output={tmp_path}", "--steps=7", "--seed=3"]
  assert run_script(ablations, *arguments) == 0
  said = capsys.readouterr().out
  assert all(loss in said for loss in ablations.TABLES["losses"].heads) and "1.62" in said
  assert len({tuple(parts) for parts in taken}) == 1 and len(taken) == 5
  assert {"--data=a,b", "--steps=7", "--seed=3", "--row_length=704"} < set(taken[0])
  assert os.path.getsize(tmp_path / "losses.png") > 1000


def test_all_tables(tmp_path, monkeypatch, capsys):
  """Every row once, in a folder of its own. Fails when a table is left out or two share a folder."""
  taken = []
  monkeypatch.setattr(ablations, "train", lambda head, folder: (taken.append(head), finished(folder, 1.5)))
  monkeypatch.setattr(ablations.plots, "can_draw", lambda: False)
  assert run_script(ablations, "--table=all", "--data=a", f"--output={tmp_path}") == 0
  said = capsys.readouterr().out
  assert taken == [head for table in ablations.TABLES.values() for head in table.heads.values()]
  assert all(table.title in said for table in ablations.TABLES.values())
  assert (tmp_path / "early_exit" / "exit_15").is_dir() and (tmp_path / "medusa" / "Medusa-2").is_dir()


def test_a_run_that_fails_ends_the_command(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(ablations, "command", lambda *_: ["false"])
  assert run_script(ablations, "--data=a", f"--output={tmp_path}") == 2
  assert "train_drafter --head='eagle3[" in error_of(capsys)


BAD = {
  "table": ("speed",),
  "head": ("medusa|--head is not used by ablations",),
  "data": ("|--data is empty",),
  "output": ("|--output is empty",),
  "steps": ("0", "many"),
  "row_length": ("15",),
  "learning_rate": ("2", "fast"),
  "start_from": ("nowhere|is not a folder",),
  "window": ("3|--window is not used by ablations",),
  "plot": ("/no/such/folder/x.png",),
}
CASES = [(flag, *value.partition("|")[::2]) for flag, values in BAD.items() for value in values]


@pytest.mark.parametrize(("flag", "value", "words"), CASES)
def test_a_bad_value_is_one_line(monkeypatch, capsys, tmp_path, flag, value, words):
  monkeypatch.setattr(ablations, "train", lambda *_: pytest.fail("a run began"))
  good = {"data": "a", "output": str(tmp_path)}
  assert run_script(ablations, *(f"--{name}={text}" for name, text in (good | {flag: value}).items())) == 2
  assert (words or flag) in error_of(capsys)


def test_every_flag_is_here():
  defined = {holder.name for holder in vars(ablations).values() if isinstance(holder, flags.FlagHolder)}
  assert defined <= set(BAD)
