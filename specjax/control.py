"""Controllers: which width each round has, so that speculation is only paid for where it pays.

A controller runs inside the compiled loop. It sees what the rounds so far did, never the noise of the round
it plans, so the law is the target's whatever it chooses: given the text so far every width of a lossless
rule emits by that law, and which width runs is settled by the past. Greedy decoding and deterministic
drafts that are followed give plain decoding's very tokens; otherwise the draws are others, of the same law.

`Adaptive` weighs measured costs against a running estimate of acceptance and keeps an account, so that
decoding is never slower than plain by more than it is allowed to spend. `Fixed` and `PlusTwoMinusOne` are the
heuristics in use elsewhere. (To stop by the draft's confidence is the drafter's own option: it knows its
distributions.)
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.base import ANY_DEPTH, Controller, RoundOutcome, RoundPlan, Trees
from specjax.tree import alike

Array = jax.Array


@flax.struct.dataclass
class Beliefs:
  """What `Adaptive` believes beforehand: costs of rounds, and how often drafts are accepted.

  W widths beside plain decoding, which is width 0; costs in any one unit, at K numbers of live tokens, linear
  between them. All of it is traced: a new calibration compiles nothing.

  Attributes:
    live: float32 ``[K]``, ascending.
    verify: float32 ``[W + 1, K]``, cost of a round without its draft.
    draft: float32 ``[W + 1, K]``, of the draft alone; 0 for plain decoding.
    catch_up: float32 ``[]``, of each committed token that the drafter has not seen when it drafts again.
    proposing: float32 ``[W + 1]``, share of rounds in which the drafter has something to propose.
    acceptance: float32 ``[W + 1, G]``, chance that the draft at depth 1 … G is accepted where the one before
      it was and something was proposed.
    strength: float32 ``[]``, how many rounds of evidence that is worth at first.
  """

  live: Array
  verify: Array
  draft: Array
  catch_up: Array
  proposing: Array
  acceptance: Array
  strength: Array

  @classmethod
  def create(
    cls,
    trees: Trees,
    *,
    verify,
    draft,
    live=(0.0,),
    catch_up=0.0,
    proposing=1.0,
    acceptance=0.6,
    strength=4.0,
  ) -> Beliefs:
    """Beliefs about the widths of ``trees``, checked; numbers stand for every width, live length or depth.

    Args:
      trees: topologies of widths 1 … W.
      verify, draft: ``[W + 1]`` or ``[W + 1, K]``.
      live: ``[K]``.
      catch_up, strength: numbers.
      proposing: one or ``[W + 1]``.
      acceptance: one, ``[G]`` or ``[W + 1, G]``.

    Raises:
      ValueError: naming the field, the value and the limit.
    """
    widths, depth = len(trees) + 1, max(tree.max_depth for tree in trees)
    live = np.atleast_1d(np.asarray(live, np.float32))
    by_live = lambda cost: np.broadcast_to(_columns(cost), (widths, len(live)))
    try:
      fields = dict(
        live=live,
        verify=by_live(verify),
        draft=by_live(draft),
        catch_up=np.float32(catch_up),
        proposing=np.broadcast_to(np.asarray(proposing, np.float32), (widths,)),
        acceptance=np.broadcast_to(np.asarray(acceptance, np.float32), (widths, depth)),
        strength=np.float32(strength),
      )
    except ValueError as error:
      raise ValueError(f"beliefs do not fit {widths} widths and a depth of {depth}: {error}") from None
    _check(np.all(np.diff(live) > 0), "live", live, "ascending")
    _check(
      np.all(fields["verify"] > 0) and np.all(np.isfinite(fields["verify"])), "verify", verify, "above 0"
    )
    for name in ("draft", "catch_up"):
      _check(
        np.all(fields[name] >= 0) and np.all(np.isfinite(fields[name])), name, fields[name], "at least 0"
      )
    _check(strength > 0, "strength", strength, "above 0")
    for name in ("proposing", "acceptance"):
      _check(np.all((fields[name] >= 0) & (fields[name] <= 1)), name, fields[name], "in [0, 1]")
    return cls(**{name: jnp.array(value) for name, value in fields.items()})


def _columns(cost) -> np.ndarray:
  cost = np.asarray(cost, np.float32)
  return cost[:, None] if cost.ndim == 1 else cost


def _check(holds: bool, name: str, value: Any, limit: str) -> None:
  if not holds:
    raise ValueError(f"beliefs: {name} = {np.asarray(value).tolist()}; it must be {limit}")


# Beliefs give way to evidence, down to this many rounds.
_LEAST_STRENGTH = 0.5


@flax.struct.dataclass
class Evidence:
  """What `Adaptive` has seen of each row. S groups of widths whose drafts are alike: chains, each tree.

  Counts of rounds, each weighted less with every round since.

  Attributes:
    judged: float32 ``[B, S, G]``, rounds that accepted all before depth d and drafted that far.
    kept: float32 ``[B, S, G]``, those of them that accepted at depth d.
    asked: float32 ``[B, S]``, rounds in which the drafter was asked.
    found: float32 ``[B, S]``, those of them in which it proposed something.
    unseen: int32 ``[B]``, tokens committed since the drafter was last asked.
    rested: int32 ``[B]``, rounds since then.
    drafted: int32 ``[B]``, rounds in which it was asked, all of them.
    account: float32 ``[B]``, what may be lost yet, in plain rounds.
  """

  judged: Array
  kept: Array
  asked: Array
  found: Array
  unseen: Array
  rested: Array
  drafted: Array
  account: Array


@dataclasses.dataclass(frozen=True)
class Adaptive:
  """The width with the most expected tokens for its cost, under a budget for being wrong.

  **Estimate.** Acceptance by depth, a row and a group of widths at a time: counts of the row on top of the
  beliefs, which are first moved by how far the row's rounds at any width were off them, so that what is seen
  at one width says something about the others.

  **Choice.** In a batch one width a round: the one with the highest Σ over rows of expected tokens / cost,
  plain decoding among them. Rows that expect less than ``least_gain`` tokens of it propose nothing.

  **Account.** A row starts with ``allowance`` plain rounds, earns ``refill`` with each token, and pays what a
  round cost beyond the tokens it emitted (gains are paid in, up to ``ceiling``). A width runs only if the
  rows' mean account can pay for it should nothing be accepted. With true costs a row alone, and the mean of
  rows that stay together, therefore never costs more than ``allowance + (1 + refill) · tokens`` plain rounds,
  whatever the drafter does.

  **Exploration.** Where plain decoding looks best, a width that would beat it if acceptance were
  ``curiosity`` standard errors better is tried as far as the account reaches. Evidence ages while a row
  rests, so the errors grow, and drafts that have become good are found again after a few tries; where they
  stay bad, the account pays for few. While drafting, every ``look_around`` rounds the width with the highest
  such bound is tried. No randomness is used.

  Attributes:
    allowance: plain rounds a row may lose from the start.
    refill: plain rounds it may lose more with each token.
    ceiling: most an account holds.
    memory: weight of what is known after each further round.
    curiosity: see above.
    look_around: see above.
    least_gain: expected accepted drafts below which a row proposes nothing.
  """

  allowance: float = 2.0
  refill: float = 0.01
  ceiling: float = 6.0
  memory: float = 0.97
  curiosity: float = 1.5
  look_around: int = 32
  least_gain: float = 0.05

  name: ClassVar[str] = "adaptive"

  def __post_init__(self):
    for name, low, high in (
      ("allowance", 0.0, np.inf),
      ("refill", 0.0, 1.0),
      ("ceiling", self.allowance, np.inf),
      ("memory", 0.0, 1.0),
      ("curiosity", 0.0, np.inf),
      ("look_around", 1, np.inf),
      ("least_gain", 0.0, np.inf),
    ):
      if not low <= getattr(self, name) <= high:
        raise ValueError(f"adaptive: {name} = {getattr(self, name)}; it must be in [{low}, {high}]")

  def init(self, beliefs: Beliefs, trees: Trees, batch: int) -> Evidence:
    shape = (len(trees) + 1, max(tree.max_depth for tree in trees))
    if beliefs is None or beliefs.acceptance.shape != shape:
      found = None if beliefs is None else beliefs.acceptance.shape
      raise ValueError(f"adaptive needs beliefs about {shape[0]} widths and {shape[1]} depths, got {found}")
    groups = int(_groups(trees).max()) + 1
    zeros = lambda *shape: jnp.zeros((batch, *shape), jnp.float32)
    counts = lambda: jnp.zeros((batch,), jnp.int32)
    return Evidence(
      judged=zeros(groups, shape[1]),
      kept=zeros(groups, shape[1]),
      asked=zeros(groups),
      found=zeros(groups),
      unseen=counts(),
      rested=counts(),
      drafted=counts(),
      account=jnp.full((batch,), self.allowance, jnp.float32),
    )

  def plan(self, beliefs: Beliefs, trees: Trees, rows: Any, deepest: Array | int = ANY_DEPTH) -> RoundPlan:
    control, active, depths = rows.control, rows.active, _depths(trees)
    verify, draft = _costs(beliefs, rows)
    mean, error = estimate(beliefs, trees, control, self.memory)
    proposing = _proposing(beliefs, trees, control)
    # The last token of the budget is the round's own: drafts reach one less far.
    reach = jnp.minimum(depths, (rows.limit - rows.length - 1)[:, None])  # [B, W + 1]

    held = jnp.sum(jnp.where(active, control.account, 0)) / jnp.maximum(active.sum(), 1)
    dearest = jnp.max(jnp.where(_may_run(trees), verify, 0), axis=1)

    def weigh(rates, least):
      """The affordable width with the most Σ over rows of expected tokens / cost, that, and who joins it."""
      reached = jnp.arange(rates.shape[-1]) < reach[:, :, None]
      gain = proposing * jnp.sum(jnp.cumprod(jnp.clip(rates, 0, 1) * reached, axis=-1), axis=-1)
      joins = active[:, None] & (gain > least) & (depths > 0)
      drafting = draft + _catch_up(beliefs, trees, control, joins)
      silent = jnp.prod(jnp.where(joins, 1 - proposing, 1), axis=0)
      cost = (drafting + (1 - silent) * verify + silent * verify[0]).at[0].set(verify[0])
      value = jnp.sum(active[:, None] * (1 + jnp.where(joins, gain, 0)), axis=0) / cost
      affordable = ((drafting + dearest) / verify[0] - 1 <= held).at[0].set(True)
      width = jnp.argmax(jnp.where(affordable & (depths <= deepest), value, -jnp.inf))
      return width, value[width], joins[:, width]

    best, value, joins_best = weigh(mean, self.least_gain)
    bold, hoped, joins_bold = weigh(mean + self.curiosity * error, 0.0)
    turn = jnp.max(jnp.where(active, control.drafted, 0)) % self.look_around == self.look_around - 1
    explore = (hoped > value) & ((best == 0) | turn)
    width = jnp.where(explore, bold, best).astype(jnp.int32)
    joins = jnp.where(explore, joins_bold, joins_best)
    return RoundPlan(width, jnp.where(joins, jnp.asarray(depths)[width], 0).astype(jnp.int32))

  def learn(
    self, beliefs: Beliefs, trees: Trees, rows: Any, plan: RoundPlan, outcome: RoundOutcome
  ) -> Evidence:
    seen: Evidence = rows.control
    asked = rows.active & (plan.depth > 0)
    verify, draft = _costs(beliefs, rows)
    drafting = draft + _catch_up(beliefs, trees, seen, asked[:, None])
    cost = verify[outcome.verified] + jnp.where(plan.width > 0, drafting[plan.width], 0)
    earned = (1 + self.refill) * outcome.emitted - cost / verify[0]
    found = asked & (outcome.depth > 0)
    # Where a round drafted less deep than its width, being cut by the budget says nothing; a draft that
    # ended early is not accepted there.
    limit = jnp.minimum(plan.depth, rows.limit - rows.length - 1)
    depth = jnp.arange(1, seen.judged.shape[-1] + 1)
    judged = found[:, None] & (depth <= limit[:, None]) & (depth <= outcome.accepted[:, None] + 1)
    kept = judged & (depth <= outcome.accepted[:, None])
    group = (jnp.asarray(_groups(trees))[plan.width] == jnp.arange(seen.asked.shape[1])).astype(jnp.float32)
    # At rest counts stay as they are, so that the mean does; new evidence meets them aged.
    older = jnp.where(asked, self.memory ** (seen.rested + 1.0), 1.0)

    def add(count, new):
      new = new.astype(jnp.float32)[:, None] * group.reshape(1, -1, *[1] * (count.ndim - 2))
      return count * older.reshape(-1, *[1] * (count.ndim - 1)) + new

    running = lambda new, old: jnp.where(rows.active, new, old)
    return Evidence(
      judged=add(seen.judged, judged),
      kept=add(seen.kept, kept),
      asked=add(seen.asked, asked),
      found=add(seen.found, found),
      unseen=running(jnp.where(asked, 0, seen.unseen + outcome.emitted), seen.unseen),
      rested=running(jnp.where(asked, 0, seen.rested + 1), seen.rested),
      drafted=seen.drafted + asked,
      account=running(jnp.minimum(seen.account + earned, self.ceiling), seen.account),
    )


def _depths(trees: Trees) -> np.ndarray:
  """int32 ``[W + 1]``: the deepest draft of each width."""
  return np.array([0, *(tree.max_depth for tree in trees)], np.int32)


def _groups(trees: Trees) -> np.ndarray:
  """int32 ``[W + 1]``: the group of each width, see `tree.alike`; plain decoding's is not used."""
  numbers = np.zeros(len(trees) + 1, np.int32)
  for number, group in enumerate(alike(trees)):
    numbers[1 + np.array(group)] = number
  return numbers


def _may_run(trees: Trees) -> np.ndarray:
  """bool ``[W + 1, W + 1]``: at which widths (columns) a round planned at one (rows) may be verified.

  At its own, plainly, and a chain that ends early at any narrower one.
  """
  may = np.eye(len(trees) + 1, dtype=bool)
  may[:, 0] = True
  for group in alike(trees):
    for place, index in enumerate(group):
      may[index + 1, [1 + narrower for narrower in group[:place]]] = True
  return may


def _costs(beliefs: Beliefs, rows: Any) -> tuple[Array, Array]:
  """Verify and draft of this round, ``[W + 1]`` each."""
  live = jnp.max(jnp.where(rows.active, rows.length, 0)).astype(jnp.float32)
  at = jax.vmap(lambda costs: jnp.interp(live, beliefs.live, costs))
  return at(beliefs.verify), at(beliefs.draft)


def _catch_up(beliefs: Beliefs, trees: Trees, seen: Evidence, joins: Array) -> Array:
  """``[W + 1]``: feeding the drafter what it missed of rows that join ``[B, W + 1 or 1]``, in whole blocks.

  A block is as long as the width has nodes.
  """
  missed = jnp.max(jnp.where(joins, seen.unseen[:, None], 0), axis=0)
  block = np.array([1, *(tree.num_nodes for tree in trees)])
  return (beliefs.catch_up * block * jnp.ceil(missed / block)).at[0].set(0.0)


def _proposing(beliefs: Beliefs, trees: Trees, seen: Evidence) -> Array:
  """float32 ``[B, W + 1]``: the chance that the drafter has something to propose."""
  groups = _groups(trees)
  prior = beliefs.strength * beliefs.proposing
  return (prior + seen.found[:, groups]) / (beliefs.strength + seen.asked[:, groups])


def estimate(beliefs: Beliefs, trees: Trees, seen: Evidence, memory: float) -> tuple[Array, Array]:
  """Acceptance by width and depth, float32 ``[B, W + 1, G]``, and its standard error."""
  groups = _groups(trees)
  strength = jnp.maximum(beliefs.strength * memory ** seen.drafted.astype(jnp.float32), _LEAST_STRENGTH)
  # The belief about a group is that about its last width.
  last = np.array([np.flatnonzero(groups[1:] == group)[-1] + 1 for group in range(groups.max() + 1)])
  surprise = jnp.sum(seen.kept - seen.judged * beliefs.acceptance[last], axis=(1, 2))
  shift = surprise / (strength + jnp.sum(seen.judged, axis=(1, 2)))
  prior = jnp.clip(beliefs.acceptance + shift[:, None, None], 0.0, 1.0)
  judged, kept, strength = seen.judged[:, groups], seen.kept[:, groups], strength[:, None, None]
  mean = (strength * prior + kept) / (strength + judged)
  # What was never or always accepted is uncertain, too.
  weight = (strength + judged) * (memory ** seen.rested.astype(jnp.float32))[:, None, None]
  return mean, jnp.sqrt(jnp.maximum(mean * (1 - mean), 0.25 / (weight + 1)) / weight)


@dataclasses.dataclass(frozen=True)
class Fixed:
  """Always the same width; only rounds in which nothing is proposed run plainly.

  Under a limit on depth it is the last width before it that is no deeper.

  Attributes:
    width: 1 … W in the order of `DecodeConfig.drafters`, 0 for plain decoding; None is the last.
  """

  width: int | None = None

  name: ClassVar[str] = "fixed"

  def init(self, beliefs, trees: Trees, batch: int) -> tuple[()]:
    if self.width is not None and not 0 <= self.width <= len(trees):
      raise ValueError(f"fixed: width = {self.width}; there are widths 0 to {len(trees)}")
    return ()

  def plan(self, beliefs, trees: Trees, rows: Any, deepest: Array | int = ANY_DEPTH) -> RoundPlan:
    depths = _depths(trees)[: len(trees) + 1 if self.width is None else self.width + 1]
    width = jnp.max(jnp.where(depths <= deepest, jnp.arange(len(depths), dtype=jnp.int32), 0))
    return RoundPlan(width, jnp.where(rows.active, jnp.asarray(depths)[width], 0))

  def learn(self, beliefs, trees: Trees, rows: Any, plan: RoundPlan, outcome: RoundOutcome):
    return rows.control


@dataclasses.dataclass(frozen=True)
class PlusTwoMinusOne:
  """The window grows by 2 after a round that accepted all of it, and shrinks by 1 after any other.

  The schedule of assisted generation as others ship it: it knows no costs and never stops drafting. A row
  proposes as far as its own window; the round runs at the narrowest chain that holds the longest of them.
  Under a limit on depth windows reach to the longest chain that is no deeper.

  Attributes:
    start: the first window.
  """

  start: int = 5

  name: ClassVar[str] = "plus2_minus1"

  def __post_init__(self):
    if self.start < 1:
      raise ValueError(f"plus2_minus1: start = {self.start}; it must be at least 1")

  def init(self, beliefs, trees: Trees, batch: int) -> Array:
    if not all(tree.is_chain for tree in trees):
      raise ValueError("plus2_minus1 takes chains; a drafter proposes a tree")
    return jnp.full((batch,), min(self.start, int(_depths(trees).max())), jnp.int32)

  def plan(self, beliefs, trees: Trees, rows: Any, deepest: Array | int = ANY_DEPTH) -> RoundPlan:
    depths = _depths(trees)[1:]
    window = jnp.minimum(rows.control, jnp.max(jnp.where(depths <= deepest, depths, 0)))
    window = jnp.where(rows.active, window, 0)
    order = np.argsort(depths, kind="stable")
    at = jnp.searchsorted(jnp.asarray(depths[order]), jnp.max(window))
    width = jnp.where(jnp.any(window > 0), jnp.asarray(order)[at] + 1, 0)
    return RoundPlan(width.astype(jnp.int32), window)

  def learn(self, beliefs, trees: Trees, rows: Any, plan: RoundPlan, outcome: RoundOutcome) -> Array:
    window = rows.control
    all_kept = outcome.accepted == outcome.depth
    moved = jnp.clip(jnp.where(all_kept, window + 2, window - 1), 1, int(_depths(trees).max()))
    return jnp.where(rows.active & (outcome.depth > 0), moved, window)


CONTROLS: dict[str, type[Controller]] = {
  control.name: control for control in (Adaptive, Fixed, PlusTwoMinusOne)
}


def assumed(trees: Trees, *, draft_step: float, batch: int = 1, proposing: float = 1.0) -> Beliefs:
  """Beliefs where nothing was measured: careful ones, so that drafting must show that it pays.

  A round of N > 1 nodes is taken to cost 1.2 + (N - 1) · min(1, B / 5) plain rounds: for one row more than on
  the one device measured yet (a CPU: up to 1.4 at 2 nodes, 1.6 at 4, 2.4 at 16), for five rows or more what
  it costs where nothing is shared. Half of the drafts are taken to be accepted.

  Args:
    trees: topologies of widths 1 … W.
    draft_step: cost of one step of the draft, one for each level, in plain rounds.
    batch: B, rows decoded together.
    proposing: share of rounds in which there is something to propose.
  """
  a_node = min(1.0, batch / 5)
  verify = [1.0, *(1.2 + (tree.num_nodes - 1) * a_node for tree in trees)]
  draft = [0.0, *(draft_step * tree.max_depth for tree in trees)]
  return Beliefs.create(
    trees, verify=verify, draft=draft, catch_up=draft_step * a_node, proposing=proposing, acceptance=0.5
  )
