"""Penalties, bias, least lengths and masks, each node along its own path, against loops in numpy."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import processors
from specjax.processors import TokenAutomaton
from specjax.sampling import Settings
from specjax.testing import draft_context
from specjax.tree import DynamicTree, TokenTree

VOCAB = 11
TREE = TokenTree((-1, 0, 0, 1, 1, 2, 3, 6))
TEXTS = ((3, 4, 3, 5, 1), (7,), (2, 2, 2, 9))
PROMPTS = (2, 1, 3)  # tokens of each text that are the prompt's
STOPS = ((9, 2), (0,), (2,))
BIAS = ({4: 2.5, 9: -3.0}, {}, {2: 1.0})
FIELDS = dict(
  repetition_penalty=(1.3, 1.0, 0.7),
  presence_penalty=(0.4, 0.0, -0.5),
  frequency_penalty=(0.25, 0.0, 0.5),
  min_new_tokens=(4, 0, 3),
)


def by_hand(logits, row, path, *, fields=FIELDS, bias=BIAS):
  """What row ``row`` makes of logits behind ``path``, in the documented order."""
  text = [*TEXTS[row], *path]
  new = text[PROMPTS[row] :]
  counts, out = collections.Counter(new), np.array(logits, np.float64)
  for token in set(text):
    r = fields["repetition_penalty"][row]
    out[token] = out[token] / r if out[token] > 0 else out[token] * r
  for token, count in counts.items():
    out[token] -= fields["presence_penalty"][row] + fields["frequency_penalty"][row] * count
  for token, value in bias[row].items():
    out[token] += value
  if len(new) < fields["min_new_tokens"][row]:
    out[list(STOPS[row])] = -np.inf
  return out


def history(settings, **changes):
  stops = np.full((3, 2), -1)
  for row, ids in enumerate(STOPS):
    stops[row, : len(ids)] = ids
  context = draft_context(TEXTS, 12, settings=settings, rubbish=4)
  return context.replace(prompt_length=jnp.array(PROMPTS), stop_ids=jnp.asarray(stops), **changes)


@jax.jit
def run(logits, history, paths):
  return processors.process(logits, history, paths)


@pytest.fixture(scope="module")
def drafted():
  """Logits and drafts of a tree in which tokens come again: on the way, in siblings, in the text."""
  rng = np.random.default_rng(0)
  return rng.normal(size=(3, 8, VOCAB)).astype(np.float32) * 2, rng.integers(0, 5, size=(3, 8)).astype(
    np.int32
  )


def way(tokens, row, node):
  return [int(tokens[row, i]) for i in TREE.paths[node][1 : TREE.depths[node] + 1]]


@pytest.mark.parametrize("dynamic", (False, True))
def test_i1_every_node_is_processed_along_its_own_path(drafted, dynamic):
  """Against loops, for each row and node of a branching tree, static and an array a row.

  Fails when a token on the way is counted twice or not at all, a sibling's is, or the prompt's is charged
  with presence and frequency.
  """
  logits, tokens = drafted
  tree = TREE
  if dynamic:
    tree = DynamicTree.from_parents(jnp.tile(jnp.array([TREE.parents], jnp.int32), (3, 1)), TREE.max_depth)
  settings = Settings.create(3, **FIELDS, logit_bias=BIAS)
  got = run(logits, history(settings), tree.path_tokens(jnp.asarray(tokens)))
  for row in range(3):
    for node in range(8):
      want = by_hand(logits[row, node], row, way(tokens, row, node))
      np.testing.assert_allclose(got.logits[row, node], want, atol=1e-5, err_msg=f"row {row} node {node}")
  assert not got.unusable.any()


def test_rows_without_settings_are_left_alone_to_the_bit(drafted):
  """Row 1 has nothing on while its neighbours have; and with nothing on anywhere all rows are raw."""
  logits, tokens = drafted
  paths = TREE.path_tokens(jnp.asarray(tokens))
  some = run(logits, history(Settings.create(3, **FIELDS, logit_bias=BIAS)), paths)
  none = run(logits, history(Settings.create(3)), paths)
  np.testing.assert_array_equal(some.logits[1], logits[1])
  np.testing.assert_array_equal(none.logits, logits)
  np.testing.assert_array_equal(none.top, logits.max(-1))


def test_drafts_that_are_no_tokens_do_no_harm(drafted):
  """Ids far outside the vocabulary on a path change that path's nodes only."""
  logits, tokens = drafted
  odd = tokens.copy()
  odd[:, 2] = (10**6, -7, VOCAB)
  settings = Settings.create(3, **FIELDS, logit_bias=BIAS)
  want = run(logits, history(settings), TREE.path_tokens(jnp.asarray(tokens))).logits
  got = run(logits, history(settings), TREE.path_tokens(jnp.asarray(odd))).logits
  elsewhere = np.array([node for node in range(8) if node not in (2, 5)])
  np.testing.assert_array_equal(got[:, elsewhere], want[:, elsewhere])


@pytest.mark.parametrize("bad", (np.nan, np.inf))
def test_errors_are_those_of_the_raw_logits(drafted, bad):
  """A bias, a penalty or a mask that covers NaN does not heal it. Fails when only the result is looked at."""
  logits = drafted[0].copy()
  logits[0, 3, 9] = logits[2, 5, 2] = bad  # ids that stop ids, hidden by min_new_tokens, cover
  logits[2, 1] = -np.inf
  want = np.zeros((3, 8), bool)
  want[0, 3] = want[2, 5] = want[2, 1] = True
  paths = jnp.full((3, 8, 1), -1)
  automaton = TokenAutomaton.create([[0] * (VOCAB - 2) + [-1, 0]])
  for settings in (Settings.create(3), Settings.create(3, **FIELDS, logit_bias=BIAS)):
    plain = run(logits, history(settings), paths)
    np.testing.assert_array_equal(plain.error, want)
    masked = run(logits, history(settings, processor=automaton, processor_state=jnp.zeros(3, int)), paths)
    np.testing.assert_array_equal(masked.error, want)
    assert not masked.complete.any()
    probs = np.asarray(plain.probs(Settings.create(3, temperature=1.0)))
    assert (probs[want] == 0).all() and np.isfinite(probs).all()


def test_a_processor_is_advanced_along_each_path(drafted):
  """States and masks of every node equal stepping through its path; a free row is not masked.

  Fails when a node gets its parent's state, or a neighbour's.
  """
  logits, tokens = drafted
  rng = np.random.default_rng(1)
  table = rng.integers(-1, 4, size=(4, VOCAB))
  table[2] = -1  # an end
  automaton = TokenAutomaton.create(table)
  begin = np.array([0, TokenAutomaton.FREE, 1])
  got = run(
    logits,
    history(Settings.create(3), processor=automaton, processor_state=jnp.asarray(begin, jnp.int32)),
    TREE.path_tokens(jnp.asarray(tokens)),
  )
  ends = 0
  for row in range(3):
    for node in range(8):
      state = begin[row]
      for token in way(tokens, row, node):
        if state >= 0:
          state = table[state, token]
          state = TokenAutomaton.DEAD if state < 0 else state
      assert got.processor_state[row, node] == state
      allowed = (
        np.ones(VOCAB, bool) if state == -1 else np.zeros(VOCAB, bool) if state < 0 else table[state] >= 0
      )
      np.testing.assert_array_equal(np.isfinite(got.logits[row, node]), allowed)
      assert got.complete[row, node] == (not allowed.any()) and not got.error[row, node]
      ends += not allowed.any()
  assert 0 < ends < 16


def test_bad_automata_are_refused():
  for bad, match in (([[0, 3]], "state 3"), ([0, 1], "shape"), ([[0.5]], "float"), ([], "shape")):
    with pytest.raises(ValueError, match=match):
      TokenAutomaton.create(bad)
  with pytest.raises(ValueError, match="masks 4 tokens; the vocabulary has 11"):
    state = dict(processor=TokenAutomaton.create([[0] * 4]), processor_state=jnp.zeros(3, int))
    run(jnp.zeros((3, 1, VOCAB)), history(Settings.create(3), **state), jnp.zeros((3, 1, 0), int))


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("repetition_penalty", 0.0),
    ("repetition_penalty", float("nan")),
    ("presence_penalty", 101),
    ("frequency_penalty", float("-inf")),
    ("min_new_tokens", -1),
    ("min_new_tokens", 1.5),
    ("logit_bias", {1: float("nan")}),
    ("logit_bias", {1: 2e4}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"a": 1.0}),
    ("logit_bias", [{1: 1.0}]),
    ("logit_bias", {i: 1.0 for i in range(65)}),
  ],
)
def test_g5_bad_settings_name_their_field(field, value):
  with pytest.raises(ValueError, match=field):
    Settings.create(2, **{field: value})
