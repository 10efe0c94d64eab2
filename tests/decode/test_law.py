"""The law of whole texts through the loop: χ² over 1.5 million seeds, several rounds.

Enumeration (`tests/verify`) covers one round; noise that is used twice shows only when rounds follow
each other. Seeds are fixed, so the outcome is, too. The error rate of the family is 0.3 %: each of its
FAMILY p-values must exceed 0.003 / FAMILY, which a correct program fails once in 300 times it is written.
"""

import dataclasses
import functools
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax import decode, sampling
from specjax.control import Adaptive, Beliefs, Fixed, PlusTwoMinusOne
from specjax.drafters import BlockWeights, EagleWeights, make_drafter
from specjax.models import BlockConfig, Eagle1, Eagle1Config
from specjax.sampling import Settings
from specjax.testing import (
  SampledDrafter,
  TableTarget,
  chi_square,
  joint_law,
  process,
  tiny_config,
  tiny_model,
)
from specjax.tree import TokenTree
from specjax.verify import make_rule
from tests import heads

VOCAB, STEPS = 3, 6
PROMPT = (0, 2)
ROWS = 50_000
TARGET = TableTarget.random(10, VOCAB, by="token", spread=1.2)
DRAFT = TableTarget.random(11, VOCAB, by="token", spread=1.2)


def two_model(window=2, **options):
  sizes = dict(vocab_size=VOCAB, num_real_tokens=VOCAB, max_length=99)
  return make_drafter("two_model", window=window, **sizes, **options)


BLOCK = BlockConfig(
  tiny_config(vocab_size=VOCAB, num_layers=1, d_model=8, d_ff=8, num_heads=1, num_kv_heads=1, head_dim=2),
  tap_layers=(0,),
  block_size=3,
  markov_rank=2,
)


def block(window=2, **options):
  sizes = dict(vocab_size=VOCAB, num_real_tokens=VOCAB, max_length=99, taps=BLOCK.tap_layers, block_size=3)
  return make_drafter("block", window=window, **sizes, **options)


@functools.cache
def tapped():
  """The target with hidden states, and a block head on them."""
  table = np.random.default_rng(5).standard_normal((VOCAB, 8)).astype(np.float32)
  return heads.Tapped(TARGET, jnp.asarray(table)), BlockWeights(heads.random_block(BLOCK), jnp.asarray(table))


TREES = {
  "tree-top_k": dict(branching=(2,), policy="top_k"),
  "tree-sample": dict(branching=(2, 2), policy="sample"),
  "tree-distinct": dict(branching=(2, 2), policy="sample_without_replacement"),
}


def lookup(**options):
  return make_drafter("prompt_lookup", window=2, min_ngram=1, **options)


def tree(name):
  """A case's drafter and its weights."""
  return functools.partial(two_model, **TREES[name]), DRAFT


TABLE = (lambda: SampledDrafter(2), DRAFT.table)
LOOKUP_TREE = (functools.partial(lookup, matches=3), None)
# Drafter, its weights, rule.


@functools.cache
def eagle_weights():
  """A head of EAGLE-1 over a table's taps, which are the tokens: one number wide, as its embeddings are."""
  sizes = dict(vocab_size=VOCAB, d_model=1, num_heads=2, num_kv_heads=1, head_dim=2, d_ff=8)
  model = tiny_model(4, num_layers=1, **sizes)
  layer = model.config.replace(num_layers=1)
  head = Eagle1(Eagle1Config(layer, 1), model, dtype=jnp.float32, rngs=nnx.Rngs(1))
  return EagleWeights(head, jnp.array([[1.0], [-1.5], [0.3]]))


def eagle(**options):
  sizes = dict(vocab_size=VOCAB, num_real_tokens=VOCAB, max_length=99, taps=(1,))
  return make_drafter("eagle", window=2, **sizes, **options)


CASES = {
  "plain": (lambda: make_drafter("none"), None, "draw_and_follow"),
  "table-speculative": (*TABLE, "speculative_sampling"),
  "table-follow": (*TABLE, "draw_and_follow"),
  "table-block": (*TABLE, "block_verification"),
  "lookup-speculative": (lookup, None, "speculative_sampling"),
  "two_model-speculative": (two_model, DRAFT, "speculative_sampling"),
  "vocabulary-speculative": (two_model, heads.Reduced(DRAFT, jnp.array([0, 2])), "speculative_sampling"),
  "dynamic-recursive": (functools.partial(two_model, nodes=5, beam=2), DRAFT, "recursive_rejection"),
  "tree-sample-recursive": (*tree("tree-sample"), "recursive_rejection"),
  "tree-distinct-recursive": (*tree("tree-distinct"), "recursive_rejection"),
  "tree-top_k-recursive": (*tree("tree-top_k"), "recursive_rejection"),
  "tree-sample-traversal": (*tree("tree-sample"), "traversal_verification"),
  "tree-distinct-traversal": (*tree("tree-distinct"), "traversal_verification"),
  "lookup-tree-traversal": (*LOOKUP_TREE, "traversal_verification"),
  "block-block": (block, tapped, "block_verification"),
  "block-tree-traversal": (
    functools.partial(block, **TREES["tree-distinct"]),
    tapped,
    "traversal_verification",
  ),
  "eagle-speculative": (lambda: eagle(policy="sample"), eagle_weights, "speculative_sampling"),
  "eagle-ablated-recursive": (
    lambda: eagle(nodes=5, beam=2, expand="confidence", rerank=False),
    eagle_weights,
    "recursive_rejection",
  ),
}
FOLLOWED = {
  "table-follow": CASES["table-follow"],
  "lookup-tree": (*LOOKUP_TREE, "draw_and_follow"),
  **{name: (*tree(name), "draw_and_follow") for name in TREES},
}
# The round's width and how deep each row may draft follow from what earlier rounds accepted: drafter,
# narrower ones, their weights, rule, controller.
CONTROLLED = {
  "table-adaptive": (
    lambda: (SampledDrafter(2), SampledDrafter(1)),
    DRAFT.table,
    "speculative_sampling",
    Adaptive(least_gain=0.6),
  ),
  "two_model-plus2": (
    lambda: (two_model(window=3), two_model(), two_model(window=1)),
    DRAFT,
    "block_verification",
    PlusTwoMinusOne(start=2),
  ),
  "tree-adaptive": (
    lambda: (two_model(), two_model(window=1), two_model(**TREES["tree-distinct"])),
    DRAFT,
    "traversal_verification",
    Adaptive(least_gain=0.6),
  ),
  "confidence": (lambda: (two_model(window=3, confidence=0.43),), DRAFT, "block_verification", Fixed()),
}
FAMILY = len(CASES) + len(CONTROLLED) + 2  # with truncation, and the rows that are sampled in a mixed batch
ALPHA = 0.003 / FAMILY
BATCHES = {"plain": 4, "table-speculative": 4}  # of ROWS draws; others 2


def config_of(drafter, rule, **changes):
  fields = dict(num_real_tokens=VOCAB, length_limit=len(PROMPT) + STEPS, prefill_widths=(2,))
  return decode.DecodeConfig(drafter=drafter, rule=make_rule(rule), **{**fields, **changes})


def program(case):
  """Config and weights of a case."""
  if case not in CONTROLLED:
    make, draft, rule = (CASES | FOLLOWED)[case]
    if draft is tapped:
      return config_of(make(), rule), decode.Weights(*tapped())
    draft = draft() if draft is eagle_weights else draft
    return config_of(make(), rule), decode.Weights(TARGET, draft)
  make, draft, rule, control = CONTROLLED[case]
  drafter, *narrower = make()
  config = config_of(drafter, rule, alternatives=tuple(narrower), control=control)
  # Drafting looks cheap, so that it goes on; a row that was rejected soon expects less than `least_gain`.
  verify = [1.0, *(1 + 0.01 * tree.num_nodes for tree in config.trees)]
  beliefs = Beliefs.create(
    config.trees, verify=verify, draft=0 * np.array(verify), acceptance=0.5, strength=2.0
  )
  return config, decode.Weights(TARGET, draft, beliefs=beliefs)


@functools.cache
def sample(case, batches=0, *, mixed=False, **settings):
  """``(tokens [rows, STEPS], accepted drafts, proposed drafts)``; mixed: every other row is greedy."""
  config, weights = program(case)
  temperature = [1.0, 0.0] * (ROWS // 2) if mixed else 1.0
  settings = Settings.create(ROWS, **{"temperature": temperature, **settings})
  start = decode.prefill(weights, config, [PROMPT] * ROWS, settings=settings)
  tokens, accepted, proposed = [], 0, 0
  for batch in range(batches or BATCHES.get(case, 2)):
    seed = jnp.arange(ROWS, dtype=jnp.uint32) + batch * ROWS
    state = jax.tree.map(jnp.copy, start.replace(settings=settings.replace(seed=seed)))
    state = decode.generate(weights, state, config, decode.ALL_ROUNDS)
    tokens.append(np.asarray(state.tokens[:, len(PROMPT) : len(PROMPT) + STEPS]))
    accepted += int(np.asarray(state.log.accepted, np.int64).sum())
    proposed += int(np.asarray(state.log.proposed, np.int64).sum())
  return np.concatenate(tokens), accepted, proposed


def proposed_depths(case):
  """How deep each round of each row drafted, over 50000 texts."""
  config, weights = program(case)
  settings = Settings.create(ROWS, temperature=1.0, seed=np.arange(ROWS))
  state = decode.prefill(weights, config, [PROMPT] * ROWS, settings=settings)
  state = decode.generate(weights, state, config, decode.ALL_ROUNDS)
  written = np.arange(config.slots) < np.asarray(state.log.rounds)[:, None]
  return np.asarray(state.log.depth)[written]


def counts(tokens):
  shape = (VOCAB,) * tokens.shape[1]
  return np.bincount(np.ravel_multi_index(tuple(tokens.T), shape), minlength=VOCAB ** tokens.shape[1])


# Their laws are enumerated in `tests/verify`, and the loop is the others': with the longer suite.
LONGER = (
  "eagle-speculative",
  "eagle-ablated-recursive",
  "tree-sample-traversal",
  "table-follow",
  "table-block",
  "two_model-speculative",
  "vocabulary-speculative",
  "dynamic-recursive",
  "lookup-speculative",
  "tree-sample-recursive",
  "tree-top_k-recursive",
  "tree-distinct-traversal",
  "tree-distinct-recursive",
  "lookup-tree-traversal",
  "block-block",
  "block-tree-traversal",
  "two_model-plus2",
  "tree-adaptive",
  "confidence",
)


@pytest.mark.parametrize(
  "case",
  [pytest.param(case, marks=pytest.mark.slow) if case in LONGER else case for case in (*CASES, *CONTROLLED)],
)
def test_f1_joint_law_of_six_tokens(case):
  """729 texts against their exact probabilities, 100000 draws or more.

  Fails when draft and acceptance share noise, acceptance and residual do, or for a wrong residual.
  (Acceptance noise keyed by position alone would pass: a chain judges no position twice. That no
  number is used twice is a test of its own, below.)
  """
  tokens, accepted, proposed = sample(case)
  law = joint_law(lambda text: process(TARGET.logits_after(text)), PROMPT, STEPS)
  assert chi_square(counts(tokens), law) > ALPHA
  if case != "plain":
    assert 0.05 * proposed < accepted < 0.9 * proposed  # both ways through the rule were taken
  if case in CONTROLLED:
    depths = np.bincount(proposed_depths(case))
    assert (depths[depths > 0] > 1000).sum() > 2, depths  # rows drafted to several depths, nothing among them


def test_e5_law_with_temperature_and_truncation():
  """T = 0.7, top-k 2, top-p 0.9 on target and draft. Impossible texts never appear."""
  settings = dict(temperature=0.7, top_k=2, top_p=0.9)
  tokens, _, _ = sample("table-speculative", 1, **settings)
  law = joint_law(lambda text: process(TARGET.logits_after(text), **settings), PROMPT, STEPS)
  assert (law == 0).any()
  assert chi_square(counts(tokens), law) > ALPHA


@pytest.mark.slow
def test_greedy_rows_among_sampled_ones():
  """A batch in which every other row is greedy: sampled ones keep their law, greedy ones say plain's text.

  Fails when a row's settings or its neighbour's walk through the tree reach another row.
  """
  tokens, _, _ = sample("tree-distinct-traversal", mixed=True)
  law = joint_law(lambda text: process(TARGET.logits_after(text)), PROMPT, STEPS)
  assert chi_square(counts(tokens[::2]), law) > ALPHA
  text = list(PROMPT)
  for _ in range(STEPS):
    text.append(int(np.argmax(TARGET.logits_after(tuple(text)))))
  assert (tokens[1::2] == text[len(PROMPT) :]).all()


def test_the_ruler_sees_small_errors():
  """χ² on the same draws with one transition off by .01 fails: the tests above could have failed."""
  tokens, _, _ = sample("table-speculative")

  def off(text):
    p = process(TARGET.logits_after(text))
    return p + np.array([0.01, -0.01, 0]) if text[-1] == 1 else p

  assert chi_square(counts(tokens), joint_law(off, PROMPT, STEPS)) < 1e-6


@pytest.mark.parametrize(
  "case", ["table-follow", *(pytest.param(case, marks=pytest.mark.slow) for case in list(FOLLOWED)[1:])]
)
def test_draw_and_follow_equals_plain_text_for_text(case):
  """The same seeds give the same texts whatever was drafted, chains and trees of every kind.

  So the law of a tree is plain's, which χ² holds to the target's. Fails when the draw is keyed by round,
  or a draft is followed that its parent did not choose.
  """
  tokens, accepted, proposed = sample(case, 0 if case == "table-follow" else 1)
  np.testing.assert_array_equal(tokens, sample("plain")[0][: len(tokens)])
  assert 0.05 * proposed < accepted < 0.9 * proposed


def test_f2_noise_is_not_frozen():
  """Flat logits, V = 1000, 50 tokens: more than 40 distinct ids; the seed decides, and alone.

  Fails when the key is a constant of the compiled step.
  """
  flat = TableTarget(jnp.zeros((1, 1000)), by="position")
  for name in ("none", "prompt_lookup"):
    drafter = make_drafter(name)
    config = decode.DecodeConfig(
      drafter, make_rule("speculative_sampling"), num_real_tokens=1000, length_limit=60, prefill_widths=(2,)
    )
    settings = Settings.create(4, temperature=1.0, seed=[1, 1, 2, 3])
    state = decode.prefill(decode.Weights(flat), config, [[1, 2]] * 4, settings=settings, max_new_tokens=50)
    rows = decode.results(decode.generate(decode.Weights(flat), state, config, decode.ALL_ROUNDS))
    texts = [row.tokens for row in rows]
    assert all(len(set(text)) > 40 for text in texts)
    assert texts[0] == texts[1] and texts[1] != texts[2] != texts[3]


@pytest.mark.parametrize(
  ("policy", "rule"),
  (
    ("sample", "speculative_sampling"),
    ("sample", "recursive_rejection"),
    ("sample_without_replacement", "traversal_verification"),
    ("sample", "draw_and_follow"),
  ),
)
def test_f7_no_random_number_is_used_twice(policy, rule):
  """Every (purpose, position, node) asked for in 20 rounds is asked for once; trees are uneven.

  (Where the target draws at every node, nodes of one depth share its number: at most one of them is on the
  path.) Fails when draft or acceptance noise is keyed by position alone: after a rejection it comes again.
  """
  drafter = two_model(policy=policy)
  if not make_rule(rule).chains_only:
    drafter = dataclasses.replace(drafter, tree=TokenTree((-1, 0, 0, 0, 1, 2, 2)))
  config = config_of(drafter, rule, length_limit=70)
  seen = []
  real = sampling.uniform

  def recorded(seed, purpose, position, node=0):
    full = jnp.asarray(position), jnp.broadcast_to(jnp.asarray(node), jnp.shape(position))

    def note(at, nodes):
      pairs = zip(np.ravel(at).tolist(), np.ravel(nodes).tolist())
      seen.extend((int(purpose), *pair) for pair in pairs)

    jax.debug.callback(note, *full)
    return real(seed, purpose, position, node)

  weights = decode.Weights(TARGET, DRAFT)
  settings = Settings.create(1, temperature=1.0, seed=5)
  state = decode.prefill(weights, config, [PROMPT], settings=settings, max_new_tokens=60)
  with unittest.mock.patch.object(sampling, "uniform", recorded):  # this config is traced here only
    state = decode.generate(weights, state, config, 20)
  jax.effects_barrier()
  (row,) = decode.results(state)
  assert row.rounds == 20 and 0 < sum(row.accepted) < sum(row.proposed)
  if rule != "draw_and_follow":
    assert {purpose for purpose, _, _ in seen} == {int(purpose) for purpose in sampling.Purpose}
  else:
    seen = [draw for draw in seen if draw[0] == int(sampling.Purpose.DRAFT)]
  assert len(seen) == len(set(seen)) > 100


def test_f6_seeds_matter_only_with_temperature():
  """T = 0: one text for all seeds. T = 1: many."""
  assert len(np.unique(sample("plain")[0], axis=0)) > 500
  config = decode.DecodeConfig(
    SampledDrafter(2),
    make_rule("speculative_sampling"),
    num_real_tokens=VOCAB,
    length_limit=8,
    prefill_widths=(2,),
  )
  weights = decode.Weights(TARGET, DRAFT.table)
  state = decode.prefill(weights, config, [PROMPT] * 10, settings=Settings.create(10, seed=range(10)))
  rows = decode.results(decode.generate(weights, state, config, decode.ALL_ROUNDS))
  assert len({tuple(row.tokens) for row in rows}) == 1


@pytest.mark.parametrize("case", ("table-speculative", "tree-distinct-recursive"))
def test_overlap_is_the_expected_acceptance(case):
  """The logged mean of Σ min(R, Q) is the rate at which tests pass, within 4 standard errors.

  Fails when positions that were never judged are counted, or q is read at another node.
  """
  make, draft, rule = CASES[case]
  config = config_of(make(), rule, length_limit=100)
  rows = 300
  settings = Settings.create(rows, temperature=1.0, seed=range(rows))
  weights = decode.Weights(TARGET, draft)
  state = decode.prefill(weights, config, [PROMPT] * rows, settings=settings, max_new_tokens=90)
  state = decode.generate(weights, state, config, decode.ALL_ROUNDS)
  judged = int(state.log.judged.sum())
  expected = float(state.log.overlap.sum()) / judged
  accepted = int(np.asarray(state.log.accepted, np.int64).sum())
  assert abs(accepted / judged - expected) < 4 * np.sqrt(expected * (1 - expected) / judged)
