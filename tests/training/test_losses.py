"""Losses: values by hand, gradients against finite differences in float64, masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.training import losses

# p = (1/2, 1/4, 1/4, 0), q = (1/4, 1/2, 1/8, 1/8).
P = np.array([0.5, 0.25, 0.25, 0.0])
LOGITS = np.log([0.25, 0.5, 0.125, 0.125])
BY_HAND = {
  "cross_entropy": 0.5 * np.log(4) + 0.25 * np.log(2) + 0.25 * np.log(8),
  "kl": 0.5 * np.log(2) + 0.25 * np.log(0.5) + 0.25 * np.log(2),
  "total_variation": 1 - (0.25 + 0.25 + 0.125),
  "log_acceptance": -np.log(0.625),
}


def softmax(logits):
  e = np.exp(logits - logits.max())
  return e / e.sum()


def in_float64(name, p, logits):
  """The formulas once more, without the package."""
  q = softmax(logits)
  shared = np.minimum(p, q).sum()
  inside = p > 0
  return {
    "cross_entropy": -(p * np.log(q)).sum(),
    "kl": (p[inside] * np.log(p[inside] / q[inside])).sum(),
    "total_variation": 1 - shared,
    "log_acceptance": -np.log(shared),
  }[name]


def test_every_loss_is_here():
  assert set(BY_HAND) == set(losses.LOSSES)


@pytest.mark.parametrize("name", BY_HAND)
def test_value_by_hand(name):
  """Fails on a sign, a missing entropy, a token with p = 0 that turns the sum into NaN."""
  value = losses.LOSSES[name](jnp.asarray(P, jnp.float32), jnp.asarray(LOGITS, jnp.float32))
  np.testing.assert_allclose(value, BY_HAND[name], rtol=1e-6)


@pytest.mark.parametrize("name", BY_HAND)
def test_zero_where_the_draft_is_right(name):
  """All but the cross-entropy, which is then the entropy of p."""
  p = jnp.asarray([0.1, 0.2, 0.3, 0.4], jnp.float32)
  least = -(p * jnp.log(p)).sum() if name == "cross_entropy" else 0.0
  np.testing.assert_allclose(losses.LOSSES[name](p, jnp.log(p) + 3.0), least, atol=1e-6)


@pytest.mark.parametrize("name", BY_HAND)
def test_gradient_is_that_of_the_formula(name):
  """Against central differences in float64. Fails when something is not differentiated, or p is."""
  rng = np.random.default_rng(0)
  for _ in range(3):
    p, logits = softmax(rng.normal(size=7) * 2), rng.normal(size=7)
    loss = lambda p, logits, name=name: losses.LOSSES[name](p, logits)
    args = jnp.asarray(p, jnp.float32), jnp.asarray(logits, jnp.float32)
    of_p, gradient = jax.grad(loss, argnums=(0, 1))(*args)
    step = 1e-6 * np.eye(7)
    ups = [in_float64(name, p, logits + h) for h in step]
    downs = [in_float64(name, p, logits - h) for h in step]
    np.testing.assert_allclose(gradient, (np.array(ups) - downs) / 2e-6, atol=2e-6)
    np.testing.assert_array_equal(of_p, 0)


def test_kl_and_cross_entropy_have_one_gradient():
  """q − p, since the entropy of p is constant."""
  p, logits = jnp.asarray(P, jnp.float32), jnp.asarray(LOGITS + 1, jnp.float32)
  gradients = [jax.grad(loss, argnums=1)(p, logits) for loss in (losses.kl, losses.cross_entropy)]
  np.testing.assert_allclose(gradients[0], gradients[1], atol=1e-7)
  np.testing.assert_allclose(gradients[0], jax.nn.softmax(logits) - p, atol=1e-7)


def test_rejected_for_sure_is_finite():
  """Nothing shared: the logarithm is cut, and its gradient is not NaN."""
  p, logits = jnp.asarray([1.0, 0.0]), jnp.asarray([-500.0, 500.0])
  value, gradient = jax.value_and_grad(losses.log_acceptance, argnums=1)(p, logits)
  assert np.isfinite(value) and np.isfinite(gradient).all()


def test_token_cross_entropy_is_that_of_a_point():
  logits = jnp.asarray(np.random.default_rng(1).normal(size=(3, 5)), jnp.float32)
  index = jnp.asarray([4, 0, 2])
  point = jax.nn.one_hot(index, 5)
  np.testing.assert_allclose(
    losses.token_cross_entropy(index, logits), losses.cross_entropy(point, logits), atol=1e-6
  )


def test_masked_sum_does_not_read_what_is_masked():
  """NaN there stays there, in the gradient, too."""
  values, counts = jnp.asarray([1.0, jnp.nan, 3.0]), jnp.asarray([True, False, True])
  assert losses.masked_sum(values, counts) == 4.0
  np.testing.assert_array_equal(jax.grad(losses.masked_sum)(values, counts), [1.0, 0.0, 1.0])
