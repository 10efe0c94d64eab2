"""Heads of EAGLE-1 and EAGLE-2 in their authors' layout.

``config.json`` with the fields of a Llama of one layer, and perhaps ``bias`` (of ``fc``; true where it is
left out) and ``qkv_bias``; ``model.safetensors`` (or ``pytorch_model.bin``) with ``fc.{weight,bias}``,
``layers.0.self_attn.*``, ``layers.0.mlp.*``, ``layers.0.post_attention_layernorm.weight`` and perhaps the
target's ``embed_tokens.weight``. There is no norm before the attention, no final norm and no output layer.

Of our own, written only where they are needed, and then of no use to other projects: a draft vocabulary,
``draft_vocab_size`` with ``d2t`` and ``t2d`` as in EAGLE-3 files; ``inputs``, where a row sees the token or
the feature alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import safetensors.numpy

from specjax.checkpoints import draft_vocabulary as vocabulary
from specjax.checkpoints.eagle_files import take_embedding
from specjax.checkpoints.files import new_folder, refusing, write_json
from specjax.checkpoints.fill import OneKey, StoredTensor, fill_module
from specjax.checkpoints.hf import SINGLE, Fields, decoder_config
from specjax.checkpoints.hf_save import config_json
from specjax.checkpoints.names import eagle1_names
from specjax.checkpoints.sources import LoadedModel
from specjax.models import Eagle1, Eagle1Config, output_rows


def is_eagle1(values: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> bool:
  """Whether config and tensors are those of such a head: ``fc`` and ``layers.0``, and no norm before it."""
  layer = any(name.startswith("layers.0.") for name in tensors)
  norms = ("norm.weight", "layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight")
  plain = values.get("speculators_model_type") is None and not any(name in tensors for name in norms)
  return layer and plain and "fc.weight" in tensors


def load_eagle1(
  folder: str,
  values: dict[str, Any],
  tensors: dict[str, StoredTensor],
  target: LoadedModel,
  *,
  dtype: jnp.dtype,
) -> Eagle1:
  """The head in a folder, on the target's final norm and output layer.

  Args:
    folder: for messages.
    values: its ``config.json``.
    tensors: its tensors.
    target: what the head drafts for.
    dtype: type of the parameters.

  Raises:
    CheckpointError: fields or tensors that are missing, left over, misshapen, or do not fit the target.
  """
  path = os.path.join(folder, "config.json")
  tensors = dict(tensors)
  fields = Fields(path, values)
  # The layer is Llama's: a file that leaves the type out means it.
  decoder = decoder_config(path, {"model_type": "llama", "num_hidden_layers": 1, **values})
  decoder = decoder.replace(qkv_bias=fields.get("qkv_bias", bool, decoder.qkv_bias))
  size = fields.get("draft_vocab_size", int, decoder.vocab_size)
  with refusing(path):
    config = Eagle1Config(
      decoder=decoder,
      target_layers=target.config.num_layers,
      inputs=fields.get("inputs", str, "both"),
      bias=fields.get("bias", bool, True),
      draft_vocab_size=None if size == decoder.vocab_size else size,
    )
  with refusing(folder):
    config.check_target(target.config)
  ids = vocabulary.take_ids(tensors, size, decoder.vocab_size, folder)
  take_embedding(tensors, target, folder)
  return fill_module(
    lambda: Eagle1(config, target.model, ids=ids, dtype=dtype, rngs=OneKey()),
    tensors,
    eagle1_names(),
    source=folder,
    what="an EAGLE-1 head of this config",
    given={
      "norm.weight": target.model.norm.weight[...].astype(dtype),
      "output.weight": output_rows(target.model, ids).astype(dtype),
    },
  )


def save_eagle1(path: str, head: Eagle1, *, target: str = "", dtype=None) -> None:
  """Writes an EAGLE-1 head, without what is the target's, as a new folder.

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
    **vocabulary.renamed(vocabulary.parameters(head, dtype), eagle1_names()),
    **vocabulary.id_tensors(head.ids, c.decoder.vocab_size),
  }
  values = {
    **config_json(c.decoder),
    "tie_word_embeddings": False,
    "architectures": ["LlamaForCausalLMEagle"],
    "bias": c.bias,
    "base_model_name_or_path": target,
  }
  if c.draft_vocab_size is not None:
    values["draft_vocab_size"] = c.draft_vocab_size
  if c.decoder.qkv_bias:
    values["qkv_bias"] = True
  if c.inputs != "both":
    values["inputs"] = c.inputs
  with new_folder(path) as work:
    write_json(os.path.join(work, "config.json"), values)
    safetensors.numpy.save_file(tensors, os.path.join(work, SINGLE), metadata={"format": "pt"})
