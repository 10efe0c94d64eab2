"""Faults from outside: broken logits, broken drafts, useless drafters, prompts at the limits.

Whatever a drafter does, the text is plain's; whatever a target says at one node of one row, other rows do
not notice, and no token is chosen from numbers that are none.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decode
from specjax.base import Proposal, StatelessDrafter
from specjax.decode import Finish
from specjax.sampling import Settings
from specjax.testing import SampledDrafter, TableTarget, chi_square, joint_law, process, tiny_model
from specjax.tree import TokenTree
from tests import contract

V = contract.VOCAB
EOS, PADDING = 17, V - 1

# --- broken logits ---------------------------------------------------------------------------------

ROW = 1
BAD = {
  "one NaN": lambda logits: logits.at[3].set(jnp.nan),
  "one +inf": lambda logits: logits.at[V - 1].set(jnp.inf),
  "all -inf": lambda logits: jnp.full_like(logits, -jnp.inf),
  "all NaN": lambda logits: jnp.full_like(logits, jnp.nan),
}
JUDGED = (
  ("scripted_ragged", "greedy"),
  ("scripted_tree", "greedy"),
  ("scripted_tree", "draw_and_follow"),
  ("two_model_sample", "speculative_sampling"),
  ("two_model_tree_distinct", "draw_and_follow"),
)


def one_round(weights, state, config):
  """The three steps one by one: the programs that `judge` needs anyway."""
  proposal, state = decode.draft_step(weights, state, config)
  verification, state = decode.verify_step(weights, state, proposal, config)
  return decode.accept_step(weights, state, proposal, verification, config)


@functools.cache
def verified(name, rule):
  """``(weights, config, proposal, verification, state)`` of a third round, before it is judged."""
  _, weights = contract.built(name)
  config = contract.static(name, rule)
  state = contract.start(name, sampling=None if rule == "greedy" else contract.SAMPLING)
  for _ in range(2):
    state = one_round(weights, state, config)
  proposal, state = decode.draft_step(weights, state, config)
  verification, state = decode.verify_step(weights, state, proposal, config)
  return weights, config, proposal, verification, state


def judge(case, change=None, node=0, row=ROW):
  """The state after the round, in whose logits ``change`` was put at one node of a row."""
  weights, config, proposal, verification, state = case
  if change is not None:
    logits = verification.logits
    verification = verification.replace(logits=logits.at[row, node].set(change(logits[row, node])))
  return decode.accept_step(weights, jax.tree.map(jnp.copy, state), proposal, verification, config)


def visited(case, sound):
  """Nodes of `ROW` from the root to the last accepted draft, read off the tokens that came out."""
  proposal, before = case[2], case[4]
  start, rounds = int(before.length[ROW]), int(before.log.rounds[ROW])
  parents = np.broadcast_to(proposal.tree.parents, proposal.tokens.shape)[ROW]
  path = [0]
  for i in range(int(sound.log.accepted[ROW, rounds])):
    fits = (parents == path[-1]) & (np.asarray(proposal.tokens)[ROW] == int(sound.tokens[ROW, start + i]))
    (child,) = np.flatnonzero(fits & np.asarray(proposal.valid)[ROW])
    path.append(int(child))
  return path


# One chain and one tree in the ordinary suite.
SOME_JUDGED = [pair if pair in JUDGED[:2] else pytest.param(*pair, marks=pytest.mark.slow) for pair in JUDGED]


def assert_rows_equal(got, want, rows):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_array_equal(np.asarray(a)[rows], np.asarray(b)[rows])


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(("name", "rule"), SOME_JUDGED)
def test_a_bad_node_ends_its_row_where_it_is_visited(name, rule, bad):
  """At each node in turn: the root, inner nodes, leaves, branches that are not taken.

  A visited one ends its row with "error" behind the tokens before it, another changes nothing, and the
  other rows are bit for bit what they are without it. Fails when a token is chosen from NaN, an error
  anywhere ends the row, or one row's error ends another.
  """
  case = verified(name, rule)
  sound = judge(case)
  path, before = visited(case, sound), case[4]
  others = [row for row in range(contract.BATCH) if row != ROW]
  start = int(before.length[ROW])
  left_out = 0
  for node in range(case[2].tree.num_nodes):
    state = judge(case, BAD[bad], node)
    assert_rows_equal(state, sound, others)
    if node not in path:
      assert_rows_equal(state, sound, [ROW])
      left_out += 1
      continue
    end = start + path.index(node)
    assert int(state.length[ROW]) == end and int(state.finish[ROW]) == Finish.ERROR
    np.testing.assert_array_equal(state.tokens[ROW, :end], sound.tokens[ROW, :end])
    assert int(state.cache.length[ROW]) == end - 1
  assert left_out or len(path) == case[2].tree.num_nodes


@pytest.mark.parametrize(("name", "rule"), SOME_JUDGED)
def test_the_others_go_on_and_the_row_stays_ended(name, rule):
  """After an error at the root of one row. Fails when an ended row is decoded on, or ends the batch."""
  case = verified(name, rule)
  weights, config = case[:2]

  def to_the_end(state):
    while np.asarray(state.active).any():
      state = one_round(weights, state, config)
    return decode.results(state)

  rows, sound = (to_the_end(judge(case, change)) for change in (BAD["one NaN"], None))
  before = decode.results(case[4])[ROW]
  assert rows[ROW].finish == "error" and rows[ROW].tokens == before.tokens
  assert rows[ROW].emitted == [*before.emitted, 0]
  for row in range(contract.BATCH):
    if row != ROW:
      assert rows[row].tokens == sound[row].tokens and rows[row].finish == "length"


def test_padding_ids_may_say_anything():
  """NaN and +inf at ids that only pad the vocabulary are no error. Fails when they are looked at."""
  weights, config, proposal, verification, state = verified("scripted_tree", "greedy")
  config = dataclasses.replace(config, num_real_tokens=V - 2)
  case = (weights, config, proposal, verification, state)
  sound = judge(case)
  for node in (0, 2):
    broken = judge(case, lambda logits: logits.at[V - 2].set(jnp.nan).at[V - 1].set(jnp.inf), node)
    assert_rows_equal(broken, sound, slice(None))


# --- broken drafts ---------------------------------------------------------------------------------


def test_drafts_from_a_broken_q_are_not_proposed():
  """Every q of a drafter is NaN: nothing counts as proposed, and sampled text is plain's token for token.

  Fails when a draft drawn from NaN is judged: its ratio is NaN, and so is the residual.
  """
  drafter = SampledDrafter(3)
  weights = decode.Weights(contract.target(), jnp.full((V, V), jnp.nan))
  for rule in ("speculative_sampling", "greedy"):
    config = contract.config(drafter, rule)
    settings = None if rule == "greedy" else Settings.create(contract.BATCH, **contract.SAMPLING)
    state = decode.prefill(
      weights, config, contract.PROMPTS, settings=settings, max_new_tokens=list(contract.BUDGETS)
    )
    rows = decode.results(decode.generate(weights, state, config))
    plain = contract.plain() if rule == "greedy" else contract.plain_sampled()
    assert [row.tokens for row in rows] == [row.tokens for row in plain]
    assert {sum(row.proposed) for row in rows} == {0}


def test_a_q_that_breaks_now_and_then_keeps_the_law():
  """q is NaN behind token 1 only. Greedy text is plain's; the law of three sampled tokens by χ², p > 1e-4.

  Whether a draft counts may depend on q, never on what was drawn from it.
  """
  vocab, rows, prompt = 3, 40_000, (0, 2)
  target, draft = (TableTarget.random(seed, vocab, by="token", spread=1.2) for seed in (10, 11))
  weights = decode.Weights(target, draft.table.at[1].set(jnp.nan))
  config = contract.config(
    SampledDrafter(2), "speculative_sampling", num_real_tokens=vocab, length_limit=5, prefill_widths=(2,)
  )
  for temperature in (0.0, 1.0):
    settings = Settings.create(rows, temperature=temperature, seed=range(rows))
    state = decode.prefill(weights, config, [prompt] * rows, settings=settings)
    state = decode.generate(weights, state, config)
    law = joint_law(lambda text, t=temperature: process(target.logits_after(text), temperature=t), prompt, 3)
    texts = np.ravel_multi_index(tuple(np.asarray(state.tokens)[:, 2:5].T), law.shape)
    counts = np.bincount(texts, minlength=law.size)
    if temperature:
      assert chi_square(counts.reshape(law.shape), law) > 1e-4
    else:
      assert counts[law.argmax()] == rows
  proposed, accepted = (np.asarray(x, np.int64).sum() for x in (state.log.proposed, state.log.accepted))
  assert 0 < accepted < proposed


@pytest.mark.parametrize(
  "policy",
  (
    "top_k",
    pytest.param("sample", marks=pytest.mark.slow),
    pytest.param("sample_without_replacement", marks=pytest.mark.slow),
  ),
)
def test_a_draft_model_with_broken_weights(policy):
  """Its embedding of one token is NaN, and once that token is in its cache every row it makes is NaN.

  Decoding goes on plainly. Fails when NaN of a draft reaches the target or the text.
  """
  draft = tiny_model(0)
  text = contract.plain_sampled()[0].tokens
  draft.embed[...] = draft.embed[...].at[text[len(text) // 2]].set(jnp.nan)
  branching = () if policy == "sample" else (2,)
  drafter, _ = contract.two_model(draft, policy, branching)
  weights = decode.Weights(contract.target(), draft)
  config = contract.config(drafter, "draw_and_follow")
  state = decode.prefill(
    weights,
    config,
    contract.PROMPTS,
    settings=Settings.create(contract.BATCH, **contract.SAMPLING),
    max_new_tokens=list(contract.BUDGETS),
  )
  rows = decode.results(decode.generate(weights, state, config))
  assert [row.tokens for row in rows] == [row.tokens for row in contract.plain_sampled()]
  assert {row.finish for row in rows} == {"length"}
  assert sum(rows[0].accepted) > 0


# --- useless drafters ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stubborn(StatelessDrafter):
  """Proposes one id everywhere, its weights; no node is valid where they are None."""

  parents: tuple[int, ...]

  name = "stubborn"
  kind = "deterministic"

  @property
  def tree(self):
    return TokenTree(self.parents)

  def propose(self, weights, state, context, target_cache):
    shape = (context.root.shape[0], len(self.parents))
    tokens = jnp.broadcast_to(weights["token"], shape).at[:, 0].set(context.root)
    valid = jnp.broadcast_to(weights["valid"], shape)
    return Proposal(tokens, valid, None, tree=self.tree, kind=self.kind), state, target_cache


def stubborn(token):
  return {"token": jnp.int32(0 if token is None else token), "valid": jnp.bool_(token is not None)}


USELESS = {
  "nothing": None,
  "end of sequence": EOS,
  "negative": -1,
  "very negative": -(2**31),
  "padding": PADDING,
  "past the vocabulary": V,
  "very large": 2**31 - 1,
}


def decoded(drafter, rule, weights=None, prompts=contract.PROMPTS, **changes):
  """Rows of a batch that ends at `EOS` or its budgets, in a vocabulary whose last id is padding."""
  config = contract.config(drafter, rule, **{"num_real_tokens": V - 1, **changes})
  weights = decode.Weights(contract.target(), weights)
  settings = None if rule == "greedy" else Settings.create(len(prompts), **contract.SAMPLING)
  budgets = list(contract.BUDGETS)
  state = decode.prefill(weights, config, prompts, settings=settings, max_new_tokens=budgets, stop_ids=[EOS])
  return decode.results(decode.generate(weights, state, config))


@functools.cache
def plainly(rule):
  return decoded(contract.built("none")[0], rule)


@pytest.mark.parametrize(
  ("parents", "rule"),
  [
    pytest.param(contract.CHAIN, "greedy", id="chain-greedy", marks=pytest.mark.slow),
    pytest.param(contract.CHAIN, "draw_and_follow", id="chain-sampled", marks=pytest.mark.slow),
    pytest.param(contract.TREE, "greedy", id="tree-greedy", marks=pytest.mark.slow),
    pytest.param(contract.TREE, "draw_and_follow", id="tree-sampled"),
  ],
)
@pytest.mark.parametrize("what", USELESS)
def test_useless_drafters_change_nothing(what, parents, rule):
  """Chains and trees of one id, greedy and sampled: the text is plain's, and ids that are not real are not
  proposed.

  Fails when an id indexes a table out of bounds (JAX wraps or clamps in silence), an invalid node is
  judged, or a stop id that was only drafted ends a row.
  """
  plain = plainly(rule)
  assert "stop" in {row.finish for row in plain}
  rows = decoded(Stubborn(parents), rule, stubborn(USELESS[what]))
  assert [(row.tokens, row.finish) for row in rows] == [(row.tokens, row.finish) for row in plain]
  if what == "end of sequence":
    assert sum(map(sum, (row.accepted for row in rows))) > 0  # where plain says it, too
  else:
    assert {sum(row.proposed) for row in rows} == {0}


@pytest.mark.parametrize("rule", ("greedy", "draw_and_follow"))
@pytest.mark.parametrize("parents", (contract.CHAIN, contract.TREE), ids=("chain", "tree"))
def test_a_drafter_that_is_always_wrong(parents, rule):
  """Each round emits the target's own token. Fails when a rejected draft leaves something behind."""
  said = {token for row in plainly(rule) for token in row.tokens}
  never = next(token for token in range(V - 1) if token not in said)
  rows = decoded(Stubborn(parents), rule, stubborn(never))
  assert [row.tokens for row in rows] == [row.tokens for row in plainly(rule)]
  assert {sum(row.accepted) for row in rows} == {0} and min(sum(row.proposed) for row in rows) > 0


@pytest.mark.slow
@pytest.mark.parametrize("vocab", (40, 90))
def test_a_draft_of_another_vocabulary(vocab):
  """Fewer ids than the target or more: the text is plain's, and no id is proposed that the target lacks.

  Fails when q keeps the draft's width, or an id is looked up in the wrong table.
  """
  draft = tiny_model(3, vocab_size=vocab, num_layers=1)
  drafter = dataclasses.replace(contract.two_model(draft, "sample")[0], num_real_tokens=V - 1)
  rows = decoded(drafter, "draw_and_follow", draft)
  assert [row.tokens for row in rows] == [row.tokens for row in plainly("draw_and_follow")]
  assert min(sum(row.proposed) for row in rows) > 0


# --- prompts at the limits -------------------------------------------------------------------------

LIMIT = 20


@pytest.mark.parametrize(
  "name",
  (
    "none",
    "prompt_lookup_tree",
    "two_model_sample",
    *(
      pytest.param(name, marks=pytest.mark.slow)
      for name in ("prompt_lookup", "two_model_tree_top_k", "eagle3_dynamic", "medusa_tree")
    ),
  ),
)
def test_b6_prompts_of_0_1_and_around_the_limit(name):
  """Together in one batch: 1, limit - 1 and limit tokens give limit - 1, 1 and 0 new ones, plain's.

  None and limit + 1 are errors that name the row and the numbers. Fails when the widest round is written
  over the end of a buffer, or a chunk of the prefill is.
  """
  prompts = [[5], [(3 * i) % V for i in range(LIMIT - 1)], [i % 7 for i in range(LIMIT)]]

  def run(name):
    config = contract.static(name, "greedy", length_limit=LIMIT, prefill_widths=(16,))
    weights = contract.built(name)[1]
    state = decode.prefill(weights, config, prompts)
    rows = decode.results(decode.generate(weights, state, config))
    for bad, words in (
      ([], "prompt 1 is empty"),
      ([1] * (LIMIT + 1), f"{LIMIT + 1} tokens.*limit is {LIMIT}"),
    ):
      with pytest.raises(ValueError, match=words):
        decode.prefill(weights, config, [[1], bad])
    return [(row.tokens, row.finish) for row in rows]

  rows = run(name)
  assert rows == run("none")
  assert [len(tokens) for tokens, _ in rows] == [LIMIT - 1, 1, 0]
  assert {finish for _, finish in rows} == {"length"}
