"""Shape classes of tree attention: whose heads, how many nodes, how long a prefix, how many bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from specjax.kernels.tree_attention import tiles
from specjax.tree import TokenTree

SLOT_MULTIPLE = 128
ITEM_BYTES = {"bfloat16": 2, "float32": 4}


class Heads(NamedTuple):
  """Query heads, key/value heads, head size."""

  q: int
  kv: int
  size: int


# As in the models' published configs; the shard is one of eight of a Llama-3.1-70B (64 and 8 heads).
MODELS = {
  "smollm2-135m": Heads(9, 3, 64),
  "llama-3.1-8b": Heads(32, 8, 128),
  "qwen3-32b": Heads(64, 8, 128),
  "llama-70b-tp8": Heads(8, 1, 128),
  "phi-3-mini": Heads(32, 32, 96),
  "gemma-2-9b": Heads(16, 8, 256),
}


MODEL_NAMES = flags.DEFINE_list("models", list(MODELS), "Whose head shapes.")


@dataclasses.dataclass(frozen=True)
class Case:
  """One call of tree attention.

  Attributes:
    model: key of `MODELS`.
    nodes: N.
    prefix: slots before the first scratch row, the same in every row of the batch.
    batch: B.
    dtype: ``bfloat16`` or ``float32``.
    causal: no ancestors are given, as in a prefill chunk; else a tree.
    window: sliding window, or None.
    softcap: of the scores, or None.
  """

  model: str
  nodes: int
  prefix: int
  batch: int = 1
  dtype: str = "bfloat16"
  causal: bool = False
  window: int | None = None
  softcap: float | None = None

  @property
  def heads(self) -> Heads:
    return MODELS[self.model]

  @property
  def rows(self) -> int:
    """Rows of the products that share keys: query heads a kv head × nodes."""
    return self.heads.q // self.heads.kv * self.nodes

  @property
  def slots(self) -> int:
    """S: a buffer that holds prefix and scratch rows, as `cache.create` rounds it."""
    return -(-(self.prefix + self.nodes) // SLOT_MULTIPLE) * SLOT_MULTIPLE

  @property
  def live(self) -> int:
    """Slots that some node sees."""
    first = 0 if self.window is None else max(self.prefix - self.window + 1, 0)
    return self.prefix + self.nodes - first

  @property
  def tile_key(self) -> str:
    return tiles.key(self.dtype, self.heads.size, self.rows)

  @property
  def kv_bytes(self) -> int:
    """Keys and values of the live slots, each once."""
    return 2 * self.batch * self.heads.kv * self.live * self.heads.size * ITEM_BYTES[self.dtype]

  @property
  def least_bytes(self) -> int:
    """What any implementation moves: live keys and values, queries, outputs and ancestor words, once each."""
    q = self.batch * self.nodes * self.heads.q * self.heads.size * ITEM_BYTES[self.dtype]
    words = 0 if self.causal else 4 * self.batch * self.nodes * -(-self.nodes // 32)
    return self.kv_bytes + 2 * q + words

  @property
  def label(self) -> str:
    parts = [self.model, {"bfloat16": "bf16", "float32": "f32"}[self.dtype]]
    parts += [("causal" if self.causal else "N") + str(self.nodes), f"S{self.prefix // 1024}k"]
    parts += [f"B{self.batch}"]
    parts += [] if self.window is None else [f"w{self.window}"]
    parts += [] if self.softcap is None else [f"cap{self.softcap:g}"]
    return " ".join(parts)

  def json(self) -> dict[str, Any]:
    return dataclasses.asdict(self)


def default_cases(models: Sequence[str]) -> list[Case]:
  """What `experiments.compile_kernels` compiles for each target."""
  cases = []
  for model in models:
    cases += [Case(model, nodes, 8192) for nodes in (1, 8, 16, 64)]
    cases.append(Case(model, 256, 2048, causal=True))
  extra = [
    Case("llama-3.1-8b", 8, 2048),
    Case("llama-3.1-8b", 8, 32768),
    Case("smollm2-135m", 8, 2048, batch=16),
    Case("llama-3.1-8b", 8, 8192, batch=16),
    Case("qwen3-32b", 8, 8192, batch=16),
    Case("llama-70b-tp8", 8, 32768, batch=16),
    Case("smollm2-135m", 8, 8192, dtype="float32"),
    Case("smollm2-135m", 64, 8192, dtype="float32"),
    Case("llama-3.1-8b", 8, 8192, dtype="float32"),
    Case("gemma-2-9b", 8, 8192, window=4096),
    Case("gemma-2-9b", 8, 8192, softcap=50.0),
  ]
  return cases + [case for case in extra if case.model in models]


def quick_case(models: Sequence[str]) -> Case:
  return Case(models[0] if "llama-3.1-8b" not in models else "llama-3.1-8b", 8, 8192)


def parse_models(names: Sequence[str]) -> list[str]:
  """
  Raises:
    ValueError: an unknown name, or none.
  """
  unknown = [name for name in names if name not in MODELS]
  if unknown or not names:
    raise ValueError(f"--models = {','.join(names)!r}; possible: {','.join(MODELS)}")
  return list(dict.fromkeys(names))


class Arguments(NamedTuple):
  """Arguments of tree attention: arrays, or their shapes."""

  q: Any  # [B, N, Q, H]
  k: Any  # [B, K, S, H]
  v: Any  # [B, K, S, H]
  prefix: Any  # int32 [B]
  ancestors: Any  # uint32 [B, N, W] or None


def shapes(case: Case, sharding: jax.sharding.Sharding | None = None) -> Arguments:
  """Shapes and types of a case's arguments."""
  q, kv, size = case.heads
  dtype = jnp.dtype(case.dtype)
  make = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
  cache = make((case.batch, kv, case.slots, size), dtype)
  words = -(-case.nodes // 32)
  return Arguments(
    make((case.batch, case.nodes, q, size), dtype),
    cache,
    cache,
    make((case.batch,), jnp.int32),
    None if case.causal else make((case.batch, case.nodes, words), jnp.uint32),
  )


def bushy_tree(nodes: int, rng: np.random.Generator) -> TokenTree:
  """A random tree: each parent is one of the four nodes before."""
  return TokenTree((-1, *(int(rng.integers(max(0, i - 4), i)) for i in range(1, nodes))))
