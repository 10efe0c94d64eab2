"""Drafting on the target's own cache, against a decoder in numpy: what is said, and what is handed over."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax import cache as kv
from specjax import decode
from specjax.base import Committed
from specjax.control import Fixed
from specjax.drafters import EarlyExitWeights, make_drafter
from specjax.models import EarlyExit, EarlyExitConfig, SkipSet, skipping, truncated
from specjax.sampling import Settings
from specjax.testing import chi_square, draft_context, joint_law, perturbed, poison, process, tiny_model
from specjax.verify import make_rule
from tests import by_hand, contract

LAYERS, VOCAB, SLOTS, WINDOW = 4, 61, 32, 3
PROMPTS = ([3, 14, 15, 9, 26, 5], [7], [1, 2, 3, 1])
SETTINGS = dict(temperature=[1.0, 0.7, 1.5], top_k=[0, 0, 9], seed=[5, 6, 7])
IDS = np.arange(1, VOCAB, 2)  # a draft vocabulary
SIZES = dict(vocab_size=VOCAB, num_real_tokens=VOCAB, max_length=512)
SKIPS = {
  "prefix": SkipSet(LAYERS, (2, 3), (2, 3)),
  "middle": SkipSet(LAYERS, (2,), (1,)),
  "first": SkipSet(LAYERS, (0,), (3,)),
}


@functools.cache
def target():
  return tiny_model(4, num_layers=LAYERS)


@functools.cache
def adapter():
  """Behind two layers, with norms that are not 1."""
  config = EarlyExitConfig(target().config.replace(num_layers=1), 2, draft_vocab_size=len(IDS))
  module = EarlyExit(config, target(), ids=IDS, dtype=jnp.float32, rngs=nnx.Rngs(3))
  shifted = nnx.Param(jnp.linspace(0.5, 1.5, target().config.d_model))
  module.attention_norm.weight, module.norm.weight = shifted, nnx.Param(shifted[...][::-1])
  return module


def weights_of(name):
  if name == "early_exit":
    return EarlyExitWeights(adapter(), truncated(target(), 2))
  return truncated(target(), 2) if name == "prefix" else skipping(target(), SKIPS[name])


def make(name, **options):
  options = {"window": WINDOW, **SIZES, **options}
  if name == "early_exit":
    return make_drafter("early_exit", exit=2, **options)
  return make_drafter("self_speculation", exit=SKIPS[name].prefix, **options)


@functools.partial(jax.jit, static_argnums=0)
def _propose(drafter, target, weights, tokens, context):
  """Behind texts whose committed rows are there; everything behind them is NaN."""
  output = target(tokens, target.init_cache(len(tokens), SLOTS), taps=drafter.taps, logits=False)
  rows = jnp.maximum(context.length - 1, 0)
  valid = jnp.arange(tokens.shape[1]) < rows[:, None]
  state = drafter.prefill(
    weights, drafter.init(weights, len(tokens), SLOTS), Committed(tokens, valid, output.taps)
  )
  cache, state = poison((kv.commit(output.cache, None, rows), state))
  return drafter.propose(weights, state, context, cache)


def proposed(drafter, name, **settings):
  context = draft_context(PROMPTS, SLOTS, settings=Settings.create(len(PROMPTS), **settings))
  tokens = jnp.asarray([text + [0] * (8 - len(text)) for text in PROMPTS])
  return jax.device_get(_propose(drafter, target(), weights_of(name), tokens, context))


def drafted(name, text, path):
  """By hand, behind ``text`` and ``path``: logits, the input of layer 2 or of the first skip, the rows there.

  The text's rows are the whole model's; those of its last token and of the path are the draft's.
  """
  model = target()
  rows, states = by_hand.text_rows(model, text[:-1])
  start = 2 if name == "early_exit" else SKIPS[name].prefix
  own = []
  for state in states:
    if name == "early_exit":
      by_hand.attention(
        adapter().attention, model.config, by_hand.rms(adapter().attention_norm, state[2]), own
      )
  for token in (text[-1], *path):
    x = hidden = by_hand.through(model, by_hand.embedded(model, token), rows, 0, start)
    if name == "early_exit":
      normed = by_hand.rms(adapter().attention_norm, x)
      x = x + by_hand.attention(adapter().attention, model.config, normed, own)
    else:
      x = by_hand.through(model, x, rows, start, LAYERS, SKIPS[name])
  if name == "early_exit":
    said = np.full(VOCAB, -np.inf)
    said[IDS] = by_hand.values(model.head.weight)[IDS] @ by_hand.rms(adapter().norm, x)
  else:
    said = by_hand.logits(model, x)
  return said, hidden, rows, own


@pytest.mark.parametrize(
  "name",
  ("middle", "early_exit", *(pytest.param(name, marks=pytest.mark.slow) for name in ("prefix", "first"))),
)
def test_a_chain_is_the_drafts_own(name):
  """q, hidden states and rows of every node, ragged, a text of one token among them.

  Fails when a draft does not see the target's rows, skips another sublayer, sits a position off, or leaves
  out what verification begins with: the last node's state, a row of the layers before.
  """
  drafter = make(name)
  proposal, state, cache = proposed(drafter, name, **SETTINGS)
  assert proposal.valid.all() and proposal.start_layer == drafter.exit
  np.testing.assert_array_equal(cache.length, [len(text) - 1 for text in PROMPTS])
  for row, text in enumerate(PROMPTS):
    path = proposal.tokens[row, 1:].tolist()
    for node in range(WINDOW + 1):
      said, hidden, rows, own = drafted(name, text, path[:node])
      if node < WINDOW:
        law = process(said, temperature=SETTINGS["temperature"][row], top_k=SETTINGS["top_k"][row])
        np.testing.assert_allclose(proposal.q[row, node], law, atol=1e-5)
        assert law[path[node]] > 0
      if not drafter.exit:
        assert proposal.hidden is None
        continue
      np.testing.assert_allclose(proposal.hidden[row, node], hidden, atol=1e-4)
      at = len(text) - 1 + node
      for layer in range(drafter.exit):
        np.testing.assert_allclose(cache.k[layer][row, :, at], rows[layer][at][0], atol=1e-4)
        np.testing.assert_allclose(cache.v[layer][row, :, at], rows[layer][at][1], atol=1e-4)
      if own:
        np.testing.assert_allclose(state.cache.k[0][row, :, at], own[at][0], atol=1e-4)
        np.testing.assert_allclose(state.cache.v[0][row, :, at], own[at][1], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("middle", "first"))
def test_a_tree_is_verified_whole(name):
  """Each node's children are the draft's likeliest behind its path, and nothing is handed over."""
  drafter = make(name, branching=(2, 2), policy="top_k")
  proposal, _, _ = proposed(drafter, name)
  assert proposal.hidden is None and proposal.start_layer == 0
  for row, text in enumerate(PROMPTS):
    for node, children in enumerate(drafter.tree.children):
      if children:
        path = proposal.tokens[row, drafter.tree.paths[node][1 : drafter.tree.depths[node] + 1]]
        best = np.argsort(-drafted(name, text, path.tolist())[0], kind="stable")
        assert proposal.tokens[row, list(children)].tolist() == best[: len(children)].tolist()


# --- in the loop -----------------------------------------------------------------------------------


def without_first_layer(model):
  """What the drafter has run is NaN: the embedding and the first layer."""
  broken = truncated(model, 1)
  nan = perturbed(broken, float("nan"))
  rest = skipping(model, SkipSet(model.config.num_layers, ff=(0,)))  # a copy with a list of its own
  rest.embed, rest.layers[0] = nan.embed, nan.layers[0]
  return rest


@pytest.mark.slow
@pytest.mark.parametrize(("confidence", "control"), [(0.0, None), (1.0, Fixed())], ids=("drafting", "silent"))
def test_what_drafted_is_not_run_again(confidence, control):
  """Rounds whose target lacks the layers that drafted say plain's text; so do those in which the draft was
  too unsure to propose anything, which run over the roots alone.

  Fails when verification begins before the exit, or a silent round begins anew.
  """
  drafter = contract.early_exit_drafter(confidence=confidence)
  config = contract.config(drafter, "greedy", control=control)
  sound = decode.Weights(contract.target(), contract.early_exit_weights())
  state = decode.prefill(sound, config, contract.PROMPTS, max_new_tokens=list(contract.BUDGETS))
  late = decode.Weights(without_first_layer(contract.target()), contract.early_exit_weights())
  rows = decode.results(decode.generate(late, state, config))
  assert [row.tokens for row in rows] == [row.tokens for row in contract.plain()]
  assert {row.finish for row in rows} == {"length"}
  if confidence:
    assert all(set(row.nodes) == {1} and sum(row.proposed) == 0 for row in rows)


STEPS, LAW_PROMPT, TEXTS = 4, (0, 2), 20_000


@functools.cache
def small():
  sizes = dict(num_layers=3, d_model=8, d_ff=12, num_heads=2, num_kv_heads=1, head_dim=4)
  return tiny_model(3, vocab_size=3, spread=1.0, **sizes)  # open laws, so that drafts are often accepted


def law_case(name):
  """A drafter of three tokens, sometimes right, and its weights."""
  sizes = dict(vocab_size=3, num_real_tokens=3, max_length=99, window=2)
  if name == "skips":
    skips = SkipSet(3, attention=(1,), ff=(2,))
    return make_drafter("self_speculation", exit=skips.prefix, **sizes), skipping(small(), skips)
  module = EarlyExit(
    EarlyExitConfig(small().config.replace(num_layers=1), 1), small(), dtype=jnp.float32, rngs=nnx.Rngs(2)
  )
  drafter = make_drafter("early_exit", exit=1, confidence=0.4, **sizes)
  return drafter, EarlyExitWeights(module, truncated(small(), 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ("skips", "early_exit"))
def test_the_law_of_four_tokens_is_the_targets(name):
  """χ² of 40000 texts under block verification, several rounds; early stops and silent rounds among them.

  p must exceed 1e-3. Fails when q is not what drafts were drawn from, or a row that an earlier draft left
  behind is read.
  """
  drafter, weights = law_case(name)
  config = decode.DecodeConfig(
    drafter,
    make_rule("block_verification"),
    num_real_tokens=3,
    length_limit=len(LAW_PROMPT) + STEPS,
    prefill_widths=(2,),
    control=Fixed(),
  )
  weights = decode.Weights(small(), weights)
  counts, accepted, proposed = np.zeros(3**STEPS), 0, 0
  for batch in range(2):
    seeds = np.arange(TEXTS) + batch * TEXTS
    settings = Settings.create(TEXTS, temperature=1.0, seed=seeds)
    state = decode.prefill(weights, config, [LAW_PROMPT] * TEXTS, settings=settings)
    state = decode.generate(weights, state, config)
    texts = np.asarray(state.tokens)[:, len(LAW_PROMPT) : len(LAW_PROMPT) + STEPS]
    counts += np.bincount(np.ravel_multi_index(tuple(texts.T), (3,) * STEPS), minlength=counts.size)
    accepted += int(np.asarray(state.log.accepted, np.int64).sum())
    proposed += int(np.asarray(state.log.proposed, np.int64).sum())

  @functools.cache
  def law(text):
    _, states = by_hand.text_rows(small(), text)
    return process(by_hand.logits(small(), states[-1][-1]))

  assert chi_square(counts, joint_law(law, LAW_PROMPT, STEPS)) > 1e-3
  assert 0.05 * proposed < accepted < 0.95 * proposed


# --- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("name", "options", "words"),
  [
    ("self_speculation", dict(exit=-1), "exit = -1"),
    ("self_speculation", dict(exit=2.0), "exit = 2.0"),
    ("self_speculation", dict(exit=1, window=0), "window = 0; self_speculation"),
    ("early_exit", dict(exit=0), "exit = 0; at least 1"),
    ("early_exit", dict(exit=1, window=0), "window = 0; early_exit"),
    ("early_exit", dict(exit=1, branching=(2,)), "branching"),
    ("early_exit", dict(exit=1, confidence=2), "confidence = 2"),
  ],
)
def test_bad_options_name_themselves(name, options, words):
  with pytest.raises(ValueError, match=words):
    make_drafter(name, **{"window": WINDOW, **SIZES, **options})


def test_weights_of_another_exit_are_refused():
  with pytest.raises(ValueError, match="exit = 2; the draft has 1 whole layers"):
    make_drafter("self_speculation", window=WINDOW, exit=2, **SIZES).init(weights_of("middle"), 1, SLOTS)
  with pytest.raises(ValueError, match="exit = 1; the adapter was trained behind 2 layers, 2 are given"):
    make_drafter("early_exit", window=WINDOW, exit=1, **SIZES).init(weights_of("early_exit"), 1, SLOTS)


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    (dict(num_layers=0), "num_layers = 0"),
    (dict(num_layers=2), "nothing is left out"),
    (dict(num_layers=2, attention=(2,)), r"attention = \(2,\); it must be ascending layers in \[0, 1\]"),
    (dict(num_layers=2, ff=(1, 0)), r"ff = \(1, 0\)"),
    (dict(num_layers=2, ff=(1, 1)), r"ff = \(1, 1\)"),
    (dict(num_layers=2, ff=(0.0,)), r"ff = \(0.0,\)"),
  ],
)
def test_a_skip_set_is_checked(fields, words):
  with pytest.raises(ValueError, match=words):
    SkipSet(**fields)


def test_skipping_shares_the_targets_arrays():
  """Only what is left is there, in the target's own buffers, and the target has all of it still."""
  before = {id(leaf) for leaf in jax.tree.leaves(target())}
  thin = skipping(target(), SKIPS["middle"])
  left = {id(leaf) for leaf in jax.tree.leaves(thin)}
  assert left < before == {id(leaf) for leaf in jax.tree.leaves(target())}
  assert len(before - left) == 5 + 4  # an attention with its norm, a feed-forward with its own
  assert [layer.attention is None for layer in thin.layers] == [False, False, True, False]
  assert [layer.ff is None for layer in thin.layers] == [False, True, False, False]
  with pytest.raises(ValueError, match="num_layers = 2; the model has 4 layers"):
    skipping(target(), SkipSet(2, (0,)))
