"""Forwards over packed rows against the decoder's own, sample by sample."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.testing import tiny_model
from specjax.training.batches import Packed
from specjax.training.packed import hidden_states
from tests.training.texts import random_texts

LENGTHS = [9, 14, 5, 11, 12]
KINDS = {"plain": {}, "qwen_window": dict(qkv_bias=True, qk_norm=True, sliding_window=4)}


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_are_the_samples_alone(kind):
  """Hidden states of all taps. Fails when attention crosses segments."""
  model, texts = tiny_model(3, **KINDS[kind]), random_texts(1, LENGTHS)
  alone = jax.jit(lambda model, x: model(x, model.init_cache(len(LENGTHS), 16), taps=(0, 1, 2), logits=False))
  expected = np.asarray(alone(model, jnp.asarray(texts.padded(16))).taps)
  packed = Packed(texts, range(5), row_length=32)
  batch = packed.read(range(packed.num_rows))
  hidden, taps = jax.jit(lambda model, batch: hidden_states(model, batch, (0, 1, 2)))(model, batch)
  assert np.isfinite(taps).all() and any(len(packed.samples_of(b)) > 1 for b in range(packed.num_rows))
  np.testing.assert_array_equal(taps[:, :, 2], hidden)
  for b in range(packed.num_rows):
    for segment, i in enumerate(packed.samples_of(b), start=1):
      found = np.asarray(taps)[b][batch.segments[b] == segment]
      np.testing.assert_allclose(found, expected[i, : len(found)], atol=1e-5)
