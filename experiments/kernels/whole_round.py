"""The whole decoding loop of real model shapes, compiled for devices that are not there.

No weight is allocated: parameters and state are shapes with shardings. What comes back is the compiler's
own memory analysis and what the optimized program holds: copies of caches, collectives.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.kernels import compile_reports as reports
from experiments.kernels import devices
from experiments.kernels.devices import Target
from specjax import decode
from specjax.drafters import make_drafter
from specjax.models import Decoder, DecoderConfig, sharding
from specjax.models.config import Llama3RopeScaling
from specjax.verify import make_rule

WINDOW = 7
SLOTS = 8192
TARGETS = ("v5e", "v6e", "h100")

# As published with the checkpoints.
CONFIGS = {
  "smollm2-135m": DecoderConfig(
    vocab_size=49152,
    num_layers=30,
    d_model=576,
    d_ff=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_length=8192,
    rope_base=100000.0,
  ),
  "llama-3.1-8b": DecoderConfig(
    vocab_size=128256,
    num_layers=32,
    d_model=4096,
    d_ff=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_length=131072,
    rope_base=500000.0,
    rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 8192),
    tie_embeddings=False,
  ),
}


@dataclasses.dataclass(frozen=True)
class Round:
  """A loop to compile.

  Attributes:
    model: key of `CONFIGS`.
    implementation: of the attention, by name.
    model_axis: devices that heads and feed-forward are cut over; 1 is one device without a mesh.
    layers: fewer layers than the model has, None for all.
  """

  model: str
  implementation: str
  model_axis: int = 1
  layers: int | None = None

  @property
  def label(self) -> str:
    mesh = f" model:{self.model_axis}" if self.model_axis > 1 else ""
    return f"{self.model} {self.implementation}{mesh}"

  def json(self) -> dict[str, Any]:
    return dataclasses.asdict(self)


def default_rounds(target: Target, models: Sequence[str]) -> list[Round]:
  """Each model on one device, the larger one also over four, with the reference and with the kernel."""
  if target.name not in TARGETS:
    return []
  ways = [(model, 1) for model in CONFIGS] + [("llama-3.1-8b", 4)]
  return [
    Round(model, implementation, axis)
    for model, axis in ways
    for implementation in ("reference", target.kernel)
    if model in models
  ]


def abstract_model(config: DecoderConfig) -> Decoder:
  """A bf16 decoder whose parameters are shapes."""
  return nnx.eval_shape(lambda: Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))


def _placed(leaf, sharding) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def compile_round(target: Target, request: Round) -> dict[str, Any]:
  """Compiles the loop; raises what the compiler raises.

  Returns:
    Bytes of the compiler's memory analysis, on each device, and counts from the optimized program.
  """
  config = CONFIGS[request.model]
  if request.layers is not None:
    config = config.replace(num_layers=request.layers)
  loop = decode.DecodeConfig(
    drafter=make_drafter("prompt_lookup", window=WINDOW),
    rule=make_rule("greedy"),
    num_real_tokens=config.num_real_tokens,
    length_limit=SLOTS - WINDOW - 1,
    implementation=request.implementation,
  )
  model = abstract_model(config)
  found = devices.topology_devices(target, request.model_axis)
  mesh = Mesh(np.array(found), ("model",), axis_types=(AxisType.Auto,))
  state = jax.eval_shape(lambda weights: decode.init_state(weights, loop, 1), decode.Weights(model))
  state = jax.tree.map(_placed, state, decode.state_shardings(state, mesh))
  graph, params = nnx.split(model)
  params = jax.tree.map(_placed, params, sharding.parameter_shardings(model, mesh))
  model = nnx.merge(graph, params)
  if request.model_axis > 1:
    model.mesh = mesh  # as `sharding.shard_model` does
  start = time.perf_counter()
  limit = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
  lowered = decode.run_rounds.lower(decode.Weights(model), state, loop, limit)
  traced = time.perf_counter()
  compiled = lowered.compile()
  compiled_s = time.perf_counter() - traced
  memory, hlo = compiled.memory_analysis(), compiled.as_text()
  needed = (
    memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    + memory.temp_size_in_bytes
    - memory.alias_size_in_bytes
  )
  cut = request.model_axis if config.num_kv_heads % request.model_axis == 0 else 1
  cache_shape = f"bf16[1,{config.num_kv_heads // cut},{SLOTS},{config.head_dim}]"
  copies = reports.copies_of(hlo, cache_shape)
  return {
    "arguments": memory.argument_size_in_bytes,
    "temporaries": memory.temp_size_in_bytes,
    "outputs": memory.output_size_in_bytes,
    "aliased": memory.alias_size_in_bytes,
    "needed": needed,
    "memory": target.memory,
    "fits": needed <= target.memory,
    "copies_in_loop": copies.in_loops,
    "copies_staged": copies.staged,
    "copies_outside": copies.outside,
    "collectives": reports.collectives(hlo),
    "trace_s": traced - start,
    "compile_s": compiled_s,
  }
