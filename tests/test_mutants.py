"""The list of `python -m tests.mutants` fits the sources, and its runner reads pytest right."""

import ast
import functools
import json
import pathlib

import pytest

from tests.mutants import Mutant, StaleMutant, apply, runner
from tests.mutants.__main__ import main
from tests.mutants.catalogue import MUTANTS

ROOT = pathlib.Path(__file__).parents[1]


@functools.cache
def text(file):
  return (ROOT / file).read_text(encoding="utf-8")


@functools.cache
def defined(file):
  """Names of a file's classes and functions; a class stands for what it inherits, too."""
  return {
    node.name for node in ast.walk(ast.parse(text(file))) if isinstance(node, (ast.FunctionDef, ast.ClassDef))
  }


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_fits_the_sources(mutant):
  """Its text is there once, and its tests exist. Fails when one of them moved."""
  apply(mutant, text(mutant.file))
  assert mutant.tests
  for test in mutant.tests:
    file, *path = test.partition("[")[0].split("::")
    assert (ROOT / file).is_file(), test
    known = defined(file) | defined("tests/kernels/suite.py")
    assert set(path) <= known, test


def test_there_are_many_and_each_has_its_name():
  names = [mutant.name for mutant in MUTANTS]
  assert len(names) >= 35 and len(set(names)) == len(names)
  assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(names)


def test_a_stale_mutant_is_an_error():
  """Fails when a mutant whose text is gone, or there twice, is skipped or does nothing."""
  mutant = lambda old, new="c": Mutant("m", "", "f.py", old, new, ())
  assert apply(mutant("a"), "abb") == "cbb"
  for stale in (mutant("x"), mutant("b"), mutant("a", "a")):
    with pytest.raises(StaleMutant, match="m"):
      apply(stale, "abb")


@pytest.mark.parametrize(
  ("code", "output", "want"),
  [
    (0, "3 passed", ("survived", "")),
    (1, "x\nFAILED tests/a.py::t[1-b] - assert 1 == 2\n1 failed", ("noticed", "tests/a.py::t[1-b]")),
    (1, "ERROR tests/a.py::t - ValueError: no", ("noticed", "tests/a.py::t")),
    (1, "FAILED tests/a.py::t[one NaN] - assert False\n1 failed", ("noticed", "tests/a.py::t[one NaN]")),
    (1, "FAILED tests/a.py::t - NameError: name 'x'", ("broken", "tests/a.py::t: NameError: name 'x'")),
    (2, "ERROR tests/a.py - SyntaxError", ("broken", "pytest ended with 2: ERROR tests/a.py - SyntaxError")),
    (
      4,
      "ERROR: not found: tests/a.py::u",
      ("broken", "pytest ended with 4: ERROR: not found: tests/a.py::u"),
    ),
    (-11, "", ("noticed", "the process died of SIGSEGV")),
    (-9, "", ("broken", "the process died of SIGKILL")),
  ],
)
def test_what_pytest_says_is_read_right(code, output, want):
  """Fails when a run without an answer counts as one."""
  outcome = runner.read(code, output, 1.0)
  assert (outcome.status, outcome.by) == want


def test_whole_files_swallow_their_node_ids():
  assert runner.by_file(["b.py::t", "a.py::u", "b.py", "a.py::t", "a.py::t"]) == {
    "a.py": ("a.py::t", "a.py::u"),
    "b.py": ("b.py",),
  }


def test_outcomes_are_kept_and_belong_to_their_sources(tmp_path):
  """Fails when a change of a source, a test or the mutant brings back an old outcome."""
  path = tmp_path / "runs" / "outcomes.json"
  outcome = runner.Outcome("noticed", "tests/a.py::t", 1.5)
  runner.Results(path, fresh=False).put("key", "m", outcome)
  assert runner.Results(path, fresh=False).get("key") == outcome
  assert runner.Results(path, fresh=True).get("key") is None
  assert json.loads(path.read_text())["key"]["name"] == "m" and len(list(path.parent.iterdir())) == 1
  for folder in ("specjax", "tests", "tests/mutants"):
    (tmp_path / folder).mkdir()
  for name in ("pyproject.toml", "specjax/a.py", "tests/b.py", "tests/mutants/c.py"):
    (tmp_path / name).write_text("1")
  hashes = [runner.hash_sources(tmp_path)]
  for name in ("specjax/a.py", "tests/b.py", "tests/mutants/c.py"):
    (tmp_path / name).write_text("2")
    hashes.append(runner.hash_sources(tmp_path))
  assert len(set(hashes[:3])) == 3 and hashes[3] == hashes[2]
  first, second = MUTANTS[:2]
  assert runner.key_of("h", first) not in (runner.key_of("h", second), runner.key_of("g", first))


def test_list_and_wrong_flags(capsys):
  assert main(["--list", "--only=temperature"]) == 0
  assert all("temperature" in line for line in capsys.readouterr().out.splitlines())
  assert main(["--only=no such mutant"]) == 2
  assert "error: --only=no such mutant" in capsys.readouterr().err
  for wrong in ("--jobs=0", "--timeout=0"):
    with pytest.raises(SystemExit) as raised:
      main([wrong])
    assert raised.value.code == 2 and wrong in capsys.readouterr().err
