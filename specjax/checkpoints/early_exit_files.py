"""The adapter of an early exit in a folder of our own.

``config.json`` has the fields of a Hugging Face model of one layer (``model_type``, ``hidden_size``, …; its
feed-forward is not there), ``draft_vocab_size``, and

    "specjax_early_exit": {"format": 1, "exit_layer": e}

``model.safetensors`` has ``layers.0.input_layernorm.weight``, ``layers.0.self_attn.{q,k,v,o}_proj.weight``
(biases and q/k norms where the config has them) and ``norm.weight``. The head is the target's. A draft
vocabulary is ``d2t`` and ``t2d``, as in EAGLE-3 files.
"""

from __future__ import annotations

import os
from typing import Any

import jax.numpy as jnp

from specjax.checkpoints import own_files
from specjax.checkpoints.files import refusing
from specjax.checkpoints.fill import OneKey, StoredTensor, fill_module
from specjax.checkpoints.names import early_exit_names
from specjax.checkpoints.sources import LoadedModel
from specjax.models import EarlyExit, EarlyExitConfig, output_rows

EARLY_EXIT_FIELD = "specjax_early_exit"


def load_early_exit(
  folder: str,
  values: dict[str, Any],
  tensors: dict[str, StoredTensor],
  target: LoadedModel,
  *,
  dtype: jnp.dtype,
) -> EarlyExit:
  """The adapter in a folder, before the target's head.

  Args:
    folder: for messages.
    values: its ``config.json``.
    tensors: its tensors.
    target: what it was trained in.
    dtype: type of the parameters.

  Raises:
    CheckpointError: fields or tensors that are missing, left over, misshapen, or do not fit the target.
  """
  config = _config(os.path.join(folder, "config.json"), values)
  tensors, ids = own_files.check(folder, config, tensors, target)
  return fill_module(
    lambda: EarlyExit(config, target.model, ids=ids, dtype=dtype, rngs=OneKey()),
    tensors,
    early_exit_names(),
    source=folder,
    what="an early exit of this config",
    given={"rows": output_rows(target.model, ids).astype(dtype)},
  )


def _config(path: str, values: dict[str, Any]) -> EarlyExitConfig:
  ours, decoder, size = own_files.read_fields(path, values, EARLY_EXIT_FIELD)
  with refusing(path):
    return EarlyExitConfig(decoder, ours.get("exit_layer", int), draft_vocab_size=size)


def save_early_exit(path: str, adapter: EarlyExit, *, target: str = "", dtype=None) -> None:
  """Writes an adapter, without the target's head, as a new folder.

  Args:
    path: the folder; it must not exist yet.
    adapter: what to write.
    target: name of the model it drafts for, kept in the config.
    dtype: float32 or bfloat16; None keeps the adapter's own type.

  Raises:
    CheckpointError: the path exists, an unknown type, or writing failed (then nothing is left).
  """
  c = adapter.config
  own_files.write(
    path,
    adapter,
    c,
    names=early_exit_names(),
    architecture="SpecjaxEarlyExit",
    field=EARLY_EXIT_FIELD,
    about={"exit_layer": c.exit_layer},
    target=target,
    dtype=dtype,
  )
