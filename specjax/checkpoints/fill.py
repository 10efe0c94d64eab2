"""Modules from named tensors. A module is built without values and every leaf is filled from the file, so
no parameter can keep an initial value."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.checkpoints.files import CheckpointError
from specjax.models import Decoder, DecoderConfig

# Written by old exporters; they are functions of the config.
_HARMLESS = re.compile(r"\.rotary_emb\.inv_freq$|\.(masked_bias|attn\.bias)$|^rope_freqs\.weight$")

_LISTED = 8
_Module = TypeVar("_Module", bound=nnx.Module)


class StoredTensor(NamedTuple):
  """A tensor that lies in a file.

  Attributes:
    shape: rows first.
    read: reads it, dequantized; the array may be a view of the file.
  """

  shape: tuple[int, ...]
  read: Callable[[], np.ndarray]


class OneKey:
  """Stands in for `nnx.Rngs` where no value is ever made; tracing its counter took seconds."""

  def __init__(self):
    self._key = jax.random.key(0)

  def params(self) -> jax.Array:
    return self._key


def abstract_decoder(config: DecoderConfig, dtype: jnp.dtype) -> Decoder:
  """A decoder whose parameters are shapes and types only."""
  return nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=OneKey()))


def path_of(path: tuple) -> str:
  """A parameter's path as one string, e.g. ``layers.0.attention.q.weight``."""
  return ".".join(str(part) for part in path)


def fill(
  config: DecoderConfig,
  tensors: Mapping[str, StoredTensor],
  name_table: Callable[[int], dict[str, str]],
  *,
  dtype: jnp.dtype,
  source: str,
) -> Decoder:
  """Builds a `Decoder` whose every parameter is read from ``tensors``, one at a time.

  Args:
    config: the architecture; it decides which parameters exist and their shapes.
    tensors: what the file holds, by the file's names.
    name_table: number of layers → (parameter path → name in the file).
    dtype: type of the parameters.
    source: the file, for messages.

  Raises:
    CheckpointError: a tensor is missing, has another shape, or has no place in the model.
  """
  if config.num_layers > len(tensors):
    raise CheckpointError(
      f"{source}: the config has {config.num_layers} layers, the file {len(tensors)} tensors"
    )
  names = name_table(config.num_layers)
  head = names["head.weight"]
  untied = (
    f"tensor {head} is missing and the config says that embeddings are not tied; "
    f"expected shape {[config.vocab_size, config.d_model]}"
  )
  if config.tie_embeddings:
    tensors = _without_tied_head(tensors, head, names["embed"], source)
  return fill_module(
    lambda: Decoder(config, dtype=dtype, rngs=OneKey()),
    tensors,
    names,
    source=source,
    what=f"a {config.family} model of this config",
    alone={head: untied},
  )


def fill_module(
  build: Callable[[], _Module],
  tensors: Mapping[str, StoredTensor],
  names: Mapping[str, str],
  *,
  source: str,
  what: str,
  given: Mapping[str, jax.Array] | None = None,
  alone: Mapping[str, str] | None = None,
) -> _Module:
  """Builds a module whose every leaf is read from ``tensors``, one at a time.

  Args:
    build: makes the module; only its shapes and types are taken.
    tensors: what the file holds, by the file's names.
    names: parameter path → name in the file, of at least the module's parameters.
    source: the file, for messages.
    what: the module, for messages.
    given: values by parameter path that come from elsewhere and have no place in the file.
    alone: by name, what to say of a tensor if no other is missing.

  Raises:
    CheckpointError: a tensor is missing, has another shape, or has no place in the module.
  """
  try:
    graph, state = nnx.split(nnx.eval_shape(build))
  except Exception as error:  # sizes that no array can have
    raise CheckpointError(f"{source}: no model has the sizes of this config ({error})") from error
  given = given or {}
  leaves = {path: leaf for path, leaf in nnx.to_flat_state(state) if path_of(path) not in given}
  wanted = {path: names[path_of(path)] for path in leaves}
  shapes = {wanted[path]: tuple(leaf.shape) for path, leaf in leaves.items()}
  check_tensors(shapes, tensors, source, what, alone)
  filled = []
  for path, leaf in nnx.to_flat_state(state):
    if path_of(path) in given:
      filled.append((path, leaf.replace(given[path_of(path)])))
      continue
    value = _to_device(tensors[wanted[path]].read(), leaf)
    if value.shape != leaf.shape:
      raise CheckpointError(f"{source}: tensor {wanted[path]} was read with shape {list(value.shape)}")
    filled.append((path, leaf.replace(value)))
  return nnx.merge(graph, nnx.from_flat_state(filled))


def _to_device(value: np.ndarray, leaf) -> jax.Array:
  # Rounded on the host, so that a device never holds the wider copy; always copied, because jax may
  # otherwise alias a host array that is a view of the mapped file.
  return jnp.array(value.astype(leaf.dtype, copy=False), copy=True)


def _without_tied_head(tensors, head: str, embed: str, source: str):
  """The tensors without the head of a tied model, which may be there if it is the embedding."""
  if head not in tensors or embed not in tensors:
    return tensors
  same = tensors[head].shape == tensors[embed].shape
  if not (same and np.array_equal(tensors[head].read(), tensors[embed].read())):
    raise CheckpointError(f"{source}: the config ties the embeddings, but tensor {head} differs from {embed}")
  return {name: tensor for name, tensor in tensors.items() if name != head}


def check_tensors(
  wanted: Mapping[str, tuple[int, ...]],
  tensors: Mapping[str, StoredTensor],
  source: str,
  what: str,
  alone: Mapping[str, str] | None = None,
) -> None:
  """Raises `CheckpointError` unless the file holds the tensors of ``wanted``, in these shapes, and no others.

  The other arguments are those of `fill_module`.
  """
  alone = alone or {}
  missing = [name for name in wanted if name not in tensors]
  if len(missing) == 1 and missing[0] in alone:
    raise CheckpointError(f"{source}: {alone[missing[0]]}")
  if missing:
    raise CheckpointError(f"{source}: {_count(missing, 'tensor')} missing: {_abbreviate(missing)}")
  for name, shape in wanted.items():
    if tensors[name].shape != shape:
      raise CheckpointError(
        f"{source}: tensor {name} has shape {list(tensors[name].shape)}; the config asks for {list(shape)}"
      )
  extra = [name for name in tensors if name not in wanted and not _HARMLESS.search(name)]
  if extra:
    raise CheckpointError(
      f"{source}: {_count(extra, 'tensor')} with no place in {what}: {_abbreviate(extra)}"
    )


def _count(names: list[str], what: str) -> str:
  return f"{len(names)} {what}" + ("" if len(names) == 1 else "s")


def _abbreviate(names: list[str]) -> str:
  shown = ", ".join(names[:_LISTED])
  return shown if len(names) <= _LISTED else f"{shown}, … ({len(names) - _LISTED} more)"
