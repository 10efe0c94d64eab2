"""Our own checkpoints: parameters written by orbax, the config and the tokenizer beside them.

A folder holds ``specjax.json`` (format, kind, config), ``params/`` and, when given, the tokenizer's files. It
is written aside and renamed, so it is whole or absent.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.checkpoints.files import CheckpointError, new_folder, read_json, write_json
from specjax.checkpoints.fill import abstract_decoder, path_of
from specjax.checkpoints.tokenizer import Tokenizer
from specjax.models import Decoder, DecoderConfig, Llama3RopeScaling

DESCRIPTION = "specjax.json"
_FORMAT = 1
_Module = TypeVar("_Module", bound=nnx.Module)


def save_module(
  path: str, module: nnx.Module, description: dict[str, Any], tokenizer: Tokenizer | None = None
) -> None:
  """Writes a module's parameters and a JSON description as a new folder.

  Args:
    path: the folder; it must not exist yet.
    description: what `read_description` gives back; enough to build the module again.

  Raises:
    CheckpointError: the path exists, or writing failed (then nothing is left).
  """
  import orbax.checkpoint as ocp  # takes seconds to import

  with new_folder(path) as work:
    write_json(os.path.join(work, DESCRIPTION), {"format": _FORMAT, **description})
    if tokenizer is not None:
      tokenizer.save(work)
    with ocp.PyTreeCheckpointer() as checkpointer:
      checkpointer.save(os.path.join(work, "params"), _flat(nnx.state(module)))


def read_description(path: str) -> dict[str, Any]:
  """The description stored with a module; `CheckpointError` when the folder is not one of ours."""
  file = os.path.join(path, DESCRIPTION)
  description = read_json(file)
  if description.get("format") != _FORMAT:
    raise CheckpointError(f"{file}: format = {description.get('format')!r}; supported: {_FORMAT}")
  return description


def load_module(path: str, abstract: _Module) -> _Module:
  """Reads parameters into a module built without values.

  Args:
    path: a folder written by `save_module`.
    abstract: the module as `nnx.eval_shape` makes it. Parameters come back in the types it has.

  Raises:
    CheckpointError: parameters are missing, left over, of another shape, or damaged.
  """
  import orbax.checkpoint as ocp

  graph, state = nnx.split(abstract)
  leaves = _flat(state)
  params = os.path.join(os.path.abspath(path), "params")
  try:
    with ocp.PyTreeCheckpointer() as checkpointer:
      stored = checkpointer.metadata(params).item_metadata.tree
      _check(path, {k: tuple(v.shape) for k, v in stored.items()}, {k: v.shape for k, v in leaves.items()})
      # As numpy: orbax would commit the arrays to a device, and what is committed compiles anew.
      args = {k: ocp.RestoreArgs(restore_type=np.ndarray, dtype=v.dtype) for k, v in leaves.items()}
      values = checkpointer.restore(params, ocp.args.PyTreeRestore(item=leaves, restore_args=args))
  except CheckpointError:
    raise
  except Exception as error:  # orbax raises many types for a damaged folder
    raise CheckpointError(f"{params}: cannot be restored, perhaps damaged ({error})") from error
  filled = [(p, leaf.replace(jnp.asarray(values[path_of(p)]))) for p, leaf in nnx.to_flat_state(state)]
  return nnx.merge(graph, nnx.from_flat_state(filled))


def save_orbax(path: str, model: Decoder, tokenizer: Tokenizer | None = None) -> None:
  """Writes a decoder, its config and perhaps its tokenizer as a new folder that `load_model` reads."""
  description = {"kind": "decoder", "config": dataclasses.asdict(model.config)}
  save_module(path, model, description, tokenizer)


def load_orbax(path: str, config: DecoderConfig, *, dtype: jnp.dtype) -> Decoder:
  """The decoder of a folder written by `save_orbax`; the config is `orbax_config`'s, perhaps limited."""
  return load_module(path, abstract_decoder(config, dtype))


def orbax_config(path: str) -> DecoderConfig:
  """The config stored beside the parameters."""
  description = read_description(path)
  if description.get("kind") != "decoder":
    raise CheckpointError(f"{path}: kind = {description.get('kind')!r}; expected 'decoder'")
  try:
    values = dict(description.get("config") or {})
    if values.get("rope_scaling") is not None:
      values["rope_scaling"] = Llama3RopeScaling(**values["rope_scaling"])
    return DecoderConfig(**values)
  except (TypeError, ValueError) as error:
    raise CheckpointError(f"{os.path.join(path, DESCRIPTION)}: config: {error}") from None


def _flat(state: nnx.State) -> dict[str, Any]:
  return {path_of(path): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}


def _check(path: str, stored: dict[str, tuple], wanted: dict[str, tuple]) -> None:
  missing, extra = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
  if missing or extra:
    what = f"parameter {missing[0]} is missing" if missing else f"parameter {extra[0]} has no place"
    raise CheckpointError(f"{path}: {what} ({len(missing)} missing, {len(extra)} left over)")
  for name, shape in wanted.items():
    if stored[name] != tuple(shape):
      raise CheckpointError(
        f"{path}: {name} has shape {list(stored[name])}; the config asks for {list(shape)}"
      )
