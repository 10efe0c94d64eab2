"""A distilled draft decoder in a folder of our own, close to a Hugging Face model's.

``config.json`` has the fields of such a model (``model_type``, ``hidden_size``, …), ``draft_vocab_size``, and

    "specjax_draft": {"format": 1, "output": "target" | "own", "output_rank": null | r}

``model.safetensors`` has the names of such a model (``model.layers.{i}.…``, ``model.norm.weight``) without
``model.embed_tokens.weight``, which is the target's. With ``output = "own"`` there is ``lm_head.weight``, or
``lm_head.up.weight`` and ``lm_head.down.weight`` where it is factored; else the output head is the target's,
too. A draft vocabulary is ``d2t`` and ``t2d``, as in EAGLE-3 files.
"""

from __future__ import annotations

import os
from typing import Any

import jax.numpy as jnp
import safetensors.numpy

from specjax.checkpoints import draft_vocabulary as vocabulary
from specjax.checkpoints.files import CheckpointError, new_folder, refusing, write_json
from specjax.checkpoints.fill import OneKey, StoredTensor, fill_module
from specjax.checkpoints.hf import SINGLE, Fields, decoder_config
from specjax.checkpoints.hf_save import config_json
from specjax.checkpoints.names import draft_names
from specjax.checkpoints.sources import LoadedModel
from specjax.models import DraftConfig, DraftDecoder, output_rows

DRAFT_FIELD = "specjax_draft"
_FORMAT = 1


def load_draft(
  folder: str,
  values: dict[str, Any],
  tensors: dict[str, StoredTensor],
  target: LoadedModel,
  *,
  dtype: jnp.dtype,
) -> DraftDecoder:
  """The draft in a folder, on the target's embedding.

  Args:
    folder: for messages.
    values: its ``config.json``.
    tensors: its tensors.
    target: what the draft was distilled from.
    dtype: type of the parameters.

  Raises:
    CheckpointError: fields or tensors that are missing, left over, misshapen, or do not fit the target.
  """
  tensors = dict(tensors)
  config = _config(os.path.join(folder, "config.json"), values)
  with refusing(folder):
    config.check_target(target.config)
  if config.decoder.num_layers > len(tensors):
    raise CheckpointError(
      f"{folder}: the config has {config.decoder.num_layers} layers, the file {len(tensors)} tensors"
    )
  size = config.decoder.vocab_size if config.draft_vocab_size is None else config.draft_vocab_size
  ids = vocabulary.take_ids(tensors, size, config.decoder.vocab_size, folder)
  given = {"embed": target.model.embed[...].astype(dtype)}
  if config.output == "target":
    given["rows"] = output_rows(target.model, ids).astype(dtype)
  return fill_module(
    lambda: DraftDecoder(config, target.model, ids=ids, dtype=dtype, rngs=OneKey()),
    tensors,
    draft_names(config.decoder.num_layers),
    source=folder,
    what="a draft decoder of this config",
    given=given,
  )


def _config(path: str, values: dict[str, Any]) -> DraftConfig:
  ours = Fields(f"{path}: {DRAFT_FIELD}", Fields(path, values).get(DRAFT_FIELD, dict))
  if ours.values.get("format") != _FORMAT:
    raise ours.error("format", ours.values.get("format"), str(_FORMAT))
  decoder = decoder_config(path, values)
  size = Fields(path, values).get("draft_vocab_size", int, decoder.vocab_size)
  rank = ours.values.get("output_rank")
  with refusing(path):
    return DraftConfig(
      decoder=decoder,
      output=ours.get("output", str),
      draft_vocab_size=None if size == decoder.vocab_size else size,
      output_rank=None if rank is None else ours.get("output_rank", int),
    )


def save_draft(path: str, draft: DraftDecoder, *, target: str = "", dtype=None) -> None:
  """Writes a draft decoder, without what is the target's, as a new folder.

  Args:
    path: the folder; it must not exist yet.
    draft: what to write.
    target: name of the model it drafts for, kept in the config.
    dtype: float32 or bfloat16; None keeps the draft's own type.

  Raises:
    CheckpointError: the path exists, an unknown type, or writing failed (then nothing is left).
  """
  c = draft.draft_config
  tensors = {
    **vocabulary.renamed(vocabulary.parameters(draft, dtype), draft_names(c.decoder.num_layers)),
    **vocabulary.id_tensors(draft.ids, c.decoder.vocab_size),
  }
  values = {
    **config_json(c.decoder),
    "architectures": ["SpecjaxDraftDecoder"],
    "draft_vocab_size": c.decoder.vocab_size if c.draft_vocab_size is None else c.draft_vocab_size,
    "base_model_name_or_path": target,
    DRAFT_FIELD: {"format": _FORMAT, "output": c.output, "output_rank": c.output_rank},
  }
  with new_folder(path) as work:
    write_json(os.path.join(work, "config.json"), values)
    safetensors.numpy.save_file(tensors, os.path.join(work, SINGLE), metadata={"format": "pt"})
