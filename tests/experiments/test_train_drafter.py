"""The training script end to end on a tiny target: its run folder, the loaded head, one-line errors."""

import json
import os

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments import runtime, train_drafter, training_plots
from specjax.checkpoints import load_head, load_model
from specjax.checkpoints.fill import path_of
from specjax.training.data import Sample
from specjax.training.distill import model_digest
from specjax.training.records import Records, read_config, read_metrics
from specjax.training.writer import ShardWriter
from tests.experiments.tiny import VOCAB, run_script

HEAD = "medusa[heads=2,draft_vocab=40]"
SMALL = ("--row_length=32", "--batch_rows=2", "--held_out_tokens=60", "--evaluate_every=3", "--steps=6")


def write_data(
  folder: str, target: str, taps: tuple[int, ...] | None, model_sha256: str | None = None
) -> str:
  """A set of random texts, with random features if taps are named."""
  loaded = load_model(target)
  told = {"sha256": model_sha256 or model_digest(loaded.model), "source": "tiny", "dtype": "float32"}
  width = loaded.config.d_model if taps else None
  writer = ShardWriter(folder, {"model": told, "taps": list(taps) if taps else None, "tap_width": width})
  rng = np.random.default_rng(0)
  for number in range(40):
    length = int(rng.integers(10, 31))
    tokens = rng.integers(0, VOCAB, length).astype(np.int32)
    features = rng.standard_normal((length - 1, len(taps), width)).astype(jnp.bfloat16) if taps else None
    writer.add(Sample(tokens, np.arange(length) >= 4), number=number, features=features)
  writer.commit({}, {})
  return folder


@pytest.fixture(scope="module")
def data(models, tmp_path_factory):
  """Folders of texts without and with features."""
  folder = tmp_path_factory.mktemp("data")
  plain = write_data(str(folder / "plain"), models[0], None)
  return plain, write_data(str(folder / "features"), models[0], (0, 1, 2))


@pytest.fixture(scope="module")
def run(models):
  """Runs the script; returns the exit code."""

  def run(output, data, *more):
    needed = [f"--model={models[0]}", f"--data={data}", f"--output={output}"]
    return run_script(
      train_drafter, *needed, *SMALL, *([] if any("--head" in m for m in more) else [f"--head={HEAD}"]), *more
    )

  run.model = models[0]
  return run


@pytest.fixture(scope="module")
def first(run, data, tmp_path_factory):
  path = str(tmp_path_factory.mktemp("runs") / "first")
  assert run(path, data[0]) == 0
  return path


def test_the_run_folder(first, models, data):
  """Config with flags, hashes, versions and result; log; curves; a head that loads."""
  assert {"config.json", "metrics.jsonl", "curves.png", "head", "checkpoints"} <= set(os.listdir(first))
  config = read_config(first)
  settings, result = config["settings"], config["result"]
  target = load_model(models[0])
  assert settings["--head"] == HEAD and settings["--seed"] == 0 and settings["steps"] == 6
  assert settings["model_sha256"] == model_digest(target.model)
  assert settings["--data"] == json.loads(open(os.path.join(data[0], "manifest.json")).read())["digest"]
  assert config["about"]["versions"]["jax"] and result["features"] == "computed"
  rows = read_metrics(first)
  assert [row["step"] for row in rows if "held_out" in row] == [0, 3, 6]
  assert result["steps"] == 6 and result["tokens"] == rows[-1]["tokens"]
  assert result["held_out"] == rows[-1]["held_out"]
  assert 0 < result["covered_tokens"] < 1 and result["draft_vocab"] == 40
  head = load_head(os.path.join(first, "head"), target)
  assert head.kind == "medusa" and head.module.ids.shape == (40,)
  assert head.config.num_heads == 2 and result["parameters"] == 2 * (32 * 32 + 32)
  assert np.abs(head.module.blocks[0].weight[...]).max() > 0
  with open(os.path.join(first, "curves.png"), "rb") as file:
    assert file.read(4) == b"\x89PNG"


def test_a_stopped_run_goes_on_to_the_same_head(run, data, first, tmp_path, capsys):
  """Stopped by --minutes, and finished by the same command without it; then there is nothing left to do."""
  output = str(tmp_path / "run")
  assert run(output, data[0], "--minutes=1e-9") == 0
  assert "stopped at step 1 of 6" in capsys.readouterr().err
  assert not os.path.exists(os.path.join(output, "head"))
  assert run(output, data[0], "--checkpoint_minutes=0") == 0
  read = lambda path: open(os.path.join(path, "head", "medusa_lm_head.safetensors"), "rb").read()
  assert read(output) == read(first)
  assert run(output, data[0]) == 0
  assert "finished before" in capsys.readouterr().err
  assert run(output, data[0], "--learning_rate=1e-4") == 2
  assert "--learning_rate = 0.001; now it is 0.0001" in capsys.readouterr().err


def test_a_head_is_trained_on(run, data, first, tmp_path, capsys):
  """With a rate of nearly 0 it stays what it was; a head of another shape is refused.

  Fails when training starts from a fresh head, or from another draft vocabulary's rows.
  """
  before, output = os.path.join(first, "head"), str(tmp_path / "on")
  more = ["--learning_rate=1e-12", "--export_dtype=float32", f"--start_from={before}"]
  assert run(output, data[0], *more) == 0
  read = lambda path: np.fromfile(os.path.join(path, "medusa_lm_head.safetensors"), np.uint8).size
  assert read(os.path.join(output, "head")) > read(before)  # float32 now
  again, start = (load_head(path, load_model(run.model)) for path in (os.path.join(output, "head"), before))
  for a, b in zip(again.module.blocks, start.module.blocks, strict=True):
    np.testing.assert_allclose(a.weight[...], b.weight[...], atol=1e-6)
  assert len(read_config(output)["settings"]["--start_from"]) == 16
  assert read_config(os.path.join(output, "before")) == read_config(first)
  assert read_metrics(os.path.join(output, "before")) == read_metrics(first)
  other = ["--head=medusa[heads=3,draft_vocab=40]", f"--start_from={before}"]
  capsys.readouterr()
  assert run(str(tmp_path / "other"), data[0], *other) == 2
  assert "blocks.0.bias is (2, 32); --head needs (3, 32)" in capsys.readouterr().err


def test_a_target_that_was_changed_is_written_beside_its_head(run, data, first, tmp_path, capsys):
  """Medusa-2 behind a first stage: a model with the original's tokenizer, a head that loads for it, the KL in
  log and result. Fails when the target is the original, or its tokenizer is lost."""
  output = str(tmp_path / "second")
  head = f"--head=medusa2[{HEAD.removeprefix('medusa[').removesuffix(']')},lora=2]"
  assert run(output, data[0], head, f"--start_from={first}/head", "--export_dtype=float32") == 0
  said = capsys.readouterr().err
  assert f"another target: --model={output}/target (KL from {run.model} a token" in said
  target, original = load_model(os.path.join(output, "target")), load_model(run.model)
  assert target.config == original.config and target.tokenizer.vocab_size == original.tokenizer.vocab_size
  differ = [
    path_of(path)
    for (path, mine), (_, its) in zip(*(nnx.to_flat_state(nnx.state(m.model)) for m in (target, original)))
    if not np.array_equal(mine.get_value(), its.get_value())
  ]
  assert len(differ) == 14 and all(".attention." in name or ".ff." in name for name in differ)
  loaded = load_head(os.path.join(output, "head"), target)
  assert loaded.kind == "medusa" and loaded.config.num_heads == 2
  before = load_head(os.path.join(first, "head"), original).module.blocks[0]
  assert not np.array_equal(loaded.module.blocks[0].weight[...], before.weight[...])
  rows, result = read_metrics(output), read_config(output)["result"]
  judged = [row["held_out"] for row in rows if "held_out" in row]
  assert judged[0]["kl"] == pytest.approx(0, abs=1e-5) and judged[-1]["kl"] > 1e-5
  assert result["held_out"] == judged[-1] and result["target"] == os.path.join(output, "target")
  assert all("kl" in row for row in rows if "loss" in row)


def test_records_of_a_shipped_head(tmp_path):
  """They lie beside it under another name, those of the runs before it in a folder."""
  head = tmp_path / "eagle3"
  (head / "before").mkdir(parents=True)
  for name, text in (("training.json", "{}"), ("metrics.jsonl", "a"), ("before/config.json", "b")):
    (head / name).write_text(text)
  records = Records(str(tmp_path / "run"), {}, {})
  records.keep_before(str(head))
  before = tmp_path / "run" / "before"
  found = {name: (before / name).read_text() for name in ("config.json", "metrics.jsonl")}
  assert found == {"config.json": "{}", "metrics.jsonl": "a"}
  assert (before / "before" / "config.json").read_text() == "b"


def test_recorded_features_and_runs_side_by_side(run, data, first, tmp_path, capsys):
  """Those of the recipe's taps are read; training_plots sets runs beside each other."""
  output = str(tmp_path / "recorded")
  head = "--head=eagle[draft_vocab=40,start=0,judged=2]"
  assert run(output, data[1], "--hidden_states=recorded", "--quick", "--export_dtype=float32", head) == 0
  assert "features: recorded" in capsys.readouterr().err
  assert read_config(output)["result"]["features"] == "recorded"
  assert read_config(output)["result"]["steps"] == train_drafter.QUICK_STEPS
  assert load_head(os.path.join(output, "head"), load_model(run.model)).kind == "eagle"
  assert all(row["feature_by_depth"][0] > 0 for row in read_metrics(output) if "loss" in row)
  plot = str(tmp_path / "both.png")
  assert run_script(training_plots, first, output, f"--plot={plot}", takes_arguments=True) == 0
  said = capsys.readouterr().out
  assert "first" in said and "recorded" in said and os.path.getsize(plot) > 1000
  assert run_script(training_plots, str(tmp_path), takes_arguments=True) == 2
  assert "this is not a training run" in capsys.readouterr().err


def test_features_that_are_not_there_or_anothers(run, data, models, tmp_path, capsys):
  assert run(str(tmp_path / "a"), data[0], "--hidden_states=recorded") == 2
  assert "--hidden_states=recorded: inputs of layers [2] were not" in capsys.readouterr().err
  others = write_data(str(tmp_path / "others"), models[0], (0, 1, 2), model_sha256="0" * 64)
  assert run(str(tmp_path / "b"), others, "--hidden_states=recorded") == 2
  assert "those of tiny in float32" in capsys.readouterr().err
  assert not os.path.exists(tmp_path / "a") and not os.path.exists(tmp_path / "b")


BAD = {
  "start_from": ("nowhere",),
  "head": (
    "",
    "eagle9",
    "eagle3[steps=0]|eagle3: steps = 0",
    "eagle[inputs=all]|eagle: inputs = 'all'",
    "eagle[noise=-1]|eagle: noise",
    "eagle3[tap_layers=2]|eagle3: tap_layers",
    "medusa[heads=x]|medusa: heads",
    "medusa[colour=1]|colour",
    "medusa[loss=l2]|medusa: loss",
    "early_exit|early_exit: exit = None",
    "early_exit[exit=2,rank=8]|early_exit: rank = 8",
    "block[markov=-1]|block: markov",
    "medusa2[share=0]|medusa2: share",
  ),
  "data": ("|--data is empty", "nowhere|nowhere: no manifest.json"),
  "output": ("|--output is empty",),
  "steps": ("0", "many"),
  "epochs": ("0", "nan"),
  "row_length": ("15",),
  "batch_rows": ("0",),
  "accumulate": ("0", "3|accumulate = 3 does not divide batch_rows = 4"),
  "learning_rate": ("0", "2", "nan"),
  "warmup_share": ("-0.1", "1.1", "nan"),
  "weight_decay": ("-1", "nan"),
  "clip": ("-1", "nan"),
  "max_tokens": ("0",),
  "held_out_tokens": ("-1",),
  "log_every": ("0",),
  "evaluate_every": ("-1",),
  "checkpoint_minutes": ("-1", "nan"),
  "minutes": ("-1", "inf"),
  "learn": ("questions",),
  "hidden_states": ("cached",),
  "export_dtype": ("float16",),
  "tensorboard": ("maybe",),
  "quick": ("maybe",),
  "mesh": ("data:1,model:2|--mesh = 'data:1,model:2'",),
  "window": ("3|--window is not used by train_drafter",),
  "plot": ("/no/such/folder/x.png",),
}
CASES = [
  (flag, *(value.rpartition("|")[::2] if "|" in value else (value, "")))
  for flag, values in BAD.items()
  for value in values
]


@pytest.mark.parametrize(("flag", "value", "words"), CASES)
def test_a_bad_value_is_one_line(monkeypatch, capsys, tmp_path, flag, value, words):
  """Fails when a value is clamped, or found out only after a model was loaded."""
  monkeypatch.setattr(runtime, "_load", lambda *_: pytest.fail("a model was loaded"))
  good = {"head": HEAD, "data": str(tmp_path), "output": str(tmp_path / "run")}
  arguments = [f"--{name}={text}" for name, text in (good | {flag: value}).items()]
  assert run_script(train_drafter, *arguments) == 2
  (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
  assert (words or flag) in line


def test_every_flag_is_here():
  """A flag that is added needs a value that is wrong."""
  flags = train_drafter.flags.FLAGS
  defined = {flag.name for flag in flags.get_flags_for_module(train_drafter)}
  assert defined - set(BAD) == set()


def test_tensorboard_says_what_it_needs(monkeypatch, capsys, run, data, tmp_path):
  """Without its packages an error before a model is loaded; with them scalars are written by step."""
  monkeypatch.setitem(__import__("sys").modules, "clu", None)
  monkeypatch.setattr(runtime, "_load", lambda *_: pytest.fail("a model was loaded"))
  assert run(str(tmp_path / "run"), data[0], "--tensorboard") == 2
  assert "specjax[tensorboard]" in capsys.readouterr().err


def test_what_does_not_fit_the_target_leaves_no_folder(run, data, tmp_path, capsys):
  """The head is made before the folder: the next try may use it."""
  output = str(tmp_path / "run")
  assert run(output, data[0], "--head=medusa[draft_vocab=99999]") == 2
  assert "draft_vocab = 99999" in capsys.readouterr().err and not os.path.exists(output)
