"""EAGLE in the loop: which feature goes with which token, what the ring holds, what is never kept."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax import decode
from specjax.base import Committed
from specjax.drafters import Eagle3Drafter, EagleDrafter, EagleWeights, make_drafter
from specjax.models import Eagle1, Eagle3
from specjax.testing import draft_context, perturbed, poison
from specjax.tree import TokenTree
from tests import contract, heads

V, WIDTH = contract.VOCAB, 48
RING = 5
PROMPTS = [list(prompt) for prompt in contract.PROMPTS]
TREE = TokenTree((-1, 0, 0, 1, 1, 2, 5))
SIZES = dict(vocab_size=V, num_real_tokens=V, max_length=512, taps=heads.TAPS)
TAPS = {"eagle": (2,), "eagle3": heads.TAPS}


IDS = np.arange(1, V, 2)  # a draft vocabulary: the head's token i is the target's 2 i + 1


@functools.cache
def weights(kind="eagle3"):
  target, common = contract.target(), dict(ids=IDS, dtype=jnp.float32, rngs=nnx.Rngs(3))
  if kind == "eagle":
    head = Eagle1(heads.eagle1_config(target.config, IDS), target, **common)
  else:
    head = Eagle3(heads.eagle3_config(target.config, IDS), **common)
  return EagleWeights(head, target.embed[...])


@jax.jit
def _features(target, head, tokens):
  taps = head.config.tap_layers
  taps = target(tokens, target.init_cache(*tokens.shape), taps=taps, logits=False).taps
  return taps, head.fuse(taps)


@jax.jit
def _rows(weights, features, tokens):
  """Logits and what recurs at rows of ``features [1, T, D]`` and ``tokens [1, T]``, from nothing."""
  embeddings = jnp.take(weights.embed, tokens, axis=0)
  output = weights.head(embeddings, features, weights.head.init_cache(1, WIDTH))
  return output.logits[0], output.hidden[0]


def features_of(texts, kind="eagle3"):
  """Taps and fused features at every position of the texts, ``[B, WIDTH, …]``."""
  tokens = np.zeros((len(texts), WIDTH), np.int32)
  for row, text in enumerate(texts):
    tokens[row, : len(text)] = text
  return jax.device_get(_features(contract.target(), weights(kind).head, jnp.asarray(tokens)))


def likeliest(text, features, path, kind="eagle3") -> list[int]:
  """The target's ids of what the head says behind a drafted path, best first: its rows are made anew, without
  its cache.

  The rows of the text are of the target's features; then each drafted token comes with what recurred from
  the row before it.
  """
  count = len(text) - 1  # rows of the text
  tokens = [*text[1:], *path]
  made = np.zeros((1, WIDTH, features.shape[-1]), np.float32)
  made[0, :count] = features[:count]
  padded = np.zeros((1, WIDTH), np.int32)
  padded[0, : len(tokens)] = tokens
  for step in range(len(path) + 1):
    logits, hidden = _rows(weights(kind), made, padded)
    if step < len(path):
      made[0, count + step] = np.asarray(hidden)[count + step - 1]
  return IDS[np.argsort(-np.asarray(logits)[count + len(path) - 1], kind="stable")].tolist()


def chunks(texts, width, kind):
  """What `prefill` is given of prompts, in chunks: padding behind each."""
  taps, _ = features_of(texts, kind)
  for start in range(0, max(map(len, texts)) - 1, width):
    tokens, valid = np.full((len(texts), width), 60, np.int32), np.zeros((len(texts), width), bool)
    for row, text in enumerate(texts):
      part = text[start : start + width]
      tokens[row, : len(part)] = part
      valid[row] = start + np.arange(width) < len(text) - 1
    yield Committed(jnp.asarray(tokens), jnp.asarray(valid), jnp.asarray(taps[:, start : start + width]))


@functools.partial(jax.jit, static_argnums=0)
def _prefill(drafter, weights, state, chunk):
  return drafter.prefill(weights, state, chunk)


@functools.partial(jax.jit, static_argnums=0)
def _propose(drafter, weights, state, context):
  return drafter.propose(weights, state, context, None)[:2]


def prefilled(drafter, texts, width=16):
  kind = drafter.name
  state = drafter.init(weights(kind), len(texts), 64)
  for chunk in chunks(texts, width, kind):
    state = _prefill(drafter, weights(kind), state, chunk)
  return state


def proposed(drafter, texts, state=None):
  """Proposal and state; behind the texts as prompts, or a state that knows them."""
  state = prefilled(drafter, texts) if state is None else state
  return jax.device_get(_propose(drafter, weights(drafter.name), state, draft_context(texts, 64)))


def make(tree=TREE, policy="top_k", kind="eagle3", **options):
  make = {"eagle": EagleDrafter, "eagle3": Eagle3Drafter}[kind]
  return make(tree, policy=policy, **{**SIZES, "taps": TAPS[kind], "ring": RING, **options})


@pytest.mark.parametrize(
  ("kind", "tree"),
  [
    pytest.param("eagle3", TREE, id="eagle3"),
    pytest.param("eagle", TREE, id="eagle"),
    pytest.param("eagle3", TokenTree.chain(4), marks=pytest.mark.slow, id="eagle3 chain"),
  ],
)
def test_drafts_are_the_heads_own(kind, tree):
  """Each node's children are the likeliest of a head that is run anew over the text and the node's path.

  Fails when a feature goes with its own token and not the next, what recurs is taken from another row or is
  fused once more, a row sits a position off, a node sees a sibling's row, or the head's own numbering is
  proposed or fed (case L3).
  """
  proposal, state = proposed(make(tree, kind=kind), PROMPTS)
  _, features = features_of(PROMPTS, kind)
  for row, text in enumerate(PROMPTS):
    if len(text) == 1:  # the target has no feature yet
      assert proposal.valid[row].tolist() == [True] + [False] * (tree.num_nodes - 1)
      continue
    assert proposal.valid[row].all()
    for node, children in enumerate(tree.children):
      if children:
        path = proposal.tokens[row, tree.paths[node][1 : tree.depths[node] + 1]]
        best = likeliest(text, features[row], path, kind)
        assert proposal.tokens[row, list(children)].tolist() == best[: len(children)]
  # What was drafted is not counted.
  np.testing.assert_array_equal(state.cache.length, [len(text) - 1 for text in PROMPTS])


@pytest.mark.slow
def test_the_dynamic_tree_is_the_heads_own():
  """The same for a tree that follows the head's probabilities: each node's children are its likeliest.

  Fails when what recurs is mixed up where the best of a level are picked.
  """
  drafter = make_drafter("eagle3[nodes=8,beam=3,window=3]", **SIZES, ring=RING)
  proposal, _ = proposed(drafter, PROMPTS)
  _, features = features_of(PROMPTS)
  assert proposal.valid.sum(axis=1).tolist() == [8, 8, 1, 8]
  for row, text in enumerate(PROMPTS):
    for node in range(8):
      children = np.flatnonzero((proposal.tree.parents[row] == node) & proposal.valid[row])
      if children.size:
        way = np.flatnonzero(proposal.tree.ancestor_mask[row, node])[1:]
        best = likeliest(text, features[row], proposal.tokens[row, way])
        assert proposal.tokens[row, children].tolist() == best[: children.size]


def test_prefill_in_chunks():
  """Rows equal those of longer chunks; the last feature waits in its slot. Ragged, a single token among them.

  Fails when the row between two chunks is left out or made twice, or padding is noted.
  """
  state = jax.device_get(prefilled(make(), PROMPTS, 4))
  _, features = features_of(PROMPTS)
  seen = np.array([len(text) - 1 for text in PROMPTS])
  np.testing.assert_array_equal(state.seen, seen)
  np.testing.assert_array_equal(state.cache.length, np.maximum(seen - 1, 0))
  whole = jax.device_get(prefilled(make(), PROMPTS))
  for row, count in enumerate(seen):
    for got, want in zip((*state.cache.k, *state.cache.v), (*whole.cache.k, *whole.cache.v)):
      rows = max(count - 1, 0)
      np.testing.assert_allclose(got[row, :, :rows], want[row, :, :rows], atol=1e-5)
    if count:
      at = (count - 1) % RING
      np.testing.assert_allclose(state.features[row, at], features[row, count - 1], atol=1e-5)
      assert state.tokens[row, at] == PROMPTS[row][count - 1]


def committed(texts, start, count, width):
  """What `extend` is given: ``count [B]`` tokens of each text from ``start [B]`` on, rubbish behind them."""
  taps, _ = features_of(texts)
  index = np.minimum(start[:, None] + np.arange(width), WIDTH - 1)
  tokens = np.array([np.pad(text, (0, WIDTH - len(text))) for text in texts])
  rows = np.arange(len(texts))[:, None]
  valid = np.arange(width) < count[:, None]
  return Committed(
    jnp.asarray(np.where(valid | (np.arange(width) == 0), tokens[rows, index], 60), jnp.int32),
    jnp.asarray(valid),
    jnp.asarray(np.where(valid[..., None, None], taps[rows, index], np.nan)),
  )


def test_the_ring_holds_what_is_pending_and_feeds_it_when_full():
  """Rounds of 0 … 3 tokens, none of them drafted, in four texts: each pending feature lies in its slot, fed
  rows equal a fresh prefill's, and what is proposed in the end is what a fresh state proposes.

  Slots that are free are NaN before each round. Fails when a slot is off by one, pending features are
  written over, fed twice or with another token, or a free slot is read.
  """
  said = np.random.default_rng(4).integers(0, V, (len(PROMPTS), 40)).tolist()
  texts = [prompt + more[: 40 - len(prompt)] for prompt, more in zip(PROMPTS, said)]
  _, features = features_of(texts)
  drafter = make(TokenTree.chain(3))
  start = [text[: len(prompt)] for text, prompt in zip(texts, contract.PROMPTS)]
  state = prefilled(drafter, start)
  seen = np.array([len(text) - 1 for text in start])
  extend = jax.jit(drafter.extend)
  random, fed = np.random.default_rng(2), []
  for _ in range(9):
    pending = (np.arange(RING) - np.asarray(state.cache.length)[:, None]) % RING < (
      seen - np.asarray(state.cache.length)
    )[:, None]
    state = poison(state.replace(features=jnp.where(pending[..., None], state.features, jnp.nan)))
    count = np.minimum(random.integers(0, 4, len(texts)), 38 - seen)
    state = extend(weights(), state, committed(texts, seen, count, 4))
    seen = seen + count
    length = np.asarray(state.cache.length)
    fed.append(length)
    np.testing.assert_array_equal(state.seen, seen)
    assert (seen - length <= RING).all()
    for row in range(len(texts)):
      for at in range(length[row], seen[row]):
        np.testing.assert_allclose(state.features[row, at % RING], features[row, at], atol=1e-5)
        assert int(state.tokens[row, at % RING]) == texts[row][at]
  assert len({tuple(length) for length in fed}) > 2  # rows were fed more than once
  now = [text[: n + 1] for text, n in zip(texts, seen)]
  late, after = proposed(drafter, now, poison(state))
  fresh, whole = proposed(drafter, now)
  np.testing.assert_array_equal(late.tokens, fresh.tokens)
  assert late.valid.all() and fresh.valid.all()
  for got, want in zip((*after.cache.k, *after.cache.v), (*whole.cache.k, *whole.cache.v)):
    for row, n in enumerate(seen):
      np.testing.assert_allclose(got[row, :, :n], want[row, :, :n], atol=1e-5)


def test_drafting_again_without_a_round_says_the_same():
  """The last row is fed again. Fails when nothing is pending and the draft begins from nothing."""
  drafter = make()
  once, state = proposed(drafter, PROMPTS)
  twice, after = proposed(drafter, PROMPTS, jax.tree.map(jnp.asarray, state))
  np.testing.assert_array_equal(once.tokens, twice.tokens)
  np.testing.assert_array_equal(state.cache.length, after.cache.length)
  assert once.valid.sum() == twice.valid.sum() > len(PROMPTS)


@pytest.mark.slow
def test_broken_weights_leave_the_text_alone():
  """Every parameter of the head is NaN: nothing is proposed, and the text is plain's."""
  _, sound = contract.built("eagle3_tree_top_k")
  broken = sound.drafter.replace(head=perturbed(sound.drafter.head, float("nan")))
  config = contract.static("eagle3_tree_top_k", "greedy")
  state = decode.prefill(
    decode.Weights(contract.target(), broken),
    config,
    contract.PROMPTS,
    max_new_tokens=list(contract.BUDGETS),
  )
  rows = decode.results(decode.generate(decode.Weights(contract.target(), broken), state, config))
  assert [row.tokens for row in rows] == [row.tokens for row in contract.plain()]
  assert {sum(row.proposed) for row in rows} == {0}


@pytest.mark.parametrize(
  ("options", "words"),
  [
    (dict(taps=()), r"taps = \(\); eagle3"),
    (dict(ring=3), "ring = 3.*up to 4"),
    (dict(ring=True), "ring = True"),
    (dict(window=0), "window = 0; eagle3"),
    (dict(confidence=2), "confidence = 2"),
  ],
)
def test_bad_options_name_themselves(options, words):
  with pytest.raises(ValueError, match=words):
    make_drafter("eagle3", **{**SIZES, "window": 3, **options})


def test_a_head_of_other_layers_is_refused():
  drafter = make(taps=(0, 1, 3))
  with pytest.raises(ValueError, match=r"taps = \(0, 1, 3\); the head was made for \(0, 1, 2\)"):
    drafter.init(weights(), 1, 64)
