"""One way in: a folder with a trained draft head → the head, checked against its target.

Layouts: Medusa (`medusa_files`), EAGLE-1 and EAGLE-2 (`eagle1_files`), EAGLE-3 of its authors and of
speculators (`eagle_files`), and of our own a distilled draft decoder (`draft_files`), a one-pass block head
(`block_files`) and the adapter of an early exit (`early_exit_files`). Which one a folder holds is seen by its
files, its config and its tensors' names.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Literal

import jax.numpy as jnp

from specjax.checkpoints import draft_vocabulary as vocabulary
from specjax.checkpoints.block_files import BLOCK_FIELD, load_block
from specjax.checkpoints.draft_files import DRAFT_FIELD, load_draft
from specjax.checkpoints.eagle1_files import is_eagle1, load_eagle1
from specjax.checkpoints.eagle_files import LAYER_NAMES, load_eagle3
from specjax.checkpoints.early_exit_files import EARLY_EXIT_FIELD, load_early_exit
from specjax.checkpoints.files import CheckpointError, read_json
from specjax.checkpoints.fill import StoredTensor
from specjax.checkpoints.hf import INDEX, SINGLE, read_tensors
from specjax.checkpoints.medusa_files import is_medusa, load_medusa
from specjax.checkpoints.pickled import read_pickled
from specjax.checkpoints.sources import LoadedModel
from specjax.models import (
  BlockConfig,
  BlockHead,
  DraftConfig,
  DraftDecoder,
  Eagle1,
  Eagle1Config,
  Eagle3,
  Eagle3Config,
  EarlyExit,
  EarlyExitConfig,
  MedusaConfig,
  MedusaHeads,
)

PICKLED = "pytorch_model.bin"


@dataclasses.dataclass(frozen=True)
class DraftHead:
  """A trained head, ready to draft for the target it was loaded for.

  Attributes:
    kind: which family it is of.
    module: its parameters, every one read from the source.
    config: its shapes.
    source: the folder it was loaded from.
  """

  kind: Literal["medusa", "eagle", "eagle3", "draft", "block", "early_exit"]
  module: MedusaHeads | Eagle1 | Eagle3 | DraftDecoder | BlockHead | EarlyExit
  config: MedusaConfig | Eagle1Config | Eagle3Config | DraftConfig | BlockConfig | EarlyExitConfig
  source: str


def load_head(path: str, target: LoadedModel, *, dtype=jnp.float32) -> DraftHead:
  """Loads a draft head.

  Args:
    path: a folder with ``medusa_lm_head.safetensors`` or ``medusa_lm_head.pt``; or with ``config.json`` and
      ``model.safetensors`` (or its index, or ``pytorch_model.bin``) of an EAGLE-1 or EAGLE-2 head, or an
      EAGLE-3 head in its authors' layout or speculators'; or written by `save_draft`, `save_block` or
      `save_early_exit`. PyTorch's own files need the extra ``torch``.
    target: what it drafts for; its widths, vocabulary and layers are checked, and a head may share its
      arrays.
    dtype: type of the parameters.

  Raises:
    CheckpointError: no such folder, a layout that is not known, a damaged file, tensors that are missing or
      left over, or a head that does not fit the target.
  """
  if not os.path.isdir(path):
    raise CheckpointError(f"draft head {path!r}: no such folder")
  if is_medusa(path):
    heads = load_medusa(path, target, dtype=dtype)
    return DraftHead("medusa", heads, heads.config, path)
  values, tensors = read_json(os.path.join(path, "config.json")), _tensors(path)
  if DRAFT_FIELD in values:
    draft = load_draft(path, values, tensors, target, dtype=dtype)
    return DraftHead("draft", draft, draft.draft_config, path)
  if BLOCK_FIELD in values:
    head = load_block(path, values, tensors, target, dtype=dtype)
    return DraftHead("block", head, head.config, path)
  if EARLY_EXIT_FIELD in values:
    adapter = load_early_exit(path, values, tensors, target, dtype=dtype)
    return DraftHead("early_exit", adapter, adapter.config, path)
  if is_eagle1(values, tensors):
    head = load_eagle1(path, values, tensors, target, dtype=dtype)
    return DraftHead("eagle", head, head.config, path)
  head = load_eagle3(path, _eagle3_layout(path, values, tensors), values, tensors, target, dtype=dtype)
  return DraftHead("eagle3", head, head.config, path)


def _tensors(folder: str) -> dict[str, StoredTensor]:
  safe = any(os.path.exists(os.path.join(folder, name)) for name in (SINGLE, INDEX))
  pickled = os.path.join(folder, PICKLED)
  if not safe and os.path.exists(pickled):
    return read_pickled(pickled, vocabulary.INTEGERS)
  return read_tensors(folder, vocabulary.INTEGERS)


def _eagle3_layout(folder: str, values: dict[str, Any], tensors: dict[str, StoredTensor]):
  kind = values.get("speculators_model_type")
  if kind is not None and kind != "eagle3":
    raise CheckpointError(f"{folder}: speculators_model_type = {kind!r} is not supported; supported: eagle3")
  layout = "eagle" if kind is None else "speculators"
  if any(name.startswith(LAYER_NAMES[layout] + ".") for name in tensors):
    return layout
  if any(name.startswith("medusa_head.") for name in tensors):
    raise CheckpointError(f"{folder}: a whole model of Medusa-2; only the heads of Medusa-1 are supported")
  raise CheckpointError(
    f"{folder}: not a known draft head; known: Medusa (medusa_lm_head.*), EAGLE-1 and EAGLE-2 (fc, "
    "layers.0.*, no norm), EAGLE-3 (midlayer.*), speculators' EAGLE-3 (speculators_model_type, layers.0.*), "
    "and what save_draft, save_block and save_early_exit write"
  )
