"""EAGLE-3 folders as their projects write them, and the head in PyTorch, which knows such a file alone."""

import json

import numpy as np
import pytest
import safetensors.numpy

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

  base = 10000.0

  def rotated(self, x):
    """``x [T, heads, H]``, row t at position t; halves, not neighbours, turn together."""
    angle = torch.arange(len(x))[:, None] * self.base ** (-torch.arange(0, SIZE, 2) / SIZE)
    angle = torch.cat([angle, angle], -1)[:, None]
    half = torch.cat([-x[..., SIZE // 2 :], x[..., : SIZE // 2]], -1)
    return x * torch.cos(angle) + half * torch.sin(angle)

  def __call__(self, embeddings, features):
    """``[T, D]`` twice → states ``[T, D]`` and logits ``[T, draft vocabulary]``."""
    layer = self.layer
    weight = lambda name: self.t[f"{layer}.self_attn.{name}_proj.weight"].T
    normed = self.norm(features, f"{layer}.hidden_norm.weight")
    x = torch.cat([self.norm(embeddings, f"{layer}.input_layernorm.weight"), normed], -1)
    residual = normed if self.norm_before_residual else features
    x = residual + self.attended(x @ weight("q"), x @ weight("k"), x @ weight("v"))
    states = x + self.fed_forward(self.norm(x, f"{layer}.post_attention_layernorm.weight"))
    return states, self.norm(states, "norm.weight") @ self.t["lm_head.weight"].T

  def attended(self, q, k, v):
    """Causal attention, ``[T, D]``, of rows from position 0 on."""
    count = len(q)
    q, k = self.rotated(q.view(count, HEADS, SIZE)), self.rotated(k.view(count, KV, SIZE))
    v = v.view(count, KV, SIZE)
    out = torch.zeros(count, HEADS, SIZE)
    for t in range(count):
      for h in range(HEADS):
        group = h // (HEADS // KV)
        scores = torch.softmax(k[: t + 1, group] @ q[t, h] / SIZE**0.5, 0)
        out[t, h] = scores @ v[: t + 1, group]
    return out.view(count, -1) @ self.t[f"{self.layer}.self_attn.o_proj.weight"].T

  def fed_forward(self, y):
    weight = lambda name: self.t[f"{self.layer}.mlp.{name}_proj.weight"].T
    return (torch.nn.functional.silu(y @ weight("gate")) * (y @ weight("up"))) @ weight("down")
