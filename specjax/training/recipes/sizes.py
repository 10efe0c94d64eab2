"""Features of one size: what heads that read the target's hidden states are trained on.

While training, a head's `fc` is multiplied by the usual sizes of its inputs (`features.usual_sizes`), and
divided by them wherever it is used: the numbers of a target's hidden states are of very different size, and
one rate of learning suits none of them. The head that is saved knows nothing of it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


class FeatureSizes(nnx.Variable):
  """Float32, as many as the columns of `fc`: what its inputs are divided by while training; never trained."""


def set_sizes(module: Any, sizes: np.ndarray) -> None:
  """Gives a fresh head the usual sizes of what its `fc` takes; its weight is that of inputs of size 1."""
  module.sizes = FeatureSizes(jnp.asarray(sizes, jnp.float32).reshape(-1))


def on_raw_features(module: Any) -> Any:
  """The head as it decodes: its `fc` divided by the sizes, which are gone."""
  part = nnx.clone(module)
  part.fc.weight[...] = part.fc.weight[...] / part.sizes[...]
  del part.sizes
  return part


def on_sized_features(module: Any, sizes: jax.Array) -> Any:
  """A head that was saved, as it is trained: the way back from `on_raw_features`; changes it."""
  set_sizes(module, sizes)
  module.fc.weight[...] = module.fc.weight[...] * module.sizes[...]
  return module
