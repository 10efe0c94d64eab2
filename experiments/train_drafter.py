"""Trains a draft head on text of the target's own; a killed or stopped run goes on with the same command.

  python -m experiments.train_drafter --head="eagle3[steps=4,draft_vocab=8192]" --data=DATA --output=RUN

`--data` is a folder written by experiments.distill_data, or several: A,B. The run folder ends with
``config.json`` (flags, versions, hashes, the result), ``metrics.jsonl``, ``curves.png`` and ``head/``, the
trained head, for `--drafter_path`. Nothing of the result depends on time: --minutes and --checkpoint_minutes
may change between parts of a run.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx

from experiments import flags as shared
from experiments import heads as trained
from experiments import measure, plots, results, runtime, training_plots
from specjax.checkpoints import LoadedModel, load_head, save_hf
from specjax.checkpoints.fill import path_of
from specjax.models import Decoder
from specjax.models.sharding import parse_mesh
from specjax.training import features, vocabulary
from specjax.training.batches import Packed, split
from specjax.training.data import Dataset
from specjax.training.distill import model_digest
from specjax.training.loop import Pace, Trained, train
from specjax.training.recipes import RECIPES, Recipe, TextStats, make_recipe, without_layers
from specjax.training.records import CURVES, HEAD, TARGET, Records
from specjax.training.step import TrainConfig

HEAD_FLAG = flags.DEFINE_string(
  "head",
  "",
  f"What to train: one of {', '.join(RECIPES)}, options in brackets: eagle3[steps=4,draft_vocab=8192], "
  "eagle[start=28,draft_vocab=8192], "
  "medusa[heads=4,draft_vocab=8192], distilled[layers=(0,29),output=own,draft_vocab=8192,rank=128], "
  "block[size=6,markov=64,draft_vocab=8192], early_exit[exit=6,draft_vocab=8192], medusa2[heads=4,lora=32] "
  "(changes the target, too; --start_from a medusa). For all: draft_vocab (the target's most frequent "
  "tokens; all if not given), rank (of an output layer of its own), loss (cross_entropy, kl, total_variation "
  "or log_acceptance on the target's probabilities, tokens on the text), decay (weight of depth d is "
  "decay ** d), judged (depths of held-out acceptance).",
)
DATA = flags.DEFINE_list(
  "data", [], "Folders of data sets, written by experiments.distill_data.", allow_override=True
)
START_FROM = flags.DEFINE_string(
  "start_from", "", "Folder of a head like --head that is trained on, e.g. one that saw less data."
)
STEPS = flags.DEFINE_integer("steps", None, "Optimizer steps. Default: as --epochs says.", 1)
EPOCHS = flags.DEFINE_float(
  "epochs", 1.0, "Times that the data are seen, if --steps is not given.", 1e-3, 1e4
)
ROW_LENGTH = flags.DEFINE_integer(
  "row_length", 512, "Tokens a packed row; longer samples are cut.", 16, 2**17
)
BATCH_ROWS = flags.DEFINE_integer("batch_rows", 4, "Packed rows a step.", 1)
ACCUMULATE = flags.DEFINE_integer("accumulate", 1, "Parts a step is computed in, to save memory.", 1)
LEARNING_RATE = flags.DEFINE_float("learning_rate", 1e-3, "Highest learning rate.", 0.0, 1.0)
WARMUP = flags.DEFINE_float("warmup_share", 0.1, "Share of the steps with a rising rate.", 0.0, 1.0)
WEIGHT_DECAY = flags.DEFINE_float("weight_decay", 0.01, "Of weights; norms and biases have none.", 0.0)
CLIP = flags.DEFINE_float("clip", 1.0, "Longest gradient; 0 is any.", 0.0)
MAX_TOKENS = flags.DEFINE_integer("max_tokens", None, "Train on the first so many tokens. Default: all.", 1)
HELD_OUT = flags.DEFINE_integer("held_out_tokens", 16384, "Tokens of held-out samples; 0 is none.", 0)
LOG_EVERY = flags.DEFINE_integer("log_every", 1, "Steps from one row of the log to the next.", 1)
EVALUATE_EVERY = flags.DEFINE_integer(
  "evaluate_every", 100, "Steps from one evaluation to the next; 0: before the first step and at the end.", 0
)
CHECKPOINT_MINUTES = flags.DEFINE_float("checkpoint_minutes", 5.0, "From one checkpoint to the next.", 0.0)
MINUTES = flags.DEFINE_float(
  "minutes", 0.0, "After so many: a checkpoint and the end, to be gone on with. 0 is no limit.", 0.0
)
LEARN = flags.DEFINE_enum(
  "learn",
  "answers",
  ["answers", "all"],
  "Tokens to learn: those of answers, or of all that a sample holds, with its question. Judged are answers.",
)
HIDDEN_STATES = flags.DEFINE_enum(
  "hidden_states",
  "auto",
  ["auto", "recorded", "computed"],
  "Hidden states of the target: those in --data, or computed batch by batch. auto: those in --data if there.",
)
EXPORT_DTYPE = flags.DEFINE_enum(
  "export_dtype", "bfloat16", ["bfloat16", "float32"], "Type of the parameters in head/."
)
TENSORBOARD = flags.DEFINE_bool("tensorboard", False, "Also log for TensorBoard, into the run folder.")
QUICK = flags.DEFINE_bool(
  "quick", False, "A few short steps on a few samples: does everything work?", allow_override=True
)

# What the result does not depend on.
FREE = ("minutes", "checkpoint_minutes", "tensorboard")
USED = ("model", "dtype", "mesh", "seed", "output", "compilation_cache")
# Samples whose features tell how large features are.
_FEW = 64
# --quick instead of these flags.
QUICK_TOKENS, QUICK_HELD_OUT, QUICK_STEPS, QUICK_ROW = 2048, 512, 4, 128


def plan_from_flags() -> tuple[Recipe, TrainConfig | None]:
  """The recipe, and the settings if --steps or --quick says how many steps there are.

  Raises:
    ValueError: what can be known to be wrong before anything is read.
  """
  defined = {flag.name for flag in flags.FLAGS.flags_by_module_dict()[shared.__name__]}
  shared.refuse(sorted(defined - set(USED)), "train_drafter", "its own flags")
  for flag in (HEAD_FLAG, DATA, shared.OUTPUT):
    if not flag.value:
      raise ValueError(f"--{flag.name} is empty; see --help")
  if START_FROM.value and not os.path.isdir(START_FROM.value):
    raise ValueError(f"--start_from = {START_FROM.value!r} is not a folder")
  plots.check()
  if set(parse_mesh(shared.MESH.value)) - {"data"}:
    raise ValueError(f"--mesh = {shared.MESH.value!r}; training goes over data alone, e.g. data:8")
  for flag in (EPOCHS, LEARNING_RATE, WARMUP, WEIGHT_DECAY, CLIP, CHECKPOINT_MINUTES, MINUTES):
    if not math.isfinite(flag.value):
      raise ValueError(f"--{flag.name} = {flag.value}; it must be a number")
  steps = QUICK_STEPS if QUICK.value else STEPS.value
  recipe = make_recipe(HEAD_FLAG.value)
  config(1 if steps is None else steps)
  return recipe, None if steps is None else config(steps)


def config(steps: int) -> TrainConfig:
  return TrainConfig(
    steps=steps,
    batch_rows=BATCH_ROWS.value,
    accumulate=ACCUMULATE.value,
    learning_rate=LEARNING_RATE.value,
    warmup=WARMUP.value,
    weight_decay=WEIGHT_DECAY.value,
    clip=CLIP.value,
    seed=shared.SEED.value,
    log_every=LOG_EVERY.value,
    evaluate_every=EVALUATE_EVERY.value,
  )


def settings(dataset: Dataset, target_sha256: str, steps: int, start: str | None) -> dict[str, Any]:
  """All that the result depends on, by name; ``start`` is the digest of the head to start from."""
  own = [flag.name for flag in flags.FLAGS.get_flags_for_module(sys.modules[__name__])]
  named = [name for name in own if name not in FREE] + ["model", "dtype", "seed", "mesh", "quick"]
  values = {f"--{name}": flags.FLAGS[name].value for name in named}
  # Where it lies is of no matter, only what it holds.
  held = {"--data": dataset.digest, "--start_from": start}
  return values | held | {"model_sha256": target_sha256, "steps": steps}


def tensorboard() -> Callable[[str], Any]:
  """Makes writers of TensorBoard's files, given a folder.

  Raises:
    ValueError: its packages are not installed.
  """
  try:
    from clu import metric_writers
  except ImportError as error:
    raise ValueError(f"--tensorboard: {error}; install it with the extra: specjax[tensorboard]") from None
  return metric_writers.SummaryWriter


def columns_of(dataset: Dataset, taps: tuple[int, ...], target_sha256: str) -> list[int] | None:
  """Where the wanted hidden states stand among the recorded ones; None: they are computed.

  Raises:
    ValueError: --hidden_states=recorded, and they are not, or another model's are.
  """
  told = dataset.manifest["provenance"]
  recorded = told.get("taps") or []
  missing = [tap for tap in taps if tap not in recorded]
  model = told["model"]
  theirs = model["sha256"]
  if HIDDEN_STATES.value == "recorded" and missing:
    raise ValueError(f"--hidden_states=recorded: inputs of layers {missing} were not; {recorded} were")
  if HIDDEN_STATES.value == "recorded" and theirs != target_sha256:
    raise ValueError(
      f"--hidden_states=recorded: in --data are those of {model['source']} in {model['dtype']} "
      f"(SHA-256 {theirs}); --model={shared.MODEL.value} --dtype={shared.DTYPE.value} has {target_sha256}"
    )
  if theirs != target_sha256:
    say(f"the text in --data was written by another model, {model['source']}")
  if HIDDEN_STATES.value == "computed" or missing or theirs != target_sha256:
    return None
  return [recorded.index(tap) for tap in taps]


def say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


def pack(dataset: Dataset, columns: list[int] | None) -> tuple[Packed, Packed | None, np.ndarray]:
  """Rows to train on, held-out ones, and the numbers of the samples in the first."""
  quick = QUICK.value
  row_length = min(ROW_LENGTH.value, QUICK_ROW) if quick else ROW_LENGTH.value
  parts = split(
    dataset,
    seed=shared.SEED.value,
    held_out_tokens=min(HELD_OUT.value, QUICK_HELD_OUT) if quick else HELD_OUT.value,
    max_tokens=QUICK_TOKENS if quick else MAX_TOKENS.value,
    longest=row_length,
  )
  rows = dict(row_length=row_length, seed=shared.SEED.value, columns=columns)
  data = Packed(dataset, parts.train, **rows, context=LEARN.value == "all")
  held_out = Packed(dataset, parts.held_out, **rows) if len(parts.held_out) else None
  for name, packed in (("training", data), ("held out", held_out)):
    if packed is not None:
      s = packed.stats
      say(
        f"{name}: {s['samples']} samples, {s['tokens']} tokens ({s['learned']} learned) in {s['rows']} rows "
        f"of {row_length}; {s['cut_samples']} samples cut, {s['cut_tokens']} tokens lost; "
        f"{s['empty_samples']} with nothing to learn left out"
      )
  return data, held_out, parts.train


def sizes_of(dataset: Dataset, numbers: np.ndarray, recipe: Recipe, target: Decoder, columns):
  """Usual sizes of the features of a few samples, None where the recipe does not ask for them.

  ``columns`` is what `columns_of` gave.
  """
  if not recipe.sized:
    return None
  few = [int(i) for i in numbers[:_FEW]]
  if columns is not None:
    return features.usual_sizes(dataset.features(i)[:, columns] for i in few)
  tokens = [dataset[i].tokens[: ROW_LENGTH.value] for i in few]
  taps = recipe.taps(target.config)
  return features.usual_sizes(
    features.features_of(target, tokens, taps, length_limit=max(map(len, tokens)), batch_size=1)
  )


def trained_before(recipe: Recipe, module: nnx.Module, target: LoadedModel) -> tuple[nnx.Module, str]:
  """The head of --start_from and its digest.

  Raises:
    ValueError: it cannot be loaded, or has other parameters than ``module``, the head that --head makes.
  """
  head = load_head(START_FROM.value, target, dtype=jnp.float32)
  digest = trained.digest(head)
  shapes = lambda of: {path_of(p): x.shape for p, x in nnx.to_flat_state(nnx.state(of, nnx.Param))}
  wanted, found = shapes(recipe.head_of(module)), shapes(head.module)
  for name in sorted(wanted.keys() | found.keys()):
    if wanted.get(name) != found.get(name):
      raise ValueError(
        f"--start_from = {START_FROM.value!r}: {name} is {found.get(name)}; --head needs {wanted.get(name)}"
      )
  return recipe.go_on(module, head.module), digest


def describe(recipe: Recipe, module: nnx.Module, counts: np.ndarray) -> dict[str, Any]:
  """Sizes of a head, for the log and the result."""
  parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(module, nnx.Param)))
  ids = None if module.ids is None else np.asarray(module.ids)
  covered = 1.0 if ids is None else vocabulary.coverage(counts, ids)
  size = len(counts) if ids is None else len(ids)
  say(f"{recipe.name}: {parameters} parameters; {size} tokens to say, {covered:.2%} of what is learned")
  return {"parameters": parameters, "draft_vocab": size, "covered_tokens": covered}


def finish(recipe: Recipe, run: Trained, records: Records, job: runtime.Job, about: dict[str, Any]) -> None:
  """Writes head/, the target if training changed it, and the result."""
  head, source = os.path.join(records.folder, HEAD), job.target.source
  if recipe.changes_target:
    source = os.path.abspath(os.path.join(records.folder, TARGET))
    about = about | {"target": source}
    if not os.path.isdir(source):
      changed = recipe.target_of(run.module, job.target.model)
      as_exported = jax.tree.map(lambda x: x.astype(EXPORT_DTYPE.value), changed)
      save_hf(source, as_exported, job.target.tokenizer)
  if not os.path.isdir(head):
    recipe.save(head, run.module, source, dtype=jnp.dtype(EXPORT_DTYPE.value))
  last, judged = records.rows[-1], training_plots.last_held_out(records.rows)
  records.finish(
    **about,
    steps=run.step,
    tokens=last["tokens"],
    seconds=last["seconds"],
    peak_memory_bytes=measure.peak_memory(),
    head_bytes=sum(os.path.getsize(os.path.join(head, name)) for name in os.listdir(head)),
    held_out=judged["held_out"] if judged else None,
  )
  say(f"head: {head}")
  if recipe.changes_target:
    kl = f"{judged['held_out']['kl']:.4f} nats" if judged else "not measured; see --held_out_tokens"
    say(f"another target: --model={source} (KL from {job.target.source} a token of held-out text: {kl})")


def show(records: Records) -> None:
  runs = {os.path.basename(os.path.normpath(records.folder)): records.rows}
  results.table(training_plots.HEADER, training_plots.table(runs))
  if plots.can_draw():
    path = plots.PLOT.value or os.path.join(records.folder, CURVES)
    training_plots.plot(runs, path)
    say(f"plot: {path}")


def main(_: list[str]) -> None:
  recipe, planned = plan_from_flags()
  write = tensorboard() if TENSORBOARD.value else None
  dataset = Dataset.open(*DATA.value)
  job = runtime.load_job(["none"])
  target = job.target.model
  digest = model_digest(target)
  columns = columns_of(dataset, recipe.taps(target.config), digest)
  say(f"features: {'computed batch by batch' if columns is None else 'recorded'}")
  data, held_out, train_on = pack(dataset, columns)
  counts = vocabulary.token_counts(dataset, train_on, target.config.vocab_size)
  stats = TextStats(counts, tuple(job.stop_ids), sizes_of(dataset, train_on, recipe, target, columns))
  module = recipe.init(target, stats, nnx.Rngs(shared.SEED.value))
  module, start = trained_before(recipe, module, job.target) if START_FROM.value else (module, None)
  about = describe(recipe, module, counts) | {
    "data": data.stats,
    "features": "computed recorded".split()[columns is not None],
  }
  planned = planned or config(math.ceil(EPOCHS.value * data.num_rows / BATCH_ROWS.value))
  records = Records(
    shared.OUTPUT.value, settings(dataset, digest, planned.steps, start), results.environment()
  )
  if START_FROM.value:
    records.keep_before(START_FROM.value)
  writers = [write(os.path.join(records.folder, "tensorboard"))] if write else []
  run = train(
    recipe,
    module,
    target if columns is None or recipe.changes_target else without_layers(target),
    data,
    held_out,
    planned,
    records,
    pace=Pace(checkpoint_minutes=CHECKPOINT_MINUTES.value, minutes=MINUTES.value),
    mesh=job.mesh,
    writers=writers,
  )
  if "result" in records.config:
    say("this run was finished before")
  elif run.finished:
    finish(recipe, run, records, job, about)
  else:
    say(f"stopped at step {run.step} of {planned.steps}; the same command goes on")
  show(records)


if __name__ == "__main__":
  shared.run(main)
