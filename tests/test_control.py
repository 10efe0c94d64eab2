"""Controllers on scripted costs and acceptances: no model, one compiled simulation for all of it."""

import itertools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.base import RoundOutcome
from specjax.control import Adaptive, Beliefs, Fixed, PlusTwoMinusOne, assumed, estimate
from specjax.tree import TokenTree

SHORT, LONG = TokenTree.chain(2), TokenTree.chain(5)
TREE = TokenTree.cartesian((2, 2))
TREES = (SHORT, LONG, TREE)
DEPTHS = np.array([0, 2, 5, 2])
G = 5
CONTROL = Adaptive()
ROUNDS = 600
# Cheap enough that drafting pays where drafts are good, dear enough that it does not where they are bad.
VERIFY, DRAFT = (1.0, 1.3, 1.6, 1.6), (0.0, 0.1, 0.2, 0.1)


@flax.struct.dataclass
class Rows:
  """As much of a `DecodeState` as a controller looks at."""

  control: object
  length: jax.Array
  limit: jax.Array
  active: jax.Array


@flax.struct.dataclass
class World:
  """What is true, beliefs apart: costs ``[W + 1]`` and acceptance by round, width and depth."""

  verify: jax.Array
  draft: jax.Array
  rates: jax.Array  # [ROUNDS, W + 1, G]
  ends: jax.Array  # [ROUNDS], deepest draft that the drafter has to offer


@jax.jit
def simulate(beliefs, world, key):
  """``ROUNDS`` rounds of one row: widths, tokens and costs of each, and its account behind it."""

  def step(carry, inputs):
    control, length = carry
    rates, ends, key = inputs
    rows = Rows(control, length, length + 1000, jnp.ones((1,), bool))
    plan = CONTROL.plan(beliefs, TREES, rows)
    proposed = jnp.minimum(plan.depth, ends)
    # A chain that ends early is verified at the narrowest width that holds it, nothing plainly.
    chain = jnp.where(proposed[0] <= SHORT.max_depth, 1, 2)
    verified = jnp.where(proposed[0] == 0, 0, jnp.where(plan.width == 3, 3, chain))
    reach = jnp.arange(G) < proposed[:, None]
    accepted = jnp.cumprod((jax.random.uniform(key, (1, G)) < rates[plan.width]) & reach, axis=1).sum(axis=1)
    outcome = RoundOutcome(verified, proposed, accepted, accepted + 1)
    control = CONTROL.learn(beliefs, TREES, rows, plan, outcome)
    cost = world.verify[verified] + world.draft[plan.width]
    return (control, length + accepted + 1), (plan.width, accepted[0] + 1, cost, control.account[0])

  start = (CONTROL.init(beliefs, TREES, 1), jnp.full((1,), 10))
  return jax.lax.scan(step, start, (world.rates, world.ends, jax.random.split(key, ROUNDS)))[1]


many = jax.jit(jax.vmap(simulate))


def worlds(rates, verify, draft, ends):
  rates = np.broadcast_to(np.asarray(rates, np.float32), (ROUNDS, 4, G))
  costs = (jnp.asarray(cost, jnp.float32) for cost in (verify, draft))
  return World(*costs, jnp.asarray(rates), jnp.broadcast_to(jnp.asarray(ends), (ROUNDS,)))


def play(rates, seeds=32, verify=VERIFY, draft=DRAFT, ends=G, **beliefs):
  """``(widths, tokens, costs, accounts)``, each ``[seeds, ROUNDS]``; costs are known, acceptance is not."""
  believed = Beliefs.create(TREES, verify=verify, draft=draft, **beliefs)
  stack = lambda tree: jax.tree.map(lambda leaf: jnp.repeat(leaf[None], seeds, axis=0), tree)
  keys = jax.random.split(jax.random.key(7), seeds)
  return jax.tree.map(np.asarray, many(stack(believed), stack(worlds(rates, verify, draft, ends)), keys))


def speed(tokens, costs):
  return tokens.sum() / costs.sum()


def true_speed(width, rate):
  tokens = 1 + sum(rate ** (d + 1) for d in range(DEPTHS[width]))
  return tokens / (VERIFY[width] + DRAFT[width])


@pytest.mark.parametrize("believed", (0.0, 0.5, 1.0))
def test_the_account_bounds_what_is_lost(believed):
  """Costs up to any round are at most allowance + (1 + refill) · tokens plain rounds, whatever is accepted.

  Random acceptances by round, drafts that end early and are verified at a dearer width than planned, costs
  that never pay, and beliefs as wrong as can be. Fails when a round is not paid for, or a width runs whose
  dearest end the account cannot pay.
  """
  random = np.random.default_rng(3)
  ends = random.integers(0, G + 1, ROUNDS)
  for top, verify in itertools.product((0.0, 0.3, 1.0), ((1.0, 1.5, 2.2, 1.9), (1.0, 2.9, 1.4, 0.5))):
    rates = random.uniform(0, top, (ROUNDS, 1, G)) * (random.uniform(size=(ROUNDS, 1, 1)) < 0.7)
    _, tokens, costs, accounts = play(rates, verify=verify, ends=ends, acceptance=believed)
    bound = CONTROL.allowance + (1 + CONTROL.refill) * tokens.cumsum(axis=1)
    assert (costs.cumsum(axis=1) <= bound + 1e-3).all()
    assert (accounts > -1e-4).all() and (accounts <= CONTROL.ceiling + 1e-4).all()


def test_useless_drafts_are_given_up():
  """Nothing is ever accepted: after the first rounds fewer than 3 % of the time goes into trying.

  Fails when a width whose expected speed is below plain's is chosen once the exploration budget is spent.
  """
  widths, tokens, costs, _ = play(0.0, acceptance=0.8)
  assert (widths[:, :3] > 0).any()  # it was tried
  late = slice(100, None)
  assert speed(tokens[:, late], costs[:, late]) > 0.985
  assert speed(tokens[:, :128], costs[:, :128]) > 0.97


def test_a_draft_that_cannot_gain_is_never_asked():
  """A draft as dear as the target: not once, whatever is believed. Fails when hope ignores the costs."""
  widths, *_ = play(1.0, draft=(0.0, 2.0, 5.0, 2.0), acceptance=1.0)
  assert (widths == 0).all()


@pytest.mark.parametrize("rate", (0.35, 0.6, 0.9))
@pytest.mark.parametrize("believed", (0.2, 0.6, 0.9))
def test_near_the_best_fixed_width(rate, believed):
  """Within 4 % of the best width of a stationary world, whatever was believed; 6 % where that gains 5 %.

  Fails when evidence is not counted, or is counted for another width or depth.
  """
  _, tokens, costs, _ = play(rate, acceptance=believed)
  best = max(true_speed(width, rate) for width in range(4))
  assert best > 1.05
  assert speed(tokens, costs) > (0.96 if best > 1.1 else 0.94) * best


def test_recovers_when_acceptance_changes_midway():
  """Bad, then good, then bad: drafting stops, comes back and stops again.

  Fails when evidence never ages, or exploration ends for good.
  """
  rates = np.zeros((ROUNDS, 4, G))
  rates[200:400] = 0.95
  widths, tokens, costs, _ = play(rates)
  drafting = (widths > 0).mean(axis=0)
  assert drafting[100:200].mean() < 0.05
  assert drafting[300:400].mean() > 0.9
  assert drafting[430:].mean() < 0.06
  assert speed(tokens[:, 300:400], costs[:, 300:400]) > 0.9 * true_speed(2, 0.95)


def test_a_tree_that_is_better_than_believed_is_found():
  """The tree accepts much more than chains do. Fails when only what was seen to be best is tried."""
  rates = np.full((ROUNDS, 4, G), 0.45)
  rates[:, 3] = 0.95
  widths, *_ = play(rates, acceptance=0.45)
  assert (widths[:, 300:] == 3).mean() > 0.8


def rows_of(control, lengths, limit=1000, active=None):
  lengths = jnp.asarray(lengths)
  active = jnp.ones(lengths.shape, bool) if active is None else jnp.asarray(active)
  return Rows(control, lengths, jnp.broadcast_to(jnp.asarray(limit), lengths.shape), active)


def believed(**changes):
  return Beliefs.create(TREES, **{"verify": VERIFY, "draft": DRAFT, "acceptance": 0.7, **changes})


@jax.jit
def planned(beliefs, rows):
  return CONTROL.plan(beliefs, TREES, rows)


def test_rows_that_do_not_gain_propose_nothing():
  """A row whose drafts were never accepted sits out; one at its last token does, too.

  Fails when rows share evidence, or the budget's end is not seen.
  """
  control = CONTROL.init(believed(), TREES, 6)
  judged = control.judged.at[1, 0, 0].set(30.0)
  control = control.replace(judged=judged, drafted=jnp.array([0, 300, 0, 0, 0, 0]))
  limits, active = [1000, 1000, 21, 1000, 1000, 1000], [True, True, True, False, True, True]
  rows = rows_of(control, [20] * 6, limits, active)
  plan = planned(believed(), rows)
  assert plan.width > 0
  np.testing.assert_array_equal(plan.depth > 0, [True, False, False, False, True, True])


def test_what_was_just_seen_to_be_bad_is_tried_again_after_a_rest():
  """20 rounds without an accepted draft, an account that could pay for more: plain; 150 rounds later: a try.

  Fails when hope ignores the evidence, or the evidence never ages.
  """
  control = CONTROL.init(believed(), TREES, 1)
  judged = control.judged.at[:, :, 0].set(20.0)
  control = control.replace(judged=judged, drafted=jnp.array([64]), account=jnp.array([CONTROL.ceiling]))
  assert planned(believed(), rows_of(control, [20])).width == 0
  rested = control.replace(rested=jnp.array([150]))
  assert planned(believed(), rows_of(rested, [20])).width > 0


def test_costs_at_the_live_length_decide():
  """Verifying gets dearer with the text: short texts draft, long ones do not. Fails when costs are read at
  another length than the longest live one."""
  verify = [[1.0, 2.0], [1.2, 9.0], [1.4, 9.0], [1.4, 9.0]]
  beliefs = believed(live=(100.0, 1000.0), verify=verify)
  control = CONTROL.init(beliefs, TREES, 2)
  short, long = (planned(beliefs, rows_of(control, [50, length], 9999)).width for length in (60, 5000))
  assert short > 0 and long == 0


def test_what_the_drafter_missed_is_paid_for():
  """200 tokens that the drafter has not seen cost more than a round gains. Fails when they count as free."""
  beliefs = believed(catch_up=0.1)
  fresh = CONTROL.init(beliefs, TREES, 1)
  behind = fresh.replace(unseen=jnp.array([200]))
  assert planned(beliefs, rows_of(fresh, [300])).width > 0
  assert planned(beliefs, rows_of(behind, [300])).width == 0
  # Of two rows one sits out: what it has not seen is not fed, and costs nothing.
  two = CONTROL.init(beliefs, TREES, 2)
  two = two.replace(
    unseen=jnp.array([0, 200]), drafted=jnp.array([0, 300]), judged=two.judged.at[1, 0, 0].set(30.0)
  )
  beside = planned(beliefs, rows_of(two, [300, 300]))
  assert beside.width > 0 and (np.asarray(beside.depth > 0) == [True, False]).all()


def test_a_drafter_that_rarely_speaks_costs_little():
  """It proposes in one round of ten, and then well: asking pays, since a silent round is a plain one.

  Fails when the width's cost is reckoned for rounds in which nothing is proposed.
  """
  beliefs = believed(draft=(0.0, 0.01, 0.01, 0.01), proposing=0.1, acceptance=0.8)
  control = CONTROL.init(beliefs, TREES, 1)
  assert planned(beliefs, rows_of(control, [20])).width > 0


def test_estimates_by_hand():
  """Memory 1: counts over counts. One group's surprise moves the belief about the other.

  Fails when groups or depths are mixed up.
  """
  beliefs = believed(acceptance=0.5, strength=2.0)
  control = CONTROL.init(beliefs, TREES, 1)
  kept, judged = control.kept.at[0, 0, :2].set((9.0, 3.0)), control.judged.at[0, 0, :2].set((10.0, 9.0))
  mean, error = estimate(beliefs, TREES, control.replace(kept=kept, judged=judged), 1.0)
  shift = (12 - 19 * 0.5) / (2 + 19)
  np.testing.assert_allclose(mean[0, 3], np.full(G, 0.5 + shift), rtol=1e-5)
  want = [(2 * (0.5 + shift) + 9) / 12, (2 * (0.5 + shift) + 3) / 11]
  np.testing.assert_allclose(mean[0, 1, :2], want, rtol=1e-5)
  np.testing.assert_array_equal(mean[0, 1], mean[0, 2])
  assert error[0, 1, 0] < error[0, 1, 1] < error[0, 1, 2]


def rounds_of(control, accepted, beliefs=None):
  """Plans of a controller that is told what each round accepted."""
  state = control.init(beliefs, TREES[:2], 1)
  for a in accepted:
    rows = rows_of(state, [10])
    plan = control.plan(beliefs, TREES[:2], rows)
    yield int(plan.width), int(plan.depth[0])
    a = min(a, int(plan.depth[0]))
    outcome = RoundOutcome(plan.width, plan.depth, jnp.array([a]), jnp.array([a + 1]))
    state = control.learn(beliefs, TREES[:2], rows, plan, outcome)


def test_plus_two_minus_one():
  """By hand: 2 → all kept 4 → 3 → 2 → 1 → stays 1 → 3 → 5 → 5 (the widest)."""
  plans = list(rounds_of(PlusTwoMinusOne(start=2), [9, 0, 0, 0, 0, 9, 9, 9, 9]))
  assert [depth for _, depth in plans] == [2, 4, 3, 2, 1, 1, 3, 5, 5]
  assert [width for width, _ in plans] == [1, 2, 2, 1, 1, 1, 2, 2, 2]


def test_fixed():
  assert list(rounds_of(Fixed(), [0, 9])) == [(2, 5), (2, 5)]
  assert list(rounds_of(Fixed(width=1), [0, 9])) == [(1, 2), (1, 2)]
  assert list(rounds_of(Fixed(width=0), [0])) == [(0, 0)]


def test_no_width_is_deeper_than_it_may_be():
  """The best of those that are not, plain decoding where there is none; no limit is none.

  Fails when the limit is not asked, or cuts a draft of a width that is paid for in full.
  """
  # The long chain is by far the best; of the others the tree is.
  beliefs = believed(verify=(1.0, 1.4, 1.0, 1.1), acceptance=0.95)
  adaptive, fixed, stepwise = Adaptive(), Fixed(), PlusTwoMinusOne(start=5)
  for deepest, of_adaptive, of_fixed in ((0, 0, 0), (1, 0, 0), (2, 3, 3), (4, 3, 3), (5, 2, 3), (99, 2, 3)):
    rows = rows_of(adaptive.init(beliefs, TREES, 1), [10])
    plan = adaptive.plan(beliefs, TREES, rows, jnp.int32(deepest))
    assert (int(plan.width), int(plan.depth[0])) == (of_adaptive, DEPTHS[of_adaptive])
    plan = fixed.plan(None, TREES, rows, jnp.int32(deepest))
    assert (int(plan.width), int(plan.depth[0])) == (of_fixed, DEPTHS[of_fixed])
    plan = stepwise.plan(None, TREES[:2], rows_of(jnp.array([5]), [10]), jnp.int32(deepest))
    widest = 0 if deepest < 2 else 1 if deepest < 5 else 2
    assert (int(plan.width), int(plan.depth[0])) == (widest, DEPTHS[widest])


def test_assumed_costs_are_careful():
  """Not below the dearest that the lab book has of one row on a CPU, in two calibrations and `decode_bench`;
  of many rows not below a node's own share. Fails when a width is assumed cheaper than it was measured."""
  measured = {2: 1.39, 3: 1.51, 4: 1.62, 6: 2.00, 8: 1.87, 12: 2.81, 16: 2.36, 32: 5.11, 64: 8.29}
  trees = tuple(TokenTree.chain(nodes - 1) for nodes in measured)
  beliefs = assumed(trees, draft_step=0.1)
  assert (np.asarray(beliefs.verify[1:, 0]) >= list(measured.values())).all()
  np.testing.assert_allclose(beliefs.draft[1:, 0], [0.1 * tree.max_depth for tree in trees], rtol=1e-6)
  many = assumed(trees, draft_step=0.1, batch=16)
  assert (np.asarray(many.verify[1:, 0]) >= list(measured)).all()


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    (dict(verify=(1.0, 0.0, 1.0, 1.0)), "verify"),
    (dict(verify=(1.0, float("nan"), 1.0, 1.0)), "verify"),
    (dict(verify=(1.0, 2.0)), "do not fit 4 widths"),
    (dict(draft=(0.0, -1.0, 0.0, 0.0)), "draft"),
    (dict(catch_up=-1), "catch_up"),
    (dict(acceptance=1.5), "acceptance"),
    (dict(acceptance=(0.5, 0.5)), "a depth of 5"),
    (dict(proposing=-0.1), "proposing"),
    (dict(strength=0), "strength"),
    (dict(live=(5.0, 5.0)), "live"),
  ],
)
def test_beliefs_are_checked(changes, words):
  with pytest.raises(ValueError, match=words):
    believed(**changes)


@pytest.mark.parametrize(
  ("make", "words"),
  [
    (lambda: Adaptive(allowance=-1), "allowance = -1"),
    (lambda: Adaptive(memory=1.1), "memory = 1.1"),
    (lambda: Adaptive(ceiling=1), "ceiling = 1"),
    (lambda: Adaptive().init(None, TREES, 1), "adaptive needs beliefs about 4 widths and 5 depths, got None"),
    (lambda: Adaptive().init(believed(), TREES[:1], 1), "about 2 widths and 2 depths"),
    (lambda: Fixed(width=4).init(None, TREES, 1), "width = 4"),
    (lambda: PlusTwoMinusOne(start=0), "start = 0"),
    (lambda: PlusTwoMinusOne().init(None, TREES, 1), "takes chains"),
  ],
)
def test_options_are_checked(make, words):
  with pytest.raises(ValueError, match=words):
    make()
