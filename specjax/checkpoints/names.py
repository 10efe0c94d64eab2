"""Where each tensor of a checkpoint goes: one table a file format.

The left side is the name in the file, the right side the path of a parameter in `Decoder`; ``{}`` is
the layer. Which of the right-hand paths exist depends on the config (biases, q/k norms, head): the
module decides, the table only names.
"""

from __future__ import annotations

_HF = {
  "model.embed_tokens.weight": "embed",
  "model.layers.{}.input_layernorm.weight": "layers.{}.attention_norm.weight",
  "model.layers.{}.self_attn.q_proj.weight": "layers.{}.attention.q.weight",
  "model.layers.{}.self_attn.q_proj.bias": "layers.{}.attention.q.bias",
  "model.layers.{}.self_attn.k_proj.weight": "layers.{}.attention.k.weight",
  "model.layers.{}.self_attn.k_proj.bias": "layers.{}.attention.k.bias",
  "model.layers.{}.self_attn.v_proj.weight": "layers.{}.attention.v.weight",
  "model.layers.{}.self_attn.v_proj.bias": "layers.{}.attention.v.bias",
  "model.layers.{}.self_attn.o_proj.weight": "layers.{}.attention.o.weight",
  "model.layers.{}.self_attn.q_norm.weight": "layers.{}.attention.q_norm.weight",
  "model.layers.{}.self_attn.k_norm.weight": "layers.{}.attention.k_norm.weight",
  "model.layers.{}.post_attention_layernorm.weight": "layers.{}.ff_norm.weight",
  "model.layers.{}.mlp.gate_proj.weight": "layers.{}.ff.gate.weight",
  "model.layers.{}.mlp.up_proj.weight": "layers.{}.ff.up.weight",
  "model.layers.{}.mlp.down_proj.weight": "layers.{}.ff.down.weight",
  "model.norm.weight": "norm.weight",
  "lm_head.weight": "head.weight",
}

_GGUF = {
  "token_embd.weight": "embed",
  "blk.{}.attn_norm.weight": "layers.{}.attention_norm.weight",
  "blk.{}.attn_q.weight": "layers.{}.attention.q.weight",
  "blk.{}.attn_q.bias": "layers.{}.attention.q.bias",
  "blk.{}.attn_k.weight": "layers.{}.attention.k.weight",
  "blk.{}.attn_k.bias": "layers.{}.attention.k.bias",
  "blk.{}.attn_v.weight": "layers.{}.attention.v.weight",
  "blk.{}.attn_v.bias": "layers.{}.attention.v.bias",
  "blk.{}.attn_output.weight": "layers.{}.attention.o.weight",
  "blk.{}.attn_q_norm.weight": "layers.{}.attention.q_norm.weight",
  "blk.{}.attn_k_norm.weight": "layers.{}.attention.k_norm.weight",
  "blk.{}.ffn_norm.weight": "layers.{}.ff_norm.weight",
  "blk.{}.ffn_gate.weight": "layers.{}.ff.gate.weight",
  "blk.{}.ffn_up.weight": "layers.{}.ff.up.weight",
  "blk.{}.ffn_down.weight": "layers.{}.ff.down.weight",
  "output_norm.weight": "norm.weight",
  "output.weight": "head.weight",
}

# Of an output layer of a head's own; the factors and the readout are ours, no public layout has them.
_OUTPUT = {
  "lm_head.weight": "output.weight",
  "lm_head.up.weight": "output.up",
  "lm_head.down.weight": "output.down",
  "lm_head.readout.weight": "output.readout",
}

# Of an EAGLE-3 head; ``{}`` is what the one layer is called. d2t: see `draft_vocabulary`.
_EAGLE3 = {
  "fc.weight": "fc.weight",
  "{}.input_layernorm.weight": "layer.embedding_norm.weight",
  "{}.hidden_norm.weight": "layer.feature_norm.weight",
  "{}.self_attn.q_proj.weight": "layer.attention.q.weight",
  "{}.self_attn.q_proj.bias": "layer.attention.q.bias",
  "{}.self_attn.k_proj.weight": "layer.attention.k.weight",
  "{}.self_attn.k_proj.bias": "layer.attention.k.bias",
  "{}.self_attn.v_proj.weight": "layer.attention.v.weight",
  "{}.self_attn.v_proj.bias": "layer.attention.v.bias",
  "{}.self_attn.o_proj.weight": "layer.attention.o.weight",
  "{}.self_attn.q_norm.weight": "layer.attention.q_norm.weight",
  "{}.self_attn.k_norm.weight": "layer.attention.k_norm.weight",
  "{}.post_attention_layernorm.weight": "layer.ff_norm.weight",
  "{}.mlp.gate_proj.weight": "layer.ff.gate.weight",
  "{}.mlp.up_proj.weight": "layer.ff.up.weight",
  "{}.mlp.down_proj.weight": "layer.ff.down.weight",
  "norm.weight": "norm.weight",
  **_OUTPUT,
  "d2t": "output.token_map",
}

# Of a one-pass block head, beside the layers, which are named as in a Hugging Face file.
_BLOCK = {
  "fc.weight": "fc.weight",
  "mask_embeddings": "masks",
  "markov.before": "markov.before",
  "markov.after": "markov.after",
  **_OUTPUT,
  "d2t": "output.token_map",
}

# Of an early exit: what a model of one layer would call them, without its feed-forward.
_EARLY_EXIT = {
  "layers.0.input_layernorm.weight": "attention_norm.weight",
  "layers.0.self_attn.q_proj.weight": "attention.q.weight",
  "layers.0.self_attn.q_proj.bias": "attention.q.bias",
  "layers.0.self_attn.k_proj.weight": "attention.k.weight",
  "layers.0.self_attn.k_proj.bias": "attention.k.bias",
  "layers.0.self_attn.v_proj.weight": "attention.v.weight",
  "layers.0.self_attn.v_proj.bias": "attention.v.bias",
  "layers.0.self_attn.o_proj.weight": "attention.o.weight",
  "layers.0.self_attn.q_norm.weight": "attention.q_norm.weight",
  "layers.0.self_attn.k_norm.weight": "attention.k_norm.weight",
  "norm.weight": "norm.weight",
  "d2t": "token_map",
}

# Of an EAGLE-1 head. The layer has no norm before its attention.
_EAGLE1 = {
  "fc.weight": "fc.weight",
  "fc.bias": "fc.bias",
  "layers.0.self_attn.q_proj.weight": "layer.attention.q.weight",
  "layers.0.self_attn.q_proj.bias": "layer.attention.q.bias",
  "layers.0.self_attn.k_proj.weight": "layer.attention.k.weight",
  "layers.0.self_attn.k_proj.bias": "layer.attention.k.bias",
  "layers.0.self_attn.v_proj.weight": "layer.attention.v.weight",
  "layers.0.self_attn.v_proj.bias": "layer.attention.v.bias",
  "layers.0.self_attn.o_proj.weight": "layer.attention.o.weight",
  "layers.0.self_attn.q_norm.weight": "layer.attention.q_norm.weight",
  "layers.0.self_attn.k_norm.weight": "layer.attention.k_norm.weight",
  "layers.0.post_attention_layernorm.weight": "layer.ff_norm.weight",
  "layers.0.mlp.gate_proj.weight": "layer.ff.gate.weight",
  "layers.0.mlp.up_proj.weight": "layer.ff.up.weight",
  "layers.0.mlp.down_proj.weight": "layer.ff.down.weight",
  "d2t": "output.token_map",
}


def _expand(table: dict[str, str], num_layers: int) -> dict[str, str]:
  names = {}
  for name, path in table.items():
    layers = range(num_layers) if "{}" in name else (0,)
    names.update({path.format(i): name.format(i) for i in layers})
  return names


def hf_names(num_layers: int) -> dict[str, str]:
  """Parameter path → tensor name in a Hugging Face file."""
  return _expand(_HF, num_layers)


def gguf_names(num_layers: int) -> dict[str, str]:
  """Parameter path → tensor name in a GGUF file."""
  return _expand(_GGUF, num_layers)


def eagle3_names(layer: str) -> dict[str, str]:
  """Parameter path of `Eagle3` → tensor name in a file that calls the draft layer ``layer``."""
  return {path: name.format(layer) for name, path in _EAGLE3.items()}


def early_exit_names() -> dict[str, str]:
  """Parameter path of `EarlyExit` → tensor name; what is the target's has none."""
  return {path: name for name, path in _EARLY_EXIT.items()}


def eagle1_names() -> dict[str, str]:
  """Parameter path of `Eagle1` → tensor name; what is the target's has none."""
  return {path: name for name, path in _EAGLE1.items()}


def draft_names(num_layers: int) -> dict[str, str]:
  """Parameter path of `DraftDecoder` → tensor name; what is the target's has none."""
  table = {name: path for name, path in _HF.items() if path not in ("embed", "head.weight")}
  return _expand({**table, **_OUTPUT, "d2t": "token_map"}, num_layers)


def block_names(num_layers: int) -> dict[str, str]:
  """Parameter path of `BlockHead` → tensor name; the embedding is the target's."""
  table = {name: path for name, path in _HF.items() if path not in ("embed", "head.weight")}
  return _expand({**table, **_BLOCK}, num_layers)
