"""Dynamic trees (EAGLE-2) against the algorithm by loops, and against all nodes there are."""

import dataclasses
import itertools

import numpy as np
import pytest

from specjax import decode
from specjax.drafters import TwoModel, make_drafter
from specjax.drafters.dynamic import DynamicGrowth
from specjax.sampling import Settings
from specjax.testing import assert_cache_rows, process, tiny_model
from specjax.tree import TreeBudget
from specjax.verify import make_rule
from tests.drafters.test_growing import STATES, TABLE, VOCAB, grow, state_of
from tests.drafters.test_two_model import DRAFT, PROMPTS, propose

# Greedy rows are ranked at temperature 1, others by their own settings.
SETTINGS = dict(temperature=[0.0, 0.7, 1.5], top_k=[1, 0, 4], seed=[5, 6, 7])
OF_ROW = (dict(), dict(temperature=0.7), dict(temperature=1.5, top_k=4))


def paths_of(proposal, row):
  """``{path of tokens: node}`` of the valid nodes of a row, the root ``()``; checks that they are a tree."""
  parents, paths = proposal.tree.parents[row], {0: ()}
  assert parents[0] == -1 and proposal.valid[row, 0]
  for node in range(1, len(parents)):
    if proposal.valid[row, node]:
      assert parents[node] < node and parents[node] in paths, (parents, proposal.valid[row])
      paths[node] = (*paths[parents[node]], int(proposal.tokens[row, node]))
    else:
      assert parents[node] == 0
  found = {path: node for node, path in paths.items()}
  assert len(found) == len(paths)  # siblings differ
  return found


def by_loops(law, depth, beam, nodes, expand="value", rerank=True):
  """Paths of the tree: of each level the ``beam`` best are expanded, of all candidates the best are kept.

  Args:
    law: path → probabilities.
    expand: ``confidence``: the best by the probability of their last token.
    rerank: if not, the expanded ones are kept, from the first level on.
  """
  value, level, candidates, expanded = {(): 1.0}, [()], [()], [()]
  for _ in range(depth):
    offered = []
    for path in level:
      p = law(path)
      best = [int(token) for token in np.argsort(-p, kind="stable")[:beam] if p[token] > 0]
      offered += [((*path, token), value[path] * p[token]) for token in best]
    value |= dict(offered)
    candidates += [path for path, _ in offered]
    last = {path: value[path] / value[path[:-1]] for path, _ in offered}
    rank = last if expand == "confidence" else dict(offered)
    level = sorted((path for path, _ in offered), key=lambda path: -rank[path])[:beam]
    expanded += level
  return set(sorted(candidates, key=lambda path: -value[path])[:nodes] if rerank else expanded[:nodes])


def law_of(row):
  return lambda path: process(TABLE[state_of(row, path)], **OF_ROW[row])


@pytest.mark.parametrize(
  ("depth", "beam", "nodes"),
  [
    (4, 3, 8),
    (3, 3, 22),
    *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((1, 3, 3), (3, 2, 6))),
  ],
)
def test_the_tree_is_what_the_algorithm_says(depth, beam, nodes):
  """States recur; rows differ in their settings. The budget may be all candidates, or a few.

  Fails when a level is expanded by the last probability alone, a value is lost on the way, candidates of
  two levels are mixed up, or greedy rows are ranked by 0 and 1.
  """
  proposal, forwards, _ = grow(DynamicGrowth(TreeBudget(nodes, depth), beam), Settings.create(3, **SETTINGS))
  assert forwards == depth - 1 and proposal.q is None and proposal.kind == "deterministic"
  for row in range(3):
    assert set(paths_of(proposal, row)) == by_loops(law_of(row), depth, beam, nodes)
    np.testing.assert_array_equal(
      proposal.tree.depths[row][proposal.valid[row]], [len(path) for path in paths_of(proposal, row)]
    )


@pytest.mark.parametrize(
  ("expand", "rerank", "nodes"),
  [
    ("confidence", True, 8),
    ("value", False, 8),
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in (("confidence", False, 13), ("value", False, 13))
    ),
  ],
)
def test_without_value_and_without_reranking(expand, rerank, nodes):
  """EAGLE-2's ablations; a budget that ends within a level, and one that holds all that is expanded.

  Fails when a level is picked by the other measure, the best of all candidates are proposed all the same, or
  a level's worse ones go before its better ones.
  """
  growth = DynamicGrowth(TreeBudget(nodes, 4), 3, expand=expand, rerank=rerank)
  proposal, _, rows = grow(growth, Settings.create(3, **SETTINGS))
  differ = 0
  for row in range(3):
    found = set(paths_of(proposal, row))
    assert found == by_loops(law_of(row), 4, 3, nodes, expand, rerank)
    differ += found != by_loops(law_of(row), 4, 3, nodes)
    has_children = np.isin(np.arange(nodes), proposal.tree.parents[row])
    assert (rows[row, has_children] >= 0).all()
  assert differ  # or it shows nothing


def test_what_is_not_there_is_not_put_in_its_place():
  """A law of one token: a level has one node, re-ranked or not. Fails when invalid ones are proposed."""
  table = np.full((STATES, VOCAB), -np.inf, np.float32)
  table[np.arange(STATES), np.arange(STATES) % VOCAB] = 0.0
  proposal, _, _ = grow(DynamicGrowth(TreeBudget(6, 3), 2, rerank=False), Settings.create(3), table=table)
  for row in range(3):
    assert set(paths_of(proposal, row)) == by_loops(
      lambda path, row=row: process(table[state_of(row, path)]), 3, 2, 6, rerank=False
    )
  assert proposal.valid.sum(axis=1).tolist() == [4, 4, 4]


def test_within_the_beam_it_is_the_best_tree_there_is():
  """With N - 1 nodes in a beam as wide, no other tree of N nodes has more joint probability: all 400 nodes
  down to depth 3 are enumerated.

  Fails when a better node is missed, or the sum of logarithms is not the joint probability.
  """
  proposal, _, _ = grow(DynamicGrowth(TreeBudget(7, 3), 6), Settings.create(3))
  for row in range(3):
    joint = {(): 1.0}
    for path in (p for depth in (1, 2, 3) for p in itertools.product(range(VOCAB), repeat=depth)):
      joint[path] = joint[path[:-1]] * process(TABLE[state_of(row, path[:-1])])[path[-1]]
    best = sorted(joint, key=lambda path: -joint[path])[:7]
    assert set(paths_of(proposal, row)) == set(best)


@pytest.mark.parametrize("seed", range(4))
def test_ties_keep_parents(seed):
  """Probabilities of 1, ½ and ¼ only: children as likely as their parents, siblings as likely as each other.

  Nodes are paths that the draft may say, and together as likely as the algorithm's: which of equals is taken
  is free, as long as a parent comes before its child. Fails when of equals a child goes before its parent.
  """
  random = np.random.default_rng(seed)
  table = np.full((STATES, VOCAB), -np.inf, np.float32)
  for state in range(STATES):
    count = random.choice([1, 1, 2, 4])
    table[state, random.permutation(VOCAB)[:count]] = 0.0
  proposal, _, _ = grow(DynamicGrowth(TreeBudget(4, 3), 3), Settings.create(3), table=table)
  for row in range(3):
    law = lambda path, row=row: process(table[state_of(row, path)])
    joint = lambda path, law=law: np.prod([law(path[:i])[path[i]] for i in range(len(path))])
    got, want = (sorted(map(joint, paths)) for paths in (paths_of(proposal, row), by_loops(law, 3, 3, 4)))
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_draft_model_sees_each_nodes_own_path():
  """A draft whose logits depend on every row that a node sees: what is fed, its place, its bits.

  Fails when a node sees a sibling's row, a level is written over another, or a position is off.
  """
  drafter = make_drafter(
    "two_model[nodes=9,beam=3]", window=4, vocab_size=5, num_real_tokens=5, max_length=99
  )
  proposal = propose(drafter, PROMPTS, Settings.create(3, **SETTINGS))
  for row, prompt in enumerate(PROMPTS):
    text, own = tuple(prompt), OF_ROW[row]
    law = lambda path, text=text, own=own: process(DRAFT.logits_after(text + path), **own)
    assert set(paths_of(proposal, row)) == by_loops(law, 4, 3, 9)


def test_rows_say_which_nodes_were_fed():
  """Scratch rows are numbered in the order of the levels; each row is one node's. Fails for another order."""
  proposal, _, rows = grow(DynamicGrowth(TreeBudget(22, 3), 3), Settings.create(3))
  for row in range(3):
    depths = proposal.tree.depths[row]
    assert rows[row, 0] == 0 and sorted(rows[row, depths == 1]) == [1, 2, 3]
    fed = sorted(rows[row, depths == 2])
    assert fed == [-1] * 6 + [4, 5, 6] and (rows[row, depths == 3] == -1).all()
    has_children = np.isin(np.arange(22), proposal.tree.parents[row])
    np.testing.assert_array_equal(has_children, rows[row] >= 0)


def test_what_is_not_there_is_not_proposed():
  """Rows that do not draft; nodes behind which the draft is unsure; positions behind its limit (case B4)."""
  growth = DynamicGrowth(TreeBudget(8, 3), 3)
  proposal, forwards, _ = grow(growth, Settings.create(3), ready=[False] * 3)
  assert proposal.valid.sum() == 3 and forwards == 0
  proposal, _, _ = grow(growth, Settings.create(3), ready=[True, False, True])
  assert proposal.valid.sum(axis=1).tolist() == [8, 1, 8]
  sure = [process(TABLE[state_of(row, ())]).max() >= 0.6 for row in range(3)]
  limited = dataclasses.replace(growth, confidence=0.6, max_length=2)
  proposal, _, _ = grow(limited, Settings.create(3))
  for row in range(3):
    paths = paths_of(proposal, row)
    assert (len(paths) > 1) == sure[row]
    assert all(process(TABLE[state_of(row, path[:-1])]).max() >= 0.6 for path in paths if path)
  assert any(sure) and not all(sure) and proposal.tree.depths[proposal.valid].max() == 2


def test_a_bias_shapes_the_tree():
  """A token forbidden in one row is in no node of it. Fails when drafts are ranked before processing."""
  settings = Settings.create(3, logit_bias=[{}, {2: -100.0}, {}])
  proposal, _, _ = grow(DynamicGrowth(TreeBudget(8, 3), 3), settings)
  held = [{token for path in paths_of(proposal, row) for token in path} for row in range(3)]
  assert 2 not in held[1] and 2 in held[0] | held[2]


@pytest.mark.parametrize(
  ("options", "words"),
  [
    ("nodes=4", "beam = None"),
    ("nodes=4,beam=0", "beam = 0"),
    ("nodes=4,beam=6", "beam = 6"),
    ("nodes=3,beam=2", "nodes = 3"),
    ("nodes=129,beam=2", "nodes = 129"),
    ("nodes=14,beam=2", "nodes = 14.*at most 11"),
    ("beam=2", "beam = 2"),
    ("nodes=4,beam=2,branching=(2,)", "branching"),
    ("nodes=4,beam=2,policy=sample", "policy = 'sample'.*top_k"),
    ("nodes=4,beam=2,expand=depth", "expand = 'depth'; it must be one of value, confidence"),
    ("nodes=4,beam=2,rerank=0", "rerank = 0"),
    ("nodes=8,beam=2,rerank=False", "nodes = 8.*at most 7"),
    ("expand=confidence", "expand = 'confidence'.*needs nodes"),
    ("rerank=False", "rerank = False shape a dynamic tree"),
  ],
)
def test_bad_options_name_themselves(options, words):
  with pytest.raises(ValueError, match=words):
    make_drafter(f"two_model[{options}]", window=3, vocab_size=5, num_real_tokens=5, max_length=9)


def test_the_buffer_has_room_for_what_is_fed():
  """More rows are drafted than nodes proposed: the budget says so. Fails when it is left at the nodes."""
  drafter = TwoModel(TreeBudget(5, 4), 61, 61, 99, policy="top_k", beam=7)
  assert drafter.tree == TreeBudget(5, 4, drafted=22) and drafter.tree.num_rows == 22
  assert TreeBudget(5, 4).num_rows == 5


@pytest.mark.slow
def test_the_last_slots_hold_what_is_fed():
  """Limit 120: rounds of 5 nodes would fit 128 slots, the 22 rows drafted do not. The text is plain's.

  Fails when the buffer is made for what is proposed: rows behind its end are clamped into others.
  """
  model = tiny_model(2, num_layers=1)
  drafter = TwoModel(TreeBudget(5, 4), 61, 61, 512, policy="top_k", beam=7)
  prompt, rows = [[(7 * i) % 61 for i in range(80)]], []
  for drafts, weights in ((make_drafter("none"), None), (drafter, model)):
    config = decode.DecodeConfig(
      drafts, make_rule("greedy"), num_real_tokens=61, length_limit=120, prefill_widths=(16,)
    )
    weights = decode.Weights(model, weights)
    state = decode.generate(weights, decode.prefill(weights, config, prompt), config)
    rows.append(decode.results(state)[0])
  assert config.slots == 256 and drafter.tree.num_rows == 22
  assert rows[1].tokens == rows[0].tokens and sum(rows[1].accepted) > 10
  assert_cache_rows(model, state.drafter.cache, state, width=120)
  assert int(state.drafter.cache.length[0]) > 114
