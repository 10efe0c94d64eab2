"""Our own checkpoints: a round trip, and nothing half-written."""

import errno
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax.checkpoints import CheckpointError, Tokenizer, files, load_model, save_hf, save_orbax
from specjax.checkpoints.fill import abstract_decoder
from specjax.models import DecoderConfig, Llama3RopeScaling

from .conftest import TEMPLATE, params

CONFIG = DecoderConfig(
  vocab_size=320,
  num_layers=1,
  d_model=8,
  d_ff=16,
  num_heads=2,
  num_kv_heads=1,
  head_dim=4,
  max_length=32,
  family="qwen3",
  qk_norm=True,
  rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 32),
  tie_embeddings=False,
)


@pytest.fixture(scope="module")
def model():
  rng = np.random.default_rng(0)
  graph, state = nnx.split(abstract_decoder(CONFIG, jnp.float32))
  return nnx.merge(graph, jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), state))


def test_m3_round_trip(tmp_path, model, bpe):
  tokenizer = Tokenizer(bpe, bos_id=1, eos_ids=[2, 0], adds_bos=True, chat_template=TEMPLATE)
  path = str(tmp_path / "deep" / "m")
  save_orbax(path, model, tokenizer)
  assert os.listdir(tmp_path / "deep") == ["m"]
  loaded = load_model(path)
  assert loaded.config == CONFIG.replace(real_vocab_size=290)
  for name, value in params(model).items():
    np.testing.assert_array_equal(params(loaded.model)[name], value, err_msg=name)
  assert loaded.tokenizer.encode("the 12 <|im_end|>") == tokenizer.encode("the 12 <|im_end|>")
  assert (loaded.tokenizer.bos_id, loaded.tokenizer.eos_ids) == (1, (0, 2))
  assert loaded.tokenizer.adds_bos and loaded.tokenizer.chat_template == TEMPLATE
  half = load_model(path, dtype=jnp.bfloat16, max_length=16)
  assert half.model.dtype == jnp.bfloat16 and half.config.max_length == 16
  with pytest.raises(CheckpointError, match="exists already"):
    save_orbax(path, model)


@pytest.mark.parametrize("save", [save_orbax, save_hf])
@pytest.mark.parametrize(
  "error, message",
  [
    (OSError(errno.ENOSPC, "full"), "no space left on the disk; nothing was kept"),
    (KeyboardInterrupt(), None),
  ],
)
def test_failed_save_leaves_nothing(tmp_path, monkeypatch, model, save, error, message):
  import importlib

  module = importlib.import_module(save.__module__)
  written = []

  def fail(path, value):
    files.write_json(path, value)
    written.append(path)
    raise error

  monkeypatch.setattr(module, "write_json", fail)
  with pytest.raises(CheckpointError if message else KeyboardInterrupt, match=message):
    save(str(tmp_path / "m"), model)
  assert written and os.listdir(tmp_path) == []


def test_damaged_checkpoints(tmp_path, model):
  path = tmp_path / "m"
  save_orbax(str(path), model)
  description = (path / "specjax.json").read_text()
  cases = {
    description[:50]: "specjax.json: not valid JSON",
    description.replace('"format": 1', '"format": 7'): "format = 7; supported: 1",
    description.replace('"decoder"', '"medusa"'): "kind = 'medusa'",
    description.replace('"d_ff": 16', '"d_ff": 0'): "d_ff = 0",
    description.replace('"d_ff": 16', '"d_fff": 16'): "d_fff",
    description.replace('"d_ff": 16', '"d_ff": 17'): r"layers.0.ff.\w+.weight has shape.*asks for",
    description.replace('"num_layers": 1', '"num_layers": 2'): r"layers.1.* is missing",
    description.replace('"qk_norm": true', '"qk_norm": false'): r"k_norm.weight has no place",
  }
  for text, message in cases.items():
    (path / "specjax.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
      load_model(str(path))
  (path / "specjax.json").write_text(description)
  for root, _, names in os.walk(path / "params"):
    for name in names:
      open(os.path.join(root, name), "wb").close()
  with pytest.raises(CheckpointError, match="cannot be restored, perhaps damaged"):
    load_model(str(path))
