"""Prompt lookup: which occurrence is copied, and what is not proposed."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.drafters import PromptLookup
from specjax.drafters.prompt_lookup import merge
from specjax.testing import draft_context

CAPACITY = 24


@jax.jit
def _propose(context):
  return PromptLookup(window=4, min_ngram=1, max_ngram=2).propose(None, (), context, None)[0]


def propose(*texts, window=None):
  """Valid drafts of each text, behind which the buffer holds rubbish that would match."""
  proposal = _propose(draft_context(texts, CAPACITY, rubbish=1))
  return [
    row[1:][valid[1:]].tolist() for row, valid in zip(np.asarray(proposal.tokens), np.asarray(proposal.valid))
  ]


def by_hand(text, window=4, max_ngram=2, min_ngram=1):
  """The documented rule by loops: longest suffix, then latest; the copy runs on into itself."""
  best = None
  for end in range(len(text) - 1):
    length = 0
    while length < min(max_ngram, end + 1) and text[end - length] == text[len(text) - 1 - length]:
      length += 1
    if length >= min_ngram and (best is None or length >= best[0]):
      best = (length, end)
  if best is None:
    return []
  out = list(text)
  for i in range(window):
    out.append(out[best[1] + 1 + i])
  return out[len(text) :]


def test_k3_the_latest_of_the_longest_matches():
  """[1, 2, 9, 1, 2, 8, 1, 2]: 8, the latest. The suffix never matches itself. Fails for leftmost."""
  assert propose([1, 2, 9, 1, 2, 8, 1, 2])[0] == [8, 1, 2, 8]
  # A longer match further back wins over a shorter one nearer.
  assert propose([1, 2, 9, 7, 2, 8, 1, 2])[0][0] == 9
  assert propose([5, 6, 7]) == [[]] and propose([5]) == [[]]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=18), min_size=3, max_size=3))
def test_equals_the_rule_by_hand(texts):
  """Small vocabularies make every kind of overlap. Fails when padding or another row is matched."""
  assert propose(*texts) == [by_hand(text) for text in texts]


def test_nothing_stands_before_the_text():
  """[1, 2, 1, 3, 0, 1]: of two single matches the latest, 3. Fails when padding before the first 1 is a 0."""
  assert propose([1, 2, 1, 3, 0, 1])[0][0] == 3


def test_empty_rows_propose_nothing():
  assert propose([], [4, 4])[0] == []


def trie(chains, nodes):
  """Paths of the merged chains by loops, in the order they come, at most ``nodes - 1`` of them."""
  paths = []
  for chain in chains:
    for depth in range(1, len(chain) + 1):
      if tuple(chain[:depth]) not in paths:
        paths.append(tuple(chain[:depth]))
  return paths[: nodes - 1]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
  st.lists(st.lists(st.integers(0, 2), min_size=12, max_size=12), min_size=2, max_size=2),
  st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=2, max_size=2),
)
def test_merged_chains_are_a_trie(numbers, found):
  """Four chains of three, some not found, ten nodes: what begins alike is one node, order decides.

  Fails when chains that differ early are merged later, or a node is kept whose parent was cut.
  """
  drafts = np.array(numbers).reshape(2, 4, 3)
  tokens, valid, parents = map(np.asarray, jax.jit(merge, static_argnums=2)(drafts, np.array(found), 10))
  for row in range(2):
    paths = {0: ()}
    for node in range(1, 10):
      if valid[row, node]:
        paths[node] = (*paths[parents[row, node]], int(tokens[row, node]))
    chains = [chain.tolist() for chain, is_there in zip(drafts[row], found[row]) if is_there]
    assert list(paths.values())[1:] == trie(chains, 10)


def test_a_tree_holds_what_followed_each_occurrence():
  """[1, 2, 9, 1, 2, 8, 1, 2]: both 9 and 8, the latest first; the chain is its first branch."""
  text = [1, 2, 9, 1, 2, 8, 1, 2]
  context = draft_context([text], 16, rubbish=1)
  drafter = PromptLookup(window=3, max_ngram=2, matches=4, nodes=6)
  proposal = drafter.propose(None, (), context, None)[0]
  assert proposal.tokens[0].tolist() == [2, 8, 1, 2, 9, 1]
  assert proposal.tree.parents[0].tolist() == [-1, 0, 1, 2, 0, 4]
  assert proposal.valid.all() and drafter.tree.num_nodes == 6


@pytest.mark.parametrize(
  "bad",
  (
    dict(window=0),
    dict(min_ngram=0),
    dict(min_ngram=3, max_ngram=2),
    dict(matches=0),
    dict(nodes=9),
    dict(nodes=5, matches=2),
    dict(nodes=200, matches=2),
  ),
)
def test_bad_options_name_themselves(bad):
  with pytest.raises(ValueError, match=next(iter(bad))):
    PromptLookup(**bad)
