"""``python -m tests.notebook``: runs the Colab notebook in a fresh environment, from its install cell on.

Makes a virtual environment with a Jupyter kernel and nothing of specjax, and executes every cell in an empty
folder; pip is held to ``.ci/constraints.txt``. ``--here`` uses this environment (extra ``notebook``) instead.
Exit code 0: no cell failed, and the timeline, the table of methods and the trained head's answer are there.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "experiments" / "specjax_colab.ipynb"
KERNEL = ("ipykernel>=7.4", "nbclient>=0.11", "nbformat>=5.11")
# What cells must have said, by their ids.
EXPECTED = {
  "answer": "text/stream",
  "timeline": "image/png",
  "table": "overall",
  "train": "image/png",
  "use": "identical         yes",
}


def execute(folder: str) -> None:
  """Executes the notebook with this interpreter's kernel in a folder, saying how long each cell took.

  Raises:
    RuntimeError: a cell failed, or did not say what it should.
  """
  import nbclient
  import nbformat

  notebook = nbformat.read(NOTEBOOK, as_version=4)
  client = nbclient.NotebookClient(
    notebook, timeout=1800, kernel_name="python3", resources={"metadata": {"path": folder}}
  )
  with client.setup_kernel():
    for number, cell in enumerate(notebook.cells):
      start = time.perf_counter()
      client.execute_cell(cell, number)
      if cell.cell_type == "code":
        print(f"{cell.id:10} {time.perf_counter() - start:7.1f} s", flush=True)
  nbformat.write(notebook, os.path.join(folder, "executed.ipynb"))
  for cell in notebook.cells:
    if cell.cell_type == "code" and not said(cell.outputs, EXPECTED.get(cell.id)):
      raise RuntimeError(f"cell {cell.id}: no {EXPECTED[cell.id]!r} in what it said")


def said(outputs: Sequence[dict], wanted: str | None) -> bool:
  """Whether a cell's outputs hold some text (``text/stream``: any), or data of a type; None is anything."""
  if wanted is None:
    return True
  streamed = "".join(output.get("text", "") for output in outputs if output["output_type"] == "stream")
  if wanted == "text/stream":
    return bool(streamed.strip())
  return wanted in streamed or any(wanted in output.get("data", {}) for output in outputs)


def main(arguments: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(prog="python -m tests.notebook", description=__doc__.partition("\n")[0])
  parser.add_argument("--here", action="store_true", help="in this environment, without making one")
  parser.add_argument("--folder", help="where cells run and executed.ipynb is kept; default: a temporary one")
  given = parser.parse_args(arguments)
  start = time.perf_counter()
  with tempfile.TemporaryDirectory(prefix="specjax-notebook-") as work:
    folder = given.folder or os.path.join(work, "run")
    os.makedirs(folder, exist_ok=True)
    if given.here:
      execute(folder)
    else:
      environment = os.path.join(work, "environment")
      venv.create(environment, with_pip=True)
      python = os.path.join(environment, "bin", "python")
      settings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
      settings |= {"SPECJAX": str(ROOT), "PIP_CONSTRAINT": str(ROOT / ".ci" / "constraints.txt")}
      subprocess.run([python, "-m", "pip", "install", "-q", *KERNEL], env=settings, check=True)
      # As a file, not as a module: else the kernel would find specjax in this folder.
      command = [python, __file__, "--here", f"--folder={os.path.abspath(folder)}"]
      if code := subprocess.run(command, env=settings, cwd=work).returncode:
        return code
  print(f"the notebook ran in {(time.perf_counter() - start) / 60:.1f} minutes")
  return 0


if __name__ == "__main__":
  sys.exit(main())
