"""Parameters on a mesh: rows of a batch over ``data``, heads and feed-forward over ``model``."""

from __future__ import annotations

import math

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specjax.models.decoder import Decoder

# Axis of each weight that is cut over ``model``: outputs of the first product of a pair, inputs of the
# second, so that a layer needs one sum over devices after attention and one after the feed-forward.
_MODEL_AXIS = {
  ("attention", "q"): 0,
  ("attention", "k"): 0,
  ("attention", "v"): 0,
  ("attention", "o"): 1,
  ("ff", "gate"): 0,
  ("ff", "up"): 0,
  ("ff", "down"): 1,
  ("head",): 0,
  ("embed",): 0,
}


def parse_mesh(text: str) -> dict[str, int]:
  """``"data:2,model:4"`` → sizes by axis; an empty text has none.

  Raises:
    ValueError: unknown or repeated axis, or a size that is no positive integer.
  """
  sizes = {}
  for part in text.split(",") if text else ():
    axis, _, size = part.partition(":")
    if axis not in ("data", "model") or axis in sizes or not size.isdecimal() or int(size) < 1:
      raise ValueError(f"mesh = {text!r}; it must look like data:2,model:4, with axes data and model")
    sizes[axis] = int(size)
  return sizes


def make_mesh(text: str) -> Mesh | None:
  """A mesh over the first devices of this process, from the text of `parse_mesh`; None for an empty text.

  Raises:
    ValueError: also when there are too few devices.
  """
  sizes = parse_mesh(text)
  if not sizes:
    return None
  count = math.prod(sizes.values())
  devices = jax.local_devices()
  if count > len(devices):
    raise ValueError(f"mesh = {text!r} needs {count} devices; there are {len(devices)}")
  # Auto axes: the compiler places what the parameters' and the state's shardings leave open.
  auto = (AxisType.Auto,) * len(sizes)
  return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=auto, devices=devices[:count])


def _spec(path: tuple, leaf, model_size: int, config) -> PartitionSpec:
  names = tuple(str(getattr(key, "key", getattr(key, "name", key))) for key in path)
  for suffix, axis in _MODEL_AXIS.items():
    start = next((i for i in range(len(names)) if names[i : i + len(suffix)] == suffix), None)
    if start is None:
      continue
    whole_heads = {
      "q": config.num_heads,
      "k": config.num_kv_heads,
      "v": config.num_kv_heads,
      "o": config.num_heads,
    }
    units = whole_heads.get(suffix[-1], leaf.shape[axis if leaf.ndim > 1 else 0])
    if units % model_size:
      return PartitionSpec()  # does not divide: replicated
    if leaf.ndim == 1:  # a bias belongs to the outputs
      return PartitionSpec("model") if axis == 0 else PartitionSpec()
    return PartitionSpec(*("model" if i == axis else None for i in range(leaf.ndim)))
  return PartitionSpec()


def parameter_shardings(model: Decoder, mesh: Mesh) -> nnx.State:
  """Where each parameter lies, a tree like ``nnx.state(model)``; abstract models (shapes only) will do."""
  model_size = dict(mesh.shape).get("model", 1)

  def sharding(path, leaf):
    spec = _spec(path, leaf, model_size, model.config) if model_size > 1 else PartitionSpec()
    return NamedSharding(mesh, spec)

  return jax.tree_util.tree_map_with_path(sharding, nnx.state(model))


def shard_model(model: Decoder, mesh: Mesh) -> Decoder:
  """The model with its parameters on the mesh; what a device count does not divide is replicated."""
  graph, params = nnx.split(model)
  sharded = nnx.merge(graph, jax.tree.map(jax.device_put, params, parameter_shardings(model, mesh)))
  sharded.mesh = mesh
  return sharded
