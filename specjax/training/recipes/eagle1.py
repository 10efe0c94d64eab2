"""EAGLE-1 (Li et al. 2024, arXiv 2401.15077): regression of the target's next feature; EAGLE-2's head too."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, get_args

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints import save_eagle1
from specjax.models import Decoder, Eagle1, Eagle1Config
from specjax.models.eagle1 import Inputs
from specjax.training import losses
from specjax.training.batches import Batch, chain_counts, rows_at
from specjax.training.recipes.base import before, copied
from specjax.training.recipes.recurrent import Recurrent, hidden_by_step
from specjax.training.recipes.sizes import on_raw_features, set_sizes

Array = jax.Array

# What the noise of the authors' code is divided by, in tokens of a sample.
_NOISE_LENGTH = 512
# Shares of a usual size that count as none where something is divided by it.
_LEAST = 1e-2


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleOne(Recurrent):
  """Loss: feature_weight · SmoothL1(h_t, f_{t+1}) + token_weight · cross-entropy of what the target's output
  layer makes of both, each a mean over learned tokens, the first also over the D numbers of a feature.

  One depth is trained, on true features; `judged` ones follow from chains of the head's own. The output layer
  is the target's (``rank`` is not taken).

  Attributes:
    inputs: ``both``, or the ``token`` or the ``feature`` alone, for the paper's comparison of inputs.
    noise: features are disturbed by uniform noise in ± noise · 512 / T, T the sample's tokens. The paper says
      U(−0.1, 0.1); its authors' code has the factor 512 / T, so this is what their heads were trained with.
    feature_weight: 1 in the paper.
    token_weight: w_cls of the paper, 0.1.
    start: x, what the layer adds to, starts as the feature (with ``inputs=token`` as the embedding, made as
      large), and the layer as that one of the target over such numbers: see `_start_as`.
  """

  inputs: str = "both"
  noise: float = 0.1
  feature_weight: float = 1.0
  token_weight: float = 0.1
  judged: int | None = 4

  name: ClassVar[str] = "eagle"
  kind: ClassVar[str] = "eagle"

  def __post_init__(self):
    super().__post_init__()
    if self.inputs not in get_args(Inputs):
      raise ValueError(f"eagle: inputs = {self.inputs!r}; it must be one of {', '.join(get_args(Inputs))}")
    for field in ("noise", "feature_weight", "token_weight"):
      value = getattr(self, field)
      if isinstance(value, bool) or not (isinstance(value, int | float) and 0 <= value < float("inf")):
        raise ValueError(f"eagle: {field} = {value!r}; it must be a number of at least 0")
    if not self.feature_weight and not self.token_weight:
      raise ValueError("eagle: feature_weight = token_weight = 0; one of them must be above 0")
    if self.output != "target" or self.rank is not None:
      raise ValueError(
        f"eagle: output = {self.output!r}, rank = {self.rank}; its output layer is the target's, not factored"
      )

  @property
  def depth(self):
    return 1

  def taps(self, target):
    return (target.num_layers,)

  def init(self, target, stats, rngs):
    c = target.config
    ids = self.choose_ids(c, stats)
    config = Eagle1Config(
      self.layer_config(c), c.num_layers, inputs=self.inputs, draft_vocab_size=self.draft_vocab
    )
    module = Eagle1(config, target, ids=ids, dtype=jnp.float32, rngs=rngs)
    # Of the raw hidden states, the embeddings, and the features, whose root mean square is the norm's.
    hidden = np.ones(c.d_model) if stats.sizes is None else stats.sizes[-1]
    embedding = np.sqrt(np.mean(np.square(np.asarray(target.embed[...], np.float32)), axis=0))
    norm = np.abs(np.asarray(target.norm.weight[...], np.float32))
    sizes = [_floored(part) for part in (embedding, norm * hidden / _rms(hidden))]
    chosen = {"both": sizes, "token": sizes[:1], "feature": sizes[1:]}[self.inputs]
    set_sizes(module, np.concatenate(chosen))
    if self.start is not None:
      _start_as(module, target, self.start, _rms(hidden), _rms(sizes[1]))
    return module

  def features(self, head, batch):
    return head.fuse(batch.taps[:, :, -1:])

  def loss_sums(self, module, frozen, batch, key):
    head = on_raw_features(module)
    features = disturbed(self.features(head, batch), batch, self.noise, key)
    (hidden,) = hidden_by_step(head, frozen, batch, features, 1)
    # Row u - 2 says what the target's feature of u - 1 is, of which the token at u is drawn.
    said = rows_at(hidden, batch.counted - 2)
    distance = losses.smooth_l1(head.fuse(before(batch)[..., None, :]), said)
    value = losses.masked_sum(distance, chain_counts(batch, 0, self.lag))
    total, sums = self.token_sums(module, frozen, batch, [head.read(said)])
    return self.feature_weight * value + self.token_weight * total, sums | {"feature": value[None]}

  def save(self, path, module, target, *, dtype):
    save_eagle1(path, on_raw_features(module), target=target, dtype=dtype)


def disturbed(features: Array, batch: Batch, noise: float, key: Array) -> Array:
  """``features [B, T, D]`` and uniform noise in ± noise · 512 / (tokens of the place's sample)."""
  if not noise:
    return features
  same = batch.segments[:, :, None] == batch.segments[:, None, :]
  scale = noise * _NOISE_LENGTH / same.sum(axis=-1, dtype=jnp.float32)
  drawn = jax.random.uniform(key, features.shape, features.dtype, -1.0, 1.0)
  return features + scale[..., None] * drawn


def _rms(x: np.ndarray) -> float:
  """The root of the mean square."""
  return float(np.sqrt(np.mean(np.square(x))))


def _floored(sizes: np.ndarray) -> np.ndarray:
  return np.maximum(sizes, _LEAST * sizes.mean() + 1e-6)


def _start_as(module: Eagle1, target: Decoder, start: int, hidden: float, feature: float) -> None:
  """Fills the head's layer from the target's layer ``start``, over features in place of hidden states.

  With n the final norm's weight, R the size of the last hidden state s and x = n · s / R:

  - attention's own norm would give it w · s / R, so q, k and v take w / n of x;
  - what attention and feed-forward add to s is n / R of it in x;
  - the feed-forward's norm divides x by the size F of features, not by that of s: its weight is w · F / n.

  Args:
    hidden: R.
    feature: F.
  """
  chosen, layer = copied(target.layers[start]), module.layer
  norm = np.asarray(target.norm.weight[...], np.float32)
  inverse = norm / (np.square(norm) + (_LEAST * _rms(norm)) ** 2)  # 1 / n, where that is not huge
  into, out = jnp.asarray(inverse), jnp.asarray(norm / hidden)[:, None]
  layer.attention, layer.ff = chosen.attention, chosen.ff
  for name in ("q", "k", "v"):
    linear = getattr(layer.attention, name)
    linear.weight[...] = linear.weight[...] * (chosen.attention_norm.weight[...] * into)
  layer.attention.o.weight[...] = out * layer.attention.o.weight[...]
  layer.ff.down.weight[...] = out * layer.ff.down.weight[...]
  layer.ff_norm.weight[...] = chosen.ff_norm.weight[...] * into * feature
  width = target.config.d_model
  if module.config.inputs == "token":
    # The embedding, as large as a feature is.
    module.fc.weight[...] = jnp.diag(jnp.asarray(norm)) * module.sizes[...] / _rms(module.sizes[...])
  else:
    # The feature alone: of the embedding, what is of use is learned.
    columns = module.config.d_in
    module.fc.weight[...] = jnp.eye(width, columns, columns - width, dtype=jnp.float32) * module.sizes[...]
