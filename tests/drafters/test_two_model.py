"""Trees grown by a draft model: every child comes from its own path, and q says how."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters import TwoModel
from specjax.sampling import Settings
from specjax.testing import TableTarget, chi_square, draft_context, process
from specjax.tree import TokenTree
from tests import heads

VOCAB = 5
# By history: the logits behind a node depend on every row it sees in the cache, and where.
DRAFT = TableTarget.random(3, VOCAB, by="history")
PROMPTS = ([1, 2, 3, 4], [2], [0, 4, 1])
TREES = {
  "chain": TokenTree.chain(4),
  "cartesian": TokenTree.cartesian((3, 2, 1, 1)),
  "widths": TokenTree.of_widths((3, 4, 2)),
  "narrowing": TokenTree.of_widths((3, 1, 1, 1)),
  "one deep branch": TokenTree((-1, 0, 0, 2, 3)),
  "numbered depth first": TokenTree((-1, 0, 1, 2, 1, 0, 5, 6, 5)),
}


def propose(drafter, prompts, settings, weights=DRAFT):
  """One proposal behind prompts that the draft has seen."""
  context = draft_context(prompts, 16, settings=settings)

  @jax.jit
  def run(weights, context):
    state = drafter.init(weights, len(prompts), 64)
    return drafter.propose(weights, state, context, None)[0]

  return jax.device_get(run(weights, context))


def make(tree, policy, **options):
  return TwoModel(
    tree, policy=policy, **{"vocab_size": VOCAB, "num_real_tokens": VOCAB, "max_length": 99, **options}
  )


def texts(proposal, tree, prompts):
  """``[row][node]``: the prompt and the path down to the node."""
  return [
    [(*prompt, *tokens[path[1 : depth + 1]].tolist()) for path, depth in zip(tree.paths, tree.depths)]
    for prompt, tokens in zip(prompts, proposal.tokens)
  ]


@pytest.mark.parametrize("name", TREES)
def test_top_k_children_are_the_likeliest(name):
  """Each node's children are the draft's best tokens behind its own path, in order.

  Fails when a level reads a sibling's rows, another level's scratch rows, or a position by node number.
  """
  tree = TREES[name]
  proposal = propose(make(tree, "top_k"), PROMPTS, Settings.create(3))
  assert proposal.q is None and proposal.valid.all()
  for row, nodes in enumerate(texts(proposal, tree, PROMPTS)):
    for node, children in enumerate(tree.children):
      best = np.argsort(-DRAFT.logits_after(nodes[node]), kind="stable")
      assert [int(proposal.tokens[row, child]) for child in children] == best[: len(children)].tolist()


@pytest.mark.parametrize("policy", ("sample", "sample_without_replacement"))
@pytest.mark.parametrize("name", TREES)
def test_q_is_kept_by_parent(name, policy):
  """q of a node with children: the draft's law behind its path, processed with the row's settings.

  Fails when q is ordered by child, by draft order, or taken before temperature.
  """
  tree = TREES[name]
  settings = Settings.create(3, temperature=[1.0, 0.7, 1.5], top_k=[0, 0, 4], seed=[5, 6, 7])
  proposal = propose(make(tree, policy), PROMPTS, settings)
  for row, nodes in enumerate(texts(proposal, tree, PROMPTS)):
    for node, children in enumerate(tree.children):
      if children and proposal.valid[row, node]:
        want = process(
          DRAFT.logits_after(nodes[node]), temperature=(1.0, 0.7, 1.5)[row], top_k=(0, 0, 4)[row]
        )
        np.testing.assert_allclose(proposal.q[row, node], want, atol=1e-6)
        drawn = [int(proposal.tokens[row, child]) for child in children]
        assert all(want[token] > 0 for token in drawn)
        if policy == "sample_without_replacement":
          assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("policy", ("sample", "sample_without_replacement"))
def test_siblings_have_the_stated_law(policy):
  """χ² of two siblings over 40000 seeds: q(x) q(y), or q(x) q(y) / (1 - q(x)) for y ≠ x.

  p must exceed 1e-4. Fails when siblings share noise, or q is not renormalised.
  """
  rows = 40_000
  prompts = [[1, 2]] * rows
  settings = Settings.create(rows, temperature=1.0, seed=range(rows))
  proposal = propose(make(TokenTree((-1, 0, 0)), policy), prompts, settings)
  q = process(DRAFT.logits_after((1, 2)))
  law = np.outer(q, q)
  if policy == "sample_without_replacement":
    law = law / (1 - q[:, None]) * (1 - np.eye(VOCAB))
  pairs = np.ravel_multi_index(proposal.tokens[:, 1:].T, law.shape)
  assert chi_square(np.bincount(pairs, minlength=law.size).reshape(law.shape), law) > 1e-4


def test_a_sibling_that_finds_nothing_left_is_not_proposed():
  """Greedy rows have all mass on one token: drawn without replacement, only the first child exists."""
  tree = TokenTree.cartesian((3, 1))
  proposal = propose(make(tree, "sample_without_replacement"), PROMPTS, Settings.create(3))
  assert proposal.valid[:, :4].tolist() == [[True, True, False, False]] * 3
  proposal = propose(
    make(tree, "sample_without_replacement"), PROMPTS, Settings.create(3, temperature=1.0, top_k=2)
  )
  assert proposal.valid[:, :4].tolist() == [[True, True, True, False]] * 3


def test_deep_nodes_end_with_the_drafts_own_limit():
  """A draft made for 4 positions, 3 tokens committed: depth 1 and 2 are proposed, deeper is not (case B4)."""
  tree = TREES["cartesian"]
  proposal = propose(make(tree, "top_k", max_length=4), [[1, 2, 3]], Settings.create(1))
  np.testing.assert_array_equal(proposal.valid[0], tree.depths <= 2)


@pytest.mark.parametrize("policy", ("sample", "top_k"))
def test_drafting_stops_where_the_draft_is_unsure(policy):
  """Children exist exactly where the draft's best token behind their parent has the probability asked for,
  before temperature; what was drawn does not matter.

  Fails when the drawn token's probability decides, or that of processed logits.
  """
  tree, least = TREES["chain"], 0.5
  # Many rows, at a temperature that often draws what is unlikely.
  prompts = [[a, b, c] for a in range(VOCAB) for b in range(VOCAB) for c in (0, 3)]
  settings = Settings.create(len(prompts), temperature=2.0, seed=range(len(prompts)))
  proposal = propose(make(tree, policy, confidence=least), prompts, settings)
  ended = 0
  for text, valid in zip(texts(proposal, tree, prompts), proposal.valid):
    for node in range(1, tree.num_nodes):
      assert valid[node] == (process(DRAFT.logits_after(text[node - 1])).max() >= least)
      if not valid[node]:  # nothing below counts
        ended += 1
        break
  assert ended > 10 and proposal.valid[:, 1:].sum() > 20


@pytest.mark.parametrize(
  "policy",
  ("sample", *(pytest.param(p, marks=pytest.mark.slow) for p in ("sample_without_replacement", "top_k"))),
)
def test_l3_a_draft_vocabulary_maps_to_the_targets_ids(policy):
  """Draft ids 0, 1 mean target ids 5, 9: proposals are 5 or 9, q is the draft's law there, and 0 elsewhere.

  Fails when draft ids are proposed as they are, or q is spread over the draft's width.
  """
  ids, vocab = np.array([5, 9]), 12
  table = TableTarget.random(3, vocab, by="history")
  tree = TokenTree.cartesian((2, 1, 1))
  settings = Settings.create(3, temperature=[1.0, 0.7, 1.5], seed=[5, 6, 7])
  drafter = make(tree, policy, vocab_size=vocab, num_real_tokens=vocab)
  proposal = propose(drafter, PROMPTS, settings, heads.Reduced(table, jnp.asarray(ids)))
  assert proposal.valid.all() and np.isin(proposal.tokens[:, 1:], ids).all()
  if policy == "top_k":
    assert set(proposal.tokens[0, 1:3].tolist()) == {5, 9}
    return
  for row, nodes in enumerate(texts(proposal, tree, PROMPTS)):
    for node, children in enumerate(tree.children):
      if children:
        law = process(table.logits_after(nodes[node])[ids], temperature=(1.0, 0.7, 1.5)[row])
        want = np.zeros(vocab)
        want[ids] = law
        np.testing.assert_allclose(proposal.q[row, node], want, atol=1e-6)


def test_l3_an_id_that_pads_the_target_is_never_said():
  """A draft vocabulary that holds one: the draft says the other tokens alone. Fails when it is not masked."""
  table = TableTarget.random(3, 12, by="history")
  drafter = make(TokenTree.chain(3), "sample", vocab_size=12, num_real_tokens=9)
  settings = Settings.create(3, temperature=1.0, seed=[5, 6, 7])
  proposal = propose(drafter, PROMPTS, settings, heads.Reduced(table, jnp.asarray([2, 5, 9])))
  assert np.isin(proposal.tokens[:, 1:], (2, 5)).all()
  np.testing.assert_allclose(proposal.q[:, :, [2, 5]].sum(axis=-1), 1, atol=1e-6)
