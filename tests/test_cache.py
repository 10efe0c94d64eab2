"""The KV buffer: writes that fit or raise, commits of a path, rollback by number."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import cache as kv
from specjax.base import Target
from specjax.testing import TableTarget, tiny_model


def numbered(batch=1, slots=8):
  """A buffer whose slot s holds s + 1."""
  return jnp.broadcast_to(jnp.arange(1.0, slots + 1)[None, None, :, None], (batch, 1, slots, 1))


@pytest.mark.parametrize("batch", (1, 2))
def test_b1_a_block_past_the_end_raises(batch):
  """8 slots, 4 rows at 6: XLA would clamp the start to 4 and destroy rows 4 and 5 without a word."""
  rows = jnp.full((batch, 1, 4, 1), 99.0)
  buffer = numbered(batch)
  with pytest.raises(ValueError, match=r"4 rows at slot 6.*8 slots"):
    kv.write_rows(buffer, rows, jnp.full((batch,), 6))
  np.testing.assert_array_equal(buffer[0, 0, :, 0], np.arange(1, 9))
  written = kv.write_rows(buffer, rows, jnp.full((batch,), 4))  # the last place where it fits
  np.testing.assert_array_equal(written[-1, 0, :, 0], [1, 2, 3, 4, 99, 99, 99, 99])


def test_rows_are_written_where_each_row_ends():
  """Fails when one start serves the whole batch (case J3)."""
  rows = -jnp.arange(1.0, 7).reshape(2, 1, 3, 1)
  out = kv.write_rows(numbered(2), rows, jnp.array([1, 4]))
  np.testing.assert_array_equal(out[:, 0, :, 0], [[1, -1, -2, -3, 5, 6, 7, 8], [1, 2, 3, 4, -4, -5, -6, 8]])


def test_commit_gathers_the_path():
  """Per-row paths of scratch rows become contiguous (case Q1); entries past the path do no harm.

  Fails when rows are gathered in place while they are overwritten, or from slot 0.
  """
  cache = kv.KVCache(k=(numbered(2),), v=(-numbered(2),), length=jnp.array([2, 3]))
  out = kv.commit(cache, jnp.array([[0, 2, 4], [0, 3, 0]]), jnp.array([3, 2]), scratch=5)
  np.testing.assert_array_equal(out.length, [5, 5])
  np.testing.assert_array_equal(out.k[0][0, 0, :5, 0], [1, 2, 3, 5, 7])
  np.testing.assert_array_equal(out.v[0][1, 0, :5, 0], [-1, -2, -3, -4, -7])


def test_rollback_is_a_number():
  """Nothing but the length changes, and it never grows."""
  cache = kv.KVCache(k=(numbered(2),), v=(numbered(2),), length=jnp.array([5, 2]))
  out = kv.rollback(cache, jnp.array([3, 4]))
  np.testing.assert_array_equal(out.length, [3, 2])
  assert out.k[0] is cache.k[0]


def test_a6_every_state_a_target_keeps_can_be_rolled_back():
  """A recurrent state could not be: the protocol leaves no place for one.

  `Target.init_cache` returns a `KVCache`, rows by position and one length; a forward returns the same
  cache, and the loop donates and rolls back nothing else. A drafter's own state is opaque, but it is
  told only of committed tokens (`extend`), so it needs no rollback. Fails when a cache grows a leaf
  that is not indexed by position.
  """
  for target in (tiny_model(0), TableTarget.random(0, 5)):
    assert isinstance(target, Target)
    cache = target.init_cache(2, 16)
    assert isinstance(cache, kv.KVCache)
    assert all(x.shape[2] == cache.capacity for x in (*cache.k, *cache.v))
    assert set(vars(cache)) == {"k", "v", "length"}
