"""EAGLE-3 folders that are refused, and what is said of them."""

import numpy as np
import pytest

from specjax.checkpoints import CheckpointError, LoadedModel, load_head
from specjax.testing import tiny_model

from .eagle3_folders import DRAFT, IDS, VOCAB, WIDTH, write


@pytest.fixture(scope="module")
def target():
  return LoadedModel(tiny_model(0, num_layers=8), None, "tiny")


def shifted(i, value):
  """Sets one offset."""

  def change(tensors):
    tensors["d2t"] = tensors["d2t"].copy()
    tensors["d2t"][i] = value

  return change


def flipped(i):
  def change(tensors):
    tensors["t2d"] = tensors["t2d"].copy()
    tensors["t2d"][i] ^= True

  return change


def put(name, value):
  return lambda tensors: tensors.update({name: value})


def drop(*names):
  return lambda tensors: [tensors.pop(name) for name in names]


@pytest.mark.parametrize(
  "change, message",
  [
    (shifted(3, 60), r"d2t\[3\] = 60, an offset, so token 3 means 63; the target's ids go from 0 to 60"),
    (shifted(0, -1), r"d2t\[0\] = -1, an offset, so token 0 means -1"),
    (shifted(5, -4), "d2t: token 5 means 1, the one before it .*; the ids must ascend"),
    # Absolute ids are no offsets.
    (put("d2t", IDS), "d2t.*an offset, so token"),
    (put("d2t", np.zeros(DRAFT, np.float32)), "tensor d2t has type F32; supported: I64, I32"),
    (
      put("d2t", np.zeros(DRAFT + 1, np.int64)),
      rf"tensor d2t has shape \[{DRAFT + 1}\]; expected \[{DRAFT}\]",
    ),
    (drop("d2t"), "tensor d2t is missing; it must say which of the target's 61 tokens"),
    (flipped(IDS[2]), rf"t2d\[{IDS[2]}\] = False, but by d2t token {IDS[2]} is in the draft vocabulary"),
    (put("t2d", np.ones(VOCAB + 3, bool)), rf"t2d has shape \[64\]; expected \[{VOCAB}\]"),
    (drop("norm.weight", "fc.weight"), "2 tensors missing: fc.weight, norm.weight"),
    (put("fc.bias", np.zeros(WIDTH, np.float32)), "1 tensor with no place in an EAGLE-3 head.*fc.bias"),
    (
      put("midlayer.self_attn.q_proj.weight", np.zeros((32, 32), np.float32)),
      r"midlayer.self_attn.q_proj.weight has shape \[32, 32\]; the config asks for \[32, 64\]",
    ),
    (
      put("lm_head.weight", np.zeros((VOCAB, WIDTH), np.float32)),
      rf"lm_head.weight has shape \[61, 32\]; the config asks for \[{DRAFT}, 32\]",
    ),
    (put("norm.weight", np.ones(WIDTH, np.int8)), "norm.weight has type I8"),
  ],
)
def test_m3_wrong_tensors(tmp_path, target, change, message):
  path, _ = write(tmp_path / "head", change=change)
  with pytest.raises(CheckpointError, match=message):
    load_head(path, target)


def test_t2d_may_be_absent_and_a_whole_map_is_none(tmp_path, target):
  assert load_head(write(tmp_path / "a", change=drop("t2d"))[0], target).module.ids is not None
  whole = lambda t: t.update(d2t=np.zeros(VOCAB, np.int64), t2d=np.ones(VOCAB, bool))
  head = load_head(write(tmp_path / "b", reduced=False, change=whole)[0], target).module
  assert head.ids is None and head.config.draft_vocab_size is None


@pytest.mark.parametrize(
  "layout, fields, message",
  [
    ("eagle", {"hidden_size": 24}, "of width 24; the target's have 32"),
    ("eagle", {"vocab_size": 64}, "vocab_size = 64; the target's is 61"),
    ("eagle", {"num_hidden_layers": 2}, "decoder.num_layers = 2; it must be 1"),
    ("eagle", {"draft_vocab_size": 100}, "draft_vocab_size = 100"),
    ("eagle", {"tap_layers": [1, 3, 9]}, r"tap_layers = \(1, 3, 9\); the target has 8 layers"),
    ("eagle", {"tap_layers": [3, 1, 2]}, "ascending"),
    ("eagle", {"tap_layers": 2}, "tap_layers = 2; it must be a list of layers"),
    ("eagle", {"tap_layers": [1, 2]}, r"fc.weight has shape \[32, 96\]; the config asks for \[32, 64\]"),
    (
      "speculators",
      {"eagle_aux_hidden_state_layer_ids": [1, 2]},
      r"layer_ids = \[1, 2\]; it must be a list of 3 layers",
    ),
    (
      "eagle",
      {"tap_layers": [1, 2, 3], "eagle_aux_hidden_state_layer_ids": [2, 3, 4]},
      r"means inputs of layers \(1, 2, 3\) and .*they must agree",
    ),
    ("eagle", {"intermediate_size": ...}, "field intermediate_size is missing"),
    ("eagle", {"rope_scaling": {"type": "yarn"}}, "rope_type = 'yarn'"),
    ("speculators", {"norm_before_residual": ...}, "field norm_before_residual is missing"),
    ("speculators", {"speculators_model_type": "mlp"}, "speculators_model_type = 'mlp'.*supported: eagle3"),
    ("speculators", {"speculators_model_type": ...}, "not a known draft head"),
    ("speculators", {"transformer_layer_config": [1]}, "transformer_layer_config = .*must be of type dict"),
  ],
)
def test_wrong_configs(tmp_path, target, layout, fields, message):
  path, _ = write(tmp_path / "head", layout, **fields)
  with pytest.raises(CheckpointError, match=message):
    load_head(path, target)


def test_small_targets_have_no_default_taps(tmp_path):
  small = LoadedModel(tiny_model(0), None, "tiny")
  path, _ = write(tmp_path / "head")
  with pytest.raises(CheckpointError, match="num_layers = 2: a target of fewer than 7 layers"):
    load_head(path, small)


def test_other_folders_say_what_they_are(tmp_path, target):
  """Medusa-2, plain models, nothing at all."""
  plain = {"model.norm.weight": np.ones(WIDTH, np.float32)}
  cases = {
    "not a known draft head": lambda t: (t.clear(), t.update(plain)),
    "whole model of Medusa-2": lambda t: t.update(
      {"medusa_head.0.0.linear.weight": plain["model.norm.weight"]}
    ),
  }
  for i, (message, change) in enumerate(cases.items()):
    other = lambda t, change=change: (change(t), [t.pop(n) for n in list(t) if n.startswith("midlayer")])
    path, _ = write(tmp_path / f"{i}", change=other)
    with pytest.raises(CheckpointError, match=message):
      load_head(path, target)
  with pytest.raises(CheckpointError, match="no such folder"):
    load_head(str(tmp_path / "nowhere"), target)
  (tmp_path / "empty").mkdir()
  with pytest.raises(CheckpointError, match=r"config.json: no such file"):
    load_head(str(tmp_path / "empty"), target)
