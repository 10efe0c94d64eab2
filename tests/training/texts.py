"""Small sets of samples for the tests of training, and the target's own text."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Text(NamedTuple):
  tokens: np.ndarray
  mask: np.ndarray


class Texts:
  """A list of samples, perhaps with features, as `training.batches.Samples` wants them."""

  def __init__(self, samples, features=None):
    self.samples, self._features = samples, features

  def __len__(self):
    return len(self.samples)

  def __getitem__(self, i):
    return self.samples[i]

  def features(self, i):
    return None if self._features is None else self._features[i]

  def padded(self, width: int) -> np.ndarray:
    """All tokens, ``[samples, width]``."""
    rows = np.zeros((len(self), width), np.int32)
    for row, sample in zip(rows, self.samples):
      row[: len(sample.tokens)] = sample.tokens
    return rows


def random_texts(seed: int, lengths, vocab: int = 61, prompt: int = 3) -> Texts:
  """Random tokens behind prompts of random lengths; the last sample has two answers."""
  rng = np.random.default_rng(seed)
  samples = []
  for length in lengths:
    mask = np.arange(length) >= rng.integers(1, prompt + 1)
    samples.append(Text(rng.integers(0, vocab, length).astype(np.int32), mask))
  middle = len(samples[-1].mask) // 2
  samples[-1].mask[middle : middle + 2] = False
  return Texts(samples)


def greedy_texts(target, prompts: np.ndarray, length: int) -> Texts:
  """What the target writes behind ``prompts [n, T]``, one token a forward of the whole row."""
  n, begin = prompts.shape
  tokens = np.zeros((n, length), np.int32)
  tokens[:, :begin] = prompts
  forward = jax.jit(lambda model, tokens: model(tokens, model.init_cache(n, length)).logits)
  for at in range(begin, length):
    logits = forward(target, jnp.asarray(tokens))
    tokens[:, at] = np.asarray(jnp.argmax(logits[:, at - 1], axis=-1))
  return Texts([Text(row, np.arange(length) >= begin) for row in tokens])
