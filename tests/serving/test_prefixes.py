"""Kept prefixes: what is copied is what would have been read, the drafter's state included (case Q4)."""

import jax
import numpy as np
import pytest

from specjax import cache as kv
from specjax.decode import Weights
from specjax.drafters import DRAFTERS
from specjax.serving.executors import DraftExecutor, VerifyExecutor
from specjax.serving.kv_manager import KVManager
from specjax.serving.requests import Request
from specjax.serving.sampler import Sampler
from specjax.testing import poison
from tests import contract, heads

TEXTS = np.random.default_rng(1).integers(0, contract.VOCAB, (2, 40)).astype(np.int32)
FITTED = (contract.target(), TEXTS, (40, 40))
SIZES = dict(vocab_size=contract.VOCAB, num_real_tokens=contract.VOCAB, max_length=512)


# A drafter of each name, with heads that were fitted to texts of no meaning.
MADE = {
  "none": lambda: contract.DRAFTERS["none"].make(),
  "prompt_lookup": lambda: contract.DRAFTERS["prompt_lookup"].make(),
  "two_model": lambda: contract.two_model(contract.draft(), "top_k"),
  "eagle": lambda: (contract.make_drafter("eagle", window=4, taps=(2,), **SIZES), heads.eagle1(*FITTED)),
  "eagle3": lambda: (contract.eagle3_drafter(), heads.eagle3(*FITTED)),
  "medusa": lambda: (
    contract.make_drafter(
      "medusa", window=3, vocab_size=contract.VOCAB, num_real_tokens=contract.VOCAB, num_heads=3, taps=(2,)
    ),
    heads.medusa(*FITTED),
  ),
  "block": lambda: (contract.block_drafter(), heads.block(*FITTED)),
  "early_exit": lambda: (contract.early_exit_drafter(), heads.early_exit(*FITTED)),
  "self_speculation": lambda: contract.prefix(),
  "from_outside": lambda: contract.DRAFTERS["from_outside"].make(),
}


def test_every_drafter_is_here():
  assert set(MADE) == {*DRAFTERS, "from_outside"}


class Rows:
  """A KV manager, and texts that are read in it without a scheduler."""

  def __init__(self, name, kept=2, slots=2):
    drafter, weights = MADE[name]()
    config = DraftExecutor(contract.config(drafter, "draw_and_follow")).config
    self.weights = Weights(contract.target(), weights)
    self.config, self.sampler = config, Sampler(config, None)
    self.kv = KVManager(self.weights, config, sizes=(slots,), kept=kept)
    self.verify = VerifyExecutor(self.weights, config, 1)

  def read(self, text, row=0, *, place=True):
    """Reads a text behind its longest kept prefix. How much was copied, and the lane it was read in."""
    text = tuple(map(int, text))
    request = Request(id="x", prompt=text, max_new_tokens=1)
    prefix = self.kv.lookup(request, text)
    cached = 0 if prefix is None else prefix.tokens
    self.kv.admit(row, text, self.sampler.inputs(request, text), None, prefix, cached)
    for start in range(cached, len(text) - 1, 16):
      self.verify.read(self.kv.lane(row), start, min(16, len(text) - 1 - start), 16)
    lane = self.kv.lane(row)
    if place:
      self.kv.place(row)
      self.kv.evict(row)
    return cached, lane


def seen(lane):
  """All that a lane knows but keys and values that no length counts."""

  def valid(node):
    if not isinstance(node, kv.KVCache):
      return node
    cut = lambda x: np.where((np.arange(x.shape[2]) < np.asarray(node.length)[0])[:, None], x, 0)
    return node.replace(k=tuple(map(cut, node.k)), v=tuple(map(cut, node.v)))

  return jax.tree.map(valid, lane.state, is_leaf=lambda node: isinstance(node, kv.KVCache))


LONGER = {"two_model", "eagle", "block", "early_exit"}


@pytest.mark.parametrize(
  "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONGER else name for name in MADE]
)
def test_q4_a_copied_prefix_is_what_was_read(name):
  """Texts that share 37 tokens: 32 are copied, over NaN, and all of the row's state is that of one read anew.

  Fails when the drafter's rows are not copied, or what it knows besides rows is of another length.
  """
  shared, rows, fresh = TEXTS[0, :37], Rows(name), Rows(name, kept=0)
  first, second = (np.concatenate([shared, own]) for own in (TEXTS[1, :9], TEXTS[1, 20:33]))
  assert rows.read(first)[0] == 0
  spare = rows.kv._spare
  spare[:] = [poison(state) for state in spare]
  cached, lane = rows.read(second)
  assert cached == 32
  assert fresh.read(second)[0] == 0  # a lane that was used before, with other things in it
  cached, expected = fresh.read(second)
  assert cached == 0
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), seen(lane), seen(expected))


def test_what_is_kept_and_what_is_found():
  """The longest prefix that ends with a chunk; the whole of a text that was read before; the newest lanes.

  Fails when a prefix is found whose tokens differ, when one is given up that is going to be copied, or when
  lanes pile up.
  """
  rows = Rows("none", kept=2, slots=4)
  text = [*map(int, TEXTS[0]), *map(int, TEXTS[1])]
  found = lambda text: getattr(rows.kv.lookup(None, text), "tokens", 0)
  assert found(text) == 0
  rows.read(text[:40])  # rows 0 … 39: chunks end at 16, 32, 39
  assert found(text[:40]) == 39 and found(text[:60]) == 32 and found(text[:33]) == 32
  assert found(text[:32]) == 16 and found(text[:16]) == 0 and found([0, *text]) == 0
  other = [*text[:20], *text[50:70]]
  assert other[20] != text[20]
  assert rows.read(other)[0] == 16  # parts from the first in its second chunk
  assert found(other) == 39 and found(text[:40]) == 39
  assert rows.read(text[:60])[0] == 32  # begins as the first did: kept in its place
  assert found(text[:40]) == 39 and found(text[:60]) == 59 and found(other) == 39
  assert len(rows.kv._kept) == 2 and len(rows.kv._spare) <= 2
  # A prefix that a row will copy stays, however many come behind it.
  prefix = rows.kv.lookup(None, text[:60])
  request = Request(id="x", prompt=text[:60], max_new_tokens=1)
  rows.kv.admit(3, request.prompt, rows.sampler.inputs(request, request.prompt), None, prefix, 59)
  for start in (3, 7, 11):
    rows.read(text[start:])
  assert found(text[:60]) == 59
  rows.kv.place(3)
  state, at = rows.kv.state, rows.kv.at(3)
  assert int(state.cache.length[at]) == 59 and int(state.length[at]) == 60
  for start in (13, 17):
    rows.read(text[start:])
  assert found(text[:60]) == 0 and len(rows.kv._kept) == 2 and len(rows.kv._spare) <= 2
  rows.read((1, 2, 3))
  assert found((1, 2, 3, 4)) == 0  # shorter than a chunk: not worth a lane


def test_a_row_that_goes_before_it_is_read():
  """Its lane and its hold on a prefix are given back. Fails when either is lost."""
  rows = Rows("none", kept=1)
  rows.read(TEXTS[0])
  assert rows.kv.take_gone()[0]
  for _ in range(3):
    assert rows.read((*TEXTS[0][:36], 1, 2, 3, 4), place=False)[0] == 32
    rows.kv.evict(0)
  (kept,) = rows.kv._kept.values()
  assert kept.users == 0 and len(rows.kv._spare) == 1 and not rows.kv.take_gone()[0]
