"""Groups B, K, L: ends of buffers, limits of two models, empty input, padded vocabularies."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decode
from specjax.drafters import make_drafter
from specjax.sampling import Settings
from specjax.testing import (
  ScriptedDrafter,
  TableTarget,
  assert_cache_rows,
  chi_square,
  perturbed,
  process,
  tiny_model,
)
from specjax.verify import make_rule
from tests import contract

MODEL = tiny_model(2, num_layers=1)
NONE = contract.built("none")[0]


def config_of(drafter, rule="greedy", **changes):
  fields = dict(num_real_tokens=61, length_limit=32, prefill_widths=(32,))
  return decode.DecodeConfig(drafter=drafter, rule=make_rule(rule), **{**fields, **changes})


def run(weights, config, prompts, **kwargs):
  state = decode.prefill(weights, config, prompts, **kwargs)
  return decode.generate(weights, state, config, decode.ALL_ROUNDS)


def two_model(window, **options):
  fields = dict(vocab_size=61, num_real_tokens=61, max_length=512)
  return make_drafter("two_model", window=window, **{**fields, **options})


def test_b2_b6_the_last_tokens_before_the_limit():
  """Limit 32, prompts of 27 … 32 tokens in one batch, K = 5, budget 10: 5 … 0 tokens, reason "length".

  The same tokens as plain; nothing stands at an index of 32 or more; the caches stay right. Fails
  when a draft runs over the limit, or the bonus does not fit and is emitted all the same.
  """
  lengths = range(27, 33)
  prompts = [[(3 * i + length) % 61 for i in range(length)] for length in lengths]
  drafter = two_model(5)
  config, weights = config_of(drafter), decode.Weights(MODEL, MODEL)
  state = run(weights, config, prompts, max_new_tokens=10)
  rows = decode.results(state)
  plain = decode.results(run(decode.Weights(MODEL), config_of(NONE), prompts, max_new_tokens=10))
  assert [row.tokens for row in rows] == [row.tokens for row in plain]
  assert [len(row.tokens) for row in rows] == [32 - length for length in lengths]
  assert {row.finish for row in rows} == {"length"}
  np.testing.assert_array_equal(state.length, 32)
  assert all(row.proposed[0] == 32 - length - 1 for row, length in zip(rows[:-1], lengths))
  assert rows[-1].rounds == 0 and rows[-1].tau == 0
  assert_cache_rows(MODEL, state.cache, state, width=32)


def test_b6_a_prompt_over_the_limit_names_both_numbers():
  """33 tokens and a limit of 32. Fails when it is cut or clamped in silence."""
  with pytest.raises(ValueError, match=r"33 tokens.*limit is 32"):
    decode.prefill(decode.Weights(MODEL), config_of(NONE), [[1], [2] * 33])


def test_b4_text_longer_than_the_draft_allows():
  """Draft limit 16: a prompt of 20 gets no proposal, one of 10 gets them up to there; output is plain's.

  Fails when the draft is fed positions it was not made for, or decoding stops with it.
  """
  drafter = two_model(3, max_length=16)
  lengths = (20, 10, 15, 16, 17)
  prompts = [list(range(n)) for n in lengths]
  weights = decode.Weights(MODEL, perturbed(MODEL, 0.01))
  config, plain_config = (config_of(d, length_limit=64) for d in (drafter, NONE))
  rows = decode.results(run(weights, config, prompts, max_new_tokens=20))
  plain = decode.results(run(decode.Weights(MODEL), plain_config, prompts, max_new_tokens=20))
  assert [row.tokens for row in rows] == [row.tokens for row in plain]
  assert sum(rows[0].proposed) == 0 and sum(rows[1].accepted) > 0
  for n, row in zip(lengths, rows):
    # The root at index n - 1 and the drafts before a draft are fed; the last of them at index 15.
    at = np.cumsum([n, *row.emitted])[:-1]
    assert row.proposed == np.clip(17 - at, 0, 3).tolist()


@pytest.mark.parametrize(
  ("kwargs", "match"),
  [
    (dict(prompts=[]), "empty"),
    (dict(prompts=[[1], []]), "prompt 1 is empty"),
    (dict(prompts=[[1, 61]]), "prompt 0 holds an id"),
    (dict(prompts=[[-1]]), "prompt 0 holds an id"),
    (dict(prompts=[[1.5]]), "prompt 0 holds an id"),
    (dict(prompts=[[1]], max_new_tokens=0), "max_new_tokens"),
    (dict(prompts=[[1]], stop_ids=range(9)), "stop_ids"),
    (dict(prompts=[[1]], stop_ids=[[1], [2]]), "stop_ids"),
    (dict(prompts=[[1]], settings=Settings.create(2)), "settings"),
    (dict(prompts=[[1]], settings=Settings.create(1, temperature=1.0)), "temperature"),
  ],
)
def test_k7_bad_input_raises_before_anything_compiles(kwargs, match):
  """Also the empty prompt: a ValueError. Fails when a bad value reaches the device."""
  before = decode.prefill_chunk._cache_size()
  with pytest.raises(ValueError, match=match):
    decode.prefill(decode.Weights(MODEL), config_of(NONE), **kwargs)
  assert decode.prefill_chunk._cache_size() == before


def test_k7_statistics_without_tokens_hold_no_nan():
  row = decode.RowResult([], 3, None, *([] for _ in range(7)), None, None)
  assert (row.tau, row.acceptance_rate, row.accept_counts) == (0.0, 0.0, [0])


def test_k5_prefill_in_chunks_and_in_one_piece():
  """20 tokens in chunks of 8 and in one of 32: target and draft caches equal to 1e-5, nothing emitted.

  Fails when a chunk starts at the padded and not at the row's own end.
  """
  prompts = [[(7 * i) % 61 for i in range(20)], [5, 4, 3], [(5 * i) % 61 for i in range(13)]]
  weights = decode.Weights(MODEL, MODEL)
  states = [
    decode.prefill(weights, config_of(two_model(3), prefill_widths=w), prompts) for w in ((8,), (32,))
  ]
  for state in states:
    np.testing.assert_array_equal(state.length, [20, 3, 13])
    for cache in (state.cache, state.drafter.cache):
      np.testing.assert_array_equal(cache.length, [19, 2, 12])
      assert_cache_rows(MODEL, cache, state, width=32)
    assert [row.tokens for row in decode.results(state)] == [[], [], []]


def test_l1_padded_vocabularies():
  """Target of 12 logits, 10 real; draft of 11. Padding has the largest logits and is never emitted.

  The law over the real ids is what it is without padding (χ², p > 1e-4). Fails when padding is masked
  on one side only, or q is given over the draft's width.
  """
  rng = np.random.default_rng(0)
  real = rng.normal(size=10)
  target = TableTarget(jnp.asarray(np.r_[real, 9, 9][None], jnp.float32), by="position")
  draft = TableTarget(jnp.asarray(np.r_[rng.normal(size=10), 9][None], jnp.float32), by="position")
  drafter = make_drafter("two_model", window=2, vocab_size=12, num_real_tokens=10, max_length=99)
  config = config_of(drafter, "speculative_sampling", num_real_tokens=10, length_limit=8)
  rows = 4096
  settings = Settings.create(rows, temperature=[0.0, *[1.0] * (rows - 1)], seed=range(rows))
  state = run(decode.Weights(target, draft), config, [[1, 2]] * rows, settings=settings)
  new = np.asarray(state.tokens)[:, 2:8]
  assert new.max() < 10
  assert (new[0] == np.argmax(real)).all()
  assert chi_square(np.bincount(new[1:].ravel(), minlength=10), process(real)) > 1e-4
  accepted = sum(sum(row.accepted) for row in decode.results(state))
  assert accepted > rows


def test_l5_caches_follow_the_drafts_config():
  """The draft has other heads, head size, depth and padding. Fails when the target's are borrowed."""
  state = contract.start("two_model_unlike")
  draft = contract.other_draft().config
  cache = state.drafter.cache
  assert cache.num_layers == draft.num_layers
  assert cache.k[0].shape == (contract.BATCH, draft.num_kv_heads, state.cache.capacity, draft.head_dim)
  assert (
    cache.k[0].shape[1:2] + cache.k[0].shape[3:] != state.cache.k[0].shape[1:2] + state.cache.k[0].shape[3:]
  )


def test_ids_out_of_range_are_not_proposed():
  """Drafts outside the real ids, and what hangs below them, do not count and do no harm.

  Fails when a draft indexes a distribution out of bounds (JAX clamps in silence).
  """
  drafter = ScriptedDrafter(script=((61, 1, 2), (-7, 1, 2), (1_000_000, 1, 2), (5, 61, 2), (-1, 3, 4)))
  plain = contract.plain()
  weights = decode.Weights(contract.target())
  config = dataclasses.replace(contract.config(drafter, "speculative_sampling"))
  rows = decode.results(run(weights, config, contract.PROMPTS, max_new_tokens=list(contract.BUDGETS)))
  assert [row.tokens for row in rows] == [row.tokens for row in plain]
  for row in rows:
    wanted = [(0, 0, 0, 1, 0)[i % 5] for i in range(row.rounds)]
    assert row.proposed[:-1] == wanted[:-1]
