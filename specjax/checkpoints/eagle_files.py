"""EAGLE-3 heads in the layouts of their authors (``eagle``) and of the speculators project.

Both: ``config.json`` with the fields of a Llama of one layer, ``model.safetensors`` (or
``pytorch_model.bin``) with ``fc``, the layer (``midlayer.*``; speculators: ``layers.0.*``), ``norm``,
``lm_head``, and ``d2t``, ``t2d`` for a reduced draft vocabulary.

Which layers are tapped, as inputs of the target's layers from 0:

* ``eagle_aux_hidden_state_layer_ids`` at the top of the config (speculators, read by vLLM): as it stands. Id
  i there is the hidden state *before* layer i, which is the output of layer i - 1; 0 is the embedding.
* the same field inside of ``eagle_config`` (SGLang and its trainers): outputs of layers, so one more.
* neither: 2, L // 2 and L - 3 of a target of L layers (output 1, L // 2 - 1, L - 4).

Fields and tensors of our own, written only where they are needed (a reader that does not know them refuses
the file or, for ``tap_layers``, must be told): in the layout ``eagle`` always ``tap_layers`` (inputs; any
number of them);
``lm_head.{up,down}.weight`` for a factored output layer; ``output``, which is ``target`` where the output
layer is the target's rows behind ``lm_head.readout.weight [D, D]``, and then no ``lm_head.weight``.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from specjax.checkpoints import draft_vocabulary as vocabulary
from specjax.checkpoints.files import CheckpointError, new_folder, refusing, write_json
from specjax.checkpoints.fill import OneKey, StoredTensor, fill_module
from specjax.checkpoints.hf import SINGLE, Fields, decoder_config
from specjax.checkpoints.hf_save import config_json
from specjax.checkpoints.names import eagle3_names
from specjax.checkpoints.sources import LoadedModel
from specjax.models import Eagle3, Eagle3Config, default_tap_layers, output_rows
from specjax.models.eagle3 import NUM_TAPS

Layout = Literal["eagle", "speculators"]
LAYER_NAMES = {"eagle": "midlayer", "speculators": "layers.0"}
_EMBEDDING = "embed_tokens.weight"
_DOWN = "lm_head.down.weight"
_TAPS = "eagle_aux_hidden_state_layer_ids"


def load_eagle3(
  folder: str,
  layout: Layout,
  values: dict[str, Any],
  tensors: dict[str, StoredTensor],
  target: LoadedModel,
  *,
  dtype: jnp.dtype,
) -> Eagle3:
  """The head in a folder.

  Args:
    folder: for messages.
    layout: what the folder was recognised as.
    values: its ``config.json``.
    tensors: its tensors.
    target: what the head drafts for.
    dtype: type of the parameters.

  Raises:
    CheckpointError: fields or tensors that are missing, left over, misshapen, or do not fit the target.
  """
  path = os.path.join(folder, "config.json")
  tensors = dict(tensors)
  config = _config(path, layout, values, tensors, target)
  with refusing(folder):
    config.check_target(target.config)
  size = config.decoder.vocab_size if config.draft_vocab_size is None else config.draft_vocab_size
  ids = vocabulary.take_ids(tensors, size, config.decoder.vocab_size, folder)
  take_embedding(tensors, target, folder)
  rows = output_rows(target.model, ids).astype(dtype) if config.output == "target" else None
  return fill_module(
    lambda: Eagle3(config, ids=ids, rows=rows, dtype=dtype, rngs=OneKey()),
    tensors,
    eagle3_names(LAYER_NAMES[layout]),
    source=folder,
    what=f"an EAGLE-3 head of this config (layout {layout})",
    given={} if rows is None else {"output.weight": rows},
  )


def _config(path: str, layout: Layout, values, tensors, target: LoadedModel) -> Eagle3Config:
  fields = Fields(path, values)
  inner = values
  if layout == "speculators" and values.get("transformer_layer_config") is not None:
    inner = fields.get("transformer_layer_config", dict)
  # The layer is Llama's: a file that leaves the type out means it.
  decoder = decoder_config(path, {"model_type": "llama", "num_hidden_layers": 1, **inner})
  size = fields.get("draft_vocab_size", int, decoder.vocab_size)
  if layout == "speculators" and not isinstance(values.get("norm_before_residual"), bool):
    # Readers differ in what they take when it is absent, and the two give different heads.
    raise CheckpointError(f"{path}: field norm_before_residual is missing; it must be true or false")
  down = tensors.get(_DOWN)
  with refusing(path):
    return Eagle3Config(
      decoder=decoder,
      target_width=fields.get("target_hidden_size", int, decoder.d_model),
      tap_layers=_tap_layers(fields, target.config.num_layers),
      draft_vocab_size=None if size == decoder.vocab_size else size,
      output_rank=down.shape[0] if down is not None and down.shape else None,
      output=fields.get("output", str, "own"),
      norm_before_residual=fields.get("norm_before_residual", bool, False),
    )


def _tap_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
  """The layers whose inputs are seen; see the head of this file."""
  inner = Fields(f"{fields.path}: eagle_config", fields.get("eagle_config", dict, {}))
  found = {}
  for where, name, add in ((fields, "tap_layers", 0), (fields, _TAPS, 0), (inner, _TAPS, 1)):
    layers = where.values.get(name)
    if layers is None:
      continue
    whole = isinstance(layers, list) and all(isinstance(i, int) for i in layers)
    if not whole or (name == _TAPS and len(layers) != NUM_TAPS):
      count = f"{NUM_TAPS} layers" if name == _TAPS else "layers"
      raise CheckpointError(f"{where.path}: {name} = {layers!r}; it must be a list of {count}")
    found[f"{where.path}: {name}"] = tuple(i + add for i in layers)
  if not found:
    return default_tap_layers(num_layers)
  if len(set(found.values())) > 1:
    said = " and ".join(f"{name} means inputs of layers {layers}" for name, layers in found.items())
    raise CheckpointError(f"{said}; they must agree")
  return next(iter(found.values()))


def take_embedding(tensors: dict[str, StoredTensor], target: LoadedModel, folder: str) -> None:
  """Takes a copy of the target's embedding out of ``tensors``, if there is one.

  Raises:
    CheckpointError: the head has another embedding.
  """
  stored = tensors.pop(_EMBEDDING, None)
  if stored is None:
    return
  embed = np.asarray(target.model.embed[...])
  value = stored.read() if stored.shape == embed.shape else None
  # Either may have been rounded to the other's type on its way here.
  if value is None or not any(
    np.array_equal(value.astype(t), embed.astype(t)) for t in (value.dtype, embed.dtype)
  ):
    raise CheckpointError(
      f"{folder}: tensor {_EMBEDDING} differs from the embedding of {target.source}; heads with an embedding "
      "of their own, or of another target, are not supported"
    )


def save_eagle3(
  path: str,
  head: Eagle3,
  *,
  layout: Layout = "eagle",
  target: str = "",
  dtype=None,
  for_others: bool = False,
) -> None:
  """Writes an EAGLE-3 head as a new folder.

  Args:
    path: the folder; it must not exist yet.
    head: what to write.
    layout: ``eagle`` or ``speculators``.
    target: name of the model it drafts for, kept in the config.
    dtype: float32 or bfloat16; None keeps the head's own type.
    for_others: write an output layer that is factored, or the target's, as the one matrix that other
      projects read.

  Raises:
    CheckpointError: the path exists, an unknown layout or type, or writing failed (then nothing is left).
  """
  if layout not in get_args(Layout):
    raise CheckpointError(f"layout = {layout!r}; it must be one of {', '.join(get_args(Layout))}")
  c = head.config
  arrays = vocabulary.parameters(head, dtype)
  if for_others and c.output_rank is not None:
    up, down = arrays.pop("output.up"), arrays.pop("output.down")
    arrays["output.weight"] = (up.astype(np.float32) @ down.astype(np.float32)).astype(up.dtype)
  if for_others and c.output == "target":
    rows, readout = np.asarray(head.output.weight[...], np.float32), arrays.pop("output.readout")
    arrays["output.weight"] = (rows @ readout.astype(np.float32)).astype(readout.dtype)
    c = dataclasses.replace(c, output="own")
  tensors = {
    **vocabulary.renamed(arrays, eagle3_names(LAYER_NAMES[layout])),
    **vocabulary.id_tensors(head.ids, c.decoder.vocab_size),
  }
  with new_folder(path) as work:
    write_json(os.path.join(work, "config.json"), _config_json(c, layout, target))
    safetensors.numpy.save_file(tensors, os.path.join(work, SINGLE), metadata={"format": "pt"})


def _config_json(c: Eagle3Config, layout: Layout, target: str) -> dict[str, Any]:
  decoder = {**config_json(c.decoder), "tie_word_embeddings": False}
  size = c.decoder.vocab_size if c.draft_vocab_size is None else c.draft_vocab_size
  common: dict[str, Any] = {"draft_vocab_size": size, "norm_before_residual": c.norm_before_residual}
  if c.output == "target":
    common["output"] = c.output
  if c.target_width != c.decoder.d_model:
    common["target_hidden_size"] = c.target_width
  if layout == "eagle":
    return {
      **decoder,
      "architectures": ["LlamaForCausalLMEagle3"],
      **common,
      "tap_layers": list(c.tap_layers),
      "base_model_name_or_path": target,
    }
  # The fields that transformers and vLLM look for; how many tokens to draft is the reader's choice.
  proposal = {"proposal_type": "greedy", "speculative_tokens": 4}
  return {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_config": {
      "algorithm": "eagle3",
      "default_proposal_method": "greedy",
      "proposal_methods": [proposal],
      "verifier": {"name_or_path": target, "architectures": []},
    },
    **common,
    _TAPS: list(c.tap_layers),
    "transformer_layer_config": decoder,
  }
