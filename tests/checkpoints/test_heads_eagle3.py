"""EAGLE-3 heads in the public layouts, against a forward in PyTorch that knows the file alone."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from specjax.checkpoints import CheckpointError, LoadedModel, load_head, save_eagle3
from specjax.models import Eagle3, Eagle3Config
from specjax.testing import tiny_config, tiny_model

from .conftest import params

torch = pytest.importorskip("torch")

VOCAB, WIDTH, DRAFT, HEADS, KV, SIZE, FF, EPS = 61, 32, 17, 4, 2, 8, 40, 1e-5
IDS = np.sort(np.random.default_rng(7).choice(VOCAB, DRAFT, replace=False))
# Of the draft layer; no rope_theta: files leave it out, and 10000 is meant.
CONFIG = dict(
  model_type="llama",
  hidden_size=WIDTH,
  intermediate_size=FF,
  num_attention_heads=HEADS,
  num_key_value_heads=KV,
  num_hidden_layers=1,
  max_position_embeddings=64,
  rms_norm_eps=EPS,
  hidden_act="silu",
  tie_word_embeddings=False,
  vocab_size=VOCAB,
)


@pytest.fixture(scope="module")
def target():
  """Its rope base is not the head's."""
  return LoadedModel(tiny_model(0, num_layers=8, rope_base=300.0), None, "tiny")


def tensors_of(layer: str, reduced: bool = True, seed: int = 0) -> dict[str, np.ndarray]:
  """A head under the names and in the shapes of the public files; norms away from 1."""
  noise = np.random.default_rng(seed)
  weight = lambda rows, columns: (noise.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)
  norm = lambda: (1 + 0.3 * noise.standard_normal(WIDTH)).astype(np.float32)
  tensors = {
    "fc.weight": weight(WIDTH, 3 * WIDTH),
    f"{layer}.hidden_norm.weight": norm(),
    f"{layer}.input_layernorm.weight": norm(),
    f"{layer}.post_attention_layernorm.weight": norm(),
    f"{layer}.self_attn.q_proj.weight": weight(HEADS * SIZE, 2 * WIDTH),
    f"{layer}.self_attn.k_proj.weight": weight(KV * SIZE, 2 * WIDTH),
    f"{layer}.self_attn.v_proj.weight": weight(KV * SIZE, 2 * WIDTH),
    f"{layer}.self_attn.o_proj.weight": weight(WIDTH, HEADS * SIZE),
    f"{layer}.mlp.gate_proj.weight": weight(FF, WIDTH),
    f"{layer}.mlp.up_proj.weight": weight(FF, WIDTH),
    f"{layer}.mlp.down_proj.weight": weight(WIDTH, FF),
    "norm.weight": norm(),
    "lm_head.weight": weight(DRAFT if reduced else VOCAB, WIDTH),
  }
  if reduced:
    tensors["d2t"] = IDS - np.arange(DRAFT)
    tensors["t2d"] = np.isin(np.arange(VOCAB), IDS)
  return tensors


def write(folder, layout="eagle", file="model.safetensors", reduced=True, change=None, **fields):
  """A folder as the projects write it; ``change`` alters tensors, a field of ``...`` is left out."""
  tensors = tensors_of("midlayer" if layout == "eagle" else "layers.0", reduced)
  if change is not None:
    change(tensors)
  config = {**CONFIG, "draft_vocab_size": DRAFT if reduced else VOCAB}
  if layout == "speculators":
    config = {
      "speculators_model_type": "eagle3",
      "speculators_config": {
        "algorithm": "eagle3",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"name_or_path": "tiny"},
      },
      "draft_vocab_size": config["draft_vocab_size"],
      "norm_before_residual": False,
      "transformer_layer_config": CONFIG,
    }
  config = {k: v for k, v in {**config, **fields}.items() if v is not ...}
  folder.mkdir()
  (folder / "config.json").write_text(json.dumps(config))
  if file.endswith(".bin"):
    torch.save({k: torch.from_numpy(np.array(v)) for k, v in tensors.items()}, folder / file)
  else:
    safetensors.numpy.save_file(tensors, folder / file)
  return str(folder), tensors


class Oracle:
  """The head in PyTorch, row by row from the list of all rows: no cache, no batch, nothing of ours."""

  def __init__(self, tensors, layer: str, norm_before_residual: bool):
    self.t = {k: torch.from_numpy(np.array(v)) for k, v in tensors.items()}
    self.layer, self.norm_before_residual = layer, norm_before_residual

  def norm(self, x, name):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * self.t[name]

  def fuse(self, low, middle, high):
    return torch.cat([low, middle, high], -1) @ self.t["fc.weight"].T

  def rotated(self, x):
    """``x [T, heads, H]``, row t at position t, base 10000; halves, not neighbours, turn together."""
    angle = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(0, SIZE, 2) / SIZE)
    angle = torch.cat([angle, angle], -1)[:, None]
    half = torch.cat([-x[..., SIZE // 2 :], x[..., : SIZE // 2]], -1)
    return x * torch.cos(angle) + half * torch.sin(angle)

  def __call__(self, embeddings, features):
    """``[T, D]`` twice → states ``[T, D]`` and logits ``[T, draft vocabulary]``."""
    layer = self.layer
    weight = lambda name: self.t[f"{layer}.{name}.weight"].T
    normed = self.norm(features, f"{layer}.hidden_norm.weight")
    x = torch.cat([self.norm(embeddings, f"{layer}.input_layernorm.weight"), normed], -1)
    count = len(x)
    q = self.rotated((x @ weight("self_attn.q_proj")).view(count, HEADS, SIZE))
    k = self.rotated((x @ weight("self_attn.k_proj")).view(count, KV, SIZE))
    v = (x @ weight("self_attn.v_proj")).view(count, KV, SIZE)
    out = torch.zeros(count, HEADS, SIZE)
    for t in range(count):
      for h in range(HEADS):
        group = h // (HEADS // KV)
        scores = torch.softmax(k[: t + 1, group] @ q[t, h] / SIZE**0.5, 0)
        out[t, h] = scores @ v[: t + 1, group]
    residual = normed if self.norm_before_residual else features
    x = residual + out.view(count, -1) @ weight("self_attn.o_proj")
    y = self.norm(x, f"{layer}.post_attention_layernorm.weight")
    gated = torch.nn.functional.silu(y @ weight("mlp.gate_proj")) * (y @ weight("mlp.up_proj"))
    states = x + gated @ weight("mlp.down_proj")
    return states, self.norm(states, "norm.weight") @ self.t["lm_head.weight"].T


@jax.jit
def forward(head, embeddings, features, cache):
  return head(embeddings, features, cache)


@pytest.mark.parametrize(
  "layout, file, residual, reduced",
  [
    ("eagle", "model.safetensors", False, True),
    ("eagle", "pytorch_model.bin", False, False),
    ("speculators", "model.safetensors", False, True),
    ("speculators", "model.safetensors", True, True),
  ],
)
def test_m2_states_and_logits_equal_pytorch(tmp_path, target, layout, file, residual, reduced):
  """A prefix of six rows from target features, then two steps on the head's own states: 1e-5.

  Fails when what recurs is normed or fused again, the residual is another one, positions or the rope base
  are the target's, or a token of the draft vocabulary means another one.
  """
  layer = {"eagle": "midlayer", "speculators": "layers.0"}[layout]
  fields = {"norm_before_residual": residual} if layout == "speculators" else {}
  path, tensors = write(tmp_path / "head", layout, file, reduced, **fields)
  loaded = load_head(path, target)
  head = loaded.module
  assert (loaded.kind, loaded.config, loaded.source) == ("eagle3", head.config, path)
  assert head.config.tap_layers == (2, 4, 5) and head.config.decoder.rope_base == 10000.0

  oracle = Oracle(tensors, layer, residual)
  noise = np.random.default_rng(1)
  taps = noise.standard_normal((6, 3, WIDTH)).astype(np.float32)
  embed = np.asarray(target.model.embed[...])
  tokens = list(noise.integers(0, VOCAB, 6))
  features = oracle.fuse(*torch.from_numpy(taps).unbind(1))
  ours, cache, block = head.fuse(jnp.asarray(taps[None])), head.init_cache(1, 32), tokens
  for _ in range(3):
    states, logits = oracle(torch.from_numpy(embed[tokens]), features)
    output = forward(head, jnp.asarray(embed[None, block]), ours, cache)
    np.testing.assert_allclose(output.hidden[0], states[-len(block) :], atol=1e-5)
    np.testing.assert_allclose(output.logits[0], logits[-len(block) :], atol=1e-5)
    # The next row: the token that was drafted, as the target names it, and the state behind it.
    drafted = int(logits[-1].argmax())
    drafted = drafted + int(tensors["d2t"][drafted]) if reduced else drafted
    mine = int(output.logits[0, -1].argmax())
    assert (mine if head.ids is None else int(head.ids[mine])) == drafted
    tokens, features = [*tokens, drafted], torch.cat([features, states[-1:]])
    cache = output.cache.replace(length=cache.length + len(block))
    ours, block = output.hidden[:, -1:], [drafted]
  assert (head.ids is None) is not reduced
  if reduced:
    np.testing.assert_array_equal(head.ids, IDS)


def test_m3_every_tensor_lands_where_it_belongs(tmp_path, target):
  """No parameter keeps an initial value. Fails when two tensors are swapped."""
  path, tensors = write(tmp_path / "head")
  found = params(load_head(path, target).module)
  places = {
    "layer.embedding_norm.weight": "midlayer.input_layernorm.weight",
    "layer.feature_norm.weight": "midlayer.hidden_norm.weight",
    "layer.ff_norm.weight": "midlayer.post_attention_layernorm.weight",
    "layer.ff.down.weight": "midlayer.mlp.down_proj.weight",
    "output.weight": "lm_head.weight",
    "norm.weight": "norm.weight",
  }
  for parameter, name in places.items():
    np.testing.assert_array_equal(found[parameter], tensors[name])
  assert len(found) == len(tensors) - 1  # t2d says nothing that d2t does not
  half = params(load_head(path, target, dtype=jnp.bfloat16).module)
  assert half["norm.weight"].dtype == jnp.bfloat16 and half["output.token_map"].dtype == jnp.int32


def random_head(dtype=jnp.float32, **changes):
  layer = tiny_config(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=6, d_ff=20, rope_base=5e3)
  values = dict(decoder=layer, target_width=WIDTH, tap_layers=(1, 3, 8), **changes)
  config = Eagle3Config(**values)
  ids = IDS if config.draft_vocab_size else None
  head = Eagle3(config, ids=ids, dtype=dtype, rngs=nnx.Rngs(3))
  head.norm.weight = nnx.Param(jnp.linspace(0.5, 1.5, WIDTH).astype(dtype))
  return head


@pytest.mark.parametrize("layout", ("eagle", "speculators"))
@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
@pytest.mark.parametrize(
  "changes",
  [
    {},
    dict(draft_vocab_size=DRAFT, output_rank=5, norm_before_residual=True),
  ],
  ids=("whole", "reduced"),
)
def test_round_trips_keep_every_bit(tmp_path, target, layout, dtype, changes):
  head = random_head(dtype, **changes)
  save_eagle3(str(tmp_path / "head"), head, layout=layout, target="tiny")
  loaded = load_head(str(tmp_path / "head"), target, dtype=dtype).module
  assert loaded.config == head.config
  mine, its = params(head), params(loaded)
  assert mine.keys() == its.keys()
  for name, value in mine.items():
    assert its[name].dtype == value.dtype
    np.testing.assert_array_equal(its[name], value, err_msg=name)


def test_what_is_written_is_what_other_projects_read(tmp_path, target):
  """Names, shapes, types and fields of the public layouts; a factored output layer multiplied out."""
  head = random_head(draft_vocab_size=DRAFT, output_rank=5)
  for layout, layer in (("eagle", "midlayer"), ("speculators", "layers.0")):
    path = tmp_path / layout
    save_eagle3(str(path), head, layout=layout, target="org/tiny", dtype=jnp.bfloat16, multiply_out=True)
    tensors = safetensors.numpy.load_file(path / "model.safetensors")
    expected = tensors_of(layer)
    assert tensors.keys() == expected.keys()
    assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == bool
    np.testing.assert_array_equal(tensors["d2t"], expected["d2t"])
    np.testing.assert_array_equal(tensors["t2d"], expected["t2d"])
    assert tensors["lm_head.weight"].dtype == jnp.bfloat16
    product = np.asarray(head.output.up[...]) @ np.asarray(head.output.down[...])
    np.testing.assert_allclose(tensors["lm_head.weight"].astype(np.float32), product, atol=0.03)
    config = json.loads((path / "config.json").read_text())
    assert config["draft_vocab_size"] == DRAFT
    if layout == "speculators":
      assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "eagle3"
      assert config["speculators_config"]["verifier"]["name_or_path"] == "org/tiny"
      assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 8]
      assert config["norm_before_residual"] is False
      config = config["transformer_layer_config"]
    assert (config["num_hidden_layers"], config["vocab_size"], config["rope_theta"]) == (1, VOCAB, 5e3)
    merged = load_head(str(path), target).module
    assert merged.config.output_rank is None and merged.output.weight.shape == (DRAFT, WIDTH)
  with pytest.raises(CheckpointError, match="layout = 'hf'; it must be one of eagle, speculators"):
    save_eagle3(str(tmp_path / "x"), head, layout="hf")
  with pytest.raises(CheckpointError, match="dtype = float16"):
    save_eagle3(str(tmp_path / "x"), head, dtype=jnp.float16)
  with pytest.raises(CheckpointError, match="exists already"):
    save_eagle3(str(tmp_path / "eagle"), head)


@pytest.mark.parametrize(
  "layout, fields, expected",
  [
    ("eagle", {}, (2, 4, 5)),
    ("eagle", {"tap_layers": [0, 1, 8]}, (0, 1, 8)),
    # Outputs of layers, as SGLang counts; then inputs, as vLLM and speculators do.
    ("eagle", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, (2, 4, 5)),
    ("speculators", {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, (1, 3, 4)),
    ("speculators", {"eagle_aux_hidden_state_layer_ids": None}, (2, 4, 5)),
  ],
)
def test_which_layers_are_tapped(tmp_path, target, layout, fields, expected):
  path, _ = write(tmp_path / "head", layout, **fields)
  assert load_head(path, target).config.tap_layers == expected


def test_the_targets_embedding_may_be_stored_with_it(tmp_path, target):
  """As some exporters do; another embedding would make another head."""
  embed = np.asarray(target.model.embed[...])
  for i, stored in enumerate((embed, embed.astype(jnp.bfloat16), embed.astype(np.float16))):
    path, _ = write(tmp_path / f"{i}", change=lambda t, x=stored: t.update({"embed_tokens.weight": x}))
    load_head(path, target)
  for name, stored in (("other", embed + 1), ("short", embed[:-1])):
    path, _ = write(tmp_path / name, change=lambda t, x=stored: t.update({"embed_tokens.weight": x}))
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight differs from the embedding of tiny"):
      load_head(path, target)


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
    ("eagle", {"tap_layers": [1, 2]}, r"tap_layers = \[1, 2\]; it must be a list of 3 layers"),
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
  """EAGLE-1, Medusa-2, plain models, nothing at all."""
  plain = {"model.norm.weight": np.ones(WIDTH, np.float32)}
  cases = {
    "EAGLE-1 or EAGLE-2": drop("norm.weight", "midlayer.hidden_norm.weight"),
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
