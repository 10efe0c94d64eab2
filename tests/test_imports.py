"""Modules import only from rows above them: DESIGN.md's map, enforced on the syntax tree."""

import ast
import pathlib
import sys

import pytest

import specjax

ROOT = pathlib.Path(specjax.__file__).parent
ROWS = {
  "tree": 0,
  "cache": 0,
  "sampling": 0,
  "processors": 0,
  "results": 0,
  "options": 0,
  "base": 1,
  "kernels": 2,
  "models": 3,
  "checkpoints": 4,
  "verify": 5,
  "drafters": 6,
  "state": 7,
  "prefill": 7,
  "decode": 7,
  "control": 7,
  "text": 8,
  "training": 8,
  "analysis": 8,
  "serving": 9,
  "testing": 9,
}
# Rows a module may import from besides its own package, and single modules.
MAY = {
  "tree": (),
  "cache": (),
  "sampling": (),
  "processors": ("sampling",),
  "options": (),
  "results": (),
  "base": (0,),
  "kernels": (),
  "models": (0, 1, 2),
  "checkpoints": (0, 1, 2, 3),
  "verify": (0, 1),
  "drafters": (0, 1, 2, 3),
  "state": (0, 1),
  "prefill": (0, 1, "state"),
  "decode": (0, 1, "state", "prefill"),
  "control": (0, 1),
  "text": (0, 1, 4, 7),
  "training": tuple(range(8)),
  "analysis": (),
  "serving": tuple(range(9)),
  "testing": tuple(range(9)),
}
# Packages from outside that may be imported at the top of a file (flax: struct and nnx, as pytrees).
ARRAYS = {"jax", "numpy", "flax"}
OUTSIDE = {
  "options": set(),
  "tree": {"jax", "numpy"},
  "kernels": {"jax", "numpy"},
  "analysis": {"numpy"},
  **{
    name: ARRAYS
    for name in (
      "cache",
      "sampling",
      "processors",
      "results",
      "state",
      "prefill",
      "base",
      "models",
      "verify",
      "drafters",
      "decode",
      "control",
    )
  },
}
# Modules that the design allows no jax at all.
NO_JAX = tuple(
  f"serving/{name}.py"
  for name in (
    "requests",
    "policies",
    "plans",
    "config",
    "entries",
    "scheduler",
    "arrivals",
    "summary",
    "simulate",
    "http/schema",
    "http/metrics",
  )
)
# Modules that need an extra; nothing else imports them, or what they need, at the top.
EXTRA = {"serving/http/app.py": "starlette", "serving/http/server.py": "uvicorn"}

FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def part_of(module: str) -> str:
  """``specjax.models.layers`` → ``models``."""
  return module.split(".")[1] if "." in module else ""


def imports(tree: ast.AST, file: pathlib.Path):
  """``(module, line, at the top)`` of every import; relative ones resolved."""
  top = {id(node) for node in ast.iter_child_nodes(tree)}
  package = ("specjax", *file.parent.parts)
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      for alias in node.names:
        yield alias.name, node.lineno, id(node) in top
    elif isinstance(node, ast.ImportFrom):
      base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
      module = ".".join(filter(None, (base, node.module)))
      if module == "specjax":  # ``from specjax import cache``
        for alias in node.names:
          yield f"specjax.{alias.name}", node.lineno, id(node) in top
      else:
        yield module, node.lineno, id(node) in top


def faults(source: str, file: pathlib.Path) -> list[str]:
  own = file.parts[0].removesuffix(".py")
  found = []
  for module, line, top in imports(ast.parse(source), file):
    name = module.split(".")[0]
    if name == "specjax":
      part = part_of(module)
      if part == own or not part:
        continue
      if part not in ROWS:
        found.append(f"{file}:{line} imports {module}, which is in no row")
      elif ROWS[part] not in MAY[own] and part not in MAY[own]:
        found.append(
          f"{file}:{line} ({own}) imports {module} of row {ROWS[part]}; it may use rows {MAY[own]}"
        )
    elif top and own in OUTSIDE and not _stdlib(name) and name not in OUTSIDE[own]:
      found.append(f"{file}:{line} ({own}) imports {name}; only {sorted(OUTSIDE[own])} there")
    elif name == "jax" and file.as_posix() in NO_JAX:
      found.append(f"{file}:{line} imports jax")
  return found


def _stdlib(name):
  return name in sys.stdlib_module_names


@pytest.mark.parametrize("file", FILES, ids=str)
def test_imports_follow_the_map(file):
  """Fails on any import from the same row or below, in functions too, and on undeclared packages."""
  own = file.parts[0].removesuffix(".py")
  if own == "__init__":
    assert not faults(ROOT.joinpath(file).read_text(), file)
    return
  assert own in ROWS, f"{file} belongs to no row of the map"
  assert not faults(ROOT.joinpath(file).read_text(), file)


@pytest.mark.parametrize(
  ("file", "source"),
  [
    ("decode.py", "from specjax.models import Decoder"),
    ("decode.py", "def f():\n  from specjax import drafters"),
    ("verify/follow.py", "import specjax.models.layers"),
    ("verify/follow.py", "from ..drafters import none"),
    ("drafters/none.py", "from specjax import verify"),
    ("kernels/tree_attention/api.py", "from specjax.cache import KVCache"),
    ("kernels/tree_attention/api.py", "import flax"),
    ("sampling.py", "from specjax.base import Proposal"),
    ("cache.py", "import torch"),
    ("serving/scheduler.py", "import jax"),
    ("analysis/cost.py", "import matplotlib.pyplot"),
    ("models/decoder.py", "from specjax.checkpoints import load_model"),
    ("base.py", "from specjax.nowhere import x"),
  ],
)
def test_the_check_sees(file, source):
  """Each of these is a fault; the check must say so."""
  assert faults(source, pathlib.Path(file))


def test_the_package_imports_without_its_extras():
  """Fails when the web server becomes a need of those who do not serve."""
  needed = {*EXTRA.values(), *("specjax." + file[:-3].replace("/", ".") for file in EXTRA)}
  for file in FILES:
    tops = {module for module, _, top in imports(ast.parse(ROOT.joinpath(file).read_text()), file) if top}
    found = {name for name in needed for module in tops if module == name or module.startswith(f"{name}.")}
    assert bool(found) == (file.as_posix() in EXTRA), file
    assert EXTRA.get(file.as_posix()) in (None, *found)


def test_every_module_has_a_rule():
  assert set(ROWS) == set(MAY)
