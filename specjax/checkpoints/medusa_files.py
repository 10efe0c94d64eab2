"""Medusa heads: ``medusa_lm_head.safetensors`` or ``medusa_lm_head.pt``, and a ``config.json``.

Tensors, h the head and L the number of blocks a head: ``{h}.{l}.linear.weight`` (D, D) and ``.bias`` (D) of
block l, and ``{h}.{L}.weight`` (V, D), the head's own output layer (Medusa v1). A file with the blocks alone
shares the target's output head. How many heads and blocks there are is counted: configs are known to say
2 heads where 5 are stored, and no field of theirs is read.

Of our own, unknown to other projects: one output layer for all heads, ``lm_head.weight``; factored ones,
``lm_head.{up,down}.weight`` and ``{h}.{L}.{up,down}.weight``; a draft vocabulary, ``d2t`` and ``t2d`` as in
EAGLE-3 files.
"""

from __future__ import annotations

import itertools
import os
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from specjax.checkpoints import draft_vocabulary as vocabulary
from specjax.checkpoints.files import CheckpointError, new_folder, refusing, write_json
from specjax.checkpoints.fill import OneKey, StoredTensor, check_tensors, fill_module
from specjax.checkpoints.hf import open_safetensors
from specjax.checkpoints.pickled import read_pickled, write_pickled
from specjax.checkpoints.sources import LoadedModel
from specjax.models import MedusaConfig, MedusaHeads

SAFE, PICKLED = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
_LINEAR = re.compile(r"(\d+)\.(\d+)\.linear\.weight")


def is_medusa(folder: str) -> bool:
  """Whether the folder holds a file of Medusa heads."""
  return any(os.path.exists(os.path.join(folder, name)) for name in (SAFE, PICKLED))


def load_medusa(folder: str, target: LoadedModel, *, dtype: jnp.dtype) -> MedusaHeads:
  """The heads in a folder; of two files the safetensors one is read.

  Raises:
    CheckpointError: tensors that are missing, left over, misshapen, or do not fit the target.
  """
  path, read = os.path.join(folder, SAFE), open_safetensors
  if not os.path.exists(path):
    path, read = os.path.join(folder, PICKLED), read_pickled
  tensors = dict(read(path, vocabulary.INTEGERS))
  num_heads, num_layers = _count(tensors, path)
  ids = vocabulary.take_ids(tensors, None, target.config.vocab_size, path)
  token_map = {} if ids is None else {"token_map": tensors.pop(vocabulary.D2T)}
  config = _config(tensors, num_heads, num_layers, ids, target, path)
  with refusing(path):
    config.check_target(target.config)
  names, what = _names(config), "a set of Medusa heads"
  size = config.vocab_size if ids is None else len(ids)
  shapes = {
    ".linear.weight": (config.d_model, config.d_model),
    ".linear.bias": (config.d_model,),
    ".up.weight": (size, config.output_rank),
    ".down.weight": (config.output_rank, config.d_model),
    ".weight": (size, config.d_model),
  }
  shape_of = lambda name: next(shape for end, shape in shapes.items() if name.endswith(end))
  check_tensors({name: shape_of(name) for files in names.values() for name in files}, tensors, path, what)
  stored = {
    parameter: _stacked([tensors[name] for name in files]) if _is_block(parameter) else tensors[files[0]]
    for parameter, files in names.items()
  }
  stored.update(token_map)
  return fill_module(
    lambda: MedusaHeads(config, ids=ids, dtype=dtype, rngs=OneKey()),
    stored,
    {parameter: parameter for parameter in stored},
    source=path,
    what=what,
  )


def _count(tensors: dict[str, StoredTensor], path: str) -> tuple[int, int]:
  """Heads, and blocks a head, by the names."""
  found = {tuple(map(int, match.groups())) for match in map(_LINEAR.fullmatch, tensors) if match}
  if not found:
    raise CheckpointError(f"{path}: no tensor 0.0.linear.weight; these are not the heads of Medusa v1")
  num_heads, num_layers = (max(numbers) + 1 for numbers in zip(*found))
  places = itertools.product(range(num_heads), range(num_layers))
  absent = next((place for place in places if place not in found), None)
  if absent is not None:
    raise CheckpointError(
      f"{path}: tensor {absent[0]}.{absent[1]}.linear.weight is missing; there are {num_heads} heads of "
      f"{num_layers} blocks by the other names"
    )
  return num_heads, num_layers


def _config(tensors, num_heads: int, num_layers: int, ids, target: LoadedModel, path: str) -> MedusaConfig:
  stems = {"own": f"0.{num_layers}.", "shared": "lm_head."}
  begins = lambda stem: any(name.startswith(stem) for name in tensors)
  output = next((kind for kind, stem in stems.items() if begins(stem)), "target")
  shape = lambda name: tensors[name].shape or (0,) if name in tensors else None
  of_output = lambda part: None if output == "target" else shape(stems[output] + part)
  rows, down = of_output("weight") or of_output("up.weight"), of_output("down.weight")
  with refusing(path):
    return MedusaConfig(
      d_model=shape("0.0.linear.weight")[0],
      # Without a map, an output layer of its own tells the vocabulary it was made for.
      vocab_size=target.config.vocab_size if ids is not None or rows is None else rows[0],
      num_heads=num_heads,
      num_layers=num_layers,
      output=output,
      draft_vocab_size=None if ids is None else len(ids),
      output_rank=None if down is None else down[0],
    )


def _names(c: MedusaConfig) -> dict[str, list[str]]:
  """Parameter path → names in the file: one a head for what is stacked in memory."""
  names = {
    f"blocks.{layer}.{part}": [f"{head}.{layer}.linear.{part}" for head in range(c.num_heads)]
    for layer in range(c.num_layers)
    for part in ("weight", "bias")
  }
  own = [f"{head}.{c.num_layers}" for head in range(c.num_heads)]
  for i, stem in enumerate({"own": own, "shared": ["lm_head"], "target": []}[c.output]):
    if c.output_rank is None:
      names[f"outputs.{i}.weight"] = [f"{stem}.weight"]
    else:
      names |= {f"outputs.{i}.{part}": [f"{stem}.{part}.weight"] for part in ("up", "down")}
  return names


def _is_block(parameter: str) -> bool:
  return parameter.startswith("blocks.")


def _stacked(tensors: list[StoredTensor]) -> StoredTensor:
  shape = (len(tensors), *tensors[0].shape)
  return StoredTensor(shape, lambda: np.stack([tensor.read() for tensor in tensors]))


def save_medusa(
  path: str, heads: MedusaHeads, *, target: str = "", dtype=None, pickled: bool = False
) -> None:
  """Writes Medusa heads as a new folder.

  With an output layer a head, all of the target's tokens and no factors it is what Medusa v1 reads.

  Args:
    path: the folder; it must not exist yet.
    heads: what to write.
    target: name of the model they draft for, kept in the config.
    dtype: float32 or bfloat16; None keeps the heads' own type.
    pickled: write ``medusa_lm_head.pt``, as Medusa v1 does itself, instead of safetensors.

  Raises:
    CheckpointError: the path exists, an unknown type, or writing failed (then nothing is left).
  """
  c = heads.config
  arrays = vocabulary.parameters(heads, dtype)
  tensors = vocabulary.id_tensors(heads.ids, c.vocab_size)
  for parameter, files in _names(c).items():
    tensors |= zip(files, arrays[parameter]) if _is_block(parameter) else {files[0]: arrays[parameter]}
  config: dict[str, Any] = {
    "medusa_num_heads": c.num_heads,
    "medusa_num_layers": c.num_layers,
    "base_model_name_or_path": target,
    "hidden_size": c.d_model,
    "vocab_size": c.vocab_size,
  }
  with new_folder(path) as work:
    write_json(os.path.join(work, "config.json"), config)
    if pickled:
      write_pickled(os.path.join(work, PICKLED), tensors)
    else:
      safetensors.numpy.save_file(tensors, os.path.join(work, SAFE), metadata={"format": "pt"})
