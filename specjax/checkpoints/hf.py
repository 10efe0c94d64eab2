"""Folders in the Hugging Face layout: ``config.json`` and safetensors. Nothing is ever unpickled."""

from __future__ import annotations

import glob
import os
from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors

from specjax.checkpoints.files import CheckpointError, read_json
from specjax.checkpoints.fill import StoredTensor, fill
from specjax.checkpoints.names import hf_names
from specjax.models import Decoder, DecoderConfig, Llama3RopeScaling

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")
_INTEGERS = ("I64", "I32", "U8", "BOOL")


class Fields:
  """Typed access to ``config.json`` with errors that name the field."""

  def __init__(self, path: str, values: dict[str, Any]):
    self.path, self.values = path, values

  def error(self, field: str, value: Any, supported: str) -> CheckpointError:
    return CheckpointError(f"{self.path}: {field} = {value!r} is not supported; supported: {supported}")

  def get(self, field: str, kind: type, default: Any = None) -> Any:
    """The field as ``kind``; the default when absent or null (an error when there is none)."""
    value = self.values.get(field)
    if value is None and default is not None:
      return default
    if value is None:
      raise CheckpointError(f"{self.path}: field {field} is missing")
    wrong = isinstance(value, bool) != (kind is bool) or not isinstance(
      value, (int, float) if kind is float else kind
    )
    if wrong:
      raise CheckpointError(f"{self.path}: {field} = {value!r}; it must be of type {kind.__name__}")
    return kind(value)


def hf_config(folder: str) -> DecoderConfig:
  """The architecture in a folder's ``config.json`` (layouts of transformers 4 and 5).

  Raises:
    CheckpointError: what the file asks for is not what `Decoder` computes.
  """
  path = os.path.join(folder, "config.json")
  return decoder_config(path, read_json(path))


def decoder_config(path: str, values: dict[str, Any]) -> DecoderConfig:
  """The architecture in an object of the form of ``config.json``; ``path`` says where it stands."""
  fields = Fields(path, values)
  family = values.get("model_type")
  if family not in FAMILIES:
    raise fields.error("model_type", family, ", ".join(FAMILIES))
  if values.get("quantization_config") is not None:
    raise fields.error("quantization_config", values["quantization_config"], "none (float weights)")
  if values.get("hidden_act", "silu") != "silu":
    raise fields.error("hidden_act", values["hidden_act"], "silu")
  for field in ("attention_bias", "mlp_bias"):
    if values.get(field):
      raise fields.error(field, values[field], "false")
  d_model, num_heads = fields.get("hidden_size", int), fields.get("num_attention_heads", int)
  num_layers = fields.get("num_hidden_layers", int)
  base, scaling = _rope(fields)
  # What transformers takes for a field that the file leaves out.
  head_dim = 128 if family == "qwen3" else d_model // max(num_heads, 1)
  kv_heads = 8 if family == "mistral" and "num_key_value_heads" not in values else num_heads
  try:
    return DecoderConfig(
      family=family,
      vocab_size=fields.get("vocab_size", int),
      num_layers=num_layers,
      d_model=d_model,
      d_ff=fields.get("intermediate_size", int),
      num_heads=num_heads,
      num_kv_heads=fields.get("num_key_value_heads", int, kv_heads),
      head_dim=fields.get("head_dim", int, head_dim),
      max_length=fields.get("max_position_embeddings", int),
      rope_base=base,
      rope_scaling=scaling,
      norm_eps=fields.get("rms_norm_eps", float, 1e-6),
      tie_embeddings=fields.get("tie_word_embeddings", bool, False),
      qkv_bias=family == "qwen2",
      qk_norm=family == "qwen3",
      sliding_window=_sliding_window(fields, family, num_layers),
    )
  except ValueError as error:
    raise error if isinstance(error, CheckpointError) else CheckpointError(f"{path}: {error}") from None


def _rope(fields: Fields) -> tuple[float, Llama3RopeScaling | None]:
  """Base and scaling; transformers 5 keeps both in ``rope_parameters``, 4 has two fields."""
  values = fields.values
  name = "rope_parameters" if values.get("rope_parameters") is not None else "rope_scaling"
  rope = values.get(name) or {}
  inner = Fields(f"{fields.path}: {name}", rope)
  base = inner.get("rope_theta", float, fields.get("rope_theta", float, 10000.0))
  kind = rope.get("rope_type", rope.get("type", "default"))
  if kind not in ("default", "llama3"):
    raise fields.error(f"{name}.rope_type", kind, "default, llama3")
  for source in (values, rope):
    if source.get("partial_rotary_factor", 1.0) != 1.0:
      raise fields.error("partial_rotary_factor", source["partial_rotary_factor"], "1.0")
  if kind == "default":
    return base, None
  return base, Llama3RopeScaling(
    factor=inner.get("factor", float),
    low_freq_factor=inner.get("low_freq_factor", float),
    high_freq_factor=inner.get("high_freq_factor", float),
    original_max_length=inner.get("original_max_position_embeddings", int),
  )


def _sliding_window(fields: Fields, family: str, num_layers: int) -> int | None:
  values = fields.values
  if family == "llama":
    return None
  if family == "mistral":
    # transformers takes 4096 when the field is left out; null means none.
    return fields.get("sliding_window", int) if values.get("sliding_window", 4096) is not None else None
  if not values.get("use_sliding_window") or values.get("sliding_window") is None:
    return None
  kinds = values.get("layer_types")
  if kinds is None:
    first = fields.get("max_window_layers", int, 28)
    kinds = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
  if set(kinds) == {"full_attention"}:
    return None
  if set(kinds) != {"sliding_attention"}:
    raise fields.error("layer_types", sorted(set(kinds)), "one kind for all layers")
  return fields.get("sliding_window", int)


def load_hf(folder: str, config: DecoderConfig, *, dtype: jnp.dtype) -> Decoder:
  """The decoder in a Hugging Face folder, read tensor by tensor.

  Args:
    folder: holds ``model.safetensors`` or its sharded index.
    config: `hf_config`'s, perhaps limited.
    dtype: type of the parameters.
  """
  return fill(config, read_tensors(folder), hf_names, dtype=dtype, source=folder)


def read_tensors(folder: str, integers: Collection[str] = ()) -> dict[str, StoredTensor]:
  """The tensors in ``model.safetensors`` or the files of its index, by name.

  Args:
    folder: holds them.
    integers: names of tensors that must hold integers or truth values; all others must hold floats.

  Raises:
    CheckpointError: no such file, a damaged one, an index that lies. A tensor of another type is an error
      when it is read.
  """
  index = os.path.join(folder, INDEX)
  if os.path.exists(index):
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
      raise CheckpointError(f"{index}: field weight_map is missing; it must map tensors to files")
    files = sorted(set(weight_map.values()))
    outside = [file for file in files if os.path.basename(file) != file]
    if outside:
      raise CheckpointError(f"{index}: file {outside[0]!r} lies outside the folder")
  elif os.path.exists(os.path.join(folder, SINGLE)):
    weight_map, files = None, [SINGLE]
  else:
    raise CheckpointError(_no_weights(folder))
  tensors = {}
  for file in files:
    for name, tensor in open_safetensors(os.path.join(folder, file), integers).items():
      if weight_map is None or weight_map.get(name) == file:
        tensors[name] = tensor
  absent = [name for name in weight_map or () if name not in tensors]
  if absent:
    raise CheckpointError(f"{index}: tensor {absent[0]} is not in {weight_map[absent[0]]}")
  return tensors


def _no_weights(folder: str) -> str:
  pickled = [p for kind in ("*.bin", "*.pt", "*.pth") for p in glob.glob(os.path.join(folder, kind))]
  if not pickled:
    return f"{folder}: neither {SINGLE} nor {INDEX} is there"
  return (
    f"{folder}: only pickled weights ({os.path.basename(pickled[0])}); unpickling runs code from the "
    f"file, so they are never read. Convert them to {SINGLE} first"
  )


def open_safetensors(path: str, integers: Collection[str] = ()) -> dict[str, StoredTensor]:
  """The tensors of one file; ``integers`` as for `read_tensors`."""
  try:
    file = safetensors.safe_open(path, "np")
  except FileNotFoundError:
    raise CheckpointError(f"{path}: no such file; the index names it") from None
  except (safetensors.SafetensorError, OSError) as error:
    raise CheckpointError(f"{path}: not a whole safetensors file ({error})") from None

  tensors = {}
  for name in file.keys():
    view = file.get_slice(name)
    kind = view.get_dtype()
    supported = _INTEGERS if name in integers else _FLOATS
    if kind not in supported:
      # An integer tensor is an error only where the model wants it: old files carry index buffers.
      read = _refuse(f"{path}: tensor {name} has type {kind}; supported: {', '.join(supported)}")
    else:
      read = _reader(file, name)
    tensors[name] = StoredTensor(tuple(view.get_shape()), read)
  return tensors


def _reader(file, name: str):
  return lambda: file.get_tensor(name)


def _refuse(message: str):
  def read() -> np.ndarray:
    raise CheckpointError(message)

  return read
