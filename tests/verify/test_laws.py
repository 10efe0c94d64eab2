"""Losslessness by enumeration: the exact law of a round, integrated over all of its random numbers."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import sampling
from specjax.base import ALL_KINDS, Proposal
from specjax.sampling import Purpose, Settings
from specjax.testing import TableTarget, fixed_noise, joint_law, oracle, process, round_law
from specjax.tree import TokenTree, TreeBudget
from specjax.verify import RULES, make_rule

CHAIN_RULES = ("speculative_sampling", "block_verification")
TREE_RULES = ("draw_and_follow", "recursive_rejection", "traversal_verification")
LOSSLESS = CHAIN_RULES + TREE_RULES
KINDS = sorted(ALL_KINDS)
VOCAB = 5
# Laws on fewer tokens leave the others without mass, so that one compiled program serves them all.
BUDGET = TreeBudget(6, 3)


def pad(p):
  return np.pad(np.asarray(p, float), (0, VOCAB - len(p)))


@functools.cache
def table_law(seed, vocab=3, **settings):
  """A law that depends on the whole history, processed as asked."""
  table = TableTarget.random(seed, vocab, rows=17, spread=1.5)
  return functools.cache(lambda context: process(table.logits_after((1, *context)), **settings))


def padded(law):
  return functools.cache(lambda context: pad(law(tuple(min(x, 2) for x in context))))


def constant(p):
  return lambda context: np.asarray(p, float)


def first(law):
  """Marginal of the first token of a joint law."""
  return law.tokens.sum(axis=tuple(range(1, law.tokens.ndim)))


def point(context):
  """All mass on one token, which the context decides."""
  return np.eye(VOCAB)[sum(context) % 3]


RANDOM, OTHER = padded(table_law(0)), padded(table_law(1))
LAWS = {
  "random": (RANDOM, OTHER),
  "each misses some": (constant(pad([0.5, 0.3, 0.2])), constant([0.0, 0.2, 0.3, 0.5, 0.0])),
  "disjoint": (constant(pad([0.4, 0.6])), constant([0, 0, 0.7, 0.3, 0])),
  "equal": (RANDOM, RANDOM),
  "ties": (constant(pad([0.25, 0.25, 0.25, 0.25])), constant(pad([0.5, 0.25, 0.25]))),
  "certain target": (point, OTHER),
  "certain draft": (RANDOM, point),
  "both certain": (point, lambda context: point((1, *context[1:]))),
  "top-k target": (padded(table_law(2, temperature=0.5, top_k=2)), padded(table_law(3))),
  "top-p draft": (padded(table_law(2)), padded(table_law(3, temperature=0.7, top_p=0.8))),
  "top-k both": (
    padded(table_law(2, temperature=0.5, top_k=2)),
    padded(table_law(3, temperature=0.5, top_k=2)),
  ),
  # A second sibling's share of the draft has no digits in float32.
  "hardly any draft left": (constant([0, 1e-20, 1, 0, 0]), constant([1, 1e-31, 0, 0, 0])),
  "near": (RANDOM, lambda context: 0.99 * RANDOM(context) + 0.01 * OTHER(context)),
}
# What a deterministic drafter says at nodes 1, 2, …, in place of a law.
SAYS = (0, 2, 1, 1, 0)
TWICE = (1, 1, 0, 0, 2)
TREES = {
  "two levels": ((-1, 0, 0, 1, 1), None),
  "deep": ((-1, 0, 1, 0, 2), None),
  "depth first": ((-1, 0, 1, 0, 3), None),
  "ragged": ((-1, 0, 0, 1, 1), (1, 1, 1, 1, 0)),
  "cut": ((-1, 0, 0, 1, 1), (1, 1, 0, 1, 1)),
}
# Laws that differ where no q is read; a rule that does not look at q needs one more.
WITHOUT_Q = ("random", "ties", "certain target", "top-k target")
LOOK_AWAY = ("draw_and_follow",)
ON_CHAINS = [
  (rule, kind, law)
  for rule, kind, law in itertools.product(CHAIN_RULES, KINDS, LAWS)
  if kind != "deterministic" or law in WITHOUT_Q
]
ON_TREES = [
  (rule, kind, "two levels", law)
  for rule, kind, law in itertools.product(TREE_RULES, KINDS, LAWS)
  if law in WITHOUT_Q or (kind != "deterministic" and rule not in LOOK_AWAY)
] + [
  (rule, kind, tree, "random") for rule, kind, tree in itertools.product(TREE_RULES, KINDS, list(TREES)[1:])
]


def check(rule, kind, law, draft, tree, **options):
  draft = (SAYS if draft is not TWICE else TWICE)[: len(tree) - 1] if kind == "deterministic" else draft
  got = round_law(make_rule(rule), law, draft, TokenTree(tree), kind=kind, **options)
  want = joint_law(law, (), got.tokens.ndim)
  np.testing.assert_allclose(got.tokens, want, atol=1e-6)
  assert (got.tokens[want == 0] == 0).all()
  np.testing.assert_allclose(got.accepted.sum(), 1, atol=1e-9)
  return got


@pytest.mark.parametrize(("rule", "kind", "tree", "law"), ON_TREES)
def test_a_round_over_a_tree_has_the_targets_joint_law(rule, kind, tree, law):
  """Topologies as arrays. Fails for a wrong ratio, residual, order of siblings or row, and when two
  draws share noise; without replacement also when Q is not renormalised or keeps the token.
  """
  parents, valid = TREES[tree]
  check(rule, kind, *LAWS[law], parents, valid=valid, budget=BUDGET)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", TREE_RULES)
def test_a_round_over_a_static_tree_has_the_targets_joint_law(rule, kind):
  """The same with a topology of the program; siblings of a deterministic draft also repeat a token.

  Fails when a token that was turned down can be accepted, or drawn, later.
  """
  tree = (-1, 0, 0, 0, 1)
  check(rule, kind, table_law(4), table_law(5), tree)
  if kind == "deterministic":
    check(rule, kind, table_law(4), TWICE, tree)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", TREE_RULES)
def test_five_tokens_three_siblings(rule, kind):
  """All five tokens in play, three draws of them. Fails when a third sibling sees the first's residual."""
  law, draft = table_law(6, 5), table_law(7, 5)
  tree = (-1, 0, 0, 0)
  check(rule, kind, law, draft, tree, budget=BUDGET)
  if kind == "sampled":  # an elder sibling that was not proposed
    check(rule, kind, law, draft, tree, valid=(1, 0, 1, 1), budget=BUDGET)


@pytest.mark.parametrize(("rule", "kind", "law"), ON_CHAINS)
def test_a_round_over_a_chain_has_the_targets_joint_law(rule, kind, law):
  """Three drafts. Fails for a wrong ratio, residual, correction row or bonus row."""
  check(rule, kind, *LAWS[law], (-1, 0, 1, 2))


@pytest.mark.parametrize("valid", ((1, 1, 0, 0), (1, 1, 1, 0), (1, 0, 0, 0), (1, 1, 0, 1)))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_a_chain_may_end_early(rule, kind, valid):
  """Fails when γ is the width of the program, or a draft behind an invalid one is judged."""
  check(rule, kind, RANDOM, OTHER, (-1, 0, 1, 2), valid=valid)


@pytest.mark.parametrize(
  ("rule", "kind", "tree"),
  [
    *((rule, "sampled", (-1, 0, 1, 2)) for rule in CHAIN_RULES),
    *((rule, kind, (-1, 0, 0, 0, 1)) for rule in TREE_RULES for kind in KINDS[1:]),
  ],
)
def test_drafting_may_stop_by_what_is_known_before_a_draw(rule, kind, tree):
  """Nodes are proposed where the draft is confident behind the drafts so far, so some texts go on and some
  end: the law is kept. Fails for a rule whose verdict on a draft depends on whether another was proposed."""
  stops = lambda context: OTHER(context).max() > 0.45
  contexts = [(), *((x,) for x in range(4)), *((x, y) for x in range(4) for y in range(4))]
  assert {stops(context) for context in contexts} == {True, False}
  check(rule, kind, RANDOM, OTHER, tree, valid=stops)


@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_dropping_a_draft_for_what_it_is_biases_the_law(rule, monkeypatch):
  """Why confidence looks at the distribution: a first draft that is not proposed because it is itself the
  least likely one is missed in the law. Fails when the test above could not have failed."""
  unlikely = min((q, x) for x, q in enumerate(OTHER(())) if q > 0)[1]
  all_drafts = oracle.drafts_of

  def without_it(*arguments):
    for draft in all_drafts(*arguments):
      yield draft._replace(valid=(True,) + (False,) * 3) if draft.tokens[1] == unlikely else draft

  monkeypatch.setattr(oracle, "drafts_of", lambda *arguments: list(without_it(*arguments)))
  got = round_law(make_rule(rule), RANDOM, OTHER, TokenTree((-1, 0, 1, 2)), kind="sampled")
  assert np.abs(first(got) - RANDOM(())).max() > 1e-3  # the laws above agree to 1e-6


def law_of(rule, law, draft, kind="sampled"):
  """`check` over three drafts in a row, with the programs the tables compiled."""
  options = dict(budget=BUDGET) if rule in TREE_RULES else {}
  return check(rule, kind, law, draft, (-1, 0, 1, 2), **options)


@pytest.mark.parametrize("rule", LOSSLESS)
def test_two_tokens(rule):
  """V = 2, p = q at one place and not at the other. Fails for a wrong ratio or residual.

  (What a rule makes of S = 0 at mass 1 does not matter: the draft behind it is always accepted.)
  """
  law = lambda context: pad([2 / 3, 1 / 3] if sum(context) % 2 else [0.5, 0.5])
  law_of(rule, law, constant(pad([0.5, 0.5])))


def test_every_lossless_rule_with_probabilities_is_enumerated():
  """A new rule must join the tables above, with every kind it takes."""
  rules = {name: rule for name, rule in RULES.items() if rule.lossless and rule.needs == "probs"}
  assert set(rules) == set(LOSSLESS)
  assert {name for name, rule in rules.items() if not rule.chains_only} == set(TREE_RULES)
  assert all(sorted(rule.kinds) == KINDS for rule in rules.values())
  assert {(rule, kind) for rule, kind, *_ in ON_CHAINS + ON_TREES} == set(itertools.product(LOSSLESS, KINDS))


@pytest.mark.parametrize("rule", LOSSLESS)
def test_e1_q_is_the_truncated_distribution(rule):
  """A drafter that keeps its top 2 must report them as q; the raw q gives [.571, .429, 0, 0].

  Fails when the rule renormalises q, or reads q at another node.
  """
  p, truncated = pad([0.4, 0.3, 0.2, 0.1]), pad([4 / 7, 3 / 7])
  law_of(rule, constant(p), constant(truncated))
  # The test sees the fault: drawn from the truncated q, judged by the raw one. Tokens 0 and 1 have
  # p = q and are always accepted, so their law is q's.
  np.testing.assert_allclose(judged_by(p, truncated, p), pad([0.571, 0.429]), atol=1e-3)


def spread(noise):
  """``{purpose: [cells]} → values`` for `fixed_noise`: the same number at every position and node."""

  def values(purpose, position, node):
    column = jnp.asarray(noise[purpose]).reshape(-1, *[1] * (position.ndim - 1))
    return jnp.broadcast_to(column, position.shape)

  return values


@jax.jit
def judge_one(target, tokens, q, noise):
  proposal = Proposal(tokens, jnp.ones_like(tokens, bool), q, tree=TokenTree.chain(1), kind="sampled")
  cells = len(tokens)
  with fixed_noise(spread(noise)):
    rule = make_rule("speculative_sampling")
    return rule(target, proposal, Settings.create(cells), jnp.ones(cells, jnp.int32))


def judged_by(p, drawn_from, reported, *, shared=False):
  """Law of a token by speculative sampling when a draft comes from one q and another is reported.

  Over a grid of noise; ``shared`` gives acceptance and residual the same number.
  """
  grid = (np.arange(60, dtype=np.float32) + 0.5) / 60
  u, w = (x.ravel() for x in np.meshgrid(grid, grid))
  u = w if shared else u
  row = lambda values: np.broadcast_to(np.asarray(values, np.float32), (u.size, 1, len(p)))
  law = np.zeros(len(p))
  for x, share in enumerate(drawn_from):
    tokens = np.broadcast_to(np.array([0, x], np.int32), (u.size, 2))
    noise = {Purpose.ACCEPT: u, Purpose.RESIDUAL: w, Purpose.TARGET: w}
    verdict = judge_one(np.repeat(row(p), 2, axis=1), tokens, row(reported), noise)
    emitted = np.where(verdict.accepted == 1, x, verdict.next_token)
    law += share * np.bincount(emitted, minlength=len(p)) / u.size
  return law


@pytest.mark.parametrize("rule", LOSSLESS)
def test_e2_replacements_come_from_the_residual(rule):
  """p = [.5, .3, .2], q = [.2, .3, .5]: a replacement is always token 0. Fails for any other normaliser."""
  p, q = pad([0.5, 0.3, 0.2]), pad([0.2, 0.3, 0.5])
  # Draft 2 is accepted with .4; rejected ones must all become 0.
  np.testing.assert_allclose(judged_by(p, pad([0, 0, 1]), q), pad([0.6, 0.0, 0.4]), atol=0.01)
  law_of(rule, constant(p), constant(q))


@pytest.mark.parametrize("rule", LOSSLESS)
def test_e3_an_argmax_draft_has_a_point_mass_q(rule):
  """p = [.1, .6, .3], draft = argmax of [.3, .2, .5]. Soft q would give [0, .4, .6]."""
  p = pad([0.1, 0.6, 0.3])
  law_of(rule, constant(p), None, "deterministic")
  soft = judged_by(p, pad([0, 0, 1]), pad([0.3, 0.2, 0.5]))
  np.testing.assert_allclose(soft, pad([0.0, 0.4, 0.6]), atol=0.01)  # the fault, seen by the same ruler


@pytest.mark.parametrize("rule", LOSSLESS)
def test_e5_processed_alike_on_both_sides(rule):
  """V = 4, T = 0.5, top-k 2 on target and draft: the law is the plain sampler's, masked tokens have 0.

  Fails when one side is processed and the other is not.
  """
  settings = dict(temperature=0.5, top_k=2)
  law, draft = table_law(2, 4, **settings), table_law(3, 4, **settings)
  wide = lambda law: lambda context: pad(law(tuple(min(x, 3) for x in context)))
  got = law_of(rule, wide(law), wide(draft)).tokens[:4, :4].sum(axis=(2, 3))
  want = joint_law(law, (), 2)
  np.testing.assert_allclose(got, want, atol=1e-6)
  assert (got[want == 0] == 0).all() and (want == 0).sum() == 12


@pytest.mark.parametrize("rule", LOSSLESS)
def test_e7_a_deterministic_draft_is_accepted_with_its_probability(rule):
  """p = [.51, .49], the drafts say 0, 2, 1: accepted with .51 and no further, otherwise token 1."""
  got = law_of(rule, constant(pad([0.51, 0.49])), None, "deterministic")
  np.testing.assert_allclose(got.accepted, [0.49, 0.51, 0, 0], atol=1e-6)


def test_f1_accept_and_residual_noise_are_independent():
  """p = [.1, .5, .4], q = [.6, .1, .3]: exact law p; sharing the noise gives about [.100, .552, .348].

  The enumeration sees sharing: residual draws that reuse the acceptance noise change the law by .02, and
  (in `tests/decode/test_law.py`) drafts that do by .05.
  """
  p, q = pad([0.1, 0.5, 0.4]), pad([0.6, 0.1, 0.3])
  for rule in LOSSLESS:
    law_of(rule, constant(p), constant(q))
  np.testing.assert_allclose(judged_by(p, q, q), p, atol=0.01)
  assert abs(judged_by(p, q, q, shared=True) - p).max() > 0.015


@functools.cache
def chain_judge(rule):
  """Compiled: three deterministic drafts in 64 rows, noise by the row's number as its seed."""

  def judge(target, tokens, valid, length):
    wide = lambda x: jnp.broadcast_to(x, (64, *x.shape))
    tokens = wide(tokens)
    proposal = Proposal(tokens, wide(valid), None, tree=TokenTree.chain(3), kind="deterministic")
    settings = Settings.create(64, temperature=1.0, seed=range(64))
    return make_rule(rule)(wide(target), proposal, settings, jnp.full(64, length))

  return jax.jit(judge)


@pytest.mark.parametrize("drafts", (0, 1, 3))
@pytest.mark.parametrize("rule", LOSSLESS)
def test_the_bonus_is_plains_draw_at_its_position(rule, drafts):
  """All drafts accepted: the next token is the target's draw with the noise of its absolute position.

  So is the token of a round without drafts. Fails when the bonus is keyed by the round's start, or a
  draft that is not valid counts as rejected.
  """
  said, length = (2, 1, 2), 9
  p = np.zeros((4, 3), np.float32)
  p[np.arange(3), said] = 1
  p[drafts:] = [0.3, 0.3, 0.4]
  verdict = chain_judge(rule)(p, np.array((0, *said)), np.arange(4) <= drafts, length)
  at = jnp.full(64, length + drafts)
  u = sampling.uniform(jnp.arange(64, dtype=jnp.uint32), Purpose.TARGET, at)
  assert (verdict.accepted == drafts).all()
  np.testing.assert_array_equal(verdict.next_token, sampling.draw(jnp.tile(p[-1], (64, 1)), u))


@pytest.mark.parametrize("rule", LOSSLESS)
def test_e9_the_correction_is_read_at_the_rejected_drafts_parent(rule):
  """Row j of the target says j; drafts [0, 2, 2] → exactly [0, 1]. Fails for row j + 1."""
  tokens = np.array([2, 0, 2, 2])
  verdict = chain_judge(rule)(np.eye(4, 3, dtype=np.float32), tokens, np.ones(4, bool), 1)
  assert (verdict.accepted == 1).all() and (verdict.next_token == 1).all()
  proposal = Proposal(
    tokens[None], np.ones((1, 4), bool), None, tree=TokenTree.chain(3), kind="deterministic"
  )
  greedy = make_rule("greedy")(jnp.arange(4)[None], proposal, Settings.create(1), jnp.array([1]))
  assert (int(greedy.accepted[0]), int(greedy.next_token[0])) == (1, 1)


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


def test_unknown_rules_wrong_kinds_and_trees_are_refused():
  """Fails when a rule judges what its proof does not cover."""
  with pytest.raises(ValueError, match="greedly"):
    make_rule("greedly")
  tokens = jnp.zeros((1, 3), jnp.int32)
  proposal = lambda **how: Proposal(tokens, jnp.ones_like(tokens, bool), jnp.ones((1, 3, 2)) / 2, **how)
  chain, tree = TokenTree.chain(2), TokenTree((-1, 0, 0))
  judge = lambda rule, proposal: rule(jnp.ones((1, 3, 2)) / 2, proposal, Settings.create(1), jnp.ones(1, int))
  for name, kind in RULES.items():
    if kind.needs == "probs" and name != "draw_and_follow":  # which takes anything
      with pytest.raises(ValueError, match=f"{name}.*proposals.*guessed"):
        judge(make_rule(name), proposal(tree=chain, kind="guessed"))
    if kind.chains_only:
      with pytest.raises(ValueError, match=f"{name} takes chains"):
        judge(make_rule(name), proposal(tree=tree, kind="sampled"))


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
