"""Exact laws on small vocabularies, in numpy and float64, independent of the code under test."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import unittest.mock
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling
from specjax.base import Proposal
from specjax.sampling import Purpose, Settings
from specjax.tree import DynamicTree, TokenTree, TreeBudget

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


class RoundLaw(NamedTuple):
  """What one round does: ``tokens [V] * (G + 1)``, the joint law of the next tokens, and ``accepted
  [G + 1]``, the law of the number of drafts accepted."""

  tokens: np.ndarray
  accepted: np.ndarray

  @property
  def mean_accepted(self) -> float:
    return float(self.accepted @ np.arange(self.accepted.size))


class Draft(NamedTuple):
  """One outcome of drafting: ``tokens, valid [N]`` and its probability."""

  tokens: tuple[int, ...]
  valid: tuple[bool, ...]
  share: float


# A token that no one may look at, and a uniform number that all but certain tests reject.
_NO_TOKEN = 1_000_000
_ONE = 1 - 2**-24
_START = 5
_ROWS = 512
# Arrays are small: most of the time would go into compiling well.
_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def drafts_of(draft_law: Law | Sequence[int], tree: TokenTree, kind: str, valid=None) -> list[Draft]:
  """Every draft that can come up, with its probability.

  Args:
    draft_law: the drafter's distribution behind drafts ``()``, ``(x1,)``, …; or the N - 1 tokens of a
      deterministic draft.
    tree: its shape.
    kind: siblings are independent draws of one distribution, draws without the tokens of elder ones, or
      fixed. A sibling that finds nothing left to draw is invalid.
    valid: bool ``[N]``, nodes that are proposed at all; or a function of the drafts before a node, ``()``,
      ``(x1,)``, …, that says whether it is.
  """
  valid = [True] * tree.num_nodes if valid is None else valid
  says = valid if callable(valid) else None
  drafts = [Draft((0,), (True,), 1.0)]
  for node, parent in enumerate(tree.parents[1:], start=1):
    grown = []
    for tokens, good, share in drafts:
      options = []
      if good[parent] and (says(_context(tokens, tree, parent)) if says else valid[node]):
        if kind == "deterministic":
          options = [(draft_law[node - 1], 1.0)]
        else:
          q = np.array(draft_law(_context(tokens, tree, parent)), float)
          if kind == "sampled_without_replacement":
            q[[tokens[i] for i in tree.children[parent] if i < node and good[i]]] = 0
          options = [(int(x), q[x] / q.sum()) for x in np.flatnonzero(q)]
      if not options:
        grown.append(Draft((*tokens, _NO_TOKEN), (*good, False), share))
      grown.extend(Draft((*tokens, x), (*good, True), share * chance) for x, chance in options)
    drafts = grown
  return drafts


def _context(tokens, tree, node):
  return tuple(tokens[i] for i in tree.paths[node][1 : tree.depths[node] + 1])


def round_law(
  rule,
  law: Law,
  draft_law: Law | Sequence[int],
  tree: TokenTree | int,
  *,
  kind: str | None = None,
  valid=None,
  budget: TreeBudget | None = None,
) -> RoundLaw:
  """Exact law of the next G + 1 tokens when they are made by one round of ``rule``.

  Drafts are enumerated by their probability, and the rule's random numbers are integrated over, with
  nothing assumed about where it cuts them. Given the drafted tokens, whether the test of a node passes is
  a step function of its number (all that comes before the test has failed, or passed, in one way), so
  the step is found by bisection on the rule's own decision; then the rule runs at a random point of
  each of the cells, and in each the steps of its last draw are found in the same way. A rule that draws
  the target at every node has no such tests: its noise is cut at every distribution function instead.

  Where a round emits fewer tokens, the rest follows the target's own law. Losslessness says: ``tokens``
  is `joint_law`. What no one may read is NaN, and a token that does not exist.

  Args:
    rule: an acceptance rule that needs probabilities.
    law: the target's distribution behind drafts ``()``, ``(x1,)``, …
    draft_law, kind, valid: as in `drafts_of`; the kind is sampled or deterministic if not said.
    tree: the topology, or the depth of a chain.
    budget: hand it over as an array a row with so many nodes, and G is the budget's depth.
  """
  tree = TokenTree.chain(tree) if isinstance(tree, int) else tree
  kind = kind or ("sampled" if callable(draft_law) else "deterministic")
  depth, vocab = tree.max_depth, law(()).size
  if budget is not None:  # nodes not used are invalid children of the root
    valid = [True] * tree.num_nodes if valid is None else list(valid)
    spare = budget.num_nodes - tree.num_nodes
    tree, valid, depth = TokenTree(tree.parents + (0,) * spare), valid + [False] * spare, budget.max_depth
  drafts = drafts_of(draft_law, tree, kind, valid)
  judge, purposes = _judge(rule, tree if budget is None else budget, kind, tree.num_nodes, vocab, depth)
  inputs = _inputs(drafts, law, draft_law, tree, kind)
  run = functools.partial(_run, judge, inputs)
  random = np.random.default_rng(0)

  if Purpose.ACCEPT in purposes:
    where, u, mass = _cells(run, drafts, tree, depth, random)
    draws, weight = _last_draws(run, where, u, vocab, depth)
    where, u, mass = (np.repeat(x, vocab, axis=0) for x in (where, u, mass))
    mass = mass * weight
  else:
    where, draws, mass = _target_cells(drafts, law, tree, depth, random, Purpose.TARGET in purposes)
    u = np.zeros((len(where), tree.num_nodes))
  keep = mass > 0
  where, u, draws, mass = where[keep], u[keep], draws[keep], mass[keep]
  path, accepted, token = run(where, u, draws)

  chosen = np.take_along_axis(inputs[2][where], path, axis=1)
  index = np.arange(depth + 1)
  blocks = np.where(index < accepted[:, None], np.roll(chosen, -1, axis=1), -1)
  blocks = np.where(index == accepted[:, None], token[:, None], blocks)
  mass = mass * np.array([draft.share for draft in drafts])[where]
  out = np.zeros((vocab,) * (depth + 1))
  unique, inverse = np.unique(blocks, axis=0, return_inverse=True)
  for row, weight in zip(unique, np.bincount(inverse.ravel(), weights=mass), strict=True):
    block = tuple(int(x) for x in row if x >= 0)
    out[block] += weight * joint_law(law, block, depth + 1 - len(block))
  return RoundLaw(out, np.bincount(accepted, weights=mass, minlength=depth + 1))


def _inputs(drafts, law, draft_law, tree, kind):
  """``target, q, tokens, valid, parents``, a row a draft."""
  vocab = law(()).size
  target = np.full((len(drafts), tree.num_nodes, vocab), np.nan, np.float32)
  q = np.full_like(target, np.nan)
  for row, draft in enumerate(drafts):
    for node in np.flatnonzero(draft.valid):
      context = _context(draft.tokens, tree, node)
      target[row, node] = law(context)
      if kind != "deterministic" and any(draft.valid[child] for child in tree.children[node]):
        q[row, node] = draft_law(context)
  tokens = np.array([draft.tokens for draft in drafts], np.int32)
  parents = np.tile(np.array(tree.parents, np.int32), (len(drafts), 1))
  return target, q, tokens, np.array([draft.valid for draft in drafts]), parents


def _cells(run, drafts, tree, depth, random):
  """Cells of the acceptance noise: ``(draft [R], a point u [R, N], mass [R])``."""
  pairs = [(k, i) for k, draft in enumerate(drafts) for i in range(1, tree.num_nodes) if draft.valid[i]]
  which, node = np.array(pairs, int).reshape(-1, 2).T
  # What is above the node lets pass what reaches it; everything else fails where it can.
  u = np.where(tree.ancestor_mask[node], 0.0, _ONE)
  rows = np.arange(len(node))

  def passes(x):
    u[rows, node] = x
    path, _, _ = run(which, u, np.full((len(rows), depth + 1), 0.5))
    return (path == node[:, None]).any(axis=1)

  chance = np.zeros((len(drafts), tree.num_nodes))
  chance[which, node] = _bisect(passes, len(rows))
  where, points, masses = [], [], []
  for k, steps in enumerate(chance):
    free = np.flatnonzero((steps > 0) & (steps < 1))
    for bits in itertools.product((False, True), repeat=len(free)):
      u, taken = np.where(steps == 1, random.random(steps.size), _ONE), np.array(bits, bool)
      inside = random.uniform(0.01, 0.99, len(free))
      u[free] = np.where(taken, steps[free] * inside, steps[free] + (1 - steps[free]) * inside)
      where.append(k)
      points.append(u)
      masses.append(np.prod(np.where(taken, steps[free], 1 - steps[free])))
  return np.array(where), np.array(points), np.array(masses)


def _last_draws(run, where, u, vocab, depth):
  """For each cell and token, a number in the middle of those that draw it, and their measure."""
  cells = len(where)
  token = np.tile(np.arange(vocab - 1), cells)
  where, u = np.repeat(where, vocab - 1), np.repeat(u, vocab - 1, axis=0)
  above = lambda w: run(where, u, np.repeat(w[:, None], depth + 1, axis=1))[2] <= token
  inner = _bisect(above, len(where)).reshape(cells, vocab - 1)
  edges = np.concatenate([np.zeros((cells, 1)), inner, np.ones((cells, 1))], axis=1)
  middle = ((edges[:, 1:] + edges[:, :-1]) / 2).reshape(-1, 1)
  return np.repeat(middle, depth + 1, axis=1), np.diff(edges, axis=1).ravel()


def _target_cells(drafts, law, tree, depth, random, drawn):
  """Cells of the target's draws, one number a depth: ``(draft [R], a point [R, G + 1], mass [R])``."""
  where, points, masses = [], [], []
  for k, draft in enumerate(drafts):
    axes = []
    for members in tree.levels + ((),) * (depth - tree.max_depth):
      steps = [np.cumsum(law(_context(draft.tokens, tree, i))) for i in members if draft.valid[i]]
      cuts = np.clip(np.concatenate([[0.0, 1.0], *steps]), 0, 1) if drawn else np.array([0.0, 1.0])
      axes.append(np.unique(np.round(cuts, 9)))
    grid = lambda parts: np.stack(np.meshgrid(*parts, indexing="ij"), -1).reshape(-1, depth + 1)
    low, width = grid([cuts[:-1] for cuts in axes]), grid([np.diff(cuts) for cuts in axes])
    where.append(np.full(len(low), k))
    points.append(low + width * random.uniform(0.01, 0.99, low.shape))
    masses.append(width.prod(axis=1))
  return np.concatenate(where), np.concatenate(points), np.concatenate(masses)


def _bisect(holds, size) -> np.ndarray:
  """Where ``holds(x [size])`` turns from true to false on [0, 1), to 3e-8; 0 and 1 are exact."""
  low, high = np.zeros(size), np.ones(size)
  for _ in range(24):
    middle = (low + high) / 2
    yes = holds(np.minimum(middle, _ONE))
    low, high = np.where(yes, middle, low), np.where(yes, high, middle)
  return np.where(low == 0, 0.0, np.where(high == 1, 1.0, (low + high) / 2))


def _run(judge, inputs, where, u, draws):
  """``path, accepted, next_token`` for rows of ``inputs`` under given noise, in pieces of one size."""
  outputs = []
  for start in range(0, max(len(where), 1), _ROWS):
    piece = [np.asarray(x[start : start + _ROWS]) for x in (where, u, draws)]
    count = len(piece[0])
    if not count:
      continue
    piece = [np.pad(x, [(0, _ROWS - count)] + [(0, 0)] * (x.ndim - 1), mode="edge") for x in piece]
    rows = [x[piece[0]] for x in inputs]
    verdict = judge(*rows, piece[1].astype(np.float32), piece[2].astype(np.float32))
    outputs.append([np.asarray(x)[:count] for x in (verdict.path, verdict.accepted, verdict.next_token)])
  if not outputs:
    return np.zeros((0, draws.shape[1]), int), np.zeros(0, int), np.zeros(0, int)
  return [np.concatenate(parts) for parts in zip(*outputs, strict=True)]


@functools.cache
def _judge(rule, shape, kind, nodes, vocab, depth):
  """A compiled ``(target, q, tokens, valid, parents, u, draws) → verdict``, and what noise it asks for."""
  purposes = set()

  def judge(target, q, tokens, valid, parents, u, draws):
    def values(purpose, position, node):
      purposes.add(purpose)
      if purpose == Purpose.ACCEPT:
        source, column = u, node
      elif purpose == Purpose.RESIDUAL:
        source, column = draws, jnp.zeros_like(position)
      else:
        source, column = draws, position - _START
      return jnp.take_along_axis(source, column.reshape(_ROWS, -1), axis=1).reshape(column.shape)

    tree = shape if isinstance(shape, TokenTree) else DynamicTree.from_parents(parents, depth)
    q = None if kind == "deterministic" else q
    proposal = Proposal(tokens, valid, q, tree=tree, kind=kind)
    length = jnp.full((_ROWS,), _START, jnp.int32)
    with fixed_noise(values):
      return rule(target, proposal, Settings.create(_ROWS, temperature=1.0), length)

  array = lambda dtype, *axes: jax.ShapeDtypeStruct((_ROWS, nodes, *axes), dtype)
  probs, whole = array(jnp.float32, vocab), array(jnp.int32)
  draws = jax.ShapeDtypeStruct((_ROWS, depth + 1), jnp.float32)
  lowered = jax.jit(judge).lower(probs, probs, whole, array(bool), whole, array(jnp.float32), draws)
  return lowered.compile(compiler_options=_QUICK), frozenset(purposes)


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
