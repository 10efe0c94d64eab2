"""Processing, drawing and noise, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import sampling
from specjax.sampling import Purpose, Settings
from specjax.testing import process


@jax.jit
def probs(logits, settings):
  return sampling.processed_probs(logits, sampling.peak(logits)[0], settings)


def test_processing_equals_the_numpy_oracle():
  """Rows of all settings in one batch. Fails for another order of temperature, top-k, top-p, min-p."""
  rng = np.random.default_rng(0)
  cases = [
    dict(temperature=t, top_k=k, top_p=p, min_p=m)
    for t in (0.5, 1.0, 1.7)
    for k, p, m in ((0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.1), (7, 0.7, 0.05), (1, 0.5, 0.5))
  ]
  logits = rng.normal(size=(len(cases), 2, 61)).astype(np.float32) * 3
  settings = Settings.create(len(cases), **{k: [case[k] for case in cases] for k in cases[0]})
  got = np.asarray(probs(logits, settings))
  for row, case in enumerate(cases):
    for node in range(2):
      np.testing.assert_allclose(
        got[row, node], process(logits[row, node], **case), atol=2e-6, err_msg=str(case)
      )


@pytest.mark.parametrize("spread", (0.01, 1.0, 4.0))
@pytest.mark.parametrize("ties", (False, True))
def test_cut_offs_anywhere_in_the_vocabulary(spread, ties):
  """V = 700, flat to peaked, cut-offs within and far beyond the most likely tokens: the kept set is exact.

  Fails when a cut-off beyond the head is taken from its end, when the search stops a token early, and when
  ties with the last are split.
  """
  cases = [
    dict(top_k=k, top_p=p, min_p=m)
    for k, p, m in ((5, 1, 0), (300, 1, 0), (128, 1, 0), (129, 1, 0), (0, 0.5, 0), (0, 0.99, 0))
    + ((400, 0.9, 0), (90, 0.9, 0.3), (0, 0.0, 0), (1, 1, 0), (700, 0.3, 0), (699, 1, 0))
  ]
  logits = np.random.default_rng(3).normal(size=(len(cases), 2, 700)) * spread
  logits = (np.round(logits, 1 if spread > 0.1 else 3) if ties else logits).astype(np.float32)
  settings = Settings.create(
    len(cases), temperature=0.8, **{k: [case[k] for case in cases] for k in cases[0]}
  )
  got = np.asarray(probs(logits, settings))
  for row, case in enumerate(cases):
    for node in range(2):
      want = process(logits[row, node], temperature=0.8, **case)
      np.testing.assert_array_equal(got[row, node] > 0, want > 0, err_msg=str(case))
      np.testing.assert_allclose(got[row, node], want, atol=2e-6, err_msg=str(case))


def test_g1_one_batch_with_all_temperatures():
  """T = [0, 1, .7, padding]: row 0 is one-hot at argmax, all finite; permuting rows permutes the result.

  Fails when the greedy marker is divided by, or seen by a neighbour.
  """
  logits = jnp.asarray(np.random.default_rng(1).normal(size=(4, 3, 61)), jnp.float32)
  settings = Settings.create(4, temperature=[0.0, 1.0, 0.7, 0.0], top_k=[0, 0, 4, 0])
  got = np.asarray(probs(logits, settings))
  assert np.isfinite(got).all()
  np.testing.assert_allclose(got.sum(-1), 1, atol=1e-6)
  np.testing.assert_array_equal(got[0], np.eye(61)[np.argmax(logits[0], -1)])
  order = np.array([2, 3, 1, 0])
  again = probs(logits[order], jax.tree.map(lambda x: x[order], settings))
  np.testing.assert_array_equal(again, got[order])


@pytest.mark.parametrize("temperature", (0.0, 1e-8))
def test_g2_zero_temperature_is_argmax(temperature):
  """Also with top-k, top-p and min-p set, on ties, and on logits as large as float32 has them."""
  logits = jnp.array([[[1.0, 3.0, 3.0, -jnp.inf]], [[3e38, -3e38, 0.0, 1.0]]])
  with jax.debug_nans(True):
    got = probs(logits, Settings.create(2, temperature=temperature, top_k=2, top_p=0.5, min_p=0.9))
  np.testing.assert_array_equal(np.argmax(got[:, 0], -1), [1, 0])
  np.testing.assert_array_equal(got.max(-1), 1)


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("top_p", float("nan")),
    ("top_p", -0.1),
    ("top_p", 2),
    ("top_k", -3),
    ("top_k", 2.5),
    ("temperature", -1),
    ("temperature", float("nan")),
    ("temperature", "hot"),
    ("min_p", 1.5),
    ("seed", -1),
    ("seed", 2**32),
    ("top_p", [0.5, float("nan")]),
    ("top_k", [1, 2, 3]),
  ],
)
def test_g5_bad_settings_name_their_field(field, value):
  with pytest.raises(ValueError, match=field):
    Settings.create(2, **{field: value})


def test_draws_follow_the_weights():
  """u on a fine grid: shares equal the weights, order is by id, zero weights never. Spans several blocks.

  Fails when block sums and the walk inside a block disagree about where a block begins.
  """
  rng = np.random.default_rng(2)
  weights = rng.random(700) * (rng.random(700) > 0.5)
  grid = (np.arange(20000) + 0.5) / 20000
  got = np.asarray(
    jax.jit(sampling.draw)(jnp.broadcast_to(jnp.asarray(weights, jnp.float32), (20000, 700)), grid)
  )
  assert (np.diff(got) >= 0).all() and (weights[got] > 0).all()
  np.testing.assert_allclose(np.bincount(got, minlength=700) / 20000, weights / weights.sum(), atol=2e-4)


@pytest.mark.parametrize("u", (0.0, np.nextafter(np.float32(1), np.float32(0))))
def test_draws_at_the_ends_of_the_noise(u):
  """u = 0 and the largest u below 1 hit tokens with weight. Fails for >= instead of >, or without a guard."""
  weights = jnp.array([[0.0, 0.25, 0.75, 0.0], [0.0, 0.0, 0.0, 1e-30], [3.0, 0.0, 0.0, 0.0]])
  got = sampling.draw(weights, jnp.full(3, u, jnp.float32))
  np.testing.assert_array_equal(got, [1 if u == 0 else 2, 3, 0])


def test_padding_is_never_drawn():
  """Padding ids with the largest logit have probability 0 (case L1)."""
  logits = jnp.zeros((1, 1, 12)).at[..., 10:].set(50.0)
  masked = sampling.mask_padding(logits, 10)
  got = probs(masked, Settings.create(1, temperature=1.0))
  np.testing.assert_allclose(got[0, 0], np.r_[np.full(10, 0.1), 0, 0], atol=1e-6)


def test_peak_marks_unusable_rows():
  """NaN, +inf and all -inf are errors; a -inf here and there is not."""
  inf = jnp.inf
  rows = jnp.array([[0, jnp.nan, 1], [0, inf, 1], [-inf, -inf, -inf], [-inf, 2, 1], [3e38, 0, 0]])
  np.testing.assert_array_equal(sampling.peak(rows)[1], [True, True, True, False, False])


def test_f7_no_purpose_position_or_node_shares_noise():
  """Each (seed, purpose, position, node) is another number, also with fields swapped.

  Fails when two of them are added instead of folded in one after the other.
  """
  seeds = jnp.arange(4, dtype=jnp.uint32)
  at = jnp.broadcast_to(jnp.arange(8), (4, 8))
  draws = [sampling.uniform(seeds, purpose, at, node) for purpose in Purpose for node in range(8)]
  values = np.concatenate([np.asarray(d).ravel() for d in draws])
  # 1024 draws of 2^23 values: .06 collisions expected.
  assert len(np.unique(values)) >= values.size - 2
  assert values.min() >= 0 and values.max() < 1


def test_noise_is_uniform_and_uncorrelated():
  """Mean, variance and neighbours' correlation of 2^14 draws within 4 standard errors."""
  u = np.asarray(
    sampling.uniform(jnp.arange(128, dtype=jnp.uint32), Purpose.TARGET, jnp.tile(jnp.arange(128), (128, 1)))
  )
  n = u.size
  assert abs(u.mean() - 0.5) < 4 * np.sqrt(1 / 12 / n)
  centred = u - 0.5
  for a, b in ((centred[1:], centred[:-1]), (centred[:, 1:], centred[:, :-1])):
    assert abs((a * b).mean()) < 4 / 12 / np.sqrt(n)
