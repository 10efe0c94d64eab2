"""A training run's folder: what it was run with, its log, and checkpoints to go on from.

``config.json`` holds settings (which a resumed run must share), what else is known of the run, and at the end
its result. ``metrics.jsonl`` has a row a logged step. ``checkpoints/`` has the last two states, written by
orbax aside and renamed. ``before/`` has config and log of the run whose head it went on with, and its
``before/`` in turn.
"""

from __future__ import annotations

import json
import os
import shutil
from typing import Any

import jax
import numpy as np

from specjax.checkpoints.files import write_whole
from specjax.checkpoints.shipped import TRAINING

CONFIG, METRICS, CHECKPOINTS, HEAD, TARGET, CURVES = (
  "config.json",
  "metrics.jsonl",
  "checkpoints",
  "head",
  "target",
  "curves.png",
)
BEFORE = "before"
_KEPT = 2


class Records:
  """Config and log of a run. Opening a folder that has them resumes it."""

  def __init__(self, folder: str, settings: dict[str, Any], about: dict[str, Any] | None = None):
    """
    Args:
      settings: what the result depends on.
      about: versions, device and the like; those of the first start stay.

    Raises:
      ValueError: the folder holds a run with other settings, or something else.
    """
    self.folder = folder
    path = os.path.join(folder, CONFIG)
    settings = json.loads(json.dumps(settings))
    if os.path.exists(path):
      self.config = read_config(folder)
      _check_same(path, self.config["settings"], settings)
    elif os.path.isdir(folder) and any(not name.endswith(".part") for name in os.listdir(folder)):
      raise ValueError(f"{folder} is not empty and holds no training run; name a new folder")
    else:
      os.makedirs(folder, exist_ok=True)
      self.config = {"settings": settings, "about": about or {}}
      self._write_config()
    self.rows = read_metrics(folder)

  def keep_before(self, head: str) -> None:
    """Copies the records of the run that a head came from: it lies in one, or is shipped with them.

    What is there stays; a head without records leaves none.
    """
    mine, (run, config) = os.path.join(self.folder, BEFORE), _place_of(head)
    if os.path.isdir(mine) or not os.path.exists(os.path.join(run, config)):
      return
    part = f"{mine}.part"
    shutil.rmtree(part, ignore_errors=True)
    os.makedirs(part)
    for name, copied in ((config, CONFIG), (METRICS, METRICS)):
      shutil.copy(os.path.join(run, name), os.path.join(part, copied))
    if os.path.isdir(os.path.join(run, BEFORE)):
      shutil.copytree(os.path.join(run, BEFORE), os.path.join(part, BEFORE))
    os.rename(part, mine)

  def keep(self, step: int) -> None:
    """Forgets rows behind a step: a resumed run writes them again."""
    self.rows = [row for row in self.rows if row["step"] <= step]
    write_whole(os.path.join(self.folder, METRICS), "".join(json.dumps(row) + "\n" for row in self.rows))

  def append(self, row: dict[str, Any]) -> None:
    with open(os.path.join(self.folder, METRICS), "a", encoding="utf-8") as file:
      file.write(json.dumps(row) + "\n")
    self.rows.append(row)

  def finish(self, **result: Any) -> None:
    """Says in ``config.json`` what came of it."""
    self.config["result"] = result
    self._write_config()

  def _write_config(self) -> None:
    text = json.dumps(self.config, indent=2, ensure_ascii=False) + "\n"
    write_whole(os.path.join(self.folder, CONFIG), text)


def _place_of(head: str) -> tuple[str, str]:
  """Where the records of the run that made a head would be, and how its configuration is called there."""
  head = os.path.abspath(head)
  if os.path.exists(os.path.join(head, TRAINING)):
    return head, TRAINING
  return os.path.dirname(head), CONFIG


def history(head: str) -> list[dict[str, Any]]:
  """Configurations, with results, of the runs that made a head, the last first; none without records.

  Args:
    head: its folder: shipped, or ``head/`` of a run.

  Raises:
    ValueError: a record that is not one of ours.
  """
  runs, (folder, name) = [], _place_of(head)
  while os.path.exists(os.path.join(folder, name)):
    runs.append(read_config(folder, name))
    folder, name = os.path.join(folder, BEFORE), CONFIG
  return runs


def read_config(folder: str, name: str = CONFIG) -> dict[str, Any]:
  """``config.json`` of a run, perhaps under another name.

  Raises:
    ValueError: none there, or not one of ours.
  """
  path = os.path.join(folder, name)
  try:
    with open(path, encoding="utf-8") as file:
      config = json.load(file)
  except (FileNotFoundError, NotADirectoryError):
    raise ValueError(f"{folder}: no {name}; this is not a training run") from None
  except ValueError as error:
    raise ValueError(f"{path}: not valid JSON ({error})") from None
  if not isinstance(config, dict) or not isinstance(config.get("settings"), dict):
    raise ValueError(f"{path}: field settings is missing; this is not a training run")
  return config


def read_metrics(folder: str) -> list[dict[str, Any]]:
  """Rows of ``metrics.jsonl``; a last line that a kill tore is left out.

  Raises:
    ValueError: a damaged line before the last.
  """
  path = os.path.join(folder, METRICS)
  if not os.path.exists(path):
    return []
  with open(path, encoding="utf-8", errors="replace") as file:
    *whole, _ = file.read().split("\n")
  rows = []
  for number, line in enumerate(whole, start=1):
    try:
      rows.append(json.loads(line))
    except ValueError as error:
      raise ValueError(f"{path}, line {number}: not a row ({error})") from None
  return rows


def _check_same(path: str, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
  for name in sorted(theirs.keys() | ours.keys()):
    if theirs.get(name) != ours.get(name):
      found = f"{path} is of a run with {name} = {theirs.get(name)!r}; now it is {ours.get(name)!r}"
      raise ValueError(f"{found}. Name a new folder")


class Checkpoints:
  """The last states of a run; whole or absent, the older of two is removed when a newer one is there."""

  def __init__(self, folder: str):
    import orbax.checkpoint as ocp  # takes seconds to import

    self._ocp = ocp
    options = ocp.CheckpointManagerOptions(
      max_to_keep=_KEPT, enable_async_checkpointing=False, cleanup_tmp_directories=True
    )
    self._manager = ocp.CheckpointManager(os.path.join(os.path.abspath(folder), CHECKPOINTS), options=options)

  def __enter__(self) -> Checkpoints:
    return self

  def __exit__(self, *_) -> None:
    self._manager.close()

  @property
  def latest(self) -> int | None:
    """The step of the last state, None without one."""
    return self._manager.latest_step()

  def save(self, step: int, state: Any) -> None:
    """Writes a pytree of arrays, unless that step is there."""
    if self.latest == step:
      return
    self._manager.save(step, args=self._ocp.args.StandardSave(_by_name(state)))
    self._manager.wait_until_finished()

  def restore(self, like: Any) -> Any:
    """The last state, as numpy arrays in a pytree like ``like``.

    Raises:
      ValueError: it has other arrays.
    """
    leaves, structure = jax.tree.flatten(like)
    wanted = {
      name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in zip(_by_name(like), leaves, strict=True)
    }
    try:
      found = self._manager.restore(self.latest, args=self._ocp.args.StandardRestore(wanted))
    except Exception as error:  # orbax raises many types
      reason = (str(error).splitlines() or [type(error).__name__])[0]
      raise ValueError(f"checkpoint of step {self.latest} cannot be read ({reason})") from error
    return jax.tree.unflatten(structure, [np.asarray(found[name]) for name in wanted])


def _by_name(tree: Any) -> dict[str, jax.Array]:
  """Leaves by their place: names in a pytree may be anything, names of files may not."""
  return {f"{i:05d}": leaf for i, leaf in enumerate(jax.tree.leaves(tree))}
