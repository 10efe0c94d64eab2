"""Finished training runs as tables read them: the head, and how it did on held-out text. Reads files only."""

from __future__ import annotations

import dataclasses
import glob
import os
from typing import Any

from experiments import training_plots
from experiments.run_files import device_of
from specjax import options
from specjax.checkpoints.shipped import TRAINING
from specjax.training.records import CONFIG, read_config, read_metrics


@dataclasses.dataclass(frozen=True)
class TrainedHead:
  """A run of `train_drafter`, alone or as a row of a table of `ablations`.

  Attributes:
    number: of the folder it was found in, as notes name it.
    path: that folder, as given.
    table, row: of `ablations`; None and the folder's name for a run alone.
    config: its ``config.json``.
    held_out: the last row of its log that was held out, None without one.
  """

  number: int
  path: str
  table: str | None
  row: str
  config: dict[str, Any]
  held_out: dict[str, Any] | None

  @property
  def name(self) -> str:
    """How rows of tables call it."""
    return f"ours [{self.number}]"

  @property
  def settings(self) -> dict[str, Any]:
    return self.config["settings"]

  @property
  def recipe(self) -> tuple[str, dict[str, Any]]:
    """``--head``, taken apart."""
    return options.parse("head", self.settings["--head"])

  @property
  def target(self) -> str:
    """The model it was trained for; what Medusa-2 makes of it is beside its head."""
    return self.settings["--model"]

  @property
  def device(self) -> str:
    return device_of(self.config["about"])

  @property
  def tokens(self) -> str | None:
    """Tokens it was trained on, in millions; None for a run that did not end."""
    result = self.config.get("result")
    return None if result is None else f"{result['tokens'] / 1e6:.2f} M"

  @property
  def figures(self) -> dict[str, Any]:
    """What was held out; empty where nothing was."""
    return self.held_out or {}

  @property
  def chain(self) -> str | None:
    """What its held-out figures are of, None where nothing was held out."""
    return f"held-out chain of {len(self.held_out['acceptance'])}" if self.held_out else None

  @property
  def acceptance(self) -> list[float]:
    """Held-out acceptance by position, of greedy rounds, as far as any got."""
    known = self.figures.get("acceptance", [])
    return known[: known.index(None)] if None in known else known


def read_trained(path: str, number: int) -> list[TrainedHead]:
  """The runs in a folder: it is one, a shipped head with its record, or ``--output`` of `ablations`.

  Raises:
    ValueError: no run there, or a record that is malformed.
  """
  for name in (TRAINING, CONFIG):
    if os.path.exists(os.path.join(path, name)):
      return [_read(path, name, number, path, None, os.path.basename(os.path.normpath(path)))]
  found = sorted(glob.glob(os.path.join(glob.escape(path), "*", "*", CONFIG)))
  if not found:
    raise ValueError(f"--ablations: {path}: no training run there, nor TABLE/ROW of experiments.ablations")
  heads = []
  for folder in map(os.path.dirname, found):
    table, row = folder.split(os.sep)[-2:]
    heads.append(_read(folder, CONFIG, number, path, table, row.replace("_", " ")))
  return heads


def _read(folder: str, name: str, number: int, path: str, table: str | None, row: str) -> TrainedHead:
  config = read_config(folder, name)
  for field, known in (("--head", config["settings"]), ("platform", config.get("about", {}))):
    if field not in known:
      raise ValueError(f"{os.path.join(folder, name)}: field {field} is missing; train_drafter writes it")
  last = training_plots.last_held_out(read_metrics(folder))
  return TrainedHead(number, path, table, row, config, last["held_out"] if last else None)


def notes(heads: list[TrainedHead]) -> list[str]:
  """A line a folder: where rows come from."""
  lines = []
  for path in dict.fromkeys(head.path for head in heads):
    mine = [head for head in heads if head.path == path]
    first = mine[0]
    digests = {str(head.settings.get("--data"))[:12] for head in mine}
    steps = sorted({head.settings.get("steps", 0) for head in mine})
    commit = (first.config["about"].get("commit") or "unknown")[:12]
    said = (
      f"[{first.number}] `{path}`: training runs on {first.device}, data {', '.join(sorted(digests))}, "
      f"{' or '.join(map(str, steps))} steps, commit {commit}"
    )
    unfinished = [head.row for head in mine if head.tokens is None]
    lines.append(said + (f"; not finished: {', '.join(unfinished)}" if unfinished else ""))
  return lines
