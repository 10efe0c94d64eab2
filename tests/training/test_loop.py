"""The loop: a killed run ends with the same bits, heads learn, the log says what happened."""

import json
import os

import numpy as np
import pytest
from flax import nnx

from specjax.checkpoints import LoadedModel, load_head
from specjax.testing import tiny_model
from specjax.training.batches import Order, Packed
from specjax.training.loop import Pace, scalars, train
from specjax.training.recipes import TextStats, make_recipe, without_layers
from specjax.training.records import METRICS, Records, read_metrics
from specjax.training.step import Parts, TrainConfig
from tests.training.texts import greedy_texts, random_texts


class Killed(Exception):
  pass


class Clock:
  """A minute a step, whatever the machine does."""

  def __init__(self, dies_after: int | None = None):
    self.seconds, self.dies_after = 0.0, dies_after

  def __call__(self):
    return self.seconds

  def after_step(self, step: int) -> None:
    self.seconds += 60.0
    if step == self.dies_after:
      raise Killed


def without_times(rows):
  return [{k: v for k, v in row.items() if k not in ("seconds", "tokens_per_s")} for row in rows]


class Job:
  """A small training run that can be started again and again."""

  def __init__(self, head: str, texts, *, target=None, **config):
    self.target = target or tiny_model(0)
    self.recipe = make_recipe(head)
    self.data = Packed(texts, range(len(texts)), row_length=32)
    self.config = TrainConfig(**{"steps": 8, "batch_rows": 2, "evaluate_every": 4, "seed": 3} | config)

  def run(self, folder, *, clock=None, settings=None, **kwargs):
    clock = clock or Clock()
    module = self.recipe.init(self.target, TextStats(np.ones(61)), nnx.Rngs(0))
    pace = Pace(checkpoint_minutes=kwargs.pop("checkpoint_minutes", 3), clock=clock, **kwargs.pop("pace", {}))
    records = Records(str(folder), settings or {"head": self.recipe.name})
    arguments = self.recipe, module, self.target, self.data, self.data, self.config, records
    return train(*arguments, pace=pace, after_step=clock.after_step, **kwargs)


@pytest.fixture(scope="module")
def job():
  return Job("medusa[heads=2,draft_vocab=30]", random_texts(0, [13, 20, 9, 24, 30, 18, 11]))


@pytest.fixture(scope="module")
def whole(job, tmp_path_factory):
  """A run that was never interrupted: its folder, and its parameters."""
  folder = tmp_path_factory.mktemp("run") / "whole"
  trained = job.run(folder)
  assert trained.finished and trained.step == 8
  return folder, Parts(trained.module).params


def test_a_killed_run_ends_with_the_same_bits(job, whole, tmp_path):
  """Killed two steps behind a checkpoint, then stopped by the clock, then finished.

  Fails when the order of the rows, the optimizer's state or the step starts anew, or the log keeps rows of
  steps that are done again.
  """
  folder = tmp_path / "killed"
  with pytest.raises(Killed):
    job.run(folder, clock=Clock(dies_after=6))
  assert sorted(os.listdir(folder / "checkpoints")) == ["4"]
  (folder / METRICS).write_text((folder / METRICS).read_text() + '{"step": 7, "lo')  # torn by the kill
  stopped = job.run(folder, pace={"minutes": 1})
  assert (stopped.finished, stopped.step) == (False, 6)
  (folder / "checkpoints" / "9.orbax-checkpoint-tmp").mkdir()  # a checkpoint that was being written
  trained = job.run(folder)
  assert trained.finished
  params = Parts(trained.module).params
  assert params.keys() == whole[1].keys()
  for name, value in whole[1].items():
    np.testing.assert_array_equal(params[name], value, err_msg=name)
  assert without_times(read_metrics(str(folder))) == without_times(read_metrics(str(whole[0])))
  again = job.run(folder)  # nothing left to do
  np.testing.assert_array_equal(Parts(again.module).params["blocks.0.weight"], params["blocks.0.weight"])


def test_killed_before_the_first_checkpoint(job, whole, tmp_path):
  with pytest.raises(Killed):
    job.run(tmp_path, clock=Clock(dies_after=2))
  trained = job.run(tmp_path)
  np.testing.assert_array_equal(Parts(trained.module).params["blocks.0.weight"], whole[1]["blocks.0.weight"])
  assert without_times(read_metrics(str(tmp_path))) == without_times(read_metrics(str(whole[0])))


def test_the_last_two_checkpoints_are_kept(job, tmp_path):
  job.run(tmp_path, checkpoint_minutes=0)
  assert sorted(os.listdir(tmp_path / "checkpoints")) == ["7", "8"]


def test_the_log(job, whole):
  """A row a step, held-out figures before the first, when due and at the end; numbers that add up."""
  rows = read_metrics(str(whole[0]))
  steps = [row for row in rows if "loss" in row]
  held_out = [row for row in rows if "held_out" in row]
  assert [row["step"] for row in steps] == list(range(1, 9))
  assert [row["step"] for row in held_out] == [0, 4, 8]
  assert steps[0]["learning_rate"] == 0 < steps[2]["learning_rate"]  # one step of warm-up, from 0
  assert all(row["gradient"] > 0 and len(row["loss_by_depth"]) == 2 for row in steps)
  assert [row["seconds"] for row in steps] == [60 * i for i in range(8)]
  order = Order(job.data.num_rows, 2, seed=3)
  assert [row["tokens"] for row in steps] == [order.tokens(job.data.row_tokens, i) for i in range(1, 9)]
  for row in held_out:
    figures = row["held_out"]
    assert figures.keys() == {"acceptance", "agreement", "overlap", "ranks", "coverage", "tau"}
    assert all(len(figures[key]) == 2 for key in ("acceptance", "agreement", "overlap", "ranks"))
    assert 0 < figures["coverage"] < 1 <= figures["tau"] <= 3
  assert scalars(held_out[0])["held_out/agreement/1"] == held_out[0]["held_out"]["agreement"][1]


def test_writers_hear_the_log(job, tmp_path):
  """What TensorBoard would be told: numbers, by step."""

  class Writer:
    def __init__(self):
      self.told, self.flushed = [], False

    def write_scalars(self, step, scalars):
      assert all(isinstance(value, float) for value in scalars.values())
      self.told.append((step, sorted(scalars)[0]))

    def flush(self):
      self.flushed = True

  writer = Writer()
  job.run(tmp_path, writers=[writer])
  assert writer.flushed and writer.told[0] == (0, "held_out/acceptance/0")
  assert (8, "agreed_by_depth/0") in writer.told


def test_settings_of_a_folder_are_the_runs(job, whole, tmp_path):
  """Another setting is an error that names it, and so is a folder of something else."""
  with pytest.raises(ValueError, match="with head = 'medusa'; now it is 'eagle3'"):
    Records(str(whole[0]), {"head": "eagle3"})
  (tmp_path / "notes.txt").write_text("mine")
  with pytest.raises(ValueError, match="not empty and holds no training run"):
    Records(str(tmp_path), {})
  config = json.loads((whole[0] / "config.json").read_text())
  assert config["settings"] == {"head": "medusa"}


def test_a_checkpoint_of_another_head(whole, tmp_path):
  other = Job("medusa[heads=3,draft_vocab=30]", random_texts(0, [13, 20, 9, 24]))
  with pytest.raises(ValueError, match="checkpoint of step 8 cannot be read"):
    other.run(whole[0])


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
  target = tiny_model(0)
  target.norm.weight[...] = target.norm.weight[...].at[0].set(np.nan)
  with pytest.raises(ValueError, match="step 1: loss nan"):
    Job("medusa[heads=2]", random_texts(0, [20, 20]), target=target).run(tmp_path)
  assert not os.listdir(tmp_path / "checkpoints")


@pytest.mark.parametrize(
  ("values", "words"),
  [
    (dict(steps=0), "steps = 0"),
    (dict(learning_rate=0.0), "learning_rate = 0"),
    (dict(learning_rate=float("nan")), "learning_rate = nan"),
    (dict(batch_rows=6, accumulate=4), "accumulate = 4 does not divide batch_rows = 6"),
    (dict(warmup=1.5), "warmup = 1.5"),
    (dict(clip=-1.0), "clip = -1"),
  ],
)
def test_bad_settings_are_named(values, words):
  with pytest.raises(ValueError, match=words):
    TrainConfig(**{"steps": 1} | values)


def test_what_cannot_be_trained(job, tmp_path):
  """Said before anything compiles."""
  short = Job("medusa[heads=20]", random_texts(0, [13, 20]))
  with pytest.raises(ValueError, match="too short for drafts of 20"):
    short.run(tmp_path / "short")
  bare = Job("medusa", random_texts(0, [13, 20]), target=without_layers(tiny_model(0)))
  with pytest.raises(ValueError, match="target is without its layers"):
    bare.run(tmp_path / "bare")


HEADS = {
  "distilled": ("distilled[layers=(0,),output=own,judged=3]", 200, 1e-2),
  "medusa": ("medusa[heads=2,output=own]", 300, 2e-2),
  "eagle": ("eagle[noise=0,judged=3]", 300, 1e-2),
  "eagle3": ("eagle3[steps=3,tap_layers=(0,1,2)]", 200, 1e-2),
  "early_exit": ("early_exit[exit=1,judged=3]", 300, 2e-2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_every_head_learns_a_few_samples_by_heart(name, tmp_path):
  """Greedy text of the target; accepted at every depth, and again once written and loaded."""
  head, steps, rate = HEADS[name]
  target = tiny_model(0)
  texts = greedy_texts(target, random_texts(7, [4] * 4).padded(4), 16)
  job = Job(head, texts, target=target, steps=steps, learning_rate=rate, evaluate_every=0)
  trained = job.run(tmp_path / "run")
  rows = [row["held_out"] for row in read_metrics(str(tmp_path / "run")) if "held_out" in row]
  # Null where no chain got so far.
  assert min(share or 0.0 for share in rows[0]["acceptance"]) < 0.7
  assert min(rows[-1]["acceptance"]) > 0.9, rows[-1]
  job.recipe.save(str(tmp_path / "head"), trained.module, "tiny", dtype=np.float32)
  loaded = load_head(str(tmp_path / "head"), LoadedModel(target, None, "tiny")).module
  # As training has it: what its inputs are divided by is out of an EAGLE head's `fc` again.
  loaded = job.recipe.go_on(nnx.clone(trained.module), loaded)
  for name, value in Parts(trained.module).params.items():
    np.testing.assert_allclose(Parts(loaded).params[name], value, rtol=1e-6, err_msg=name)
