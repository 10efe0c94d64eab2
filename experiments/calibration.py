"""Where a calibration lies, what it must match, and how it is read: see `calibrate`, which writes it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from typing import Any

import jax
from absl import flags

import specjax
from experiments import flags as shared
from experiments import results, runtime
from specjax.analysis import CostTable
from specjax.checkpoints import package

CALIBRATION = flags.DEFINE_string(
  "calibration",
  "",
  "Calibration file: what rounds cost here. Default: the one of this device, model and versions in the "
  "cache folder.",
)


def key_of(job: runtime.Job) -> dict[str, Any]:
  """What costs depend on: device, target, parameter type, attention and versions."""
  about = results.environment()
  parameters = jax.tree.leaves(job.target.model)
  plain = runtime.make_method(job, "none", runtime.LENGTH_MULTIPLE)
  return {
    "platform": about["platform"],
    "device_kind": about["device_kind"],
    "cpu": about["cpu"],
    "cpu_count": about["cpu_count"],
    "device_count": about["device_count"],
    "model": job.target.source,
    "parameters": sum(leaf.size for leaf in parameters),
    "dtype": shared.DTYPE.value,
    "attention": runtime.attention(job, plain).implementation,
    "specjax": specjax.__version__,
    "jax": about["versions"]["jax"],
    "jaxlib": about["versions"]["jaxlib"],
  }


def path_of(key: Mapping[str, Any]) -> str:
  """The file for a key, in the cache folder: device, model, type, and a digest of the whole key."""
  device = key["device_kind"] if key["device_kind"] != "cpu" else f"cpu{key['cpu_count']}"
  model = os.path.basename(str(key["model"]).rstrip("/"))
  words = [_word(part) for part in (device, model, key["dtype"])]
  digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:8]
  return os.path.join(package.cache_folder(), "calibration", "-".join([*words, digest]) + ".json")


def _word(text: str) -> str:
  return re.sub(r"[^A-Za-z0-9.]+", "_", text).strip("_.") or "unnamed"


def load(job: runtime.Job) -> CostTable | None:
  """The calibration that --calibration names, or the one of this device and target; None if not made yet.

  Raises:
    ValueError: a file that is malformed, or that is of another device, target or version.
  """
  key = key_of(job)
  path = CALIBRATION.value or path_of(key)
  if not os.path.exists(path):
    return None
  table = CostTable.read(path)
  check_key(path, table.key, key)
  return table


def check_key(path: str, stored: Mapping[str, Any], key: Mapping[str, Any]) -> None:
  """Raises ValueError with every field in which what ``path`` holds is not of this key."""
  names = [name for name in {**stored, **key} if stored.get(name) != key.get(name)]
  if names:
    found = ", ".join(f"{name} = {stored.get(name)!r} (here {key.get(name)!r})" for name in names)
    raise ValueError(f"{path}: measured with {found}; measure again with python -m experiments.calibrate")
