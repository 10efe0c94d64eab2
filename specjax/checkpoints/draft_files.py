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

from specjax.checkpoints import own_files
from specjax.checkpoints.files import refusing
from specjax.checkpoints.fill import OneKey, StoredTensor, fill_module
from specjax.checkpoints.names import draft_names
from specjax.checkpoints.sources import LoadedModel
from specjax.models import DraftConfig, DraftDecoder, output_rows

DRAFT_FIELD = "specjax_draft"


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
  config = _config(os.path.join(folder, "config.json"), values)
  tensors, ids = own_files.check(folder, config, tensors, target)
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
  ours, decoder, size = own_files.read_fields(path, values, DRAFT_FIELD)
  with refusing(path):
    return DraftConfig(
      decoder=decoder,
      output=ours.get("output", str),
      draft_vocab_size=size,
      output_rank=own_files.optional(ours, "output_rank"),
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
  own_files.write(
    path,
    draft,
    c,
    names=draft_names(c.decoder.num_layers),
    architecture="SpecjaxDraftDecoder",
    field=DRAFT_FIELD,
    about={"output": c.output, "output_rank": c.output_rank},
    target=target,
    dtype=dtype,
  )
