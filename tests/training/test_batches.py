"""Packing: every token once, nothing crosses samples, an order that the step alone decides."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from specjax.training.batches import HELD_OUT_SHARE, Order, Packed, chain_counts, split
from tests.training.texts import Text, Texts, random_texts


def numbered(lengths, prompt=2) -> Texts:
  """Samples whose tokens are all different, so that each can be found again; features are the tokens."""
  ends = np.cumsum(lengths)
  tokens = [np.arange(end - length, end, dtype=np.int32) for end, length in zip(ends, lengths)]
  samples = [Text(row, np.arange(len(row)) >= prompt) for row in tokens]
  return Texts(samples, [np.stack([row, -row], axis=1)[..., None].astype(np.float32) for row in tokens])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(3, 40), min_size=1, max_size=30), st.integers(8, 24), st.integers(0, 3))
def test_every_token_once(lengths, row_length, seed):
  """Fails when a sample is lost, packed twice, or cut where it did not have to be."""
  texts = numbered(lengths)
  packed = Packed(texts, range(len(lengths)), row_length=row_length, seed=seed, columns=(1,))
  batch = packed.read(range(packed.num_rows))
  kept = [sample.tokens[:row_length] for sample in texts.samples]
  assert sorted(batch.tokens[batch.segments > 0]) == sorted(np.concatenate(kept))
  assert packed.row_tokens.tolist() == (batch.segments > 0).sum(axis=1).tolist()
  learned = np.concatenate([s.tokens[:row_length][s.mask[:row_length]] for s in texts.samples])
  places = batch.counted
  assert sorted(np.take_along_axis(batch.tokens, places, 1)[places >= 0]) == sorted(learned)
  assert packed.stats["cut_samples"] == sum(length > row_length for length in lengths)
  assert packed.stats["cut_tokens"] == sum(max(length - row_length, 0) for length in lengths)
  assert packed.stats["learned"] == len(learned) and packed.width <= row_length
  # Segments and positions belong to their samples, and features lie beside their tokens.
  for b in range(packed.num_rows):
    for segment, i in enumerate(packed.samples_of(b), start=1):
      inside = batch.segments[b] == segment
      assert batch.tokens[b][inside].tolist() == kept[i].tolist()
      assert batch.positions[b][inside].tolist() == list(range(len(kept[i])))
      assert batch.taps[b, inside, 0, 0].tolist() == (-kept[i]).tolist()
  assert not batch.taps[batch.segments == 0].any()
  ascending = np.diff(np.where(places < 0, 10**6, places), axis=1)
  assert (ascending[places[:, :-1] >= 0] > 0).all()


def test_rows_are_well_filled():
  """First fit over open rows leaves little of a row empty. Fails when samples are packed one a row."""
  lengths = np.random.default_rng(0).integers(20, 200, 300)
  packed = Packed(numbered(lengths), range(300), row_length=512)
  assert packed.stats["tokens"] == lengths.sum()
  assert packed.num_rows <= 1.06 * lengths.sum() / 512


def test_a_sample_without_a_learned_token_is_left_out():
  texts = numbered([10, 10, 30])
  texts.samples[1].mask[:] = False
  texts.samples[2].mask[:20] = False  # what is cut off does not count
  packed = Packed(texts, range(3), row_length=16)
  assert packed.stats["empty_samples"] == 2 and packed.stats["samples"] == 1
  with pytest.raises(ValueError, match="none of 1 samples"):
    Packed(texts, [1], row_length=16)


def test_the_first_token_is_never_learned():
  """Nothing stands before it that could draft it."""
  texts = Texts([Text(np.array([5, 6, 7]), np.ones(3, bool))])
  assert Packed(texts, [0], row_length=8).read([0]).counted[0].tolist() == [1, 2, -1, -1, -1, -1, -1, -1]


def test_context_may_be_learned_as_well():
  """Fails when only answers are counted, or more than what is left of a sample that is cut."""
  texts = Texts([Text(np.arange(9), np.array([0, 0, 0, 0, 1, 1, 1, 1, 1], bool))])
  read = lambda **options: Packed(texts, [0], row_length=6, **options).read([0]).counted[0].tolist()
  assert read() == [4, 5, -1, -1, -1, -1]
  assert read(context=True) == [1, 2, 3, 4, 5, -1]


def test_empty_rows_and_missing_features():
  packed = Packed(random_texts(0, [9, 9]), [0, 1], row_length=16, columns=(0,))
  with pytest.raises(ValueError, match="has no recorded features"):
    packed.read([0])
  packed = Packed(random_texts(0, [9, 9]), [0, 1], row_length=32)
  batch = packed.read([0, -1])
  assert batch.segments[0].any() and not batch.segments[1].any() and (batch.counted[1] == -1).all()
  assert batch.taps is None


def test_features_may_lack_the_last_position():
  texts = numbered([6])
  texts._features[0] = texts._features[0][:-1]
  batch = Packed(texts, [0], row_length=8, columns=(0,)).read([0])
  assert batch.taps[0, :, 0, 0].tolist() == [0, 1, 2, 3, 4, 0, 0, 0]


def test_chains_end_with_their_sample_and_their_answer():
  """By hand: two samples in a row, the first with a gap in what is learned."""
  first = Text(np.arange(8), np.array([0, 1, 1, 1, 0, 1, 1, 0], bool))
  second = Text(np.arange(4), np.array([0, 1, 1, 1], bool))
  packed = Packed(Texts([first, second]), [0, 1], row_length=12)
  batch = packed.read([0])
  start = 0 if packed.samples_of(0) == (0, 1) else 4
  other = 8 - 2 * start
  chosen = {d: {} for d in range(3)}
  for lag in (0, 1):
    for d in range(3):
      counts = np.asarray(chain_counts(batch, d, lag))[0]
      chosen[d][lag] = set(batch.counted[0, : len(counts)][counts].tolist())
  at = lambda *places: {start + place for place in places}
  behind = lambda *places: {other + place for place in places}
  assert chosen[0] == {0: at(1, 2, 3, 5, 6) | behind(1, 2, 3), 1: at(2, 3, 5, 6) | behind(2, 3)}
  assert chosen[1] == {0: at(1, 2, 5) | behind(1, 2), 1: at(2, 5) | behind(2)}
  assert chosen[2] == {0: at(1) | behind(1), 1: set()}


def test_order_sees_every_row_once_an_epoch():
  order = Order(num_rows=7, batch=3, seed=5)
  seen = np.concatenate([order.rows(step) for step in range(14)])
  epochs = seen.reshape(6, 7)
  assert all(sorted(epoch) == list(range(7)) for epoch in epochs.tolist())
  assert len({tuple(epoch) for epoch in epochs.tolist()}) == 6
  assert Order(7, 3, 6).rows(0).tolist() != order.rows(0).tolist()
  # The step alone decides: what came before does not.
  np.testing.assert_array_equal(Order(7, 3, 5).rows(9), order.rows(9))


def test_tokens_seen():
  order, tokens = Order(num_rows=5, batch=2, seed=1), np.array([10, 1, 7, 3, 100])
  for steps in range(9):
    expected = sum(int(tokens[order.rows(step)].sum()) for step in range(steps))
    assert order.tokens(tokens, steps) == expected


def test_split_is_stable_and_apart():
  """A dataset that has grown keeps what was held out. Fails when a held-out sample is trained on later."""
  short, long = (random_texts(3, [10] * n) for n in (400, 900))
  few = split(short, seed=1, held_out_tokens=100, longest=64)
  many = split(long, seed=1, held_out_tokens=100, longest=64)
  assert few.held_out.tolist() == many.held_out.tolist() and len(few.held_out) == 10
  assert not set(few.train) & set(few.held_out) and len(few.train) + len(few.held_out) == 400
  assert split(short, seed=2, held_out_tokens=100, longest=64).held_out.tolist() != few.held_out.tolist()
  cut = split(short, seed=1, held_out_tokens=100, max_tokens=50, longest=64)
  assert cut.train.tolist() == few.train[:5].tolist() and cut.held_out.tolist() == few.held_out.tolist()
  all_of = split(short, seed=1, held_out_tokens=10**9, longest=64)
  assert len(all_of.held_out) < 2 * HELD_OUT_SHARE * 400
  assert len(split(random_texts(0, [10] * 3), seed=0, held_out_tokens=9, longest=64).held_out) == 1
  assert not len(split(short, seed=1, held_out_tokens=0, longest=64).held_out)
  with pytest.raises(ValueError, match="max_tokens = 3"):
    split(short, seed=1, held_out_tokens=0, max_tokens=3, longest=64)
