"""A draft vocabulary in a file: ``d2t``, ``t2d`` (the tensors of EAGLE-3), and tensors on their way out.

``d2t`` is int64 ``[Vd]`` and an *offset*: draft token i is the target's token ``i + d2t[i]``. ``t2d`` is bool
``[V]``: whether the target's token is in the draft vocabulary. In memory there are the ids themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.checkpoints.files import CheckpointError
from specjax.checkpoints.fill import StoredTensor, path_of

D2T, T2D = "d2t", "t2d"
INTEGERS = (D2T, T2D)


def take_ids(
  tensors: dict[str, StoredTensor], size: int | None, vocab_size: int, source: str
) -> np.ndarray | None:
  """Takes ``d2t`` and ``t2d`` out of ``tensors`` and puts ids under the name ``d2t`` where there are any.

  Args:
    tensors: of a file; changed in place.
    size: Vd, None for what ``d2t`` says itself.
    vocab_size: V.
    source: the file, for messages.

  Returns:
    int32 ``[Vd]``, ascending; None when the draft vocabulary is the target's.

  Raises:
    CheckpointError: ``d2t`` is missing or misshapen, leaves the vocabulary or does not ascend, or ``t2d``
      says otherwise.
  """
  stored, flags = tensors.pop(D2T, None), tensors.pop(T2D, None)
  if stored is None:
    if flags is not None or size not in (None, vocab_size):
      raise CheckpointError(
        f"{source}: tensor {D2T} is missing; it must say which of the target's {vocab_size} tokens "
        + ("the draft vocabulary has" if size is None else f"the {size} of the draft vocabulary are")
      )
    return None
  if len(stored.shape) != 1 or size not in (None, *stored.shape) or not 1 <= stored.shape[0] <= vocab_size:
    wanted = f"[1 … {vocab_size}]" if size is None else [size]
    raise CheckpointError(f"{source}: tensor {D2T} has shape {list(stored.shape)}; expected {wanted}")
  offsets = stored.read().astype(np.int64)
  ids = np.arange(len(offsets)) + offsets
  outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
  if outside.size:
    i = outside[0]
    raise CheckpointError(
      f"{source}: {D2T}[{i}] = {offsets[i]}, an offset, so token {i} means {ids[i]}; the target's ids "
      f"go from 0 to {vocab_size - 1}"
    )
  falls = np.flatnonzero(np.diff(ids) <= 0)
  if falls.size:
    i = falls[0] + 1
    raise CheckpointError(
      f"{source}: {D2T}: token {i} means {ids[i]}, the one before it {ids[i - 1]}; the ids must ascend"
    )
  if flags is not None:
    _check_flags(flags, ids, vocab_size, source)
  if len(ids) == vocab_size:
    return None
  ids = ids.astype(np.int32)
  tensors[D2T] = StoredTensor(ids.shape, lambda: ids)
  return ids


def _check_flags(flags: StoredTensor, ids: np.ndarray, vocab_size: int, source: str) -> None:
  if flags.shape != (vocab_size,):
    raise CheckpointError(f"{source}: tensor {T2D} has shape {list(flags.shape)}; expected [{vocab_size}]")
  wanted = np.zeros(vocab_size, bool)
  wanted[ids] = True
  wrong = np.flatnonzero(flags.read().astype(bool) != wanted)
  if wrong.size:
    i = wrong[0]
    raise CheckpointError(
      f"{source}: {T2D}[{i}] = {not wanted[i]}, but by {D2T} token {i} is "
      f"{'in' if wanted[i] else 'not in'} the draft vocabulary ({wrong.size} such tokens)"
    )


def id_tensors(ids: Iterable[int] | None, vocab_size: int) -> dict[str, np.ndarray]:
  """``d2t`` and ``t2d`` as files hold them; nothing for the target's whole vocabulary."""
  if ids is None:
    return {}
  ids = np.asarray(ids, np.int64)
  flags = np.zeros(vocab_size, bool)
  flags[ids] = True
  return {D2T: ids - np.arange(len(ids)), T2D: flags}


def parameters(module: nnx.Module, dtype=None) -> dict[str, np.ndarray]:
  """What a head has learned, on the host, by parameter path.

  Args:
    dtype: of the arrays: float32 or bfloat16; None keeps the module's.

  Raises:
    CheckpointError: another type is asked for.
  """
  if dtype is not None and jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
    raise CheckpointError(f"dtype = {jnp.dtype(dtype)}; heads are saved as float32 or bfloat16")
  arrays = {}
  for path, leaf in nnx.to_flat_state(nnx.state(module, nnx.Param)):
    value = np.asarray(leaf.get_value())
    arrays[path_of(path)] = value if dtype is None else value.astype(dtype)
  return arrays


def renamed(arrays: Mapping[str, np.ndarray], names: Mapping[str, str]) -> dict[str, np.ndarray]:
  """Arrays by parameter path → by the names of a file."""
  return {names[path]: value for path, value in arrays.items()}
