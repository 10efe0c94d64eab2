"""Is a tree attention right? Against a dense float64 oracle in NumPy, written from the definition.

Two kinds of data. *spiky*: random q, k, v with scores far apart, so that a few slots carry each output;
the error is judged against Σ w·|v|, what rounding is relative to. *probe*: q = 0, so that every visible
slot has the same weight, and v a one-hot of the slot's number modulo the head size: the output counts the
visible slots by lane, and one slot too many or too few shows. Then NaN: in slots that no node sees they must
not change a bit, and in a draft they must reach those who see it and nobody else.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments.kernels.attention_cases import SLOT_MULTIPLE, Case, bushy_tree, default_cases
from specjax.kernels.tree_attention import tree_attention

# Largest error as a share of Σ w·|v|: bfloat16 weights and outputs are rounded to 8 bits each.
TOLERANCE = {"bfloat16": 2**-7, "float32": 2**-15}
# `(q, k, v, prefix, ancestors or None, window, softcap) → out`
Attention = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class Check:
  """A shape class with ragged rows.

  Attributes:
    case: heads, nodes, type, mask and cap; its prefix and batch are not used.
    prefixes: slots before the first scratch row, of each row.
  """

  case: Case
  prefixes: tuple[int, ...]

  @property
  def slots(self) -> int:
    return -(-(max(self.prefixes) + self.case.nodes) // SLOT_MULTIPLE) * SLOT_MULTIPLE

  @property
  def label(self) -> str:
    parts = self.case.label.split()
    return " ".join([*parts[:3], "P" + ",".join(map(str, self.prefixes)), *parts[5:]])


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What came of a check; ``error`` is the largest one as a share of Σ w·|v|, None where nothing ran."""

  error: float | None
  wrong: tuple[str, ...]


def grid(models: Sequence[str]) -> list[Check]:
  """The shape classes that are compiled (`attention_cases.default_cases`), with short ragged prefixes.

  The window of a class is shortened with its prefix. One long prefix is there too.
  """
  checks: dict[Check, None] = {}
  for case in default_cases(models):
    window = None if case.window is None else 200
    case = dataclasses.replace(case, prefix=0, batch=1, window=window)
    checks[Check(case, (0, 131, 900))] = None
  if "llama-70b-tp8" in models:
    checks[Check(Case("llama-70b-tp8", 8, 0), (32768, 5))] = None
  return list(checks)


def tiny_grid() -> list[Check]:
  """What the interpreters do in seconds."""
  case = functools.partial(Case, "smollm2-135m", prefix=0)
  return [
    Check(case(nodes=5, dtype="float32"), (0, 57)),
    Check(case(nodes=5, dtype="bfloat16", causal=True, window=20, softcap=30.0), (40, 9)),
  ]


@dataclasses.dataclass(frozen=True)
class Inputs:
  """NumPy arrays of a check; ``sees [B, N, N]`` says which scratch row each node sees."""

  q: np.ndarray
  k: np.ndarray
  v: np.ndarray
  prefix: np.ndarray
  words: np.ndarray | None
  sees: np.ndarray


def make_inputs(check: Check, kind: str, seed: int = 0) -> Inputs:
  """Data of a kind, ``spiky`` or ``probe``, in the check's type."""
  case, rng = check.case, np.random.default_rng(seed)
  q_heads, kv_heads, size = case.heads
  batch, nodes, slots = len(check.prefixes), case.nodes, check.slots
  dtype = jnp.dtype(case.dtype)
  if kind == "probe":
    q = np.zeros((batch, nodes, q_heads, size))
    k = rng.standard_normal((batch, kv_heads, slots, size))
    v = np.broadcast_to(np.arange(size) == np.arange(slots)[:, None] % size, (batch, kv_heads, slots, size))
  else:
    # Scores with a spread of 3.
    q = 3 * rng.standard_normal((batch, nodes, q_heads, size))
    k, v = rng.standard_normal((2, batch, kv_heads, slots, size))
  if case.causal:
    words, sees = None, np.broadcast_to(np.tri(nodes, dtype=bool), (batch, nodes, nodes))
  else:
    trees = [bushy_tree(nodes, rng) for _ in range(batch)]
    words = np.stack([np.asarray(tree.ancestors, np.uint32) for tree in trees])
    sees = np.stack([np.asarray(tree.ancestor_mask) for tree in trees])
    # Where there is no prefix either, the last node sees nothing at all.
    nothing = (np.array(check.prefixes) == 0) & (nodes > 1)
    words[nothing, -1], sees[nothing, -1] = 0, False
  prefix = np.array(check.prefixes, np.int32)
  return Inputs(*(x.astype(dtype) for x in (q, k, v)), prefix, words, sees)


def visible(check: Check, inputs: Inputs) -> np.ndarray:
  """bool ``[B, N, S]``, from the definition: a node sees the last ``window`` positions of its own line."""
  case = check.case
  batch, nodes, _ = inputs.sees.shape
  seen = np.zeros((batch, nodes, check.slots), bool)
  for b, prefix in enumerate(check.prefixes):
    for i in range(nodes):
      line = [*range(prefix), *(prefix + np.flatnonzero(inputs.sees[b, i]))]
      seen[b, i, line if case.window is None else line[-case.window :]] = True
  return seen


def oracle(check: Check, inputs: Inputs, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Dense attention in float64: outputs ``[B, N, Q, H]`` and Σ w·|v|, of the same shape."""
  case = check.case
  group = case.heads.q // case.heads.kv
  wide = lambda x: np.asarray(x, np.float64)
  q, k, v = wide(inputs.q), wide(inputs.k), wide(inputs.v)
  outs, scales = np.zeros(q.shape), np.zeros(q.shape)
  for b in range(q.shape[0]):
    for head in range(case.heads.q):
      scores = q[b, :, head] @ k[b, head // group].T / np.sqrt(case.heads.size)
      if case.softcap is not None:
        scores = case.softcap * np.tanh(scores / case.softcap)
      scores = np.where(seen[b], scores, -np.inf)
      top = scores.max(axis=1, keepdims=True)
      weights = np.exp(scores - np.where(np.isinf(top), 0, top))
      weights /= np.maximum(weights.sum(axis=1, keepdims=True), 1e-30)  # nothing seen: 0
      outs[b, :, head] = weights @ v[b, head // group]
      scales[b, :, head] = weights @ np.abs(v[b, head // group])
  return outs, scales


def kernel_attention(implementation: str) -> Attention:
  """`tree_attention` by name, compiled."""

  @functools.partial(jax.jit, static_argnums=(5, 6))
  def attend(q, k, v, prefix, ancestors, window, softcap):
    return tree_attention(
      q, k, v, prefix, ancestors, sliding_window=window, logit_softcap=softcap, implementation=implementation
    )[0]

  return attend


def run_check(attend: Attention, check: Check) -> Verdict:
  """All data kinds and NaN placements of one check; every call has the same shapes."""
  case, wrong, worst = check.case, [], 0.0

  def call(inputs: Inputs, k=None, v=None) -> np.ndarray:
    words = None if inputs.words is None else jnp.asarray(inputs.words)
    k, v = inputs.k if k is None else k, inputs.v if v is None else v
    arrays = [jnp.asarray(x) for x in (inputs.q, k, v, inputs.prefix)]
    return np.asarray(attend(*arrays, words, case.window, case.softcap))

  for kind in ("probe", "spiky"):
    inputs = make_inputs(check, kind)
    seen = visible(check, inputs)
    expected, scale = oracle(check, inputs, seen)
    out = call(inputs)
    error = np.abs(out.astype(np.float64) - expected) / np.maximum(scale, 1e-30)
    error = np.where((scale == 0) & (out == 0), 0.0, error)
    worst = max(worst, float(np.max(error, initial=0.0, where=~np.isnan(error))))
    if np.isnan(error).any():
      wrong.append(f"{kind}: NaN")
    elif error.max() > TOLERANCE[case.dtype]:
      b, node, head, _ = np.unravel_index(error.argmax(), error.shape)
      wrong.append(f"{kind}: error {error.max():.2e} at row {b}, node {node}, head {head}")
  # ``inputs``, ``seen`` and ``out`` are those of the spiky data.
  nan = lambda x, where: np.where(where, np.array(np.nan, x.dtype), x)
  unseen = ~seen.any(axis=1)[:, None, :, None]
  if not _same(call(inputs, nan(inputs.k, unseen), nan(inputs.v, unseen)), out):
    wrong.append("NaN in slots that nobody sees changes outputs")
  draft = np.zeros(seen.shape[::2], bool)  # [B, S]
  for b, prefix in enumerate(check.prefixes):
    draft[b, prefix + case.nodes - 1] = True
  touched = (seen & draft[:, None, :]).any(axis=2)
  spoiled = call(inputs, v=nan(inputs.v, draft[:, None, :, None]))
  if not _same(spoiled[~touched], out[~touched]):
    wrong.append("NaN in a draft changes nodes that do not see it")
  if not np.isnan(spoiled[touched]).all():
    wrong.append("NaN in a draft does not reach the nodes that see it")
  return Verdict(worst, tuple(wrong))


def _same(a: np.ndarray, b: np.ndarray) -> bool:
  """Bit for bit."""
  return a.tobytes() == b.tobytes()
