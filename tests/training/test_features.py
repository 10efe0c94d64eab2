"""Recorded features against a forward of the whole text: ragged prompts, rows replaced midway."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decode
from specjax.sampling import Settings
from specjax.testing import tiny_model
from specjax.training.features import Recorder, features_of, usual_sizes, usual_taps
from specjax.verify import DrawAndFollow

TAPS = (2, 0, 1)
# Prompts of one chunk, of several, of one token; then two that take the places of rows that ended.
PROMPTS = ((5, 3, 9), tuple(range(1, 41)), (7,), tuple(range(20, 37)))
LATER = ((11, 12, 13, 14, 15, 16, 17, 18), (4,), (1,), (1,))
# The first two end early.
BUDGETS = (3, 2, 30, 30)
_forward = jax.jit(lambda model, tokens, cache: model(tokens, cache, taps=TAPS, logits=False).taps)


def direct(model, tokens):
  """float32 ``[T - 1, taps, D]``: one forward over the whole text, without the loop."""
  text = np.zeros((1, 96), np.int32)
  text[0, : len(tokens)] = tokens
  return np.asarray(_forward(model, jnp.asarray(text), model.init_cache(1, 96))[0, : len(tokens) - 1])


def config(drafter):
  return decode.DecodeConfig(
    drafter=drafter,
    rule=DrawAndFollow(),
    num_real_tokens=61,
    length_limit=96,
    prefill_widths=(16,),
    logprobs="off",
  )


def replaced_midway(drafter):
  """A state of four rows, two of which were replaced after five rounds."""
  model = tiny_model(0)
  weights, static = decode.Weights(model), config(drafter)
  settings = Settings.create(4, temperature=(0.0, 0.9, 0.9, 0.0), seed=[3, 4, 5, 6])
  state = decode.prefill(weights, static, PROMPTS, settings=settings, max_new_tokens=BUDGETS)
  state = decode.generate(weights, state, static, 5)
  later = decode.prefill(
    weights, static, LATER, settings=Settings.create(4, temperature=0.9, seed=[8, 9, 0, 0])
  )
  for row in (0, 1):
    assert state.finish[row] == decode.Finish.LENGTH
    state = decode.insert(state, row, later, row)
  return model, decode.generate(weights, state, static, 9)


def test_usual_sizes():
  """Of each number by itself, whatever a first token has. Fails for a mean of squares."""
  random = np.random.default_rng(0)
  wanted = np.array([[0.5, 3.0, 40.0], [1.0, 1.0, 1e-9]], np.float32)
  texts = [random.standard_normal((400, 2, 3)).astype(np.float32) * wanted for _ in range(4)]
  for text in texts:
    text[0] *= 1e4
  found = usual_sizes(texts)
  np.testing.assert_allclose(found[wanted > 1e-6], wanted[wanted > 1e-6], rtol=0.1)
  assert 1e-3 < found[1, 2] < 0.1


def test_recorded_rows_are_those_of_one_forward():
  """Fails when a chunk or a round is written at another row's length, or a replaced row keeps its old one."""
  recorder = Recorder(TAPS, 32, "float32")
  model, state = replaced_midway(recorder)
  for row in range(4):
    tokens = state.tokens[row, : int(state.length[row])].tolist()
    assert int(state.drafter.length[row]) == len(tokens) - 1
    found = recorder.read(state.drafter, row, len(tokens) - 1)
    assert found.shape == (len(tokens) - 1, len(TAPS), 32)
    np.testing.assert_allclose(found, direct(model, tokens), rtol=1e-5, atol=1e-5)


def test_features_of_texts_from_elsewhere():
  """More texts than a batch, ragged, one of a single token; bfloat16 is all that is lost."""
  model = tiny_model(0)
  texts = [PROMPTS[1], PROMPTS[2], (1, 2), PROMPTS[3], tuple(range(60))]
  found = list(features_of(model, texts, TAPS, length_limit=96, batch_size=2))
  assert [len(of_text) for of_text in found] == [len(text) - 1 for text in texts]
  for text, of_text in zip(texts, found, strict=True):
    assert of_text.dtype == jnp.bfloat16
    if len(text) > 1:
      np.testing.assert_allclose(of_text.astype(np.float32), direct(model, text), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize(
  ("layers", "taps"), [(30, (2, 15, 27, 30)), (6, (2, 3, 3, 6)), (2, (2, 1, 0, 2)), (1, (1, 0, 0, 1))]
)
def test_usual_taps(layers, taps):
  assert usual_taps(layers) == taps


@pytest.mark.parametrize(
  ("fields", "words"), [({"taps": ()}, "taps"), ({"taps": (-1,)}, "taps"), ({"width": 0}, "width = 0")]
)
def test_recorders_that_make_no_sense(fields, words):
  with pytest.raises(ValueError, match=words):
    Recorder(**{"taps": (0,), "width": 8, **fields})
