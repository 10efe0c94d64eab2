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


def make_mesh(spec: str) -> Mesh:
  """``"data:2,model:4"`` → a mesh over the first 8 devices.

  Raises:
    ValueError: unknown axis, sizes that are no positive integers, or more devices than there are.
  """
  sizes = {}
  for part in spec.split(","):
    axis, _, size = part.partition(":")
    if axis not in ("data", "model") or axis in sizes or not size.isdigit() or int(size) < 1:
      raise ValueError(f"mesh = {spec!r}; it must look like data:2,model:4")
    sizes[axis] = int(size)
  count = math.prod(sizes.values())
  if count > jax.device_count():
    raise ValueError(f"mesh = {spec!r} needs {count} devices; there are {jax.device_count()}")
  # Auto axes: the compiler places what the parameters' and the state's shardings leave open.
  auto = (AxisType.Auto,) * len(sizes)
  return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=auto, devices=jax.devices()[:count])


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


def shard_model(model: Decoder, mesh: Mesh) -> Decoder:
  """The model with its parameters on the mesh; what a device count does not divide is replicated."""
  graph, params = nnx.split(model)
  model_size = dict(mesh.shape).get("model", 1)

  def place(path, leaf):
    spec = _spec(path, leaf, model_size, model.config) if model_size > 1 else PartitionSpec()
    return jax.device_put(leaf, NamedSharding(mesh, spec))

  return nnx.merge(graph, jax.tree_util.tree_map_with_path(place, params))
