"""A block head's forward anew, in numpy and float64: no cache, one root at a time, a loop over heads."""

from __future__ import annotations

import numpy as np


def _of(parameter) -> np.ndarray:
  return np.asarray(parameter[...], np.float64)


def _norm(norm, x):
  return _of(norm.weight) * x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + norm.eps)


def _rotated(x, positions, base):
  """Pairs (i, i + H / 2) of ``x [T, heads, H]``, turned by position · base^(-2 i / H)."""
  half = x.shape[-1] // 2
  angle = positions[:, None, None] * base ** (-np.arange(half) / half)
  a, b = x[..., :half], x[..., half:]
  return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


def _softmax(x):
  e = np.exp(x - x.max(axis=-1, keepdims=True))
  return e / e.sum(axis=-1, keepdims=True)


def base_logits(head, taps: np.ndarray, embedding: np.ndarray) -> np.ndarray:
  """Logits of a block before the Markov head's share.

  Args:
    taps: ``[t, taps, D]``, the target's hidden states at the positions before the root's.
    embedding: ``[D]``, of the root, whose position is t.

  Returns:
    ``[G, Vd]``.
  """
  c, count = head.config.decoder, len(taps)
  features = np.asarray(taps, np.float64).reshape(count, -1) @ _of(head.fc.weight).T
  x = np.concatenate([np.asarray(embedding, np.float64)[None], _of(head.masks)])
  positions = np.arange(count + len(x))
  for layer in head.layers:
    attention, heads = layer.attention, lambda y: y.reshape(len(y), -1, c.head_dim)
    normed = _norm(layer.attention_norm, np.concatenate([features, x]))
    q = _rotated(heads(normed[count:] @ _of(attention.q.weight).T), positions[count:], c.rope_base)
    k = _rotated(heads(normed @ _of(attention.k.weight).T), positions, c.rope_base)
    v = heads(normed @ _of(attention.v.weight).T)
    attended = []
    for h in range(c.num_heads):
      of = h // (c.num_heads // c.num_kv_heads)
      attended.append(_softmax(q[:, h] @ k[:, of].T / np.sqrt(c.head_dim)) @ v[:, of])
    x = x + np.concatenate(attended, axis=-1) @ _of(attention.o.weight).T
    normed = _norm(layer.ff_norm, x)
    gate = normed @ _of(layer.ff.gate.weight).T
    x = x + (gate / (1 + np.exp(-gate)) * (normed @ _of(layer.ff.up.weight).T)) @ _of(layer.ff.down.weight).T
  return _norm(head.norm, x) @ _of(head.output.weight).T


def conditioned(head, logits: np.ndarray, token: int) -> np.ndarray:
  """Logits ``[Vd]`` of a position of the block, behind the token before it."""
  if head.markov is None:
    return logits
  return logits + _of(head.markov.after) @ _of(head.markov.before)[token]


def chain_law(head, logits: np.ndarray, root: int, ids, depth: int, temperature: float = 1.0) -> np.ndarray:
  """Probability of each chain of ``depth`` drafts behind the root, ``[Vd, …, Vd]``: a product of softmaxes.

  Args:
    logits: of `base_logits`.
    ids: ``[Vd]``, the target's ids of the draft vocabulary.
  """
  law = np.ones(())
  for d in range(depth):
    before = [root] if d == 0 else ids
    rows = np.stack([_softmax(conditioned(head, logits[d], token) / temperature) for token in before])
    law = rows[0] if d == 0 else law[..., None] * rows
  return law
