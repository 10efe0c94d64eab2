"""A decoder in numpy and float64, a token and a sublayer at a time; it takes the package's parameters."""

from __future__ import annotations

import numpy as np

from specjax.models import Decoder, SkipSet

Rows = list[tuple[np.ndarray, np.ndarray]]  # key and value [K, H] of each position


def values(parameter) -> np.ndarray:
  return np.asarray(parameter[...], np.float64)


def rms(norm, x: np.ndarray) -> np.ndarray:
  return values(norm.weight) * x / np.sqrt(np.mean(x * x) + norm.eps)


def rotated(x: np.ndarray, position: int, base: float) -> np.ndarray:
  """``x [heads, H]``: element i and i + H/2 turn together."""
  half = x.shape[1] // 2
  angle = position * base ** (-np.arange(half) / half)
  first, second = x[:, :half], x[:, half:]
  return np.concatenate(
    [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], axis=1
  )


def attention(part, config, x: np.ndarray, rows: Rows) -> np.ndarray:
  """``x [D]``, normed, behind the positions in ``rows``, to which its own is added: ``[D]``."""
  heads = lambda linear, count: (values(linear.weight) @ x).reshape(count, config.head_dim)
  turn = lambda heads: rotated(heads, len(rows), config.rope_base)
  q, k = turn(heads(part.q, config.num_heads)), turn(heads(part.k, config.num_kv_heads))
  rows.append((k, heads(part.v, config.num_kv_heads)))
  keys, known = (np.stack(each) for each in zip(*rows))
  said = []
  for head in range(config.num_heads):
    of = head // (config.num_heads // config.num_kv_heads)
    scores = keys[:, of] @ q[head] / np.sqrt(config.head_dim)
    weights = np.exp(scores - scores.max())
    said.append(weights / weights.sum() @ known[:, of])
  return values(part.o.weight) @ np.concatenate(said)


def through(
  model: Decoder, x: np.ndarray, rows: list[Rows], first: int, last: int, skips: SkipSet | None = None
) -> np.ndarray:
  """``x [D]`` through layers ``first … last - 1``, without the sublayers of ``skips``; rows by layer."""
  for i in range(first, last):
    layer = model.layers[i]
    if skips is None or i not in skips.attention:
      x = x + attention(layer.attention, model.config, rms(layer.attention_norm, x), rows[i])
    if skips is None or i not in skips.ff:
      y = rms(layer.ff_norm, x)
      gate = values(layer.ff.gate.weight) @ y
      x = x + values(layer.ff.down.weight) @ (gate / (1 + np.exp(-gate)) * (values(layer.ff.up.weight) @ y))
  return x


def embedded(model: Decoder, token: int) -> np.ndarray:
  return values(model.embed)[token]


def logits(model: Decoder, x: np.ndarray) -> np.ndarray:
  """Behind the last layer run."""
  return values(model.head.weight) @ rms(model.norm, x)


def text_rows(model: Decoder, tokens) -> tuple[list[Rows], list[list[np.ndarray]]]:
  """Rows of every layer over a text, and the input of every layer at each of its tokens, the output last."""
  rows: list[Rows] = [[] for _ in model.layers]
  states = []
  for token in tokens:
    x = [embedded(model, token)]
    for i in range(len(model.layers)):
      x.append(through(model, x[-1], rows, i, i + 1))
    states.append(x)
  return rows, states
