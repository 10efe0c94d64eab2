"""A skip set in a JSON file of our own.

    {"format": 1, "num_layers": L, "attention": [layers], "feed_forward": [layers], "found": {…}}

``attention`` and ``feed_forward`` are the layers whose attention, whose feed-forward is left out. ``found``
says how it was found; it is not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specjax.checkpoints.files import CheckpointError, read_json, refusing, write_whole
from specjax.checkpoints.hf import Fields
from specjax.models import DecoderConfig, SkipSet

_FORMAT = 1


def load_skips(path: str, target: DecoderConfig) -> SkipSet:
  """The skip set in a file.

  Args:
    path: of the file.
    target: whose sublayers are meant.

  Raises:
    CheckpointError: no such file, a field that is missing or wrong, or a set for a model of another depth.
  """
  fields = Fields(path, read_json(path))
  if fields.values.get("format") != _FORMAT:
    raise fields.error("format", fields.values.get("format"), str(_FORMAT))
  with refusing(path):
    skips = SkipSet(
      num_layers=fields.get("num_layers", int),
      attention=tuple(fields.get("attention", list)),
      ff=tuple(fields.get("feed_forward", list)),
    )
  if skips.num_layers != target.num_layers:
    raise CheckpointError(
      f"{path}: num_layers = {skips.num_layers}; the target has {target.num_layers} layers"
    )
  return skips


def save_skips(path: str, skips: SkipSet, found: Mapping[str, Any]) -> None:
  """Writes a skip set, and how it was found; a file that is there is replaced whole."""
  values = {
    "format": _FORMAT,
    "num_layers": skips.num_layers,
    "attention": list(skips.attention),
    "feed_forward": list(skips.ff),
    "found": dict(found),
  }
  write_whole(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")
