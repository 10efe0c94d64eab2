"""Medusa heads in the public layouts, against PyTorch; PyTorch's own files and who may read them."""

import json
import os
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from specjax.checkpoints import CheckpointError, LoadedModel, load_head, save_medusa
from specjax.checkpoints.pickled import read_pickled
from specjax.models import MedusaConfig, MedusaHeads
from specjax.testing import tiny_model

from .conftest import params

torch = pytest.importorskip("torch")

VOCAB, WIDTH = 61, 32
HIDDEN = np.random.default_rng(3).standard_normal((2, 3, WIDTH)).astype(np.float32)


@pytest.fixture(scope="module")
def target():
  return LoadedModel(tiny_model(0, num_layers=1), None, "tiny")


def tensors_of(num_heads=5, num_layers=1, own=True):
  """Heads under the names and in the shapes of Medusa v1."""
  noise = np.random.default_rng(0)
  weight = lambda *shape: (noise.standard_normal(shape) / WIDTH**0.5).astype(np.float32)
  tensors = {}
  for h in range(num_heads):
    for i in range(num_layers):
      tensors[f"{h}.{i}.linear.weight"] = weight(WIDTH, WIDTH)
      tensors[f"{h}.{i}.linear.bias"] = weight(WIDTH)
    if own:
      tensors[f"{h}.{num_layers}.weight"] = weight(VOCAB, WIDTH)
  return tensors


def write(folder, tensors, file="medusa_lm_head.safetensors", **fields):
  folder.mkdir()
  # What the authors' files say, whatever is in them.
  config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "tiny", **fields}
  (folder / "config.json").write_text(json.dumps(config))
  if file.endswith(".pt"):
    torch.save({k: torch.from_numpy(np.array(v)) for k, v in tensors.items()}, folder / file)
  else:
    safetensors.numpy.save_file(tensors, folder / file)
  return str(folder)


def oracle(tensors, num_heads, num_layers, outputs):
  """Every head's logits of `HIDDEN` in PyTorch, from the file's tensors."""
  t = {k: torch.from_numpy(np.array(v)) for k, v in tensors.items()}
  said = []
  for h in range(num_heads):
    x = torch.from_numpy(HIDDEN)
    for i in range(num_layers):
      x = x + torch.nn.functional.silu(x @ t[f"{h}.{i}.linear.weight"].T + t[f"{h}.{i}.linear.bias"])
    said.append(x @ torch.from_numpy(np.asarray(outputs(h))).T)
  return torch.stack(said, dim=-2).numpy()


@pytest.mark.parametrize(
  "file, num_heads, num_layers, own",
  [
    ("medusa_lm_head.pt", 5, 1, True),
    ("medusa_lm_head.safetensors", 3, 2, True),
    ("medusa_lm_head.safetensors", 4, 1, False),
  ],
)
def test_m2_logits_equal_pytorch(tmp_path, target, file, num_heads, num_layers, own):
  """Heads and blocks are counted, whatever the config says; without output layers the target's head speaks.

  Fails when heads or blocks are swapped, or the residual or SiLU is another.
  """
  tensors = tensors_of(num_heads, num_layers, own)
  path = write(tmp_path / "m", tensors, file)
  loaded = load_head(path, target)
  heads = loaded.module
  assert (loaded.kind, loaded.config, loaded.source) == ("medusa", heads.config, path)
  assert loaded.config == MedusaConfig(WIDTH, VOCAB, num_heads, num_layers, "own" if own else "target")
  outputs = (
    (lambda h: tensors[f"{h}.{num_layers}.weight"]) if own else (lambda h: target.model.head.weight[...])
  )
  said = heads(jnp.asarray(HIDDEN), target.model.unembed)
  np.testing.assert_allclose(said, oracle(tensors, num_heads, num_layers, outputs), atol=3e-5)
  assert len(params(heads)) == 2 * num_layers + num_heads * own  # and none kept an initial value:
  np.testing.assert_array_equal(heads.blocks[0].bias[...][1], tensors["1.0.linear.bias"])


def random_heads(dtype, **options):
  ids = [1, 5, 40] if options.get("draft_vocab_size") else None
  heads = MedusaHeads(MedusaConfig(WIDTH, VOCAB, 3, **options), ids=ids, dtype=dtype, rngs=nnx.Rngs(0))
  noise = np.random.default_rng(1)
  for block in heads.blocks:
    for name in ("weight", "bias"):
      setattr(block, name, nnx.Param(jnp.asarray(noise.standard_normal(getattr(block, name).shape), dtype)))
  return heads


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
@pytest.mark.parametrize("pickled", (False, True))
@pytest.mark.parametrize(
  "options",
  [
    dict(),
    dict(num_layers=2, draft_vocab_size=3),
    dict(output="own"),
    dict(output="own", output_rank=4, draft_vocab_size=3),
    dict(output="shared", draft_vocab_size=3),
    dict(output="shared", output_rank=4, num_layers=2),
  ],
  ids=str,
)
def test_round_trips_keep_every_bit(tmp_path, target, dtype, pickled, options):
  heads = random_heads(dtype, **options)
  save_medusa(str(tmp_path / "m"), heads, target="tiny", pickled=pickled)
  loaded = load_head(str(tmp_path / "m"), target, dtype=dtype).module
  assert loaded.config == heads.config
  mine, its = params(heads), params(loaded)
  assert mine.keys() == its.keys()
  for name, value in mine.items():
    assert its[name].dtype == value.dtype
    np.testing.assert_array_equal(its[name], value, err_msg=name)


def test_what_is_written_is_medusa_v1(tmp_path, target):
  """Names, shapes and fields; bf16 on request."""
  heads = random_heads(jnp.float32, output="own")
  save_medusa(str(tmp_path / "m"), heads, target="org/tiny", dtype=jnp.bfloat16)
  tensors = safetensors.numpy.load_file(tmp_path / "m" / "medusa_lm_head.safetensors")
  assert {k: v.shape for k, v in tensors.items()} == {k: v.shape for k, v in tensors_of(3).items()}
  assert all(v.dtype == jnp.bfloat16 for v in tensors.values())
  np.testing.assert_array_equal(tensors["2.1.weight"], heads.outputs[2].weight[...].astype(jnp.bfloat16))
  config = json.loads((tmp_path / "m" / "config.json").read_text())
  assert config["medusa_num_heads"] == 3 and config["base_model_name_or_path"] == "org/tiny"
  save_medusa(str(tmp_path / "p"), heads, pickled=True)
  stored = torch.load(tmp_path / "p" / "medusa_lm_head.pt", weights_only=True)
  assert torch.equal(stored["0.0.linear.bias"], torch.from_numpy(np.array(heads.blocks[0].bias[...][0])))
  with pytest.raises(CheckpointError, match="exists already"):
    save_medusa(str(tmp_path / "m"), heads)


def put(name, value):
  return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
  "change, message",
  [
    (
      lambda t: t.pop("2.0.linear.weight"),
      "tensor 2.0.linear.weight is missing; there are 5 heads of 1 block",
    ),
    (lambda t: t.pop("2.0.linear.bias"), "1 tensor missing: 2.0.linear.bias"),
    (lambda t: t.pop("4.1.weight"), "1 tensor missing: 4.1.weight"),
    (put("7.1.weight", np.zeros((VOCAB, WIDTH), np.float32)), "1 tensor with no place.*7.1.weight"),
    (put("1.0.linear.bias", np.zeros(31, np.float32)), r"1.0.linear.bias has shape \[31\].*\[32\]"),
    (put("3.1.weight", np.zeros((60, WIDTH), np.float32)), r"3.1.weight has shape \[60, 32\].*\[61, 32\]"),
    (put("0.1.weight", np.zeros((64, WIDTH), np.float32)), "vocab_size = 64; the target's is 61"),
    (put("0.0.linear.weight", np.zeros((24, 24), np.float32)), "d_model = 24; the target's is 32"),
    (put("0.0.linear.weight", np.zeros((32, 16), np.float32)), r"linear.weight has shape \[32, 16\]"),
    (put("0.0.linear.weight", np.array(1, np.float32)), "d_model = 0"),
    (put("9000000.0.linear.weight", np.zeros((1, 1), np.float32)), "tensor 5.0.linear.weight is missing"),
    (put("d2t", np.array([70])), r"d2t\[0\] = 70, an offset"),
    (put("t2d", np.ones(VOCAB, bool)), "tensor d2t is missing"),
    (
      lambda t: (t.clear(), t.update({"medusa_head.0": np.ones(3, np.float32)})),
      "not the heads of Medusa v1",
    ),
  ],
)
def test_m3_wrong_tensors(tmp_path, target, change, message):
  tensors = tensors_of()
  change(tensors)
  with pytest.raises(CheckpointError, match=message):
    load_head(write(tmp_path / "m", tensors), target)


class Evil:
  """A pickle that runs code when it is read by a plain reader."""

  def __reduce__(self):
    return os.mkdir, (os.environ["EVIL_PATH"],)


def test_pickles_are_read_by_a_weights_only_reader(tmp_path, target, monkeypatch):
  """Nothing of the file runs, whatever is in it. Fails with any other reader."""
  monkeypatch.setenv("EVIL_PATH", str(tmp_path / "ran"))
  path = write(tmp_path / "m", tensors_of(), "medusa_lm_head.pt")
  file = os.path.join(path, "medusa_lm_head.pt")
  torch.save({"0.0.linear.weight": Evil()}, file)
  with pytest.raises(CheckpointError, match=r"medusa_lm_head.pt: the weights-only reader refuses it"):
    load_head(path, target)
  assert not (tmp_path / "ran").exists()
  for value, message in (
    ([torch.ones(2)], "a dictionary of tensors is expected, not list"),
    ({"0.0.linear.weight": 3}, "entry '0.0.linear.weight' is of type int"),
    ({"0.0.linear.weight": torch.ones(2, dtype=torch.int8)}, "has type int8; supported: float64"),
  ):
    torch.save(value, file)
    with pytest.raises(CheckpointError, match=message):
      load_head(path, target)
  with open(file, "wb") as stream:
    stream.write(b"PK\x03\x04 not a zip")
  with pytest.raises(CheckpointError, match="refuses it; it is damaged"):
    load_head(path, target)


def test_torch_is_an_extra_and_new_enough(tmp_path, target, monkeypatch):
  path = write(tmp_path / "m", tensors_of(), "medusa_lm_head.pt")
  monkeypatch.setattr(torch, "__version__", "2.5.1+cpu")
  with pytest.raises(CheckpointError, match=r"torch 2.5.1\+cpu is installed; .*safe from 2.6 on"):
    load_head(path, target)
  monkeypatch.setitem(sys.modules, "torch", None)
  with pytest.raises(CheckpointError, match=r"need torch; install it with the extra: specjax\[torch\]"):
    load_head(path, target)


def test_types_in_pickles(tmp_path):
  tensors = {"a": torch.tensor([1.5, -2.0], dtype=torch.bfloat16), "d2t": torch.tensor([3, 4])}
  tensors["b"] = torch.arange(6, dtype=torch.float16).reshape(2, 3).T  # not contiguous
  torch.save(tensors, tmp_path / "x.pt")
  read = read_pickled(str(tmp_path / "x.pt"), ("d2t",))
  assert read["a"].read().dtype == jnp.bfloat16 and read["b"].shape == (3, 2)
  np.testing.assert_array_equal(read["a"].read().astype(np.float32), [1.5, -2.0])
  np.testing.assert_array_equal(read["b"].read(), np.arange(6).reshape(2, 3).T)
  np.testing.assert_array_equal(read["d2t"].read(), [3, 4])
