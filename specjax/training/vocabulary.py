"""A draft vocabulary: the tokens a target writes most."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from specjax.training.batches import Samples


def token_counts(dataset: Samples, indices: Iterable[int], vocab_size: int) -> np.ndarray:
  """How often each token is learned in some samples: int64 ``[V]``.

  Raises:
    ValueError: a token outside of the vocabulary.
  """
  counts = np.zeros(vocab_size, np.int64)
  for i in map(int, indices):
    sample = dataset[i]
    written = sample.tokens[sample.mask]
    if written.size and not 0 <= written.min() <= written.max() < vocab_size:
      raise ValueError(
        f"sample {i} holds token {written.max()}; the target's vocabulary has {vocab_size} (ids from 0 on)"
      )
    counts += np.bincount(written, minlength=vocab_size)
  return counts


def draft_vocabulary(
  counts: np.ndarray, size: int, *, num_real_tokens: int, keep: Sequence[int] = ()
) -> np.ndarray:
  """The most frequent tokens, as ascending ids: int32 ``[size]``. Of equals the lower id.

  Args:
    counts: int ``[V]``.
    size: tokens to take.
    num_real_tokens: ids below are real; others are never taken.
    keep: ids that are in it whatever their counts, e.g. those that end an answer.

  Raises:
    ValueError: more tokens than are real, or fewer than must be kept.
  """
  keep = sorted(set(keep))
  least = max(len(keep), 1)
  if not least <= size <= num_real_tokens:
    raise ValueError(
      f"draft_vocab = {size}; it must be in [{least}, {num_real_tokens}] ({len(keep)} ids are kept)"
    )
  if keep and not 0 <= keep[0] <= keep[-1] < num_real_tokens:
    raise ValueError(
      f"keep holds {keep[0] if keep[0] < 0 else keep[-1]}; ids are in [0, {num_real_tokens - 1}]"
    )
  rank = counts[:num_real_tokens].astype(np.float64)
  rank[keep] = np.inf
  chosen = np.argsort(-rank, kind="stable")[:size]
  return np.sort(chosen).astype(np.int32)


def coverage(counts: np.ndarray, ids: np.ndarray) -> float:
  """Share of the counted tokens that a draft vocabulary has."""
  return float(counts[ids].sum() / max(counts.sum(), 1))
