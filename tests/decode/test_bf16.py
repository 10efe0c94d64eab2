"""Case N1: what "equal" means in bf16, and N2: what a difference must say."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decode
from specjax.drafters import make_drafter
from specjax.testing import first_difference, perturbed, teacher_forced, tiny_model
from specjax.verify import make_rule
from tests import contract

MODEL = tiny_model(0, dtype=jnp.bfloat16, num_layers=1)


def bf16_step(x):
  """Distance to the next bf16 number at |x|: 8 bits of significand, 0.125 for 16 … 32."""
  return 2.0 ** (np.floor(np.log2(np.abs(x))) - 7)


def test_n1_the_step_of_bf16():
  assert bf16_step(16.0) == bf16_step(31.9) == 0.125 and bf16_step(1.0) == 2.0**-7
  assert float(jnp.bfloat16(16) + jnp.bfloat16(0.125)) == 16.125


def outside(prompt, new, model=MODEL):
  """Emitted tokens whose logit is more than a bf16 step below the row's maximum."""
  logits = teacher_forced(model, prompt, new)
  top = logits.max(axis=-1)
  return [i for i, token in enumerate(new) if logits[i, token] < top[i] - bf16_step(top[i])]


@pytest.mark.parametrize("name", ("prompt_lookup", pytest.param("two_model", marks=pytest.mark.slow)))
def test_n1_bf16_greedy_is_within_a_rounding_step(name):
  """Each emitted token, fed to the plain model, is a maximum but for a tie. Fails for a wrong token."""
  if name == "two_model":
    drafter = make_drafter("two_model", window=4, vocab_size=61, num_real_tokens=61, max_length=512)
  else:
    drafter = make_drafter(name)
  config = decode.DecodeConfig(
    drafter, make_rule("greedy"), num_real_tokens=61, length_limit=90, prefill_widths=(32,)
  )
  weights = decode.Weights(MODEL, perturbed(MODEL, 0.05))
  assert MODEL.init_cache(1, 1).k[0].dtype == jnp.bfloat16
  state = decode.prefill(weights, config, contract.PROMPTS, max_new_tokens=40)
  rows = decode.results(decode.generate(weights, state, config, decode.ALL_ROUNDS))
  for prompt, row in zip(contract.PROMPTS, rows):
    assert outside(prompt, row.tokens) == []
    # The test sees an error: any other token in one place.
    wrong = row.tokens[:20] + [(row.tokens[20] + 1) % 61] + row.tokens[21:]
    assert 20 in outside(prompt, wrong)


def test_n2_differences_report_place_and_margin():
  """Equal texts: None. A changed token: its index and a margin far above rounding."""
  prompt, text = contract.PROMPTS[0], contract.plain()[0].tokens
  assert first_difference(contract.target(), prompt, text, text) is None
  changed = text[:7] + [(text[7] + 1) % 61] + text[8:]
  index, margin = first_difference(contract.target(), prompt, changed, text)
  assert index == 7 and margin > 1e-2
