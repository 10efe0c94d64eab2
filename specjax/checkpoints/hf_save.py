"""Writing a decoder in the Hugging Face layout, so that other projects can load it."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import safetensors.numpy
from flax import nnx

from specjax.checkpoints.files import new_folder, write_json
from specjax.checkpoints.fill import path_of
from specjax.checkpoints.hf import SINGLE
from specjax.checkpoints.names import hf_names
from specjax.checkpoints.tokenizer import Tokenizer
from specjax.models import Decoder, DecoderConfig

_CLASSES = {
  "llama": "LlamaForCausalLM",
  "mistral": "MistralForCausalLM",
  "qwen2": "Qwen2ForCausalLM",
  "qwen3": "Qwen3ForCausalLM",
}


def save_hf(path: str, model: Decoder, tokenizer: Tokenizer | None = None) -> None:
  """Writes ``config.json``, one ``model.safetensors`` and perhaps the tokenizer as a new folder.

  All parameters are brought to the host at once.

  Raises:
    CheckpointError: the path exists, or writing failed (then nothing is left).
  """
  names = hf_names(model.config.num_layers)
  with new_folder(path) as work:
    write_json(os.path.join(work, "config.json"), config_json(model.config))
    leaves = nnx.to_flat_state(nnx.state(model))
    tensors = {names[path_of(p)]: np.asarray(leaf.get_value()) for p, leaf in leaves}
    # transformers refuses files without the format's name.
    safetensors.numpy.save_file(tensors, os.path.join(work, SINGLE), metadata={"format": "pt"})
    if tokenizer is not None:
      tokenizer.save(work)


def config_json(config: DecoderConfig) -> dict[str, Any]:
  """What `hf_config` reads."""
  c, scaling = config, config.rope_scaling
  rope: dict[str, Any] = {"rope_type": "default"}
  if scaling is not None:
    rope = {
      "rope_type": "llama3",
      "factor": scaling.factor,
      "low_freq_factor": scaling.low_freq_factor,
      "high_freq_factor": scaling.high_freq_factor,
      "original_max_position_embeddings": scaling.original_max_length,
    }
  values = {
    "model_type": c.family,
    "architectures": [_CLASSES[c.family]],
    "vocab_size": c.vocab_size,
    "hidden_size": c.d_model,
    "intermediate_size": c.d_ff,
    "num_hidden_layers": c.num_layers,
    "num_attention_heads": c.num_heads,
    "num_key_value_heads": c.num_kv_heads,
    "head_dim": c.head_dim,
    "hidden_act": "silu",
    "max_position_embeddings": c.max_length,
    "rms_norm_eps": c.norm_eps,
    "rope_theta": c.rope_base,
    "rope_parameters": {**rope, "rope_theta": c.rope_base},
    "rope_scaling": rope if scaling is not None else None,
    "tie_word_embeddings": c.tie_embeddings,
    "sliding_window": c.sliding_window,
  }
  if c.family.startswith("qwen") and c.sliding_window is not None:
    values.update(use_sliding_window=True, max_window_layers=0)
  return values
