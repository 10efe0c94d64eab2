"""Trained heads that come with specjax, by packaged target, and how they did.

``shipped/TARGET/KIND/`` is a head as `load_head` reads it, beside it how it was made: ``training.json``
(settings, versions, the data's digest, the result) and ``metrics.jsonl`` (its training's log); in ``before/``
the same of the runs that it went on from.
``shipped/TARGET/results.json`` records how fast they were on one device. All of it is written by
`experiments.ship_heads`.
"""

from __future__ import annotations

import os
from typing import Any

from specjax.checkpoints.files import read_json

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "shipped")
TRAINING, RESULTS = "training.json", "results.json"
# Kinds as in `DraftHead`.
KINDS = ("eagle", "eagle3", "medusa", "draft", "block", "early_exit")


def shipped_heads(target: str) -> dict[str, str]:
  """``{kind: folder}`` of a packaged target's heads; empty if it has none.

  Args:
    target: a name in `package.PACKAGED`. Names of other sources have no heads: a path may hold anything.
  """
  folders = {kind: os.path.join(FOLDER, target, kind) for kind in KINDS}
  known = target in os.listdir(FOLDER) if os.path.isdir(FOLDER) else False
  return {kind: folder for kind, folder in folders.items() if known and os.path.isdir(folder)}


def shipped_results(target: str) -> dict[str, Any] | None:
  """The recorded table: ``methods`` → by temperature ``tau`` and ``speedup``; device, commands, versions.

  None if nothing was recorded for this target.
  """
  path = os.path.join(FOLDER, target, RESULTS)
  return read_json(path) if shipped_heads(target) and os.path.exists(path) else None
