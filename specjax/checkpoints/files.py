"""One error type for everything that can be wrong with a checkpoint; JSON files; whole-or-absent folders."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any


class CheckpointError(ValueError):
  """A checkpoint, tokenizer or model source that cannot be used; says which file, field and value."""


@contextlib.contextmanager
def refusing(source: str) -> Iterator[None]:
  """Turns a ``ValueError`` of a config or a module into a `CheckpointError` that names the file."""
  try:
    yield
  except CheckpointError:
    raise
  except ValueError as error:
    raise CheckpointError(f"{source}: {error}") from None


def read_json(path: str) -> dict[str, Any]:
  """The JSON object in a UTF-8 file; `CheckpointError` when it is missing, truncated or no object."""
  try:
    with open(path, encoding="utf-8") as file:
      value = json.load(file)
  except FileNotFoundError:
    raise CheckpointError(f"{path}: no such file") from None
  except (json.JSONDecodeError, UnicodeDecodeError) as error:
    raise CheckpointError(f"{path}: not valid JSON, perhaps truncated ({error})") from None
  if not isinstance(value, dict):
    raise CheckpointError(f"{path}: a JSON object is expected, not {type(value).__name__}")
  return value


def write_whole(path: str, text: str) -> None:
  """Writes a UTF-8 file that is whole or as it was: aside, to the disk, then renamed."""
  part = f"{path}.part"
  with open(part, "w", encoding="utf-8") as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  os.replace(part, path)


def write_json(path: str, value: Any) -> None:
  with open(path, "w", encoding="utf-8") as file:
    json.dump(value, file, indent=2, ensure_ascii=False)
    file.write("\n")


@contextlib.contextmanager
def writing(path: str, doing: str) -> Iterator[None]:
  """Turns whatever is raised while writing ``path`` into one `CheckpointError`."""
  try:
    yield
  except CheckpointError:
    raise
  except Exception as error:  # safetensors and tensorstore wrap the system's errors in types of their own
    raise CheckpointError(f"{doing} {path}: {_describe(error)}; nothing was kept") from error


def _describe(error: Exception) -> str:
  full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
  if full or "No space left" in str(error):
    return "no space left on the disk"
  return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


@contextlib.contextmanager
def new_folder(path: str) -> Iterator[str]:
  """A folder that is whole or absent: yields one beside it, which is renamed to ``path`` at the end.

  Raises:
    CheckpointError: ``path`` exists already, or something in the block failed; then nothing is left.
  """
  path = os.path.abspath(path)
  if os.path.lexists(path):
    raise CheckpointError(f"{path}: exists already; checkpoints are never overwritten")
  parent = os.path.dirname(path)
  with writing(path, "saving"):
    os.makedirs(parent, exist_ok=True)
    work = tempfile.mkdtemp(prefix=f".{os.path.basename(path)}-", dir=parent)
    try:
      yield work
      os.chmod(work, os.stat(parent).st_mode & 0o777)  # mkdtemp makes private folders
      os.rename(work, path)
    finally:
      shutil.rmtree(work, ignore_errors=True)
