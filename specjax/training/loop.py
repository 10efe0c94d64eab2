"""One training loop for all heads.

Its state is the parameters, the optimizer's state and the step; all else follows from settings and step. So a
run that was killed goes on from its last checkpoint and ends with the same bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.models import Decoder
from specjax.training.batches import Batch, Order, Packed
from specjax.training.recipes import Recipe, acceptance, reference
from specjax.training.records import Checkpoints, Records
from specjax.training.step import Parts, TrainConfig, TrainState, make_optimizer, make_step, with_features

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pace:
  """What of a run depends on the clock, and changes nothing of its result.

  Attributes:
    checkpoint_minutes: from one checkpoint to the next; one comes at the end.
    minutes: after so many the run writes a checkpoint and ends, to be gone on with; 0: it ends when done.
    clock: seconds.
  """

  checkpoint_minutes: float = 5.0
  minutes: float = 0.0
  clock: Callable[[], float] = time.monotonic

  def __post_init__(self):
    for name in ("checkpoint_minutes", "minutes"):
      if not 0 <= getattr(self, name) < float("inf"):
        raise ValueError(f"{name} = {getattr(self, name)}; it must not be below 0")


class Writer(Protocol):
  """Where scalars of the log go besides, e.g. a ``clu.metric_writers.MetricWriter``."""

  def write_scalars(self, step: int, scalars: dict[str, float]) -> None: ...

  def flush(self) -> None: ...


class Trained(NamedTuple):
  """What `train` returns: the head as it is now, the steps done, and whether these were all."""

  module: nnx.Module
  step: int
  finished: bool


class _Placement:
  """Where arrays lie: rows of a batch over the mesh's ``data`` axis, all else on every device."""

  def __init__(self, mesh: Mesh | None):
    self._rows = None if mesh is None else NamedSharding(mesh, PartitionSpec("data"))
    self._whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())

  def batch(self, batch: Batch) -> Batch:
    return jax.tree.map(jnp.asarray, batch) if self._rows is None else jax.device_put(batch, self._rows)

  def whole(self, tree: Any) -> Any:
    return jax.tree.map(jnp.asarray, tree) if self._whole is None else jax.device_put(tree, self._whole)


class Judge:
  """Held-out acceptance by position. What the target says there is computed once and kept on the host."""

  def __init__(self, recipe: Recipe, parts: Parts, rest, frozen, held_out: Packed, rows: int, place):
    self._rest, self._frozen, self._place = rest, frozen, place

    @jax.jit
    def prepare(params, rest, frozen, batch):
      ids = parts.merge(params, rest).ids
      known = with_features(recipe, frozen, batch)
      return known.taps if batch.taps is None else None, *reference(frozen, known, ids)

    @jax.jit
    def evaluate(params, rest, frozen, batch):
      return recipe.evaluate(parts.merge(params, rest), frozen, batch)

    self._evaluate, self._batches = evaluate, []
    params = place.whole(parts.params)
    for start in range(0, held_out.num_rows, rows):
      numbers = np.full(rows, -1)
      real = np.arange(start, min(start + rows, held_out.num_rows))
      numbers[: len(real)] = real
      batch = held_out.read(numbers)
      taps, best, mass = prepare(params, rest, frozen, place.batch(batch))
      taps = batch.taps if taps is None else np.asarray(taps)
      batch = batch.replace(taps=taps, best=np.asarray(best), mass=np.asarray(mass))
      self._batches.append(batch)

  def __call__(self, params: dict[str, Array]) -> dict[str, Any]:
    """See `recipes.acceptance`."""
    totals = None
    for batch in self._batches:
      sums = self._evaluate(params, self._rest, self._frozen, self._place.batch(batch))
      sums = jax.tree.map(lambda x: np.asarray(x, np.float64), sums)
      totals = sums if totals is None else jax.tree.map(np.add, totals, sums)
    return acceptance(totals)


def train(
  recipe: Recipe,
  module: nnx.Module,
  frozen: Decoder,
  data: Packed,
  held_out: Packed | None,
  config: TrainConfig,
  records: Records,
  *,
  pace: Pace | None = None,
  mesh: Mesh | None = None,
  writers: Sequence[Writer] = (),
  after_step: Callable[[int], None] = lambda step: None,
) -> Trained:
  """Trains a head, or goes on with it.

  Args:
    module: the head as `Recipe.init` made it.
    frozen: the target; without its layers (`recipes.without_layers`) if the batches bring features and the
      recipe does not change it.
    data: what is trained on.
    held_out: what acceptance is measured on; None: nothing.
    records: the run's folder.
    pace: checkpoints and an early end.
    mesh: rows of a batch go over its ``data`` axis; parameters lie on every device.
    writers: what else is told of the log.
    after_step: called with the number of steps done behind each one.

  Raises:
    ValueError: rows that the mesh does not divide, rows too short for the depths, features that are
      neither recorded nor can be computed, or a checkpoint that does not fit.
  """
  pace = pace or Pace()
  _check(recipe, frozen, data, held_out, config, mesh)
  began, place, order = pace.clock(), _Placement(mesh), Order(data.num_rows, config.batch_rows, config.seed)
  parts = Parts(module)
  rest, frozen = place.whole(parts.rest), place.whole(frozen)
  optimizer, _ = make_optimizer(config, recipe.rate)
  state = TrainState(parts.params, optimizer.init(parts.params), jnp.int32(0))
  with contextlib.ExitStack() as stack:
    checkpoints = stack.enter_context(Checkpoints(records.folder))
    start = checkpoints.latest
    state = place.whole(state if start is None else checkpoints.restore(state))
    records.keep(-1 if start is None else start)
    done = start or 0
    log = stack.enter_context(contextlib.closing(_Log(records, order, data, config, pace, writers, done)))
    judge = None
    if held_out is not None and done < config.steps:
      judge = Judge(recipe, parts, rest, frozen, held_out, config.part_rows, place)
      if start is None:
        log.held_out(0, judge(state.params))
    step, saved = make_step(recipe, parts, config, mesh), pace.clock()
    while done < config.steps:
      state, metrics = step(state, rest, frozen, place.batch(data.read(order.rows(done))))
      done += 1
      log.step(done, metrics)
      if judge is not None and _due(done, config.evaluate_every, config.steps):
        log.held_out(done, judge(state.params))
      now, last = pace.clock(), done == config.steps
      stop = bool(pace.minutes) and now - began >= 60 * pace.minutes
      if last or stop or now - saved >= 60 * pace.checkpoint_minutes:
        checkpoints.save(done, state)
        saved = now
      after_step(done)
      if stop:
        break
  return Trained(parts.merge(state.params, parts.rest), done, done == config.steps)


def _due(step: int, every: int, last: int) -> bool:
  return step == last or (every > 0 and step % every == 0)


class _Log:
  """Rows of the log, writers and the progress bar."""

  def __init__(self, records: Records, order, data, config, pace, writers, done: int):
    self._records, self._writers, self._config, self._clock = records, writers, config, pace.clock
    self._tokens = lambda steps: order.tokens(data.row_tokens, steps)
    self._spent = max((row["seconds"] for row in records.rows), default=0.0)
    self._began = self._logged = pace.clock()
    self._at = done
    self._bar = tqdm.tqdm(
      total=self._tokens(config.steps),
      initial=self._tokens(done),
      unit="token",
      unit_scale=True,
      desc="training",
      file=sys.stderr,
    )

  def step(self, step: int, metrics: dict[str, Array]) -> None:
    """Adds a row if one is due; waits for the step only then."""
    if not _due(step, self._config.log_every, self._config.steps):
      return
    metrics = jax.tree.map(np.asarray, metrics)
    if not (np.isfinite(metrics["total"]) and np.isfinite(metrics["gradient"])):
      why = f"loss {metrics['total']:g}, gradient {metrics['gradient']:g}"
      raise ValueError(f"step {step}: {why} are not finite; lower the learning rate")
    count = np.maximum(metrics["count"], 1)
    now, tokens = self._clock(), self._tokens(step)
    rate = (tokens - self._tokens(self._at)) / max(now - self._logged, 1e-9)
    self._at, self._logged = step, now
    row = {
      "loss": float(metrics["total"]),
      "learning_rate": float(metrics["learning_rate"]),
      "gradient": float(metrics["gradient"]),
    }
    if "kl" in metrics:
      nats, places = metrics.pop("kl")
      row["kl"] = float(nats / max(places, 1))
    # Sums by depth: the loss, agreement, and what a recipe adds of its own.
    sums = {name: values for name, values in metrics.items() if values.ndim and name != "count"}
    row |= {f"{name}_by_depth": (values / count).tolist() for name, values in sums.items()}
    self._add(step, row, tokens_per_s=rate)
    self._bar.set_postfix(step=step, loss=f"{row['loss']:.3f}", refresh=False)
    self._bar.update(tokens - self._bar.n)

  def held_out(self, step: int, figures: dict[str, Any]) -> None:
    self._add(step, {"held_out": figures})
    self._logged = self._clock()  # evaluation is not training

  def _add(self, step: int, values: dict[str, Any], **more: Any) -> None:
    seconds = self._spent + self._clock() - self._began
    self._records.append(
      {"step": step, "tokens": self._tokens(step), **values, "seconds": round(seconds, 2), **more}
    )
    for writer in self._writers:
      writer.write_scalars(step, scalars(values))

  def close(self) -> None:
    self._bar.close()
    for writer in self._writers:
      writer.flush()


def scalars(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
  """Nested figures as ``name/inner/index`` → number; what is not known is left out."""
  flat: dict[str, float] = {}
  for name, value in values.items():
    if isinstance(value, list):
      value = dict(enumerate(value))
    if isinstance(value, dict):
      flat |= scalars(value, f"{prefix}{name}/")
    elif value is not None:
      flat[f"{prefix}{name}"] = value
  return flat


def _check(recipe: Recipe, frozen: Decoder, data: Packed, held_out: Packed | None, config, mesh) -> None:
  devices = 1 if mesh is None else dict(mesh.shape).get("data", 1)
  if mesh is not None and set(mesh.shape) != {"data"}:
    raise ValueError(f"mesh = {dict(mesh.shape)}; training goes over one axis, data")
  if config.part_rows % devices:
    raise ValueError(f"{config.part_rows} rows at once do not divide over {devices} devices")
  for packed in (data,) if held_out is None else (data, held_out):
    most = max(recipe.depth, recipe.judged or 0)
    if packed.width <= most:
      raise ValueError(f"rows of {packed.row_length} tokens are too short for drafts of {most}")
    if (recipe.changes_target or not packed.has_features) and not len(frozen.layers):
      why = "training changes it" if recipe.changes_target else "no features were recorded"
      raise ValueError(f"{why}, and the target is without its layers: pass it whole")
