"""Tensors in PyTorch's own files (``.pt``, ``.bin``), read by its weights-only reader and by nothing else.

Such a file is a pickle, which may name any function to be called. The weights-only reader refuses whatever
is no tensor, number, string or container of them. It is torch's, so torch is needed (extra ``torch``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping

import jax.numpy as jnp
import numpy as np

from specjax.checkpoints.files import CheckpointError, writing
from specjax.checkpoints.fill import StoredTensor

# Before, files could be made that ran code in spite of weights_only (CVE-2025-32434).
_OLDEST_TORCH = (2, 6)
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_INTEGERS = ("int64", "int32", "uint8", "bool")


def read_pickled(path: str, integers: Collection[str] = ()) -> dict[str, StoredTensor]:
  """The tensors of a file, by name.

  Args:
    path: holds a dictionary of tensors, as ``torch.save(module.state_dict(), path)`` writes it.
    integers: names of tensors that must hold integers or truth values; all others must hold floats.

  Raises:
    CheckpointError: torch is missing or too old, or the file is damaged or holds anything else.
  """
  torch = _torch(path)
  try:
    tensors = torch.load(path, map_location="cpu", weights_only=True)
  except Exception as error:  # of many types: pickle's, zip's, torch's
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    raise CheckpointError(
      f"{path}: the weights-only reader refuses it; it is damaged or holds more than tensors ({reason})"
    ) from None
  if not isinstance(tensors, Mapping):
    raise CheckpointError(f"{path}: a dictionary of tensors is expected, not {type(tensors).__name__}")
  return {name: _stored(torch, path, name, tensor, integers) for name, tensor in tensors.items()}


def write_pickled(path: str, tensors: Mapping[str, np.ndarray]) -> None:
  """Writes a dictionary of tensors for readers that know nothing else; `read_pickled` reads it."""
  torch = _torch(path)
  with writing(path, "saving"):
    torch.save({name: _to_torch(torch, array) for name, array in tensors.items()}, path)


def _torch(path: str):
  try:
    import torch
  except ImportError:
    raise CheckpointError(
      f"{path}: PyTorch's own files need torch; install it with the extra: specjax[torch]"
    ) from None
  version = tuple(map(int, re.match(r"(\d+)\.(\d+)", torch.__version__).groups()))
  if version < _OLDEST_TORCH:
    raise CheckpointError(
      f"{os.path.basename(path)}: torch {torch.__version__} is installed; its weights-only reader is safe "
      f"from {'.'.join(map(str, _OLDEST_TORCH))} on"
    )
  return torch


def _stored(torch, path: str, name, tensor, integers: Collection[str]) -> StoredTensor:
  if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
    raise CheckpointError(f"{path}: entry {name!r} is of type {type(tensor).__name__}; tensors are expected")
  kind = str(tensor.dtype).removeprefix("torch.")
  supported = _INTEGERS if name in integers else _FLOATS
  if kind not in supported or tensor.layout != torch.strided:
    raise CheckpointError(f"{path}: tensor {name} has type {kind}; supported: {', '.join(supported)}, dense")
  return StoredTensor(tuple(tensor.shape), lambda: _to_numpy(torch, tensor))


def _to_numpy(torch, tensor) -> np.ndarray:
  tensor = tensor.detach().contiguous()
  if tensor.dtype == torch.bfloat16:  # numpy's own types have none
    return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
  return tensor.numpy()


def _to_torch(torch, array: np.ndarray):
  array = np.ascontiguousarray(array)
  if array.dtype == jnp.bfloat16:
    return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
  return torch.from_numpy(array.copy())
