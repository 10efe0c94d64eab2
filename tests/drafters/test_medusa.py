"""Medusa: which head, which rank, which hidden state; processing along paths."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax import decode
from specjax.drafters import MedusaWeights, make_drafter
from specjax.models import MedusaConfig, MedusaHeads, output_rows
from specjax.processors import TokenAutomaton
from specjax.sampling import Settings
from specjax.testing import draft_context
from tests import contract

V, HEADS = contract.VOCAB, 3
PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0))
SIZES = dict(vocab_size=V, num_real_tokens=V, num_heads=HEADS, taps=(2,))
TEXTS = [list(contract.PROMPTS[0]), list(contract.PROMPTS[1])]


@functools.cache
def weights(ids=None):
  """Heads whose blocks do something, on the target's own output rows."""
  target = contract.target()
  config = MedusaConfig(32, V, HEADS, draft_vocab_size=None if ids is None else len(ids))
  heads = MedusaHeads(config, ids=ids, dtype=jnp.float32, rngs=nnx.Rngs(0))
  noise = np.random.default_rng(5)
  for block in heads.blocks:
    block.weight = nnx.Param(jnp.asarray(noise.normal(0, 0.2, block.weight.shape), jnp.float32))
  return MedusaWeights(heads, target.norm, output_rows(target, heads.ids))


HIDDEN = np.random.default_rng(6).standard_normal((2, 32)).astype(np.float32)


def said(weights) -> np.ndarray:
  """Logits of every head at `HIDDEN`, ``[B, heads, Vd]``."""
  unembed = lambda x: x @ weights.rows.T
  return np.asarray(weights.heads(weights.norm(jnp.asarray(HIDDEN)), unembed))


def propose(drafter, weights, *, processor=None, texts=TEXTS, **settings):
  context = draft_context(texts, 32, settings=Settings.create(len(texts), **settings))
  if processor is not None:
    states = jnp.zeros((len(texts),), jnp.int32)
    context = context.replace(processor=processor, processor_state=states)
  state = drafter.init(weights, len(texts), 32).replace(hidden=jnp.asarray(HIDDEN))
  run = jax.jit(lambda weights, state, context: drafter.propose(weights, state, context, None)[0])
  return jax.device_get(run(weights, state, context))


@functools.cache
def tree():
  return make_drafter("medusa", tree=PATHS, **SIZES)


def test_a_node_is_its_rank_of_its_depths_head():
  """Fails when a head serves another depth, or ranks go by node number."""
  proposal, logits = propose(tree(), weights()), said(weights())
  assert proposal.valid.all() and proposal.q is None and proposal.kind == "deterministic"
  assert proposal.tree.parents == (-1, 0, 0, 0, 1, 1, 2, 4, 5)
  for row in range(2):
    assert proposal.tokens[row, 0] == TEXTS[row][-1]
    for node, path in enumerate(PATHS, start=1):
      best = np.argsort(-logits[row, len(path) - 1], kind="stable")
      assert proposal.tokens[row, node] == best[path[-1]]


def test_paths_do_not_matter_where_nothing_is_processed():
  """A batch in which one row has a bias is drafted along paths: the other row's tokens stay.

  Fails when the two ways of choosing differ.
  """
  plain = propose(tree(), weights())
  biased = propose(tree(), weights(), logit_bias=[{3: 50.0}, {}])
  np.testing.assert_array_equal(plain.tokens[1], biased.tokens[1])
  np.testing.assert_array_equal(plain.valid[1], biased.valid[1])
  assert biased.tokens[0, 1] == biased.tokens[0, 4] == 3


def test_penalties_count_the_nodes_own_path():
  """A presence penalty that forbids what was said: no path says a token twice, siblings' tokens stay free.

  Fails when processing looks at the committed text alone.
  """
  plain = propose(tree(), weights(), logit_bias={7: 60.0})
  assert plain.tokens[0, 1] == plain.tokens[0, 4] == plain.tokens[0, 7] == 7
  proposal = propose(tree(), weights(), logit_bias={7: 60.0}, presence_penalty=100.0)
  for row in range(2):
    for node in range(1, 9):
      way = np.flatnonzero(proposal.tree.ancestor_mask[node])[1:]
      path = proposal.tokens[row, way].tolist()
      assert len(set(path)) == len(path)
      if 7 not in path[:-1] and PATHS[node - 1][-1] == 0:
        assert path[-1] == 7  # said on another branch, or not at all


def test_masks_follow_the_path():
  """An automaton of even and odd tokens in turn: every node is of its depth's kind.

  Fails when the mask behind the root serves all depths.
  """
  turns = [
    [(1 if token % 2 == 0 else -1) for token in range(V)],
    [(0 if token % 2 else -1) for token in range(V)],
  ]
  proposal = propose(tree(), weights(), processor=TokenAutomaton.create(turns))
  assert proposal.valid.all()
  for row in range(2):
    assert (proposal.tokens[row, 1:] % 2 == (np.array([len(path) for path in PATHS]) - 1) % 2).all()


def test_a_draft_vocabulary_maps_to_the_targets_ids():
  """Fails when a head's own numbering is proposed (case L3)."""
  ids = tuple(range(2, V, 3))
  proposal, logits = propose(tree(), weights(ids)), said(weights(ids))
  assert logits.shape == (2, HEADS, len(ids))
  for row in range(2):
    for node, path in enumerate(PATHS, start=1):
      best = np.argsort(-logits[row, len(path) - 1], kind="stable")
      assert proposal.tokens[row, node] == ids[best[path[-1]]]


def test_the_hidden_state_is_the_last_rows():
  """After prefill and each round: what a fresh forward of the target gives at position n - 2. Behind a single
  token nothing is known, and nothing is proposed.

  Fails when the state is the padding's, the last proposed node's, or a round late.
  """
  drafter, loaded = contract.built("medusa_tree")
  config = contract.static("medusa_tree", "greedy")
  state = contract.start("medusa_tree")

  @jax.jit
  def outputs(target, tokens):
    return target(tokens, target.init_cache(*tokens.shape), taps=(2,), logits=False).taps[:, :, 0]

  for _ in range(4):
    n = np.asarray(state.length)
    fresh = np.asarray(outputs(loaded.target, state.tokens))
    for row in np.flatnonzero(n > 1):
      np.testing.assert_allclose(state.drafter.hidden[row], fresh[row, n[row] - 2], atol=1e-5)
    state = decode.generate(loaded, state, config, 1)
  rows = decode.results(state)
  assert [row.proposed[0] for row in rows] == [8, 8, 0, 8] and drafter.tree.num_nodes == 9


@pytest.mark.parametrize(
  ("text", "words"),
  [
    ("medusa[window=4]", "4 deep; there are 3 heads"),
    ("medusa", "window = None; medusa"),
    ("medusa[window=2,branching=(2,2,2)]", "branching"),
    ("medusa[tree=((0,),),window=1]", "leave window and branching out"),
    ("medusa[tree=(0,1)]", r"tree = \(0, 1\); it must be paths"),
    ("medusa[tree=((1,),)]", "which is missing"),
    ("medusa[window=1,branching=(62,)]", "62 children"),
  ],
)
def test_bad_options_name_themselves(text, words):
  with pytest.raises(ValueError, match=words):
    make_drafter(text, **SIZES)


def test_weights_that_do_not_fit_are_refused():
  drafter = make_drafter("medusa", window=2, **{**SIZES, "num_heads": 2})
  with pytest.raises(ValueError, match="num_heads = 2; the weights have 3 heads"):
    drafter.init(weights(), 1, 64)
  with pytest.raises(ValueError, match="taps"):
    make_drafter("medusa", window=2, **{**SIZES, "taps": ()})
