"""What Pallas's interpreters must do for the other tests here to mean anything: runs first, knows no kernel.

A toolchain that fails here explains every failure behind it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu

# How each kernel is interpreted, as in the package.
INTERPRETERS = {"tpu": pltpu.InterpretParams(), "gpu": True}


@jax.jit
def load_from_3(x):
  """Eight numbers from offset 3 on, -1 for those past the end."""

  def body(x, out):
    index = 3 + jnp.arange(8)
    out[...] = plgpu.load(x.at[index], mask=index < 8, other=-1)

  return pl.pallas_call(body, out_shape=x, interpret=True)(x)


def test_d4_a_masked_load_past_the_end_gives_the_fill():
  """3, 4, 5, 6, 7, -1, -1, -1, as on a device. Fails when the interpreter shifts a load that does not fit.

  The last line is that fault: XLA's slice starts at 0 in place of 3.
  """
  x = jnp.arange(8)
  np.testing.assert_array_equal(load_from_3(x), [3, 4, 5, 6, 7, -1, -1, -1])
  assert jax.lax.dynamic_slice(x, (3,), (8,)).tolist() == list(range(8))


@functools.partial(jax.jit, static_argnums=(1, 2))
def copied(x, blocks, interpreter):
  """A kernel that copies, one block of the last axis a step; two steps over the first."""
  rows, columns = x.shape[0] // 2, x.shape[1] // blocks
  spec = pl.BlockSpec((rows, columns), lambda i, j: (i, j))

  def body(x, out):
    out[...] = x[...]

  call = pl.pallas_call(
    body,
    out_shape=x,
    grid=(2, blocks),
    in_specs=[spec],
    out_specs=spec,
    interpret=INTERPRETERS[interpreter],
  )
  return call(x)


@pytest.mark.parametrize("interpreter", INTERPRETERS)
@pytest.mark.parametrize("blocks", (2, 3, 4))
def test_d5_a_copy_in_blocks_is_its_input(blocks, interpreter):
  """2, 3 and 4 blocks of 128 on the last axis. Fails when blocks behind the second are never written.

  Memory that nobody writes is NaN in the TPU interpreter, so a block left out is seen.
  """
  x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 128 * blocks)), jnp.float32)
  np.testing.assert_array_equal(copied(x, blocks, interpreter), x)
