"""One optimizer step, the same for all heads: compiled once, its state donated."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.checkpoints.fill import path_of
from specjax.models import Decoder
from specjax.training.batches import Batch
from specjax.training.packed import hidden_states
from specjax.training.recipes import Recipe

Array = jax.Array

_BETAS = (0.9, 0.95)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
  """How a run goes.

  Attributes:
    steps: optimizer steps.
    batch_rows: B, packed rows a step.
    accumulate: parts a step's rows are cut into, one after the other, to save memory.
    learning_rate: the highest one.
    warmup: share of the steps over which it rises to that from 0; then it falls to 0 as a cosine.
    weight_decay: of weights; norms and biases have none.
    clip: longest gradient, in the 2-norm of all parameters; 0: any.
    seed: of the order of the rows, and of noise.
    log_every: steps from one row of the log to the next.
    evaluate_every: steps from one evaluation to the next; one comes before the first step and one at the
      end. 0: these two.
  """

  steps: int
  batch_rows: int = 4
  accumulate: int = 1
  learning_rate: float = 1e-3
  warmup: float = 0.1
  weight_decay: float = 0.01
  clip: float = 1.0
  seed: int = 0
  log_every: int = 1
  evaluate_every: int = 0

  def __post_init__(self):
    for name in ("steps", "batch_rows", "accumulate", "log_every"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} = {getattr(self, name)}; it must be at least 1")
    for name in ("weight_decay", "clip", "evaluate_every", "seed"):
      if not 0 <= getattr(self, name) < float("inf"):
        raise ValueError(f"{name} = {getattr(self, name)}; it must not be below 0")
    if not 0 < self.learning_rate <= 1:
      raise ValueError(f"learning_rate = {self.learning_rate}; it must be in (0, 1]")
    if not 0 <= self.warmup <= 1:
      raise ValueError(f"warmup = {self.warmup}; it must be in [0, 1]")
    if self.batch_rows % self.accumulate:
      raise ValueError(f"accumulate = {self.accumulate} does not divide batch_rows = {self.batch_rows}")

  @property
  def part_rows(self) -> int:
    """Rows that go through the head at once."""
    return self.batch_rows // self.accumulate


@flax.struct.dataclass
class TrainState:
  """What a checkpoint holds: parameters by path, optax's state, and the steps done, int32 ``[]``."""

  params: dict[str, Array]
  optimizer: Any
  step: Array


class Parts:
  """A head taken apart: parameters (`nnx.Param`), which are trained, and the rest, which is not."""

  def __init__(self, module: nnx.Module):
    self._graph, params, self.rest = nnx.split(module, nnx.Param, ...)
    flat = nnx.to_flat_state(params)
    # Copied: the state is donated, and the head may share arrays with the target.
    self.params = {path_of(path): jnp.array(leaf.get_value(), jnp.float32) for path, leaf in flat}
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    self._leaves = [(path, jax.tree.map(shape, leaf)) for path, leaf in flat]

  def merge(self, params: dict[str, Array], rest: Any) -> Any:
    """The head with these parameters."""
    filled = [(path, leaf.replace(params[path_of(path)])) for path, leaf in self._leaves]
    return nnx.merge(self._graph, nnx.from_flat_state(filled), rest)


def make_optimizer(
  config: TrainConfig, rate: Callable[[str], float] = lambda name: 1.0
) -> tuple[optax.GradientTransformation, optax.Schedule]:
  """AdamW with warm-up, cosine and clipping; and its learning rate by step.

  Args:
    rate: of that learning rate, what the parameter of a path has; see `Recipe.rate`.
  """
  schedule = optax.warmup_cosine_decay_schedule(
    0.0, config.learning_rate, min(round(config.warmup * config.steps), config.steps - 1), config.steps
  )
  weights = lambda params: {
    name: leaf.ndim > 1 and not name.endswith("bias") for name, leaf in params.items()
  }
  adamw = optax.adamw(schedule, *_BETAS, weight_decay=config.weight_decay, mask=weights)
  clip = optax.clip_by_global_norm(config.clip) if config.clip else optax.identity()
  rated = optax.stateless(lambda updates, _: {name: rate(name) * leaf for name, leaf in updates.items()})
  return optax.chain(clip, adamw, rated), schedule


def with_features(recipe: Recipe, frozen: Decoder, batch: Batch) -> Batch:
  """The batch with the target's hidden states, from a forward of the target if it brings none."""
  if batch.taps is not None:
    return batch
  _, taps = hidden_states(frozen, batch, recipe.taps(frozen.config))
  return batch.replace(taps=jax.lax.stop_gradient(taps))


def make_gradients(recipe: Recipe, parts: Parts, accumulate: int = 1):
  """``(params, rest, frozen, batch, key) → (gradients, loss, metrics)``, means over the learned tokens."""

  def loss(params, rest, frozen, batch, key):
    module = parts.merge(params, rest)
    return recipe.loss_sums(module, frozen, with_features(recipe, frozen, batch), key)

  def of_part(params, rest, frozen, batch, key):
    (value, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(params, rest, frozen, batch, key)
    return gradients, value, metrics

  def gradients(params, rest, frozen, batch, key):
    if accumulate == 1:
      sums = of_part(params, rest, frozen, batch, key)
    else:
      # Every accumulate-th row: what lies on one device stays there.
      cut = lambda x: x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1)
      cuts = jax.tree.map(cut, batch), jax.random.split(key, accumulate)
      at = lambda i: jax.tree.map(lambda x: x[i], cuts)
      add = lambda sums, part: (jax.tree.map(jnp.add, sums, of_part(params, rest, frozen, *part)), None)
      shapes = jax.eval_shape(lambda: of_part(params, rest, frozen, *at(0)))
      zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
      sums, _ = jax.lax.scan(add, zeros, cuts)
    learned = jnp.maximum((batch.counted >= 0).sum(), 1).astype(jnp.float32)
    gradients, value, metrics = sums
    return jax.tree.map(lambda x: x / learned, gradients), value / learned, metrics

  return gradients


def make_step(recipe: Recipe, parts: Parts, config: TrainConfig, mesh: Mesh | None):
  """The compiled step: ``(state, rest, frozen, batch) → (state, metrics)``; the state is donated."""
  optimizer, schedule = make_optimizer(config, recipe.rate)
  gradients_of = make_gradients(recipe, parts, config.accumulate)

  @functools.partial(jax.jit, donate_argnums=0)
  def step(state: TrainState, rest, frozen, batch):
    key = jax.random.fold_in(jax.random.key(config.seed), state.step)
    gradients, loss, metrics = gradients_of(state.params, rest, frozen, batch, key)
    updates, opt = optimizer.update(gradients, state.optimizer, state.params)
    metrics |= {
      "total": loss,
      "gradient": optax.tree.norm(gradients),
      "learning_rate": schedule(state.step),
    }
    state = TrainState(optax.apply_updates(state.params, updates), opt, state.step + 1)
    if mesh is not None:
      state = jax.lax.with_sharding_constraint(state, NamedSharding(mesh, PartitionSpec()))
    return state, metrics

  return step
