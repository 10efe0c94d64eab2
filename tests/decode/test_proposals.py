"""What the loop makes of proposals and rows that are not as announced."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decode
from specjax.base import Proposal, StatelessDrafter
from specjax.testing import NOTHING, ScriptedDrafter, tiny_model
from specjax.tree import TokenTree
from tests import contract


@dataclasses.dataclass(frozen=True)
class Odd(StatelessDrafter):
  """Announces a chain of one draft and proposes ``parents``, ``kind`` and the id ``token``; ``begun`` layers
  have run over ``states`` nodes."""

  parents: tuple[int, ...] = (-1, 0)
  proposes: str = "deterministic"
  kind: str = "deterministic"
  token: int = 0
  announced: tuple[int, ...] = (-1, 0)
  begun: int = 0
  states: int = 0

  name: ClassVar[str] = "odd"

  @property
  def tree(self):
    return TokenTree(self.announced)

  def propose(self, weights, state, context, target_cache):
    tokens = jnp.full((context.root.shape[0], len(self.parents)), self.token, jnp.int32)
    tokens = tokens.at[:, 0].set(context.root)
    q = (
      None if self.proposes == "deterministic" else jnp.ones((*tokens.shape, contract.VOCAB)) / contract.VOCAB
    )
    hidden = jnp.zeros((len(tokens), self.states, 32)) if self.states else None
    handed = dict(hidden=hidden, start_layer=self.begun)
    tree = TokenTree(self.parents)
    return (
      Proposal(tokens, jnp.ones_like(tokens, bool), q, tree=tree, kind=self.proposes, **handed),
      state,
      target_cache,
    )


def draft(drafter, rule="draw_and_follow", **changes):
  config = contract.config(drafter, rule, **changes)
  weights = decode.Weights(contract.target())
  return decode.draft_step(weights, decode.prefill(weights, config, [[1, 2], [3]]), config)[0]


def test_proposals_must_be_what_was_announced():
  """Fails when a wider tree is written over the end of the buffer, or a rule is handed another kind."""
  with pytest.raises(ValueError, match="proposes 3 nodes; it announced 2"):
    draft(Odd(parents=(-1, 0, 0)))
  with pytest.raises(ValueError, match="proposes sampled drafts; it announced deterministic"):
    draft(Odd(proposes="sampled"))


@pytest.mark.parametrize(("begun", "states"), ((1, 0), (0, 2), (1, 1)))
def test_layers_that_were_run_are_those_of_all_nodes(begun, states):
  """Before anything compiles. Fails when verification begins late with nothing to begin from."""
  config = contract.config(Odd(begun=begun, states=states), "greedy")
  weights = decode.Weights(contract.target())
  state = decode.init_state(weights, config, 1)
  found = r"\(1, \d\)" if states else "None"
  with pytest.raises(ValueError, match=f"hidden states of {found} nodes with start_layer = {begun}"):
    decode.draft_step(weights, state, config)


def test_what_hangs_below_an_invalid_node_is_not_proposed():
  """Neither judged nor counted. Fails when each node's validity stands alone."""
  proposal = draft(ScriptedDrafter(((5, NOTHING, 7),)))
  assert proposal.valid.tolist() == [[True, True, False, False]] * 2


def test_a_sampled_id_is_never_dropped_for_what_it_is():
  """Dropping it would redraw from p instead of the residual. Fails when unreal sampled ids are invalid."""
  sampled = Odd(proposes="sampled", kind="sampled", token=contract.VOCAB - 1)
  assert draft(sampled, num_real_tokens=contract.VOCAB - 1).valid.all()
  fixed = Odd(token=contract.VOCAB - 1)
  assert not draft(fixed, num_real_tokens=contract.VOCAB - 1).valid[:, 1].any()


def test_configs_that_cannot_work_raise_when_made():
  with pytest.raises(ValueError, match="rule speculative_sampling takes chains; drafter odd proposes a tree"):
    contract.config(Odd(announced=(-1, 0, 0)), "speculative_sampling")
  with pytest.raises(ValueError, match="prefill_widths"):
    contract.config(Odd(), "greedy", prefill_widths=(0, 16))


def test_insert_names_rows_that_do_not_exist():
  """Fails when the row is clamped, over one that is running."""
  config = contract.config(Odd(), "greedy")
  weights = decode.Weights(contract.target())
  state, one = (decode.prefill(weights, config, prompts) for prompts in ([[1, 2], [3]], [[4]]))
  for row, source in ((2, 0), (-1, 0), (0, 1)):
    with pytest.raises(ValueError, match="the state has rows 0 to"):
      decode.insert(state, row, one, source)


def test_stop_ids_must_be_integers():
  config = contract.config(Odd(), "greedy")
  weights = decode.Weights(contract.target())
  with pytest.raises(ValueError, match="stop_ids"):
    decode.prefill(weights, config, [[1, 2]], stop_ids=[2.7])


def test_a_rejected_draft_with_broken_weights_does_no_harm():
  """The drafted id's embedding is NaN and plain decoding never emits it: the text stays plain's.

  Fails when one node's NaN reaches the others through attention.
  """
  model = tiny_model(3, vocab_size=contract.VOCAB, tie_embeddings=False)
  bad = 60
  prompt = [[5, 6, 7, 8]]

  def run(drafter):
    config = contract.config(drafter, "greedy")
    weights = decode.Weights(model)
    state = decode.prefill(weights, config, prompt, max_new_tokens=12)
    return decode.results(decode.generate(weights, state, config))[0]

  model.embed[...] = model.embed[...].at[bad].set(0.0)
  plain = run(contract.built("none")[0])
  assert bad not in plain.tokens
  # The head is not tied: only what goes in is broken.
  model.embed[...] = model.embed[...].at[bad].set(jnp.nan)
  row = run(Odd(token=bad))
  assert row.tokens == plain.tokens and row.finish == "length" and np.sum(row.proposed) > 0
