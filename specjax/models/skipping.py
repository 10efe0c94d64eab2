"""A decoder without some of its sublayers, a draft that adds no parameters (Zhang et al. 2309.08168)."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable

from flax import nnx

from specjax.models.decoder import Decoder


@dataclasses.dataclass(frozen=True)
class SkipSet:
  """Which sublayers a draft leaves out; attention and feed-forward are chosen apart.

  Attributes:
    num_layers: L, of the model.
    attention: layers whose attention is left out, ascending.
    ff: layers whose feed-forward is left out, ascending.
  """

  num_layers: int
  attention: tuple[int, ...] = ()
  ff: tuple[int, ...] = ()

  def __post_init__(self):
    if type(self.num_layers) is not int or self.num_layers < 1:
      raise ValueError(f"SkipSet.num_layers = {self.num_layers!r}; it must be an integer of at least 1")
    for name in ("attention", "ff"):
      object.__setattr__(self, name, self._checked(name, getattr(self, name)))
    if not self.attention and not self.ff:
      raise ValueError("SkipSet: nothing is left out; such a draft is the target itself")

  def _checked(self, name: str, layers: Iterable[int]) -> tuple[int, ...]:
    layers = tuple(layers)
    whole = all(type(i) is int and 0 <= i < self.num_layers for i in layers)
    if not whole or list(layers) != sorted(set(layers)):
      raise ValueError(
        f"SkipSet.{name} = {layers}; it must be ascending layers in [0, {self.num_layers - 1}], none twice"
      )
    return layers

  @property
  def prefix(self) -> int:
    """Layers before the first that lacks something: what they compute is the whole model's."""
    return min((*self.attention, *self.ff))


def skipping(model: Decoder, skips: SkipSet) -> Decoder:
  """The model without the sublayers: it adds no arrays, and its cache has the model's layers.

  Raises:
    ValueError: the skip set is of a model of another depth.
  """
  if skips.num_layers != model.config.num_layers:
    raise ValueError(
      f"skip set: num_layers = {skips.num_layers}; the model has {model.config.num_layers} layers"
    )
  thin = copy.copy(model)
  thin.layers = nnx.List([copy.copy(layer) for layer in model.layers])
  for i in skips.attention:
    thin.layers[i].attention = thin.layers[i].attention_norm = None
  for i in skips.ff:
    thin.layers[i].ff = thin.layers[i].ff_norm = None
  return thin
