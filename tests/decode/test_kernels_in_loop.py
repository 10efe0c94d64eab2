"""The kernels inside the loop, in Pallas's interpreters: greedy text is that of the XLA path."""

import pytest

from specjax import decode
from specjax.sampling import Settings
from specjax.testing import TruthDrafter, tiny_model
from specjax.tree import TokenTree
from specjax.verify import make_rule

PROMPTS = [[3, 14, 15, 9, 26], [7]]
MODEL = tiny_model(0, num_layers=1, num_heads=3, num_kv_heads=1, head_dim=64)
TREE = TokenTree((-1, 0, 0, 1, 2, 3))


def run(implementation, weights=None, rounds=decode.ALL_ROUNDS):
  drafter = TruthDrafter(TREE.parents, 61)
  config = decode.DecodeConfig(
    drafter,
    make_rule("greedy"),
    num_real_tokens=61,
    length_limit=20,
    prefill_widths=(8,),
    implementation=implementation,
  )
  weights = decode.Weights(MODEL, TruthDrafter.plan([[0] * 20] * 2, (0,)) if weights is None else weights)
  settings = Settings.create(2, seed=[0, 1])
  state = decode.prefill(weights, config, PROMPTS, settings=settings, max_new_tokens=8)
  return decode.results(decode.generate(weights, state, config, rounds))


@pytest.mark.parametrize("implementation", ("pallas_tpu_interpreted", "pallas_gpu_interpreted"))
def test_greedy_text_is_the_references(implementation):
  """Prefill chunk, a tree that is accepted to different depths in two rows, and its compaction.

  Fails when the kernel and the loop disagree about where scratch rows lie, or who sees them.
  """
  plain = run("reference")
  texts = [[*prompt, *row.tokens] for prompt, row in zip(PROMPTS, plain)]
  plan = TruthDrafter.plan([text + [0] * (20 - len(text)) for text in texts], (5, 2, 4, 0))
  rows = run(implementation, plan)
  assert [row.tokens for row in rows] == [row.tokens for row in plain]
  assert len({tuple(row.accepted) for row in rows}) == 2 and max(map(max, (r.accepted for r in rows))) == 3
