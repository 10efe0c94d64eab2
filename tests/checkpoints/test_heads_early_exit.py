"""An early exit's adapter and skip sets in files of our own: round trips, what is refused."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from specjax.checkpoints import (
  CheckpointError,
  LoadedModel,
  load_head,
  load_skips,
  save_early_exit,
  save_skips,
)
from specjax.models import EarlyExit, EarlyExitConfig, SkipSet
from specjax.models.output import Bound
from specjax.testing import tiny_config, tiny_model

from .conftest import params
from .test_heads_draft import edit_config, edit_tensors

IDS = np.array([0, 3, 17, 60], np.int32)


@pytest.fixture(scope="module")
def target():
  return LoadedModel(tiny_model(0), None, "tiny")


def adapter_of(target, ids=None, dtype=jnp.float32, **changes):
  sizes = tiny_config(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=6, max_length=256, **changes)
  config = EarlyExitConfig(sizes, 1, draft_vocab_size=None if ids is None else len(ids))
  return EarlyExit(config, target.model, ids=ids, dtype=dtype, rngs=nnx.Rngs(2))


@pytest.fixture
def folder(tmp_path, target):
  """A saved adapter, to be damaged."""
  save_early_exit(str(tmp_path / "exit"), adapter_of(target, IDS))
  return tmp_path / "exit"


@pytest.mark.parametrize(
  ("ids", "dtype", "changes"),
  [
    (None, jnp.float32, {}),
    (IDS, jnp.bfloat16, {}),
    (IDS, jnp.float32, dict(family="qwen2", qkv_bias=True)),
    (None, jnp.float32, dict(family="qwen3", qk_norm=True)),
  ],
)
def test_round_trips_keep_every_bit(tmp_path, target, ids, dtype, changes):
  adapter = adapter_of(target, ids, dtype, **changes)
  save_early_exit(str(tmp_path / "e"), adapter, target="tiny")
  stored = safetensors.numpy.load_file(tmp_path / "e" / "model.safetensors")
  assert not any("lm_head" in name or "mlp" in name for name in stored)
  assert json.loads((tmp_path / "e" / "config.json").read_text())["base_model_name_or_path"] == "tiny"
  loaded = load_head(str(tmp_path / "e"), target, dtype=dtype)
  assert loaded.kind == "early_exit" and loaded.config == loaded.module.config == adapter.config
  mine, its = params(adapter), params(loaded.module)
  assert mine.keys() == its.keys()
  for name, value in mine.items():
    assert its[name].dtype == value.dtype
    np.testing.assert_array_equal(its[name], value, err_msg=name)
  rows = dict(nnx.to_flat_state(nnx.state(loaded.module, Bound)))[("rows",)].get_value()
  np.testing.assert_array_equal(rows, adapter.rows[...])
  if ids is None and dtype == jnp.float32:  # the target's own buffer
    assert rows.unsafe_buffer_pointer() == target.model.head.weight[...].unsafe_buffer_pointer()


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"hidden_size": 24}, "d_model = 24; the target's is 32"),
    ({"vocab_size": 64}, "vocab_size = 64; the target's is 61"),
    ({"draft_vocab_size": 5}, r"tensor d2t has shape \[4\]; expected \[5\]"),
    ({"num_hidden_layers": 2}, "num_layers = 2; it must be 1"),
    ({"specjax_early_exit": {"format": 2}}, "format = 2 is not supported; supported: 1"),
    ({"specjax_early_exit": {"format": 1}}, "specjax_early_exit: field exit_layer is missing"),
    (
      {"specjax_early_exit": {"format": 1, "exit_layer": 0}},
      "exit_layer = 0; it must be an integer of at least 1",
    ),
    ({"specjax_early_exit": {"format": 1, "exit_layer": 2}}, r"exit_layer = 2; it must be in \[1, 1\]"),
    ({"specjax_early_exit": 1}, "specjax_early_exit = 1; it must be of type dict"),
  ],
)
def test_wrong_configs(folder, target, changes, message):
  edit_config(folder, **changes)
  with pytest.raises(CheckpointError, match=message):
    load_head(str(folder), target)


def test_m3_wrong_tensors(folder, target):
  edit_tensors(folder, lambda t: t.update({"lm_head.weight": np.ones((4, 32), np.float32)}))
  with pytest.raises(CheckpointError, match=r"1 tensor with no place in an early exit.*lm_head"):
    load_head(str(folder), target)
  edit_tensors(folder, lambda t: t.pop("lm_head.weight"))
  edit_tensors(folder, lambda t: t.update({"norm.weight": np.ones(31, np.float32)}))
  with pytest.raises(CheckpointError, match=r"norm.weight has shape \[31\]"):
    load_head(str(folder), target)
  edit_tensors(folder, lambda t: t.pop("norm.weight"))
  with pytest.raises(CheckpointError, match=r"1 tensor missing: norm\.weight"):
    load_head(str(folder), target)
  with pytest.raises(CheckpointError, match="exists already"):
    save_early_exit(str(folder), adapter_of(target))


# --- skip sets -------------------------------------------------------------------------------------

SKIPS = SkipSet(4, (1, 3), (0,))


def test_a_skip_set_comes_back(tmp_path):
  path = str(tmp_path / "skips.json")
  save_skips(path, SKIPS, {"agreement": 0.5})
  assert load_skips(path, tiny_config(num_layers=4)) == SKIPS
  save_skips(path, SkipSet(4, ff=(2,)), {})  # a better one is found
  assert load_skips(path, tiny_config(num_layers=4)).ff == (2,)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"format": 2}, "format = 2 is not supported"),
    ({"num_layers": 5}, "num_layers = 5; the target has 4 layers"),
    ({"num_layers": "4"}, "num_layers = '4'; it must be of type int"),
    ({"attention": [4]}, r"attention = \(4,\); it must be ascending layers in \[0, 3\]"),
    ({"attention": 1}, "attention = 1; it must be of type list"),
    ({"feed_forward": [[1]]}, r"ff = \(\[1\],\)"),
    ({"feed_forward": None}, "field feed_forward is missing"),
    ({"attention": [], "feed_forward": []}, "nothing is left out"),
  ],
)
def test_wrong_skip_sets(tmp_path, changes, message):
  path = tmp_path / "skips.json"
  save_skips(str(path), SKIPS, {})
  edited = {**json.loads(path.read_text()), **changes}
  path.write_text(json.dumps(edited))
  with pytest.raises(CheckpointError, match=message):
    load_skips(str(path), tiny_config(num_layers=4))


def test_no_skip_set(tmp_path):
  with pytest.raises(CheckpointError, match="no such file"):
    load_skips(str(tmp_path / "none.json"), tiny_config())
