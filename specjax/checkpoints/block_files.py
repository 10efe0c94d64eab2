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

from specjax.checkpoints import own_files
from specjax.checkpoints.files import refusing
from specjax.checkpoints.fill import OneKey, StoredTensor, fill_module
from specjax.checkpoints.names import block_names
from specjax.checkpoints.sources import LoadedModel
from specjax.models import BlockConfig, BlockHead, output_rows

BLOCK_FIELD = "specjax_block"


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
  config = _config(os.path.join(folder, "config.json"), values)
  tensors, ids = own_files.check(folder, config, tensors, target)
  rows = output_rows(target.model, ids).astype(dtype) if config.output == "target" else None
  return fill_module(
    lambda: BlockHead(config, ids=ids, rows=rows, dtype=dtype, rngs=OneKey()),
    tensors,
    block_names(config.decoder.num_layers),
    source=folder,
    what="a block head of this config",
    given={} if rows is None else {"output.weight": rows},
  )


def _config(path: str, values: dict[str, Any]) -> BlockConfig:
  ours, decoder, size = own_files.read_fields(path, values, BLOCK_FIELD)
  with refusing(path):
    return BlockConfig(
      decoder=decoder,
      tap_layers=tuple(ours.get("tap_layers", list)),
      block_size=ours.get("block_size", int),
      draft_vocab_size=size,
      output_rank=own_files.optional(ours, "output_rank"),
      output=ours.get("output", str),
      markov_rank=own_files.optional(ours, "markov_rank"),
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
  own_files.write(
    path,
    head,
    c,
    names=block_names(c.decoder.num_layers),
    architecture="SpecjaxBlockHead",
    field=BLOCK_FIELD,
    about={
      "block_size": c.block_size,
      "tap_layers": list(c.tap_layers),
      "output": c.output,
      "output_rank": c.output_rank,
      "markov_rank": c.markov_rank,
    },
    target=target,
    dtype=dtype,
  )
