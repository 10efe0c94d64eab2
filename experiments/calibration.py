"""Where a calibration lies, what it must match, and what a controller believes by it. See `calibrate`."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments import flags as shared
from experiments.results import ratio
from specjax.analysis import CostTable
from specjax.base import Trees
from specjax.checkpoints import package
from specjax.control import Beliefs

# How many rounds of evidence a measured acceptance is worth; and one of another temperature, or a guess.
_MEASURED, _GUESSED = 8.0, 4.0


def path_of(key: Mapping[str, Any]) -> str:
  """The file for a key, in the cache folder: device, model, type, and a digest of the whole key."""
  device = key["device_kind"] if key["device_kind"] != "cpu" else f"cpu{key['cpu_count']}"
  model = os.path.basename(str(key["model"]).rstrip("/"))
  words = [_word(part) for part in (device, model, key["dtype"])]
  digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:8]
  return os.path.join(package.cache_folder(), "calibration", "-".join([*words, digest]) + ".json")


def _word(text: str) -> str:
  return re.sub(r"[^A-Za-z0-9.]+", "_", text).strip("_.") or "unnamed"


def load(key: Mapping[str, Any]) -> CostTable | None:
  """The calibration that --calibration names, or the one of this key; None if that is not made yet.

  Raises:
    ValueError: a file that is malformed, of another key, or named and not there.
  """
  path = shared.CALIBRATION.value or path_of(key)
  if not shared.CALIBRATION.value and not os.path.exists(path):
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


def lacking(
  table: CostTable, widths: Sequence[str], trees: Trees, batch: int, head: str | None = None
) -> str | None:
  """Why the table says nothing about these widths, None if it does; ``head`` is the digest of theirs."""
  missing = [name for name in widths if name not in table.drafts]
  if missing:
    return f"the calibration lacks {', '.join(missing)}"
  for name, tree in zip(widths, trees, strict=True):
    if table.drafts[name]["nodes"] != tree.num_nodes:
      nodes = table.drafts[name]["nodes"]
      return f"the calibration has {name} with {nodes} nodes, here it has {tree.num_nodes}"
    if table.drafts[name].get("head") != head:
      return f"the calibration has {name} with another head"
  if batch > table.batches[-1]:
    return f"the calibration ends at batch {table.batches[-1]}, here it is {batch}"
  return None


def beliefs(
  table: CostTable,
  widths: Sequence[str],
  trees: Trees,
  *,
  batch: int,
  temperature: float,
  length_limit: int,
) -> Beliefs:
  """What an adaptive controller believes of ``widths``, which the table must not be `lacking`.

  Costs are the table's at this batch, up to the longest row; what catching up costs a token was measured at
  the first batch and grows as the draft does. Acceptance is what was measured of each width, worth less if at
  another temperature; of a width without a measurement the mean of the others', and without any one half.
  """
  lives = np.unique([*table.lives, max(length_limit, table.lives[-1])])
  draft_ms = lambda name, batch: table.draft_ms_at(name, batch=batch, live=lives)
  at = lambda nodes: table.round_ms_at(nodes, batch=batch, live=lives)
  depth = max(tree.max_depth for tree in trees)
  proposing, acceptance = np.ones(len(trees) + 1), np.full((len(trees) + 1, depth), 0.5)
  measured = {
    width: found
    for width, name in enumerate(widths, start=1)
    if (found := table.acceptance.get(name)) is not None and len(found["rates"])
  }
  for width, found in measured.items():
    proposing[width] = found["proposing"]
    # Deeper than anything was accepted: as at the deepest.
    acceptance[width] = np.pad(found["rates"], (0, depth), mode="edge")[:depth]
  if measured:
    others = [width for width in range(1, len(trees) + 1) if width not in measured]
    proposing[others] = proposing[list(measured)].mean()
    acceptance[others] = acceptance[list(measured)].mean(axis=0)
  same = measured and all(found["temperature"] == temperature for found in measured.values())
  strength = _MEASURED if same else _GUESSED
  return Beliefs.create(
    trees,
    live=lives,
    verify=np.stack([at(1), *(at(tree.num_nodes) for tree in trees)]),
    draft=np.stack([0.0 * at(1), *(draft_ms(name, batch) for name in widths)]),
    catch_up=max(
      table.drafts[name]["catch_up_ms"]
      * ratio(draft_ms(name, batch)[-1], draft_ms(name, table.batches[0])[-1])
      for name in widths
    ),
    proposing=proposing,
    acceptance=acceptance,
    strength=strength,
  )
