"""Exact laws on small vocabularies, in numpy and float64, independent of the code under test."""

from __future__ import annotations

import contextlib
import itertools
import math
import unittest.mock
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling
from specjax.base import Proposal
from specjax.sampling import Purpose, Settings
from specjax.tree import TokenTree

Law = Callable[[tuple[int, ...]], np.ndarray]


def process(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
  """The processed distribution of one position, by sorting; ties at a cut-off stay."""
  logits = np.asarray(logits, np.float64)
  if temperature == 0:
    return np.eye(logits.size)[np.argmax(logits)]
  p = np.exp((logits - logits.max()) / temperature)
  if 0 < top_k < p.size:
    p = np.where(p >= np.sort(p)[-top_k], p, 0.0)
  p /= p.sum()
  order = np.sort(p)[::-1]
  kept = order[np.searchsorted(np.cumsum(order), top_p - 1e-9)] if top_p < 1 else 0.0
  p = np.where(p >= kept, p, 0.0)
  p = np.where(p >= min_p * p.max(), p, 0.0)
  return p / p.sum()


def joint_law(law: Law, prefix: Sequence[int], steps: int) -> np.ndarray:
  """Probabilities of the next ``steps`` tokens behind ``prefix``, ``[V] * steps``."""
  prefix = tuple(prefix)
  vocab = law(prefix).size
  out = np.empty((vocab,) * steps)
  for block in itertools.product(range(vocab), repeat=steps):
    out[block] = np.prod([law(prefix + block[:i])[token] for i, token in enumerate(block)])
  return out


@contextlib.contextmanager
def fixed_noise(values: Callable[..., object]):
  """Replaces `sampling.uniform` by ``values(purpose, position, node)`` (arrays) inside the block.

  Affects what is traced inside; compiled programs keep the noise they have.
  """

  def uniform(seed, purpose, position, node=0):
    position = jnp.asarray(position)
    return values(purpose, position, jnp.broadcast_to(jnp.asarray(node), position.shape))

  with unittest.mock.patch.object(sampling, "uniform", uniform):
    yield


def round_law(rule, law: Law, draft_law: Law | Sequence[int], depth: int) -> np.ndarray:
  """Exact law of the next ``depth + 1`` tokens when they are made by one round of ``rule``.

  Integrates over every random number of the round. The rule sees each combination of drafts (weighted
  by q) with each cell of the noise: [0, 1) is cut at every acceptance ratio and at every step of every
  distribution function that can matter, so the rule is constant on a cell and the sum is exact for a
  correct rule. Where a round emits fewer tokens, the rest follows the target's own law. Losslessness
  says: the result is `joint_law`.

  Args:
    rule: an acceptance rule for chains that needs probabilities.
    law: the target's distribution behind drafts ``()``, ``(x1,)``, …
    draft_law: the same of the drafter, or the tokens of a deterministic draft.
    depth: drafts.
  """
  sampled = callable(draft_law)
  vocab = law(()).size
  contexts = [c for d in range(depth + 1) for c in itertools.product(range(vocab), repeat=d)]
  # One axis of noise for each draft's acceptance, one for each target draw (the residual's is an
  # alternative to the target's in the same place).
  steps = [np.cumsum(law(c)) for c in contexts]
  ratios = [[] for _ in range(depth)]
  for c in contexts:
    if len(c) == depth:
      continue
    p = law(c)
    q = draft_law(c) if sampled else np.eye(vocab)[draft_law[len(c)]]
    ratios[len(c)].extend(p[q > 0] / q[q > 0])
    residual = np.maximum(p - q, 0) if sampled else np.where(q > 0, 0, p)
    if residual.sum() > 0:
      steps.append(np.cumsum(residual) / residual.sum())
  cell = lambda cuts: np.unique(np.concatenate([[0.0, 1.0], np.clip(np.ravel(cuts), 0, 1)]))
  follows = rule.name == "draw_and_follow"
  if follows:
    by_depth = [
      np.concatenate([np.cumsum(law(c)) for c in contexts if len(c) == d]) for d in range(depth + 1)
    ]
    axes = [cell(cuts) for cuts in by_depth]
  else:
    axes = [cell(np.array(cuts)) for cuts in ratios] + [cell(np.concatenate(steps))]
  middles = [(edges[1:] + edges[:-1]) / 2 for edges in axes]
  noise = np.stack(np.meshgrid(*middles, indexing="ij"), axis=-1).reshape(-1, len(axes))
  mass = (
    np.stack(np.meshgrid(*map(np.diff, axes), indexing="ij"), axis=-1).reshape(-1, len(axes)).prod(axis=1)
  )

  out = np.zeros((vocab,) * (depth + 1))
  drafts = list(itertools.product(range(vocab), repeat=depth)) if sampled else [tuple(draft_law)]
  judge = _judge(rule, depth, "sampled" if sampled else "deterministic", follows)
  for draft in drafts:
    share = np.prod([draft_law(draft[:i])[x] for i, x in enumerate(draft)]) if sampled else 1.0
    if share == 0:
      continue
    blocks = _run(judge, law, draft_law if sampled else None, draft, noise)
    for block, weight in _tally(blocks, mass):
      rest = joint_law(lambda tail, block=block: law(block + tail), (), depth + 1 - len(block))
      out[block] += share * weight * rest
  return out


def _judge(rule, depth, kind, follows):
  """``(target, q, tokens, noise) → verdict``, compiled, with the noise where the rule asks for it."""
  start = 5

  def judge(target, q, tokens, noise):
    cells = noise.shape[0]
    wide = lambda x: jnp.broadcast_to(x, (cells, *x.shape))

    def values(purpose, position, node):
      if purpose == Purpose.ACCEPT:
        column = jnp.maximum(node - 1, 0)
      else:
        column = position - start if follows else jnp.full_like(node, depth)
      flat = column.reshape(cells, -1)
      return jnp.take_along_axis(noise, flat, axis=1).reshape(column.shape)

    proposal = Proposal(
      wide(tokens), jnp.ones((cells, depth + 1), bool), wide(q), tree=TokenTree.chain(depth), kind=kind
    )
    length = jnp.full((cells,), start, jnp.int32)
    with fixed_noise(values):
      return rule(wide(target), proposal, Settings.create(cells, temperature=1.0), length)

  return jax.jit(judge)


def _run(judge, law, draft_law, draft, noise):
  """Emitted blocks ``[cells, depth + 1]`` (-1 behind the end) of one draft under every cell of noise."""
  depth = len(draft)
  target = np.stack([law(draft[:i]) for i in range(depth + 1)])
  q = np.stack([draft_law(draft[:i]) for i in range(depth)]) if draft_law else np.zeros_like(target)
  verdict = judge(
    target.astype(np.float32), q.astype(np.float32), np.array((0, *draft), np.int32), noise.astype(np.float32)
  )
  accepted, path = np.asarray(verdict.accepted), np.asarray(verdict.path)
  chosen = np.array((0, *draft))[path]
  index = np.arange(depth + 1)
  block = np.where(index < accepted[:, None], np.roll(chosen, -1, axis=1), -1)
  return np.where(index == accepted[:, None], np.asarray(verdict.next_token)[:, None], block)


def _tally(blocks, mass):
  unique, inverse = np.unique(blocks, axis=0, return_inverse=True)
  weights = np.bincount(inverse.ravel(), weights=mass, minlength=len(unique))
  return [(tuple(int(t) for t in row if t >= 0), w) for row, w in zip(unique, weights, strict=True)]


def chi_square(counts: np.ndarray, law: np.ndarray) -> float:
  """p-value of Pearson's test; cells expected fewer than 5 times are pooled, impossible ones must be empty.

  The tail is the Wilson-Hilferty normal approximation (no scipy): good to a few per cent of the
  exponent from 3 degrees of freedom on.
  """
  counts, law = np.ravel(counts).astype(float), np.ravel(law)
  if counts[law == 0].any():
    return 0.0
  expected = counts.sum() * law
  small = expected < 5
  observed = np.append(counts[~small], counts[small].sum())
  expected = np.append(expected[~small], expected[small].sum())
  observed, expected = observed[expected > 0], expected[expected > 0]
  freedom = len(expected) - 1
  statistic = ((observed - expected) ** 2 / expected).sum()
  z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
  return 0.5 * math.erfc(z / math.sqrt(2))
