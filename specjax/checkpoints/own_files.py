"""What folders of our own share: a Hugging Face model's config, a field of ours in it, a draft vocabulary.

The config has the fields of a model that is as the head's own layers are, ``draft_vocab_size``, and a field
``specjax_…`` with the format's number and what else there is to say.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.numpy

from specjax.checkpoints import draft_vocabulary as vocabulary
from specjax.checkpoints.files import CheckpointError, new_folder, refusing, write_json
from specjax.checkpoints.fill import StoredTensor
from specjax.checkpoints.hf import SINGLE, Fields, decoder_config
from specjax.checkpoints.hf_save import config_json
from specjax.checkpoints.sources import LoadedModel
from specjax.models import DecoderConfig

_FORMAT = 1


def read_fields(path: str, values: dict[str, Any], field: str) -> tuple[Fields, DecoderConfig, int | None]:
  """Our field, the layers' shapes, and the size of the draft vocabulary, None for the target's.

  Args:
    path: of ``config.json``, for messages.
    values: what it holds.
    field: name of ours.

  Raises:
    CheckpointError: a field that is missing or wrong, or a format that is not known.
  """
  fields = Fields(path, values)
  ours = Fields(f"{path}: {field}", fields.get(field, dict))
  if ours.values.get("format") != _FORMAT:
    raise ours.error("format", ours.values.get("format"), str(_FORMAT))
  decoder = decoder_config(path, values)
  size = fields.get("draft_vocab_size", int, decoder.vocab_size)
  return ours, decoder, None if size == decoder.vocab_size else size


def optional(ours: Fields, name: str) -> int | None:
  """An integer of our field, or null."""
  return None if ours.values.get(name) is None else ours.get(name, int)


def check(
  folder: str, config: Any, tensors: Mapping[str, StoredTensor], target: LoadedModel
) -> tuple[dict[str, StoredTensor], np.ndarray | None]:
  """Whether a config fits target and file; the tensors with ids for ``d2t``, and these, see `take_ids`.

  Args:
    folder: for messages.
    config: with ``decoder``, ``draft_vocab_size`` and ``check_target``.

  Raises:
    CheckpointError: it does not.
  """
  tensors, c = dict(tensors), config.decoder
  with refusing(folder):
    config.check_target(target.config)
  if c.num_layers > len(tensors):
    raise CheckpointError(f"{folder}: the config has {c.num_layers} layers, the file {len(tensors)} tensors")
  size = c.vocab_size if config.draft_vocab_size is None else config.draft_vocab_size
  return tensors, vocabulary.take_ids(tensors, size, c.vocab_size, folder)


def write(
  path: str,
  module: Any,
  config: Any,
  *,
  names: Mapping[str, str],
  architecture: str,
  field: str,
  about: Mapping[str, Any],
  target: str,
  dtype: Any,
) -> None:
  """Writes what a head has learned, and its config, as a new folder.

  Args:
    module: the head, with ``ids``.
    config: as for `check`.
    names: of the file, by parameter path.
    architecture, target: for the config.
    field, about: name of our field, and what is in it beside the format.
    dtype: float32 or bfloat16; None keeps the head's own type.

  Raises:
    CheckpointError: the path exists, an unknown type, or writing failed (then nothing is left).
  """
  c = config.decoder
  tensors = {
    **vocabulary.renamed(vocabulary.parameters(module, dtype), names),
    **vocabulary.id_tensors(module.ids, c.vocab_size),
  }
  values = {
    **config_json(c),
    "architectures": [architecture],
    "draft_vocab_size": c.vocab_size if config.draft_vocab_size is None else config.draft_vocab_size,
    "base_model_name_or_path": target,
    field: {"format": _FORMAT, **about},
  }
  with new_folder(path) as work:
    write_json(os.path.join(work, "config.json"), values)
    safetensors.numpy.save_file(tensors, os.path.join(work, SINGLE), metadata={"format": "pt"})
