"""Draft vocabularies: the most frequent tokens, ascending, with what must be in them."""

import numpy as np
import pytest

from specjax.training import vocabulary
from tests.training.texts import Text, Texts


def test_counts_only_what_is_learned():
  samples = [Text(np.array([1, 2, 2, 3]), np.array([False, True, True, True]))] * 2
  np.testing.assert_array_equal(vocabulary.token_counts(Texts(samples), [0, 1], 5), [0, 0, 4, 2, 0])
  np.testing.assert_array_equal(vocabulary.token_counts(Texts(samples), [1], 5), [0, 0, 2, 1, 0])


def test_most_frequent_ascending_and_ties_by_id():
  counts = np.array([1, 5, 0, 5, 2, 2, 9])
  ids = vocabulary.draft_vocabulary(counts, 4, num_real_tokens=7)
  assert ids.dtype == np.int32 and ids.tolist() == [1, 3, 4, 6]
  assert vocabulary.coverage(counts, ids) == 21 / 24


def test_kept_and_padding_ids():
  """An id that ends answers is in it though it was never counted; padding is not, though it was."""
  counts = np.array([0, 5, 4, 3, 9])
  assert vocabulary.draft_vocabulary(counts, 2, num_real_tokens=4, keep=(0,)).tolist() == [0, 1]
  assert vocabulary.draft_vocabulary(counts, 4, num_real_tokens=4).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
  ("size", "keep", "words"),
  [
    (0, (), "draft_vocab = 0"),
    (6, (), "draft_vocab = 6"),
    (1, (1, 2), "2 ids are kept"),
    (2, (7,), "holds 7"),
  ],
)
def test_bad_values_are_named(size, keep, words):
  with pytest.raises(ValueError, match=words):
    vocabulary.draft_vocabulary(np.ones(5), size, num_real_tokens=5, keep=keep)


def test_tokens_outside_of_the_vocabulary():
  samples = Texts([Text(np.array([1, 7]), np.array([True, True]))])
  with pytest.raises(ValueError, match="sample 0 holds token 7"):
    vocabulary.token_counts(samples, [0], 5)
