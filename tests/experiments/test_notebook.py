"""The notebook as a file: clean, and in step with the scripts. ``python -m tests.notebook`` executes it."""

import ast
import importlib
import json

import pytest
from absl import flags

from tests.notebook import EXPECTED, NOTEBOOK, said


@pytest.fixture(scope="module")
def notebook():
  return json.loads(NOTEBOOK.read_text(encoding="utf-8"))


def test_it_is_clean(notebook):
  """A reader sees no stored outputs, and cells have the ids that the executing test asks for."""
  cells = notebook["cells"]
  assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
  ids = [cell["id"] for cell in cells]
  assert len(set(ids)) == len(ids) and EXPECTED.keys() <= set(ids)
  for cell in cells:
    if cell["cell_type"] == "code":
      assert cell["outputs"] == [] and cell["execution_count"] is None
      compile("".join(cell["source"]), cell["id"], "exec")


def calls(notebook):
  """``(script, flag)`` of every call of ``run`` in the notebook, and what it imports of specjax."""
  source = "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
  tree = ast.parse(source)
  names = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
  lists = {node.targets[0].id: node.value for node in names if isinstance(node.targets[0], ast.Name)}
  found, imports = [], []

  def start(node):
    """The fixed beginning of a text, an f-string or a name of one."""
    node = lists.get(node.id, node) if isinstance(node, ast.Name) else node
    node = node.values[0] if isinstance(node, ast.JoinedStr) else node
    return node.value

  for node in ast.walk(tree):
    if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "run":
      script, *given = node.args
      for argument in given:
        parts = lists[argument.value.id].elts if isinstance(argument, ast.Starred) else [argument]
        found += [(script.value, start(part).removeprefix("--").partition("=")[0]) for part in parts]
    if isinstance(node, ast.ImportFrom) and node.module.startswith("specjax"):
      imports += [(node.module, name.name) for name in node.names]
  return found, imports


def test_scripts_have_the_flags_that_it_gives(notebook):
  """Fails when a script, a flag or a name that a cell uses is renamed."""
  given, imports = calls(notebook)
  assert {script for script, _ in given} == {"spec_bench", "distill_data", "train_drafter", "generate"}
  for script, flag in given:
    importlib.import_module(f"experiments.{script}")
    assert flag in flags.FLAGS, f"{script} --{flag}"
  for module, name in imports:
    assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


def test_what_a_cell_said():
  stream = [{"output_type": "stream", "text": "a\n"}]
  assert said([], None) and said(stream, "a") and said(stream, "text/stream")
  assert not said([], "text/stream") and not said(stream, "b")
  assert said([{"output_type": "display_data", "data": {"image/png": ""}}], "image/png")
