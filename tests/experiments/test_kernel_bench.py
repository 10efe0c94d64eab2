"""The kernel benchmark where there is no device: its checks, its refusals, and what they catch."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import kernel_bench
from experiments.kernels import attention_cases, kernel_checks, kernel_paths
from experiments.kernels.attention_cases import Case
from experiments.kernels.kernel_checks import Check
from specjax.kernels.tree_attention import tiles
from tests.experiments.tiny import run_script

TREE, CAUSAL = kernel_checks.tiny_grid()
reference = kernel_checks.kernel_attention("reference")


def test_interpret_runs_both_kernels(tmp_path, monkeypatch, capsys):
  small = Check(Case("llama-70b-tp8", 3, 0, dtype="float32"), (9,))
  monkeypatch.setattr(kernel_checks, "tiny_grid", lambda: [small])
  assert run_script(kernel_bench, "--interpret", f"--output={tmp_path / 'run'}") == 0
  report = json.loads((tmp_path / "run" / "report.json").read_text())
  assert [(row["implementation"], row["status"]) for row in report["checks"]] == [
    ("pallas_tpu_interpreted", "right"),
    ("pallas_gpu_interpreted", "right"),
  ]
  assert "largest error" in capsys.readouterr().out


@pytest.mark.parametrize("check", [TREE, CAUSAL], ids=lambda check: check.label)
def test_the_reference_is_right(check):
  verdict = kernel_checks.run_check(reference, check)
  assert not verdict.wrong and verdict.error < kernel_checks.TOLERANCE[check.case.dtype]


def wrong_mask(q, k, v, prefix, ancestors, window, softcap):
  """Siblings see each other: causal instead of the tree."""
  return reference(q, k, v, prefix, None, window, softcap)


def short_prefix(q, k, v, prefix, ancestors, window, softcap):
  """The first slot is never seen."""
  broken = k.at[:, :, 0].set(-1e4 * jnp.sign(q).mean()), v.at[:, :, 0].set(0)
  return reference(q, *broken, prefix, ancestors, window, softcap)


def wrong_scale(q, k, v, prefix, ancestors, window, softcap):
  return reference(q * 1.01, k, v, prefix, ancestors, window, softcap)


def leaks_nan(q, k, v, prefix, ancestors, window, softcap):
  """A weight of 0 times NaN."""
  return reference(q, k, v, prefix, ancestors, window, softcap) + 0 * v.sum()


def hides_nan(q, k, v, prefix, ancestors, window, softcap):
  return jnp.nan_to_num(reference(q, k, v, prefix, ancestors, window, softcap))


@pytest.mark.parametrize(
  ("attend", "word"),
  [
    (wrong_mask, "probe"),
    (short_prefix, "probe"),
    (wrong_scale, "spiky"),
    (leaks_nan, "changes outputs"),
    (hides_nan, "does not reach"),
  ],
)
def test_a_wrong_attention_is_caught(attend, word):
  verdict = kernel_checks.run_check(attend, TREE)
  assert any(word in what for what in verdict.wrong), verdict


def test_a_wrong_kernel_fails_the_run(monkeypatch, capsys):
  monkeypatch.setattr(kernel_checks, "tiny_grid", lambda: [TREE])
  monkeypatch.setattr(kernel_checks, "kernel_attention", lambda implementation: wrong_scale)
  assert run_script(kernel_bench, "--interpret") == 1
  assert "wrong" in capsys.readouterr().out


def test_the_oracle_by_hand():
  """Two slots of prefix and a window of 2: node 0 sees slot 1 and itself, node 1 node 0 and itself."""
  check = Check(dataclasses.replace(CAUSAL.case, nodes=2, window=2, softcap=None, dtype="float32"), (2,))
  inputs = kernel_checks.make_inputs(check, "probe")
  seen = kernel_checks.visible(check, inputs)
  assert np.flatnonzero(seen[0, 0]).tolist() == [1, 2] and np.flatnonzero(seen[0, 1]).tolist() == [2, 3]
  out, scale = kernel_checks.oracle(check, inputs, seen)
  assert out[0, 0, 0, :4].tolist() == [0, 0.5, 0.5, 0] and (out == scale).all()


def test_needs_a_device_or_interpret(capsys):
  assert run_script(kernel_bench) == 2
  error = capsys.readouterr().err.strip()
  assert error.startswith("error: kernel_bench measures on a GPU or a TPU") and "--interpret" in error


@pytest.mark.parametrize(
  ("flag", "word"),
  [
    ("--interpret --record", "--record"),
    ("--interpret --tune", "--tune"),
    ("--record --models=phi-3-mini", "--models"),
    ("--models=none", "none"),
  ],
)
def test_wrong_flags_end_with_one_line(flag, word, capsys):
  assert run_script(kernel_bench, *flag.split()) == 2
  error = capsys.readouterr().err.strip()
  assert error.startswith("error: ") and word in error and "\n" not in error


@pytest.fixture
def folder(tmp_path, monkeypatch):
  monkeypatch.setattr(tiles, "FOLDER", tmp_path)
  tiles.files.cache_clear()
  yield tmp_path
  tiles.files.cache_clear()


def rows(*statuses):
  return [{"check": f"shape {i}", "status": status} for i, status in enumerate(statuses)]


@pytest.mark.parametrize("statuses", [("right", "wrong"), ("right", "not run"), ()])
def test_nothing_is_recorded_unless_all_is_right(folder, statuses):
  with pytest.raises(ValueError, match="Nothing was recorded"):
    kernel_bench.record("pallas_gpu", rows(*statuses))
  assert not list(folder.iterdir())


def test_a_record_makes_the_kernel_verified(folder):
  """On whatever the default device is; a kind without a target gets a file of its own."""
  kernel_bench.record("pallas_gpu", rows("right", "right"))
  record = tiles.verified("cpu")
  assert record.kernel == "pallas_gpu" and "experiments.kernel_bench" in record.command
  kernel_bench.write_tiles("pallas_gpu", {"bfloat16/64/16": {"rows": 16}})
  assert tiles.verified("cpu") is None  # other tiles than those that were checked
  assert tiles.read("cpu")["source"] == "measured"


def test_times_on_this_machine(monkeypatch):
  """The timing loop runs every path of XLA; other sizes than a device's."""
  monkeypatch.setattr(kernel_paths, "TURNS", 2)
  monkeypatch.setattr(kernel_paths, "SAMPLES", 1)
  monkeypatch.setattr(kernel_paths, "COPY_BYTES", 2**16)
  monkeypatch.setattr(
    kernel_bench, "sweeps", lambda model: [(Case(model, 4, 0, dtype="float32"), 256, (64, 128))]
  )
  found = kernel_bench.time_all(
    "pallas_gpu", "smollm2-135m", kernel_paths.copy_bandwidth(), kernel_bench.Clock(60)
  )
  timed = {row["path"]: row for row in found if row["prefix"] == 128}
  assert timed["reference"]["us"] > 0 and timed["dense XLA"]["us"] > 0
  assert timed["cuDNN"]["us"] is None and timed["cuDNN"]["why"]  # says why not
  kernel_bench.print_times(found, 1e9)
  late = kernel_bench.time_all("pallas_gpu", "smollm2-135m", 1e9, kernel_bench.Clock(-1))
  assert {row["why"] for row in late} == {"budget"}


def test_the_dense_path_is_attention():
  case = Case("smollm2-135m", 5, 40, dtype="float32")
  check = Check(case, (40,))
  words = kernel_paths.tree_words(case)
  step = kernel_paths.dense_path(case, words).step
  inputs = kernel_checks.make_inputs(check, "spiky")
  arrays = [jnp.asarray(x) for x in (inputs.q, inputs.k, inputs.v, inputs.prefix)]
  expected = reference(*arrays, words, None, None)
  assert np.allclose(jax.jit(step)(*arrays)[0], expected, atol=1e-4)


def test_every_recorded_key_is_checked():
  """What a tiles file may hold is what a correctness run covers."""
  models = list(attention_cases.MODELS)
  keys = {case.tile_key for case in attention_cases.default_cases(models)}
  assert keys == {check.case.tile_key for check in kernel_checks.grid(models)}
