"""Checks on a running state: are the valid cache rows right, and is nothing else read?"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax import cache as kv
from specjax.decode import DecodeState, RowResult

_NO_TOKEN = 1_000_000


@functools.partial(jax.jit, donate_argnames="tree")
def poison(tree, value=jnp.nan):
  """Every slot of every `KVCache` in ``tree`` that holds no valid row is set to ``value``.

  In a `DecodeState` the tokens behind the committed ones become an id that does not exist.
  """

  def one(node):
    if not isinstance(node, kv.KVCache):
      return node
    fill = lambda x: jnp.where((jnp.arange(x.shape[2]) >= node.length[:, None])[:, None, :, None], value, x)
    return node.replace(k=tuple(map(fill, node.k)), v=tuple(map(fill, node.v)))

  if isinstance(tree, DecodeState):
    behind = jnp.arange(tree.tokens.shape[1]) >= tree.length[:, None]
    tree = tree.replace(tokens=jnp.where(behind, _NO_TOKEN, tree.tokens))
  return jax.tree.map(one, tree, is_leaf=lambda node: isinstance(node, kv.KVCache))


@functools.partial(jax.jit, static_argnames="slots")
def fresh_cache(model, tokens, slots: int) -> kv.KVCache:
  """The cache of one forward over ``tokens [B, T]`` from nothing."""
  return model(tokens, model.init_cache(tokens.shape[0], slots), logits=False).cache


def assert_cache_rows(
  model, cache: kv.KVCache, state: DecodeState, *, width: int, atol: float = 1e-5
) -> None:
  """Valid rows of ``cache`` equal a fresh prefill of the committed tokens; at most n - 1 of them."""
  reference = fresh_cache(model, state.tokens[:, :width], cache.capacity)
  lengths, committed = np.asarray(cache.length), np.asarray(state.length)
  assert (lengths <= np.maximum(committed - 1, 0)).all(), (lengths, committed)
  assert committed.max() <= width, f"width = {width} is shorter than a row of {committed.max()}"
  for name in ("k", "v"):
    for layer, (got, want) in enumerate(zip(getattr(cache, name), getattr(reference, name), strict=True)):
      got, want = np.asarray(got), np.asarray(want)
      assert np.isfinite(want).all()
      for row, length in enumerate(lengths):
        np.testing.assert_allclose(
          got[row, :, :length],
          want[row, :, :length],
          atol=atol,
          rtol=0,
          err_msg=f"{name}, layer {layer}, row {row}",
        )


def accepted_differs(rows: list[RowResult]) -> bool:
  """Whether in some round two rows accepted different numbers of drafts."""
  accepted = [row.accepted for row in rows]
  return any(len(set(counts)) > 1 for counts in zip(*accepted, strict=False))


@jax.jit
def _logits(model, tokens):
  return model(tokens, model.init_cache(1, tokens.shape[1])).logits[0]


def teacher_forced(model, prompt, new) -> np.ndarray:
  """float32 ``[len(new), V]``: what plain decoding would have seen before each of the new tokens."""
  text = np.array([*prompt, *new], np.int32)
  return np.asarray(_logits(model, text[None]), np.float32)[len(prompt) - 1 : -1]


def first_difference(model, prompt, got, want) -> tuple[int, float] | None:
  """Where two continuations part, and by how much the model prefers ``want`` there (case N2).

  Returns:
    None if they are equal as far as the shorter goes; else the index among the new tokens and the
    margin, logit of ``want`` minus logit of ``got``. A tie has a margin of rounding size, an error
    has not.
  """
  for i, (a, b) in enumerate(zip(got, want, strict=False)):
    if a != b:
      logits = teacher_forced(model, prompt, [*want[:i], b])[-1]
      return i, float(logits[b] - logits[a])
  return None
