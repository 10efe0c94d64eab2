"""What compiles, how often, and what the compiled loop does to its buffers."""

import re

import jax
import numpy as np
import pytest

from specjax import decode
from specjax.sampling import Settings
from tests import contract


def traces():
  steps = (decode.run_rounds, decode.decode_round, decode.draft_step, decode.verify_step, decode.accept_step)
  return sum(step._cache_size() for step in steps)


@pytest.mark.parametrize("name", ("none", "prompt_lookup", "two_model_sample", "prompt_lookup_tree"))
def test_o1_one_trace_over_everything_a_user_varies(name):
  """Lengths, budgets, temperatures, top-k, top-p, min-p, seeds, penalties, biases, stop ids, round limits.

  Fails when one of them becomes static or changes its type.
  """
  rule = "speculative_sampling" if contract.built(name)[0].tree.is_chain else "draw_and_follow"
  contract.run(name, rule)
  before = traces()
  _, weights = contract.built(name)
  config = contract.static(name, rule)
  for seed, temperature in enumerate((0.0, 0.5, 1)):
    settings = Settings.create(
      4,
      temperature=temperature,
      top_k=seed,
      top_p=0.9,
      min_p=0.1,
      seed=seed,
      repetition_penalty=1 + seed / 10,
      presence_penalty=seed,
      frequency_penalty=-seed,
      min_new_tokens=seed,
      logit_bias={i: 1.0 for i in range(seed)},
    )
    prompts = [contract.PROMPTS[i][: 3 + seed] for i in range(4)]
    state = decode.prefill(
      weights, config, prompts, settings=settings, max_new_tokens=3 + seed, stop_ids=range(seed)
    )
    for limit in (1, np.int32(2), jax.numpy.int32(3), decode.ALL_ROUNDS):
      state = decode.generate(weights, state, config, limit)
  assert traces() == before


def test_o1_prompts_of_any_length_compile_one_program_a_bucket():
  """5 to 60 tokens with buckets 16, 32, 64: at most 3 prefill programs. Fails when a width is traced raw."""
  drafter, weights = contract.built("none")
  config = contract.config(drafter, "greedy", prefill_widths=(16, 32, 64))
  before = decode.prefill_chunk._cache_size()
  for length in range(5, 61, 5):
    decode.prefill(weights, config, [list(range(length))] * 4)
  assert decode.prefill_chunk._cache_size() - before <= 3


def test_o3_the_old_state_is_donated():
  """The old cache is deleted after a step, and reading it says so. Fails when a step does not donate.

  (A donation that has no effect is a warning, which is an error in this suite.)
  """
  drafter, weights = contract.built("none")
  config = contract.config(drafter, "greedy")
  state = contract.start("none")
  old = state.cache.k[0]
  state = decode.generate(weights, state, config, 1)
  assert old.is_deleted()
  with pytest.raises(RuntimeError, match="deleted"):
    np.asarray(old)
  decode.results(state)  # reading results does not use the state up (case O4)
  assert not state.cache.k[0].is_deleted()


# What may have the shape of a cache in the optimized program: names for a buffer, and updates of a
# block of it in place. A copy, a select between two caches, a scatter or a pad is work over all slots.
IN_PLACE = {"parameter", "get-tuple-element", "bitcast", "dynamic-update-slice", "fusion"}


def cache_sized_work(text: str, caches) -> set[str]:
  """Instructions of optimized HLO that make a whole cache, fused ones included."""
  shapes = {",".join(map(str, x.shape)) for cache in caches for x in (*cache.k, *cache.v)}
  shape = "|".join(map(re.escape, sorted(shapes)))
  made = set(re.findall(rf"= \w+\[(?:{shape})\]\S* ([\w-]+)\(", text))
  copied_async = re.findall(rf"= \(\w+\[(?:{shape})\].* (copy-start)\(", text)
  assert {"parameter", "dynamic-update-slice"} <= made, made  # else the pattern reads nothing
  return (made | set(copied_async)) - IN_PLACE


LOOPS = [
  pytest.param(name, batch, marks=pytest.mark.slow if batch == 1 else ())
  for name in ("none", "prompt_lookup", "two_model_sample")
  for batch in (1, 2)
]


TREES = ("scripted_tree", "prompt_lookup_tree")
LOOPS += [(name, 2) for name in TREES]
LONGER = (
  "prompt_lookup_plain_rounds",
  "two_model_tree_top_k",
  "two_model_widths",
  "eagle3_chain_sample",
  "eagle3_dynamic",
  "two_model_dynamic",
  "eagle3_widths",
  "self_speculation_skips",
  "early_exit_widths",
)
LOOPS += [pytest.param(name, 2, marks=pytest.mark.slow) for name in LONGER]


@pytest.mark.parametrize(("name", "batch"), LOOPS)
def test_no_cache_is_copied_in_the_loop(name, batch):
  """Reads the optimized program of the whole generation (B = 1 and 2).

  Fails when a round chooses between an old and a new cache, or keeps the old one (see DESIGN.md).
  """
  drafter, weights = contract.built(name)
  rule = "speculative_sampling" if drafter.tree.is_chain and "widths" not in name else "draw_and_follow"
  # Three blocks of slots: in a buffer of one block, a block of it has the shape of a cache.
  config = contract.static(name, rule, length_limit=300)
  state = contract.start(name, rows=tuple(range(batch)), length_limit=300)
  lowered = decode.run_rounds.lower(weights, state, config, np.int32(1))
  caches = [state.cache, *(cache for _, cache in contract.DRAFTERS[name].caches(state.drafter).values())]
  assert not cache_sized_work(lowered.compile().as_text(), caches)


def test_the_detector_sees_copies_and_selects():
  """A loop that keeps the old cache copies it; one that chooses between two selects over all slots."""
  cache = contract.target().init_cache(1, 300)
  write = lambda k: jax.lax.dynamic_update_slice(k, k[:, :, 5:6] + 1, (0, 0, 3, 0))

  def work(step):
    loop = jax.jit(lambda k, v: jax.lax.fori_loop(0, 5, step, (k, v)), donate_argnums=(0, 1))
    return cache_sized_work(loop.lower(cache.k[0], cache.v[0]).compile().as_text(), [cache])

  assert work(lambda _, carry: (write(carry[0]), write(carry[1]))) == set()
  assert "copy" in work(lambda _, carry: (write(carry[0]), carry[0]))
  assert "select" in work(lambda i, carry: (jax.numpy.where(i > 2, *carry), write(carry[1])))
