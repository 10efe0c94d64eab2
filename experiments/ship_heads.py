"""Puts trained heads into the package, with what made them, and records how fast they are.

  python -m experiments.ship_heads --trained=RUN,RUN,…        run folders of experiments.train_drafter
  python -m experiments.ship_heads --measured=T0,T1         run folders of experiments.spec_bench

Heads go to ``specjax/checkpoints/shipped/TARGET/KIND/`` with their training's settings, result and log; the
table goes to ``results.json`` beside them. Together heads must not be larger than --most_megabytes. This is
for who maintains the package; one's own heads are used from where they lie, by --drafter_path.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from absl import flags

from experiments import flags as shared
from experiments import results, summary
from experiments.run_files import Run
from specjax.checkpoints import package, shipped
from specjax.checkpoints.files import write_json, write_whole
from specjax.training.recipes import make_recipe
from specjax.training.records import BEFORE, HEAD, METRICS, read_config, read_metrics

TRAINED = flags.DEFINE_list("trained", [], "Finished training runs, one a kind of head.")
MEASURED = flags.DEFINE_list("measured", [], "Finished runs of experiments.spec_bench, one a temperature.")
MOST = flags.DEFINE_float("most_megabytes", 24.0, "Of all heads of a target together, 10^6 bytes each.", 0.0)


def kind_of(config: dict[str, Any]) -> str:
  """The kind of head that a training run made.

  Raises:
    ValueError: the head is for a target of its own.
  """
  recipe = make_recipe(config["settings"]["--head"])
  if recipe.changes_target:
    raise ValueError(f"--trained: {recipe.name} changed the target; its head is not for the packaged one")
  return recipe.kind


def place(run: str, folder: str) -> str:
  """Copies a run's head with its records into a target's folder; returns the kind.

  Raises:
    ValueError: a run that is not finished.
  """
  config = read_config(run)
  if "result" not in config:
    raise ValueError(f"--trained: {run}: this run is not finished; the same command of train_drafter goes on")
  kind = kind_of(config)
  os.makedirs(folder, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=folder, prefix=f"{kind}.part-") as aside:
    new = os.path.join(aside, kind)
    shutil.copytree(os.path.join(run, HEAD), new)
    write_json(os.path.join(new, shipped.TRAINING), config)
    rows = read_metrics(run)
    write_whole(os.path.join(new, METRICS), "".join(json.dumps(row) + "\n" for row in rows))
    if os.path.isdir(os.path.join(run, BEFORE)):
      shutil.copytree(os.path.join(run, BEFORE), os.path.join(new, BEFORE))
    old = os.path.join(folder, kind)
    if os.path.isdir(old):
      os.rename(old, os.path.join(aside, "old"))
    os.rename(new, old)
  return kind


def sizes(folder: str) -> dict[str, int]:
  """Bytes of each kind of head there."""
  return {
    kind: _bytes(os.path.join(folder, kind))
    for kind in shipped.KINDS
    if os.path.isdir(os.path.join(folder, kind))
  }


def _bytes(folder: str) -> int:
  return sum(os.path.getsize(os.path.join(at, name)) for at, _, names in os.walk(folder) for name in names)


def ship(runs: Sequence[str], folder: str, most: float) -> None:
  """Raises ValueError before anything is copied if the heads would be too large together."""
  configs = [read_config(run) for run in runs]
  kinds = [kind_of(config) for config in configs]
  if len(set(kinds)) < len(kinds):
    raise ValueError(f"--trained are of {', '.join(kinds)}; one of a kind is needed")
  after = sizes(folder)
  for run, kind in zip(runs, kinds, strict=True):
    after[kind] = _bytes(os.path.join(run, HEAD))
  if sum(after.values()) > most * 1e6:
    listed = ", ".join(f"{kind} {size / 1e6:.1f}" for kind, size in after.items())
    raise ValueError(f"--most_megabytes = {most:g}; the heads would be {listed}")
  for run in runs:
    place(run, folder)
  found = sizes(folder)
  rows = [[kind, f"{size / 1e6:.2f}"] for kind, size in found.items()]
  results.table(["head", "MB"], [*rows, ["together", f"{sum(found.values()) / 1e6:.2f}"]])


def recorded(runs: Sequence[Run]) -> dict[str, Any]:
  """The table: each method's τ and speedup, by temperature, over all questions that plain answered too.

  Raises:
    ValueError: two runs at one temperature, or a run without plain decoding.
  """
  methods: dict[str, dict[str, dict[str, float]]] = {}
  seen: set[str] = set()
  for run in runs:
    (temperature,) = {f"{row['settings']['temperature']:g}" for row in run.rows}
    if temperature in seen:
      raise ValueError(f"--measured: {run.path}: another run has temperature {temperature} too")
    seen.add(temperature)
    of_method = summary.by_method(run.rows)
    baseline = of_method.pop(summary.BASELINE)
    if not baseline:
      raise ValueError(f"--measured: {run.path}: no rows of plain decoding to compare with")
    for method, answered in of_method.items():
      mine = [row for key, row in answered.items() if key in baseline]
      plain = [baseline[key] for key in answered if key in baseline]
      methods.setdefault(method, {})[temperature] = {
        "tau": round(summary.tau(mine), 3),
        "speedup": round(results.ratio(summary.decode_rate(mine), summary.decode_rate(plain)), 3),
      }
  first = runs[0].info
  return {
    "best": best_of(methods),
    "methods": methods,
    "device": runs[0].device,
    "versions": first["versions"],
    "finished": max(run.info["finished"] for run in runs),
    "commands": [run.command for run in runs],
  }


def best_of(methods: dict[str, dict[str, dict[str, float]]]) -> str:
  """The method of the highest speedup, as a geometric mean over the temperatures that all were run at."""
  common = set.intersection(*(set(found) for found in methods.values()))
  mean = lambda name: math.prod(methods[name][t]["speedup"] for t in common)
  return max(methods, key=mean)


def main(_: Sequence[str]) -> None:
  model = shared.MODEL.value
  if model not in package.PACKAGED:
    raise ValueError(f"--model = {model!r}; heads are shipped for {', '.join(package.PACKAGED)}")
  if not TRAINED.value and not MEASURED.value:
    raise ValueError("--trained or --measured is needed; see --help")
  folder = os.path.join(shipped.FOLDER, model)
  if TRAINED.value:
    ship(TRAINED.value, folder, MOST.value)
  if MEASURED.value:
    table = recorded([Run.read(path, i) for i, path in enumerate(MEASURED.value, start=1)])
    if not os.path.isdir(folder):
      raise ValueError(f"{folder}: no heads there; ship some first, with --trained")
    write_whole(os.path.join(folder, shipped.RESULTS), json.dumps(table, indent=2, ensure_ascii=False) + "\n")
    print(f"best: {table['best']}", file=sys.stderr)


if __name__ == "__main__":
  shared.run(main)
