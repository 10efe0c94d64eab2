"""A one-pass block head in a folder of our own, close to a Hugging Face model's.

``config.json`` has the fields of such a model (``model_type``, ``hidden_size``, …; those of the head's own
layers), ``draft_vocab_size``, and

    "specjax_block": {"format": 1, "block_size": G, "tap_layers": [2, 15, 27], "output": "target" | "own",
                      "output_rank": null | r, "markov_rank": null | r}

``tap_layers`` are layers of the target whose *input* is seen. ``model.safetensors`` has the names of such a
model (``model.layers.{i}.…``, ``model.norm.weight``, no embedding), and ``fc.weight (D, taps · D)``,
``mask_embeddings (G - 1, D)``, with a Markov head ``markov.before (V, r)`` and ``markov.after (Vd, r)``. The
output layer is ``lm_head.weight``, or ``lm_head.{up,down}.weight`` where it is factored; with ``output =
"target"`` it is the target's rows behind ``lm_head.readout.weight (D, D)``. A draft vocabulary is ``d2t`` and
``t2d``, as in EAGLE-3 files.
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
from specjax.checkpoints.names import block_names
from specjax.checkpoints.sources import LoadedModel
from specjax.models import BlockConfig, BlockHead, output_rows

BLOCK_FIELD = "specjax_block"
_FORMAT = 1


def load_block(
  folder: str,
  values: dict[str, Any],
  tensors: dict[str, StoredTensor],
  target: LoadedModel,
  *,
  dtype: jnp.dtype,
) -> BlockHead:
  """The head in a folder.

  Args:
    folder: for messages.
    values: its ``config.json``.
    tensors: its tensors.
    target: what the head drafts for.
    dtype: type of the parameters.

  Raises:
    CheckpointError: fields or tensors that are missing, left over, misshapen, or do not fit the target.
  """
  tensors = dict(tensors)
  config = _config(os.path.join(folder, "config.json"), values)
  with refusing(folder):
    config.check_target(target.config)
  c = config.decoder
  if c.num_layers > len(tensors):
    raise CheckpointError(f"{folder}: the config has {c.num_layers} layers, the file {len(tensors)} tensors")
  size = c.vocab_size if config.draft_vocab_size is None else config.draft_vocab_size
  ids = vocabulary.take_ids(tensors, size, c.vocab_size, folder)
  rows = output_rows(target.model, ids).astype(dtype) if config.output == "target" else None
  return fill_module(
    lambda: BlockHead(config, ids=ids, rows=rows, dtype=dtype, rngs=OneKey()),
    tensors,
    block_names(c.num_layers),
    source=folder,
    what="a block head of this config",
    given={} if rows is None else {"output.weight": rows},
  )


def _config(path: str, values: dict[str, Any]) -> BlockConfig:
  fields = Fields(path, values)
  ours = Fields(f"{path}: {BLOCK_FIELD}", fields.get(BLOCK_FIELD, dict))
  if ours.values.get("format") != _FORMAT:
    raise ours.error("format", ours.values.get("format"), str(_FORMAT))
  decoder = decoder_config(path, values)
  size = fields.get("draft_vocab_size", int, decoder.vocab_size)
  or_none = lambda field: None if ours.values.get(field) is None else ours.get(field, int)
  with refusing(path):
    return BlockConfig(
      decoder=decoder,
      tap_layers=tuple(ours.get("tap_layers", list)),
      block_size=ours.get("block_size", int),
      draft_vocab_size=None if size == decoder.vocab_size else size,
      output_rank=or_none("output_rank"),
      output=ours.get("output", str),
      markov_rank=or_none("markov_rank"),
    )


def save_block(path: str, head: BlockHead, *, target: str = "", dtype=None) -> None:
  """Writes a block head, without what is the target's, as a new folder.

  Args:
    path: the folder; it must not exist yet.
    head: what to write.
    target: name of the model it drafts for, kept in the config.
    dtype: float32 or bfloat16; None keeps the head's own type.

  Raises:
    CheckpointError: the path exists, an unknown type, or writing failed (then nothing is left).
  """
  c = head.config
  tensors = {
    **vocabulary.renamed(vocabulary.parameters(head, dtype), block_names(c.decoder.num_layers)),
    **vocabulary.id_tensors(head.ids, c.decoder.vocab_size),
  }
  values = {
    **config_json(c.decoder),
    "architectures": ["SpecjaxBlockHead"],
    "draft_vocab_size": c.decoder.vocab_size if c.draft_vocab_size is None else c.draft_vocab_size,
    "base_model_name_or_path": target,
    BLOCK_FIELD: {
      "format": _FORMAT,
      "block_size": c.block_size,
      "tap_layers": list(c.tap_layers),
      "output": c.output,
      "output_rank": c.output_rank,
      "markov_rank": c.markov_rank,
    },
  }
  with new_folder(path) as work:
    write_json(os.path.join(work, "config.json"), values)
    safetensors.numpy.save_file(tensors, os.path.join(work, SINGLE), metadata={"format": "pt"})
