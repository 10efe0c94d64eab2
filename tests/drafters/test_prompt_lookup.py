"""Prompt lookup: which occurrence is copied, and what is not proposed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.base import DraftContext
from specjax.drafters import PromptLookup
from specjax.sampling import Settings

CAPACITY = 24


@jax.jit
def _propose(tokens, length):
  batch = tokens.shape[0]
  root = jnp.take_along_axis(tokens, jnp.maximum(length - 1, 0)[:, None], axis=1)[:, 0]
  context = DraftContext(tokens, length, root, length > 0, Settings.create(1))
  drafter = PromptLookup(window=4, min_ngram=1, max_ngram=2)
  return drafter.propose(None, drafter.init(None, batch, CAPACITY), context, None)[0]


def propose(*texts, window=None):
  """Valid drafts of each text, behind which the buffer holds rubbish that would match."""
  tokens = np.full((len(texts), CAPACITY), 1, np.int32)
  for row, text in enumerate(texts):
    tokens[row, : len(text)] = text
  proposal = _propose(tokens, np.array([len(text) for text in texts], np.int32))
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


def test_empty_rows_propose_nothing():
  assert propose([], [4, 4])[0] == []


@pytest.mark.parametrize("bad", (dict(window=0), dict(min_ngram=0), dict(min_ngram=3, max_ngram=2)))
def test_bad_options_name_themselves(bad):
  with pytest.raises(ValueError, match=next(iter(bad))):
    PromptLookup(**bad)
