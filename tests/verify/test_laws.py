"""Losslessness by enumeration: the exact law of a round, integrated over all of its random numbers."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import sampling
from specjax.base import Proposal
from specjax.sampling import Purpose, Settings
from specjax.testing import TableTarget, fixed_noise, joint_law, process, round_law
from specjax.tree import DynamicTree, TokenTree
from specjax.verify import RULES, make_rule

LOSSLESS = ("draw_and_follow", "speculative_sampling")


def table_law(seed, vocab=3, **settings):
  """A law that depends on the whole history, processed as asked."""
  table = TableTarget.random(seed, vocab, rows=17, spread=1.5)
  return lambda context: process(table.logits_after((1, *context)), **settings)


def constant(p):
  return lambda context: np.asarray(p, float)


def first(law):
  """Marginal of the first token of a joint law."""
  return law.sum(axis=tuple(range(1, law.ndim)))


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("draft", ("sampled", "argmax", "unlikely"))
@pytest.mark.parametrize("depth", (1, 2))
def test_a_round_has_the_targets_joint_law(rule, draft, depth):
  """Fails for a wrong ratio, residual, correction row or bonus row, and when two draws share noise."""
  law, draft_law = table_law(0), table_law(1)
  if draft != "sampled":
    draft_law = (
      (int(np.argmax(law(()))), 1)[:depth] if draft == "argmax" else (int(np.argmin(law(()))), 0)[:depth]
    )
  np.testing.assert_allclose(
    round_law(make_rule(rule), law, draft_law, depth), joint_law(law, (), depth + 1), atol=1e-6
  )


def test_every_lossless_rule_with_probabilities_is_enumerated():
  """A new rule must join the table above."""
  assert {name for name, rule in RULES.items() if rule.lossless and rule.needs == "probs"} == set(LOSSLESS)


def test_e1_q_is_the_truncated_distribution():
  """A drafter that keeps its top 2 must report them as q; the raw q gives [.571, .429, 0, 0].

  Fails when the rule renormalises q, or reads q at another node.
  """
  p = [0.4, 0.3, 0.2, 0.1]
  rule = make_rule("speculative_sampling")
  truncated = [4 / 7, 3 / 7, 0, 0]
  np.testing.assert_allclose(first(round_law(rule, constant(p), constant(truncated), 1)), p, atol=1e-6)
  # The test sees the fault: drawn from the truncated q, judged by the raw one. Tokens 0 and 1 have
  # p = q and are always accepted, so their law is q's.
  np.testing.assert_allclose(judged_by(rule, p, truncated, p), [0.571, 0.429, 0, 0], atol=1e-3)


def spread(noise):
  """``{purpose: [cells]} → values`` for `fixed_noise`: the same number at every position and node."""

  def values(purpose, position, node):
    column = jnp.asarray(noise[purpose]).reshape(-1, *[1] * (position.ndim - 1))
    return jnp.broadcast_to(column, position.shape)

  return values


def compiled(rule):
  """A fresh program, so that the noise in force is what it sees."""
  return jax.jit(lambda *args: rule(*args))


def chain(draft, cells, q=None):
  """A proposal of one draft, in every cell."""
  tokens = jnp.tile(jnp.array([(0, *draft)], jnp.int32), (cells, 1))
  q = None if q is None else jnp.broadcast_to(jnp.asarray(q, jnp.float32), (cells, len(draft), len(q)))
  kind = "deterministic" if q is None else "sampled"
  return Proposal(tokens, jnp.ones_like(tokens, bool), q, tree=TokenTree.chain(len(draft)), kind=kind)


def judged_by(rule, p, drawn_from, reported, *, shared=False):
  """Law of one emitted token when a draft is drawn from one q and another is reported (grid of noise).

  ``shared`` gives acceptance and residual the same number.
  """
  grid = (np.arange(60) + 0.5) / 60
  u, w = (x.ravel() for x in np.meshgrid(grid, grid))
  u = w if shared else u
  cells = u.size
  target = jnp.broadcast_to(jnp.asarray([p, p], jnp.float32), (cells, 2, len(p)))
  law = np.zeros(len(p))
  for x, share in enumerate(drawn_from):
    with fixed_noise(spread({Purpose.ACCEPT: u, Purpose.RESIDUAL: w, Purpose.TARGET: w})):
      verdict = rule(
        target, chain((x,), u.size, reported), Settings.create(u.size), jnp.ones(u.size, jnp.int32)
      )
    emitted = np.where(verdict.accepted == 1, x, verdict.next_token)
    law += share * np.bincount(emitted, minlength=len(p)) / cells
  return law


def test_e2_replacements_come_from_the_residual():
  """p = [.5, .3, .2], q = [.2, .3, .5]: a replacement is always token 0. Fails for any other normaliser."""
  p, q = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]
  # Draft 2 is accepted with .4; rejected ones must all become 0.
  law = judged_by(make_rule("speculative_sampling"), p, [0, 0, 1], q)
  np.testing.assert_allclose(law, [0.6, 0.0, 0.4], atol=0.01)
  np.testing.assert_allclose(
    first(round_law(make_rule("speculative_sampling"), constant(p), constant(q), 1)), p, atol=1e-6
  )


@pytest.mark.parametrize("rule", LOSSLESS)
def test_e3_an_argmax_draft_has_a_point_mass_q(rule):
  """p = [.1, .6, .3], draft = argmax of [.3, .2, .5]. Soft q would give [0, .4, .6]."""
  p = [0.1, 0.6, 0.3]
  np.testing.assert_allclose(first(round_law(make_rule(rule), constant(p), (2,), 1)), p, atol=1e-6)
  soft = judged_by(make_rule("speculative_sampling"), p, [0, 0, 1], [0.3, 0.2, 0.5])
  np.testing.assert_allclose(soft, [0.0, 0.4, 0.6], atol=0.01)  # the fault, seen by the same ruler


@pytest.mark.parametrize("rule", LOSSLESS)
def test_e5_processed_alike_on_both_sides(rule):
  """V = 4, T = 0.5, top-k 2 on target and draft: the law is the plain sampler's, masked tokens have 0.

  Fails when one side is processed and the other is not.
  """
  settings = dict(temperature=0.5, top_k=2)
  law, draft = table_law(2, 4, **settings), table_law(3, 4, **settings)
  got = round_law(make_rule(rule), law, draft, 1)
  want = joint_law(law, (), 2)
  np.testing.assert_allclose(got, want, atol=1e-6)
  assert (got[want == 0] == 0).all() and (want == 0).sum() == 12


@pytest.mark.parametrize("rule", LOSSLESS)
def test_e7_a_deterministic_draft_is_accepted_with_its_probability(rule):
  """p = [.51, .49], the draft always says 0: accepted with .51, otherwise token 1."""
  p = [0.51, 0.49]
  np.testing.assert_allclose(first(round_law(make_rule(rule), constant(p), (0,), 1)), p, atol=1e-6)


def test_f1_accept_and_residual_noise_are_independent():
  """p = [.1, .5, .4], q = [.6, .1, .3]: exact law p; sharing the noise gives about [.100, .552, .348].

  The enumeration sees sharing: residual draws that reuse the acceptance noise change the law by .02, and
  (in `tests/decode/test_law.py`) drafts that do by .05.
  """
  p, q = [0.1, 0.5, 0.4], [0.6, 0.1, 0.3]
  rule = make_rule("speculative_sampling")
  np.testing.assert_allclose(first(round_law(rule, constant(p), constant(q), 1)), p, atol=1e-6)
  np.testing.assert_allclose(judged_by(rule, p, q, q), p, atol=0.01)
  assert abs(judged_by(rule, p, q, q, shared=True) - p).max() > 0.015


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("q", (None, (0.0, 0.0, 1.0)))
def test_invalid_drafts_leave_the_law_alone(rule, q):
  """Nothing proposed at depth 1 (so nothing at 2): a plain draw. Fails when validity is ignored."""
  p = np.array([0.2, 0.5, 0.3], np.float32)
  u = (np.arange(50) + 0.5) / 50
  proposal = chain((2, 1), 50, q)
  proposal = proposal.replace(valid=proposal.valid.at[:, 1].set(False))
  target = jnp.broadcast_to(p, (50, 3, 3))
  zero = np.zeros(50)
  with fixed_noise(spread({Purpose.TARGET: u, Purpose.ACCEPT: zero, Purpose.RESIDUAL: zero})):
    verdict = compiled(make_rule(rule))(target, proposal, Settings.create(50), jnp.ones(50, jnp.int32))
  assert (verdict.accepted == 0).all()
  np.testing.assert_allclose(np.bincount(verdict.next_token, minlength=3) / 50, p, atol=1e-6)


@pytest.mark.parametrize("dynamic", (False, True))
def test_draw_and_follow_on_a_tree_has_the_targets_law(dynamic):
  """A branching draft: each path is followed where the target's own draws lead. Law of three tokens.

  Fails when a node's choice is read at its own row instead of its parent's, or noise goes by node.
  """
  law = table_law(4)
  tree = TokenTree((-1, 0, 0, 1, 2, 2))
  drafts = (0, 0, 2, 1, 0, 2)  # root; 0 and 2; 0→1; 2→0 and 2→2
  contexts = [tuple(drafts[i] for i in path[1 : tree.depths[n] + 1]) for n, path in enumerate(tree.paths)]
  target = np.stack([law(c) for c in contexts])
  cuts = [
    np.unique(np.concatenate([[0], *[np.cumsum(law(c)) for c in contexts if len(c) == d]])) for d in range(3)
  ]
  cuts = [np.append(c[c < 1 - 1e-12], 1.0) for c in cuts]
  u = np.stack(np.meshgrid(*[(c[1:] + c[:-1]) / 2 for c in cuts], indexing="ij"), -1).reshape(-1, 3)
  mass = np.stack(np.meshgrid(*map(np.diff, cuts), indexing="ij"), -1).reshape(-1, 3).prod(1)
  noise = jnp.asarray(u, jnp.float32)
  values = lambda purpose, position, node: jnp.take_along_axis(noise, position - 5, axis=1)
  tokens = jnp.tile(jnp.array([drafts], jnp.int32), (len(u), 1))
  if dynamic:  # the same topology as an array a row
    tree = DynamicTree.from_parents(jnp.tile(jnp.array([tree.parents], jnp.int32), (len(u), 1)), 2)
  proposal = Proposal(tokens, jnp.ones_like(tokens, bool), None, tree=tree, kind="deterministic")
  with fixed_noise(values):
    verdict = compiled(make_rule("draw_and_follow"))(
      jnp.broadcast_to(jnp.asarray(target, jnp.float32), (len(u), *target.shape)),
      proposal,
      Settings.create(len(u), temperature=1.0),
      jnp.full(len(u), 5, jnp.int32),
    )
  got = np.zeros((3, 3, 3))
  for row in range(len(u)):
    a = int(verdict.accepted[row])
    block = (*(drafts[int(n)] for n in verdict.path[row][1 : a + 1]), int(verdict.next_token[row]))
    got[block] += mass[row] * joint_law(lambda tail, block=block: law(block + tail), (), 3 - len(block))
  np.testing.assert_allclose(got, joint_law(law, (), 3), atol=1e-6)
  assert len(set(np.asarray(verdict.accepted).tolist())) == 3


@pytest.mark.parametrize("drafts", ((), (1,), (2, 1)))
def test_the_bonus_is_plains_draw_at_its_position(drafts):
  """All drafts accepted: the next token is the target's draw with the noise of its absolute position.

  So is the token of a round without drafts. Fails when the bonus is keyed by the round's start.
  """
  rows, length = 64, 9
  p = np.zeros((len(drafts) + 1, 3), np.float32)
  p[np.arange(len(drafts)), drafts] = 1
  p[-1] = [0.3, 0.3, 0.4]
  settings = Settings.create(rows, temperature=1.0, seed=range(rows))
  proposal = chain(drafts, rows)
  verdict = compiled(make_rule("speculative_sampling"))(
    jnp.broadcast_to(p, (rows, *p.shape)), proposal, settings, jnp.full(rows, length)
  )
  at = jnp.full(rows, length + len(drafts))
  want = sampling.draw(
    jnp.broadcast_to(p[-1], (rows, 3)), sampling.uniform(settings.seed, Purpose.TARGET, at)
  )
  assert (verdict.accepted == len(drafts)).all()
  np.testing.assert_array_equal(verdict.next_token, want)


def test_synthetic_is_marked():
  """The one rule that does not keep the law says so; its rates are followed."""
  assert not RULES["synthetic"].lossless
  rule = make_rule("synthetic", rates=(1.0, 0.0))
  tokens = jnp.zeros((5, 4), jnp.int32)
  proposal = Proposal(
    tokens, jnp.ones_like(tokens, bool), None, tree=TokenTree.chain(3), kind="deterministic"
  )
  verdict = rule(tokens, proposal, Settings.create(5), jnp.arange(5))
  assert (verdict.accepted == 1).all()
  for bad in ((), (1.5,), (float("nan"),)):
    with pytest.raises(ValueError, match="rates"):
      make_rule("synthetic", rates=bad)


def test_unknown_rules_and_wrong_kinds_are_refused():
  with pytest.raises(ValueError, match="greedly"):
    make_rule("greedly")
  tree = TokenTree((-1, 0, 0))
  tokens = jnp.zeros((1, 3), jnp.int32)
  proposal = Proposal(tokens, jnp.ones_like(tokens, bool), None, tree=tree, kind="deterministic")
  with pytest.raises(ValueError, match="chains"):
    make_rule("speculative_sampling")(jnp.ones((1, 3, 2)) / 2, proposal, Settings.create(1), jnp.ones(1, int))


def test_e9_the_correction_is_read_at_the_rejected_drafts_parent():
  """Row j of the target says 10 + j; draft [10, 99, 12] → exactly [10, 11]. Fails for row j + 1."""
  tokens = jnp.array([[5, 10, 99, 12]], jnp.int32)
  proposal = Proposal(
    tokens, jnp.ones_like(tokens, bool), None, tree=TokenTree.chain(3), kind="deterministic"
  )
  said = jnp.array([[10, 11, 12, 13]], jnp.int32)
  greedy = compiled(make_rule("greedy"))(said, proposal, Settings.create(1), jnp.array([1]))
  assert (int(greedy.accepted[0]), int(greedy.next_token[0])) == (1, 11)
  probs = jnp.eye(128)[said]
  for name in LOSSLESS:
    verdict = compiled(make_rule(name))(probs, proposal, Settings.create(1, temperature=1.0), jnp.array([1]))
    assert (int(verdict.accepted[0]), int(verdict.next_token[0])) == (1, 11)


def test_process_oracle_against_hand_numbers():
  """The oracle itself: hand-computed values, and every kept set for all orders of four logits."""
  logits = np.log([0.4, 0.3, 0.2, 0.1])
  np.testing.assert_allclose(process(logits), [0.4, 0.3, 0.2, 0.1])
  np.testing.assert_allclose(process(logits, top_k=2), [4 / 7, 3 / 7, 0, 0])
  np.testing.assert_allclose(process(logits, top_p=0.65), [4 / 7, 3 / 7, 0, 0])
  np.testing.assert_allclose(process(logits, min_p=0.5), [4 / 9, 3 / 9, 2 / 9, 0])
  np.testing.assert_allclose(process(logits, temperature=0.5), np.array([16, 9, 4, 1]) / 30)
  for order in itertools.permutations(range(4)):
    p = process(logits[list(order)], top_k=3)
    assert (p == 0).nonzero()[0].tolist() == [order.index(3)]
