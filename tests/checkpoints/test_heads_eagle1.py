"""EAGLE-1 and EAGLE-2 heads in the public layout, against a forward in PyTorch that knows file and target."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from specjax.checkpoints import CheckpointError, LoadedModel, load_head, save_eagle1
from specjax.models import Eagle1, Eagle1Config
from specjax.testing import tiny_config, tiny_model

from .conftest import params
from .eagle3_folders import CONFIG, EPS, FF, HEADS, KV, SIZE, VOCAB, WIDTH, Oracle, torch

IDS = np.array([2, 3, 17, 60])


@pytest.fixture(scope="module")
def target():
  """Its final norm is no identity, its rope base and its epsilon are not the head's."""
  model = tiny_model(0, num_layers=3, rope_base=300.0, norm_eps=1e-2)
  model.norm.weight = nnx.Param(jnp.linspace(0.5, 1.5, WIDTH))
  return LoadedModel(model, None, "tiny")


def tensors_of(bias: bool = True, inputs: int = 2, qkv_bias: bool = False) -> dict[str, np.ndarray]:
  """A head under the names and in the shapes of the public files."""
  noise = np.random.default_rng(0)
  weight = lambda rows, columns: (noise.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)
  vector = lambda size: (0.3 * noise.standard_normal(size)).astype(np.float32)
  attention = {"q": HEADS * SIZE, "k": KV * SIZE, "v": KV * SIZE}
  return {
    "fc.weight": weight(WIDTH, inputs * WIDTH),
    **({"fc.bias": vector(WIDTH)} if bias else {}),
    **{f"layers.0.self_attn.{name}_proj.weight": weight(size, WIDTH) for name, size in attention.items()},
    **{f"layers.0.self_attn.{name}_proj.bias": vector(size) for name, size in attention.items() if qkv_bias},
    "layers.0.self_attn.o_proj.weight": weight(WIDTH, HEADS * SIZE),
    "layers.0.mlp.gate_proj.weight": weight(FF, WIDTH),
    "layers.0.mlp.up_proj.weight": weight(FF, WIDTH),
    "layers.0.mlp.down_proj.weight": weight(WIDTH, FF),
    "layers.0.post_attention_layernorm.weight": 1 + vector(WIDTH),
  }


def write(folder, tensors, file="model.safetensors", **fields):
  """A folder as the project writes it; a field of ``...`` is left out."""
  config = {k: v for k, v in {**CONFIG, **fields}.items() if v is not ...}
  folder.mkdir()
  (folder / "config.json").write_text(json.dumps(config))
  if file.endswith(".bin"):
    torch.save({k: torch.from_numpy(np.array(v)) for k, v in tensors.items()}, folder / file)
  else:
    safetensors.numpy.save_file(tensors, folder / file)
  return str(folder)


class Eagle1Oracle(Oracle):
  """The head in PyTorch, on the target's last norm and output rows; row by row, without a cache."""

  def __init__(self, tensors, model):
    super().__init__(tensors, "layers.0", False)
    self.final = torch.from_numpy(np.array(model.norm.weight[...]))
    self.rows = torch.from_numpy(np.array(model.head.weight[...]))
    self.eps = model.config.norm_eps

  def feature(self, hidden):
    return hidden / torch.sqrt((hidden * hidden).mean(-1, keepdim=True) + self.eps) * self.final

  def __call__(self, embeddings, features):
    """``[T, D]`` twice → next features ``[T, D]`` and logits ``[T, V]``."""
    parts = [embeddings, features] if self.t["fc.weight"].shape[1] == 2 * WIDTH else [embeddings]
    x = torch.cat(parts, -1) @ self.t["fc.weight"].T + self.t.get("fc.bias", torch.zeros(WIDTH))
    linear = lambda name: (
      x @ self.t[f"layers.0.self_attn.{name}.weight"].T
      + self.t.get(f"layers.0.self_attn.{name}.bias", torch.zeros(1))
    )
    x = x + self.attended(linear("q_proj"), linear("k_proj"), linear("v_proj"))
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)
    y = y * self.t["layers.0.post_attention_layernorm.weight"]
    x = x + self.fed_forward(y)
    return x, x @ self.rows.T


@jax.jit
def forward(head, embeddings, features, cache):
  return head(embeddings, features, cache)


@pytest.mark.parametrize(
  "file, options, fields",
  [
    ("model.safetensors", {}, {}),
    ("pytorch_model.bin", dict(bias=False), dict(bias=False, rope_theta=77.0)),
    ("model.safetensors", dict(qkv_bias=True), dict(qkv_bias=True)),
    ("model.safetensors", dict(inputs=1), dict(inputs="token")),
  ],
  ids=("public", "no bias", "qkv bias", "token"),
)
def test_m2_features_and_logits_equal_pytorch(tmp_path, target, file, options, fields):
  """A prefix of six rows from target features, then two steps on the head's own output: 1e-5.

  Fails when the feature is not normed, or by the head's epsilon, the two inputs are swapped, what the layer
  takes or gives is normed, or positions or the rope base are the target's.
  """
  tensors = tensors_of(**options)
  path = write(tmp_path / "head", tensors, file, **fields)
  loaded = load_head(path, target)
  head = loaded.module
  assert (loaded.kind, loaded.config, loaded.source) == ("eagle", head.config, path)
  assert head.config.tap_layers == (3,) and head.ids is None
  assert head.config.decoder.rope_base == fields.get("rope_theta", 10000.0)
  assert head.output.weight[...] is target.model.head.weight[...]

  oracle = Eagle1Oracle(tensors, target.model)
  oracle.base = fields.get("rope_theta", 10000.0)
  noise = np.random.default_rng(1)
  taps = 3 * noise.standard_normal((6, 1, WIDTH)).astype(np.float32)
  embed = np.asarray(target.model.embed[...])
  tokens = list(noise.integers(0, VOCAB, 6))
  features = oracle.feature(torch.from_numpy(taps[:, 0]))
  ours, cache, block = head.fuse(jnp.asarray(taps[None])), head.init_cache(1, 32), tokens
  for _ in range(3):
    states, logits = oracle(torch.from_numpy(embed[tokens]), features)
    output = forward(head, jnp.asarray(embed[None, block]), ours, cache)
    np.testing.assert_allclose(output.hidden[0], states[-len(block) :], atol=1e-5)
    np.testing.assert_allclose(output.logits[0], logits[-len(block) :], atol=1e-4, rtol=1e-5)
    drafted = int(logits[-1].argmax())
    tokens, features = [*tokens, drafted], torch.cat([features, states[-1:]])
    cache = output.cache.replace(length=cache.length + len(block))
    ours, block = output.hidden[:, -1:], [drafted]


def random_head(target, dtype=jnp.float32, ids=None, **changes):
  layer = tiny_config(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=6, d_ff=20, rope_base=5e3)
  size = None if ids is None else len(ids)
  config = Eagle1Config(layer.replace(**changes.pop("layer", {})), 3, draft_vocab_size=size, **changes)
  return Eagle1(config, target.model, ids=ids, dtype=dtype, rngs=nnx.Rngs(3))


@pytest.mark.parametrize(
  "options",
  [
    dict(),
    dict(dtype=jnp.bfloat16, ids=IDS, bias=False),
    dict(inputs="feature", layer=dict(family="qwen2", qkv_bias=True)),
  ],
  ids=("public", "reduced", "feature"),
)
def test_round_trips_keep_every_bit(tmp_path, target, options):
  head = random_head(target, **options)
  save_eagle1(str(tmp_path / "head"), head, target="tiny")
  loaded = load_head(str(tmp_path / "head"), target, dtype=head.dtype).module
  assert loaded.config == head.config
  mine, its = params(head), params(loaded)
  assert mine.keys() == its.keys()
  for name, value in mine.items():
    assert its[name].dtype == value.dtype
    np.testing.assert_array_equal(its[name], value, err_msg=name)


def test_what_is_written_is_what_other_projects_read(tmp_path, target):
  """Names, shapes, types and fields of the public layout. Fails when what is the target's is stored."""
  head = random_head(target, layer=dict(num_heads=HEADS, num_kv_heads=KV, head_dim=SIZE, d_ff=FF))
  path = tmp_path / "head"
  save_eagle1(str(path), head, target="org/tiny", dtype=jnp.bfloat16)
  tensors = safetensors.numpy.load_file(path / "model.safetensors")
  expected = tensors_of()
  assert {k: v.shape for k, v in tensors.items()} == {k: v.shape for k, v in expected.items()}
  assert {v.dtype for v in tensors.values()} == {np.dtype(jnp.bfloat16)}
  config = json.loads((path / "config.json").read_text())
  assert config["bias"] is True and config["base_model_name_or_path"] == "org/tiny"
  assert (config["num_hidden_layers"], config["vocab_size"], config["rope_theta"]) == (1, VOCAB, 5e3)
  assert not {"draft_vocab_size", "inputs", "qkv_bias"} & config.keys()
  with pytest.raises(CheckpointError, match="exists already"):
    save_eagle1(str(path), head)
  with pytest.raises(CheckpointError, match="dtype = float16"):
    save_eagle1(str(tmp_path / "x"), head, dtype=jnp.float16)


def test_the_targets_embedding_may_be_stored_with_it(tmp_path, target):
  """As the authors' files do; another one would make another head."""
  embed = np.asarray(target.model.embed[...])
  same = {**tensors_of(), "embed_tokens.weight": embed.astype(np.float16)}
  assert load_head(write(tmp_path / "same", same), target).kind == "eagle"
  with pytest.raises(CheckpointError, match=r"embed_tokens.weight differs from the embedding of tiny"):
    load_head(write(tmp_path / "other", {**same, "embed_tokens.weight": embed + 1}), target)


@pytest.mark.parametrize(
  "change, fields, message",
  [
    ({"fc.bias": ...}, {}, "1 tensor missing: fc.bias"),
    ({}, dict(bias=False), "1 tensor with no place in an EAGLE-1 head.*fc.bias"),
    ({}, dict(bias="no"), "bias = 'no'; it must be of type bool"),
    ({}, dict(inputs="none"), "inputs = 'none'"),
    ({}, dict(inputs="token"), r"fc.weight has shape \[32, 64\]; the config asks for \[32, 32\]"),
    ({"layers.1.mlp.up_proj.weight": np.zeros((FF, WIDTH))}, {}, "no place in an EAGLE-1 head"),
    ({}, dict(num_hidden_layers=2), "decoder.num_layers = 2; it must be 1"),
    ({}, dict(hidden_size=24), "made for d_model = 24; the target has 32"),
    ({}, dict(vocab_size=64), "made for vocab_size = 64; the target has 61"),
    ({}, dict(draft_vocab_size=5), "tensor d2t is missing"),
    ({}, dict(rope_scaling={"type": "dynamic", "factor": 2.0}), "rope_type = 'dynamic'"),
    ({"layers.0.input_layernorm.weight": np.ones(WIDTH)}, {}, "not a known draft head"),
    ({}, dict(speculators_model_type="eagle"), "speculators_model_type = 'eagle'.*supported: eagle3"),
  ],
)
def test_wrong_folders(tmp_path, target, change, fields, message):
  tensors = {name: np.asarray(x, np.float32) for name, x in (tensors_of() | change).items() if x is not ...}
  with pytest.raises(CheckpointError, match=message):
    load_head(write(tmp_path / "head", tensors, **fields), target)
