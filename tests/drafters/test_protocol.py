"""What the loop owes a drafter: every committed token but the last, once, in order, with its taps."""

import jax
import numpy as np
import pytest

from specjax import decode
from specjax.sampling import Settings
from specjax.testing import SampledDrafter, TruthDrafter, poison
from specjax.verify import make_rule
from tests import contract


@pytest.mark.parametrize("parents", (contract.CHAIN, contract.TREE))
def test_taps_belong_to_their_tokens(parents):
  """The tap of layer 0 is the embedding, so each recorded tap names its token; chains and trees.

  Fails when taps are gathered by node number, or fed for rejected drafts.
  """
  drafter = TruthDrafter(parents, contract.VOCAB, taps=(0, 2))
  target = contract.target()
  weights = decode.Weights(target, drafter.plan(contract.plain_texts(), (0, 4, 2, 1)))
  config = contract.config(drafter, "greedy")
  state = decode.prefill(
    weights, config, contract.PROMPTS, settings=Settings.create(4, seed=range(4)), max_new_tokens=20
  )
  embed = np.asarray(target.embed[...])[:, 0]
  while np.asarray(state.active).any():
    state = decode.generate(weights, poison(state), config, 2)
    record, tokens = jax.device_get((state.drafter, state.tokens))
    np.testing.assert_array_equal(record.length, np.asarray(state.length) - 1)
    for row, n in enumerate(record.length):
      np.testing.assert_array_equal(record.tokens[row, :n], tokens[row, :n])
      np.testing.assert_allclose(record.taps[row, :n], embed[tokens[row, :n]])
  assert [r.tokens for r in decode.results(state)] == [r.tokens[:20] for r in contract.plain()]


@pytest.mark.parametrize("kind", (pytest.param("chain", marks=pytest.mark.slow), "dynamic tree"))
def test_public_steps_compose_to_a_round(kind):
  """draft_step, verify_step and accept_step one by one equal decode_round and one round of generate.

  A proposal crosses from program to program: fails when its topology is no pytree.
  """
  if kind == "chain":
    drafter, weights = SampledDrafter(2), jax.random.normal(jax.random.key(0), (61, 61)) * 2
    weights = decode.Weights(contract.target(), weights)
  else:
    drafter, weights = contract.built("prompt_lookup_tree")
  rule = "speculative_sampling" if kind == "chain" else "draw_and_follow"
  config = contract.config(drafter, rule)

  def start():
    settings = Settings.create(4, temperature=2.0, seed=range(4))
    return decode.prefill(weights, config, contract.PROMPTS, settings=settings, max_new_tokens=12)

  state = start()
  for _ in range(3):
    proposal, state = decode.draft_step(weights, state, config)
    verification, state = decode.verify_step(weights, state, proposal, config)
    state = decode.accept_step(weights, state, proposal, verification, config)
  other = start()
  for _ in range(3):
    other = decode.decode_round(weights, other, config)
  third = decode.generate(weights, start(), config, 3)
  assert contract.comparable(decode.results(state)) == contract.comparable(decode.results(other))
  assert contract.comparable(decode.results(state)) == contract.comparable(decode.results(third))
  assert make_rule(rule) == config.rule
