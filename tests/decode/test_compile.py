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


@pytest.mark.parametrize("name", ("none", "prompt_lookup", "two_model_sample"))
def test_o1_one_trace_over_everything_a_user_varies(name):
  """Lengths, budgets, temperatures, top-k, top-p, min-p, seeds, stop ids, round limits, acceptance.

  Fails when one of them becomes static or changes its type.
  """
  rule = "speculative_sampling"
  contract.run(name, rule)
  before = traces()
  _, weights = contract.built(name)
  config = contract.static(name, rule)
  for seed, temperature in enumerate((0.0, 0.5, 1)):
    settings = Settings.create(4, temperature=temperature, top_k=seed, top_p=0.9, min_p=0.1, seed=seed)
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


def cache_copies(text: str, caches) -> list[str]:
  """Lines of optimized HLO that copy an array of the shape of a cache."""
  shapes = {",".join(map(str, x.shape)) for cache in caches for x in (*cache.k, *cache.v)}
  pattern = re.compile(r"= \(?\w+\[(" + "|".join(map(re.escape, sorted(shapes))) + r")\].* copy(-start)?\(")
  return [line.strip() for line in text.splitlines() if pattern.search(line)]


@pytest.mark.parametrize(
  ("name", "batch"),
  [
    *((name, batch) for name in ("none", "prompt_lookup", "two_model_sample") for batch in (1, 2)),
    ("scripted_tree", 2),
  ],
)
def test_no_cache_is_copied_in_the_loop(name, batch):
  """Looks for copies with the shape of a cache in the optimized program of the whole generation.

  Fails when attention reads a cache it does not hand back, or a branch carries one (see DESIGN.md).
  """
  drafter, weights = contract.built(name)
  rule = "speculative_sampling" if drafter.tree.is_chain else "draw_and_follow"
  # Three blocks of slots: in a buffer of one block, a block of it has the shape of a cache.
  config = contract.static(name, rule, length_limit=300)
  state = contract.start(name, rows=tuple(range(batch)), length_limit=300)
  lowered = decode.run_rounds.lower(weights, state, config, decode.ALL_ROUNDS)
  text = lowered.compile().as_text()
  caches = [state.cache, *(cache for _, cache in contract.DRAFTERS[name].caches(state.drafter).values())]
  assert "while(" in text and "f32[" in text
  assert not cache_copies(text, caches)


def test_the_copy_detector_detects():
  """A loop that keeps the old cache must copy it: the check above sees that."""
  cache = contract.target().init_cache(1, 64)

  @jax.jit
  def loop(cache):
    def body(_, carry):
      k, old = carry
      return k.at[0, 0, 0, 0].add(old[0, 0, 1, 1]), k

    return jax.lax.fori_loop(0, 5, body, (cache.k[0], cache.k[0]))

  assert cache_copies(loop.lower(cache).compile().as_text(), [cache])
