"""What is left of the target behind a node once drafts there were turned down, without copies of rows.

With P and q the target's and the drafter's row of a node, and drafts turned down one after the other, each
time with ``R ← norm((mass R - Q)+)``, what is left stays of one form:

  R(x) = (scale P(x) - taken q(x))+ ,

because ``((a P - b q)+ - c q)+ = (a P - (b + c) q)+``. So two numbers a node stand for it. Without
replacement q loses the token x that was turned down; but x can only be turned down where mass R(x) < Q(x),
so R(x) is 0 from then on, and the form serves there, too. A deterministic draft's q is a point mass: R is P
without the tokens turned down. One pass over a row of the vocabulary a test, none for deterministic drafts.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.base import Proposal
from specjax.sampling import Purpose, Settings

Array = jax.Array

# What is left counts as nothing below this share of the target: it can only be rounding, and scaling it
# up again and again would leave float32's range.
_NOTHING = 1e-30


def check(rule, proposal: Proposal) -> None:
  """Raises ValueError for a kind the rule does not take, or a tree where it takes chains."""
  if proposal.kind not in rule.kinds:
    raise ValueError(f"rule {rule.name} takes {sorted(rule.kinds)} proposals, got {proposal.kind!r}")
  if rule.chains_only and not proposal.tree.is_chain:
    raise ValueError(f"rule {rule.name} takes chains, got {proposal.tree}")


def at(values: Array, index: Array) -> Array:
  """``values [B, N, …], index [B]`` → ``[B, …]``."""
  index = index.reshape(-1, *[1] * (values.ndim - 1))
  return jnp.take_along_axis(values, index, axis=1)[:, 0]


def acceptance_noise(settings: Settings, length: Array, nodes: int) -> Array:
  """Uniform ``[B, N]``: the number that decides about node i, keyed by the round's start and i."""
  starts = jnp.broadcast_to(length[:, None], (length.shape[0], nodes))
  return sampling.uniform(settings.seed, Purpose.ACCEPT, starts, jnp.arange(nodes))


def draw_last(
  weights: Array, settings: Settings, length: Array, node: Array, depth: Array, rejected: Array
) -> Array:
  """The token behind the last accepted node, int32 ``[B]``, drawn from ``weights [B, V]``.

  Where a draft was rejected there, noise of its own; else that of plain decoding at the same position.
  """
  u = jnp.where(
    rejected,
    sampling.uniform(settings.seed, Purpose.RESIDUAL, length, node),
    sampling.uniform(settings.seed, Purpose.TARGET, length + depth),
  )
  return sampling.draw(weights, u)


def ratio(p: Array, q: Array) -> Array:
  """min(1, p / q), 0 where p is: what the target gives no mass is never accepted, whatever q says."""
  return jnp.where(p > 0, jnp.where(p >= q, 1.0, p / jnp.where(q > 0, q, 1.0)), 0.0)


def mass_left(left: Array, mass: Array) -> Array:
  """left / (left + 1 - mass), the mass after a draft was rejected: ``left = Σ (mass P - Q)+``.

  Nothing left: 1 where the mass is 1 (then P = Q and only rounding can have rejected), else 0.
  """
  whole = jnp.where(mass >= 1, 1.0, 0.0)
  return jnp.where(left > 0, left / jnp.where(left > 0, left + (1 - mass), 1.0), whole)


@flax.struct.dataclass
class Remaining:
  """Per node of a draft, every leaf ``[B, N]``.

  Attributes:
    mass: what R sums to.
    scale: how much of P is in R.
    taken: how much of q was subtracted.
    unseen: the part of q that was not turned down; 1 unless drafts are without replacement.
    out: of a child, that it was turned down.
  """

  mass: Array
  scale: Array
  taken: Array
  unseen: Array
  out: Array


class Residuals:
  """The tests of one proposal against ``target [B, N, V]``; node numbers are ``[B]`` everywhere."""

  def __init__(self, target: Array, proposal: Proposal):
    batch, nodes = proposal.tokens.shape
    self.target = target
    # With the root alone there is nothing to test, and q may have no rows.
    self.kind = "deterministic" if nodes == 1 else proposal.kind
    self.parents = jnp.broadcast_to(jnp.asarray(proposal.tree.parents), (batch, nodes))
    self.usable = proposal.valid.at[:, 0].set(False)
    self.vocab = target.shape[-1]
    # Unusable nodes may hold any number as their token.
    self.tokens = jnp.where(self.usable, proposal.tokens, 0)
    rows, above = jnp.arange(batch)[:, None], jnp.maximum(self.parents, 0)
    self.p = target[rows, above, self.tokens]
    self.q, self.draft = jnp.ones_like(self.p), None
    if self.kind != "deterministic":
      self.draft = proposal.q
      self.q = proposal.q[rows, jnp.minimum(above, proposal.q.shape[1] - 1), self.tokens]

  def start(self) -> Remaining:
    """Nothing turned down."""
    ones = jnp.ones(self.tokens.shape, jnp.float32)
    return Remaining(ones, ones, jnp.zeros_like(ones), ones, jnp.zeros(ones.shape, bool))

  def next_child(self, left: Remaining, node: Array) -> tuple[Array, Array]:
    """The first usable child of a node that was not turned down, and whether there is one.

    Without replacement only while some of q is left beside what was turned down: else the child's share
    of it has no digits. That depends on siblings already judged alone, so the law is kept.
    """
    here = self.usable & (self.parents == node[:, None]) & ~left.out
    here &= (at(left.unseen, node) > _NOTHING)[:, None]
    return jnp.argmax(here, axis=1).astype(jnp.int32), jnp.any(here, axis=1)

  def test(self, left: Remaining, child: Array) -> tuple[Array, Array]:
    """R and Q at the child's token, ``[B]`` each."""
    node = at(self.parents, child)
    p, q = at(self.p, child), at(self.q, child)
    r = jnp.maximum(at(left.scale, node) * p - at(left.taken, node) * q, 0.0)
    if self.kind == "sampled":
      return r, q
    # A token comes twice where deterministic drafts say so: it was turned down for good.
    same = self.tokens == at(self.tokens, child)[:, None]
    r = jnp.where(jnp.any(same & self._turned_down(left, node), axis=1), 0.0, r)
    return r, q if self.kind == "deterministic" else q * _inverse(at(left.unseen, node))

  def turn_down(self, left: Remaining, child: Array, where: Array) -> tuple[Remaining, Array]:
    """The child's parent without it, in the rows ``where``; and Σ_x min(R(x), Q(x)) there, ``[B]``."""
    node = jnp.maximum(at(self.parents, child), 0)
    mass, scale, taken = at(left.mass, node), at(left.scale, node), at(left.taken, node)
    r, _ = self.test(left, child)
    unseen = at(left.unseen, node)
    this = jnp.arange(left.out.shape[1]) == child[:, None]
    if self.kind == "deterministic":
      total = jnp.maximum(mass - r, 0.0)
    else:
      more = taken + _inverse(unseen)
      row, q_row = at(self.target, node), self._draft_row(node)
      reduced = jnp.maximum(scale[:, None] * row - more[:, None] * q_row, 0.0)
      if self.kind == "sampled_without_replacement":
        unseen = self._without(q_row, self._turned_down(left, node) | this).sum(axis=-1)
      total = reduced.sum(axis=-1)
    nothing = total <= _NOTHING * scale
    new_mass = mass_left(jnp.where(nothing, 0.0, total), mass)
    # Mass 1 and nothing left is rounding: R stays what it was. Less mass and nothing left: R is gone.
    grow = jnp.where(nothing, jnp.where(mass >= 1, 1.0, 0.0), 1 / jnp.where(nothing, 1.0, total + (1 - mass)))
    if self.kind != "deterministic":
      taken = jnp.where(nothing, taken, more)
    put = lambda old, new: jnp.where(jnp.arange(old.shape[1]) == node[:, None], new[:, None], old)
    new = Remaining(
      mass=put(left.mass, new_mass),
      scale=put(left.scale, scale * grow),
      taken=put(left.taken, taken * grow),
      unseen=put(left.unseen, unseen),
      out=left.out | this,
    )
    choose = lambda new, old: jnp.where(where[:, None], new, old)
    return jax.tree.map(choose, new, left), jnp.clip(mass - total, 0.0, 1.0)

  def weights(self, left: Remaining, node: Array) -> tuple[Array, Array]:
    """What to draw the token behind a node from, ``[B, V]`` up to a factor, and whether a child is out.

    P itself where nothing was turned down, or where nothing is left, which only rounding can bring about.
    """
    mine = self._turned_down(left, node)
    row = at(self.target, node)
    if self.kind == "deterministic":
      r = self._without(row, mine)
    else:
      q_row = self._draft_row(node)
      r = jnp.maximum(at(left.scale, node)[:, None] * row - at(left.taken, node)[:, None] * q_row, 0.0)
    rejected = mine.any(axis=1)
    return jnp.where((rejected & (r.sum(axis=-1) > 0))[:, None], r, row), rejected

  def _turned_down(self, left, node):
    """bool ``[B, N]``: children of a node that were turned down."""
    return left.out & (self.parents == node[:, None])

  def _draft_row(self, node):
    return at(self.draft, jnp.minimum(node, self.draft.shape[1] - 1))

  def _without(self, row, nodes):
    """``row [B, V]`` with 0 at the tokens of ``nodes`` (bool ``[B, N]``)."""
    tokens = jnp.where(nodes, self.tokens, self.vocab)
    return row.at[jnp.arange(row.shape[0])[:, None], tokens].set(0.0, mode="drop")


def _inverse(unseen):
  """1 / unseen; 0 where nothing is left of q, so that nothing was drawn from it either."""
  return jnp.where(unseen > _NOTHING, 1 / jnp.where(unseen > _NOTHING, unseen, 1.0), 0.0)
