"""The block drafter: drafts and q against a numpy forward, its cache, the last slots."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decode
from specjax.base import Committed
from specjax.drafters import Block, BlockWeights, make_drafter
from specjax.sampling import Settings
from specjax.testing import chi_square, draft_context, perturbed
from specjax.tree import TokenTree
from tests import block_reference, contract, heads

V, SIZE = contract.VOCAB, 5
PROMPTS = [list(prompt) for prompt in contract.PROMPTS]
TREE = TokenTree((-1, 0, 0, 1, 1, 2, 5))
SIZES = dict(vocab_size=V, num_real_tokens=V, max_length=512, taps=heads.TAPS, block_size=SIZE)
IDS = np.arange(1, V, 2)  # a draft vocabulary: the head's token i is the target's 2 i + 1


@functools.cache
def weights(markov_rank=24, ids=tuple(IDS)):
  target = contract.target()
  head = heads.block_head(target.config, np.array(ids), markov_rank=markov_rank)
  return BlockWeights(head, target.embed[...])


@jax.jit
def _taps(target, tokens):
  return target(tokens, target.init_cache(*tokens.shape), taps=heads.TAPS, logits=False).taps


def taps_of(texts):
  tokens = np.zeros((len(texts), max(map(len, texts))), np.int32)
  for row, text in enumerate(texts):
    tokens[row, : len(text)] = text
  return np.asarray(_taps(contract.target(), jnp.asarray(tokens)))


@functools.partial(jax.jit, static_argnums=0)
def _run(drafter, weights, state, chunk, context):
  state = drafter.prefill(weights, state, chunk)
  return drafter.propose(weights, state, context, None)[:2]


def proposed(drafter, weights, texts, **settings):
  """Proposal and state behind the texts as prompts; `prefill` gets one chunk with padding behind them."""
  count = np.array([len(text) - 1 for text in texts])
  width = max(map(len, texts))
  tokens = np.array([np.pad(text, (0, width - len(text))) for text in texts], np.int32)
  valid = np.arange(width) < count[:, None]
  taps = np.where(valid[..., None, None], taps_of(texts), np.nan)
  chunk = Committed(jnp.asarray(tokens), jnp.asarray(valid), jnp.asarray(taps))
  context = draft_context(texts, 64, settings=Settings.create(len(texts), **settings))
  state = drafter.init(weights, len(texts), 64)
  return jax.device_get(_run(drafter, weights, state, chunk, context))


def base_logits(weights, text):
  """``[G, Vd]`` behind a text, by numpy."""
  taps = taps_of([text])[0, : len(text) - 1]
  return block_reference.base_logits(weights.head, taps, np.asarray(weights.embed)[text[-1]])


def make(tree=TREE, policy="top_k", **options):
  return Block(tree, policy=policy, **{**SIZES, **options})


@pytest.mark.parametrize(
  "text", ("static", pytest.param("block[nodes=8,beam=3,window=3]", marks=pytest.mark.slow))
)
def test_drafts_are_the_heads_own(text):
  """Each node's children are the likeliest of numpy's pass at its depth, with the Markov head's share of the
  node's token; behind a single token, where the target has no feature, nothing is proposed.

  Fails when a position of the block serves another depth, the Markov head reads the root or the head's own
  numbering, a draft's number is not mapped to the target's id (case L3), or padding's features are kept.
  """
  drafter = make() if text == "static" else make_drafter(text, **SIZES, policy="top_k")
  proposal, state = proposed(drafter, weights(), PROMPTS)
  parents = np.broadcast_to(proposal.tree.parents, proposal.tokens.shape)
  for row, prompt in enumerate(PROMPTS):
    if len(prompt) == 1:
      assert proposal.valid[row].tolist() == [True] + [False] * (proposal.tokens.shape[1] - 1)
      continue
    assert proposal.valid[row].all()
    base, depth = base_logits(weights(), prompt), {0: 0}
    for node in range(proposal.tokens.shape[1]):
      depth[node] = 0 if node == 0 else depth[parents[row, node]] + 1
      children = np.flatnonzero(parents[row] == node)
      if children.size:
        said = block_reference.conditioned(weights().head, base[depth[node]], proposal.tokens[row, node])
        best = IDS[np.argsort(-said, kind="stable")]
        assert proposal.tokens[row, children].tolist() == best[: children.size].tolist()
  # What was drafted is not counted.
  np.testing.assert_array_equal(state.cache.length, [len(prompt) - 1 for prompt in PROMPTS])


@pytest.mark.parametrize("markov_rank", (24, pytest.param(None, marks=pytest.mark.slow)))
def test_sampled_chains_have_the_law_that_q_says(markov_rank):
  """2000 seeds: pairs of drafts against their exact law, p(x_1) · p(x_2 | x_1) of numpy's pass, by χ²; and q
  at every node is the distribution behind what was drafted there, at the row's temperature.

  Without a Markov head x_2 is independent of x_1. Fails when q is that of another draft than was drawn, the
  drafts share noise, or a tree's children follow another branch.
  """
  few, rows = (3, 17, 20, 41, 58), 2000
  head = weights(markov_rank, few)
  drafter = make(TokenTree.chain(3), "sample")
  proposal, _ = proposed(drafter, head, [PROMPTS[0]] * rows, temperature=0.8, seed=range(rows))
  ids, root = np.array(few), PROMPTS[0][-1]
  base = base_logits(head, PROMPTS[0])
  law = block_reference.chain_law(head.head, base, root, ids, 2, temperature=0.8)
  index = np.searchsorted(ids, proposal.tokens)
  counts = np.zeros(law.shape)
  np.add.at(counts, (index[:, 1], index[:, 2]), 1)
  assert chi_square(counts.ravel(), law.ravel()) > 1e-3
  independent = np.outer(law.sum(axis=1), law.sum(axis=0))
  assert (np.abs(law - independent).max() < 1e-12) == (markov_rank is None)
  for row in range(5):
    for d in range(3):
      said = block_reference.conditioned(head.head, base[d], proposal.tokens[row, d]) / 0.8
      q = np.zeros(V)
      q[ids] = np.exp(said - said.max()) / np.exp(said - said.max()).sum()
      np.testing.assert_allclose(proposal.q[row, d], q, atol=1e-5)


def test_a_block_fits_behind_the_last_slot():
  """However few drafts the loop makes room for. Fails when the cache ends with the loop's own slots."""
  assert make(TokenTree.chain(1)).init(weights(), 1, 128).cache.capacity >= 128 + SIZE


@pytest.mark.slow
def test_broken_weights_leave_the_text_alone():
  """Every parameter of the head is NaN: nothing is proposed, and the text is plain's."""
  _, sound = contract.built("block_tree_distinct")
  broken = sound.drafter.replace(head=perturbed(sound.drafter.head, float("nan")))
  config = contract.static("block_tree_distinct", "draw_and_follow")
  loaded = decode.Weights(contract.target(), broken)
  state = decode.prefill(loaded, config, contract.PROMPTS, max_new_tokens=list(contract.BUDGETS))
  rows = decode.results(decode.generate(loaded, state, config))
  assert [row.tokens for row in rows] == [row.tokens for row in contract.plain()]
  assert {sum(row.proposed) for row in rows} == {0}


@pytest.mark.parametrize(
  ("text", "words"),
  [
    ("block[window=6]", "6 deep; the head says 5 tokens"),
    ("block[window=0]", "window = 0; block"),
    ("block[window=2,taps=()]", r"taps = \(\)"),
    ("block[window=2,confidence=2]", "confidence = 2"),
    ("block[window=2,nodes=4]", "beam = None"),
  ],
)
def test_bad_options_name_themselves(text, words):
  with pytest.raises(ValueError, match=words):
    make_drafter(text, **SIZES, **({"policy": "top_k"} if "nodes" in text else {}))


def test_a_head_of_other_shapes_is_refused():
  with pytest.raises(ValueError, match=r"taps = \(0, 1\); the head was made for \(0, 1, 2\)"):
    make(taps=(0, 1)).init(weights(), 1, 64)
  with pytest.raises(ValueError, match="block_size = 7; the head was made for 5"):
    make(block_size=7).init(weights(), 1, 64)
