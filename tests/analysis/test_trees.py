"""The best window and the best tree, against all windows and all trees."""

import functools
import itertools

import numpy as np
import pytest

from specjax import analysis
from specjax.tree import TokenTree

ACCEPTANCES = {
  "equal siblings": analysis.rank_acceptance(0.6, 4),
  "one rank": np.array([0.7]),
  "flat": np.array([0.3, 0.29, 0.28]),
  "steep": np.array([0.9, 0.05, 0.01]),
  "a better second": np.array([0.1, 0.6, 0.2]),
  "nothing": np.zeros(2),
  "by depth": np.array([[0.3, 0.25, 0.2], [0.9, 0.05, 0.0], [0.5, 0.3, 0.1]]),
  "good behind bad": np.array([[0.2, 0.1], [0.4, 0.3], [0.95, 0.0]]),
}
MOST = 7
MONOTONE = {
  "free": lambda nodes, depth: 1.0,
  "verify": lambda nodes, depth: 1 + 0.09 * (nodes - 1),
  "draft": lambda nodes, depth: 1 + 0.03 * (nodes - 1) + 0.15 * depth,
  "steps": lambda nodes, depth: 1 + 0.6 * ((nodes - 1) // 4) + 0.02 * depth,
}


@functools.cache
def trees(nodes):
  """Every ordered tree of so many nodes, numbered level by level, once."""
  found = {}
  for rest in itertools.product(*(range(node) for node in range(1, nodes))):
    if list(rest) == sorted(rest):  # level order gives parents that never fall
      found[(-1, *rest)] = None
  return tuple(found)


def depth_of(parents):
  return TokenTree(parents).max_depth


@functools.cache
def valued(name):
  """``(tokens, nodes, depth)`` of every tree up to `MOST` nodes."""
  return [
    (analysis.tree_tokens(parents, ACCEPTANCES[name]), nodes, depth_of(parents))
    for nodes in range(1, MOST + 1)
    for parents in trees(nodes)
  ]


def test_all_trees_are_there():
  """As many as the Catalan numbers say: else the brute force would prove nothing."""
  assert [len(trees(nodes)) for nodes in range(1, MOST + 1)] == [1, 1, 2, 5, 14, 42, 132]


@pytest.mark.parametrize("name", ACCEPTANCES)
def test_no_tree_beats_the_programme(name):
  """For every budget up to seven nodes and every limit of depth.

  Fails when a rank, depth or split of the budget is taken wrongly; the tree is worth what it says.
  """
  acceptance = ACCEPTANCES[name]
  for nodes, limit in itertools.product(range(1, MOST + 1), (None, 0, 1, 2, 3)):
    most = MOST if limit is None else limit
    best = max(tokens for tokens, n, depth in valued(name) if n <= nodes and depth <= most)
    tree = analysis.best_tree(acceptance, nodes, max_depth=limit)
    assert tree.tokens == pytest.approx(best, rel=1e-12), (nodes, limit)
    assert analysis.tree_tokens(tree.parents, acceptance) == pytest.approx(best, rel=1e-12)
    assert tree.nodes <= nodes and tree.depth == depth_of(tree.parents) <= most
    assert list(tree.parents) == sorted(tree.parents)


def test_no_nodes_are_wasted():
  """What is never accepted is left out. Fails when a budget is filled with it."""
  assert analysis.best_tree([0.0, 0.0], 6).parents == (-1,)
  assert analysis.best_tree([[0.5, 0.0], [0.0, 0.0]], 6).parents == (-1, 0)


def test_a_large_tree():
  """64 nodes, as Sequoia's: more than the chain, the binary tree and Medusa's shape give; a chain where
  one rank is accepted. Fails when the programme only holds for small trees.
  """
  acceptance = analysis.rank_acceptance(0.55, 8)
  tree = analysis.best_tree(acceptance, 64)
  assert tree.nodes == 64 and TokenTree(tree.parents).num_nodes == 64
  others = (TokenTree.chain(63), TokenTree.cartesian((2, 2, 2, 2, 2)), TokenTree.of_widths((10, 28, 23, 2)))
  assert all(tree.tokens > analysis.tree_tokens(other.parents, acceptance) for other in others)
  assert analysis.best_tree([0.9], 40).parents == TokenTree.chain(39).parents
  flat = analysis.best_tree(acceptance, 64, max_depth=3)
  assert flat.depth == 3 and flat.tokens < tree.tokens


@pytest.mark.parametrize("cost", MONOTONE)
@pytest.mark.parametrize("name", ACCEPTANCES)
def test_no_tree_pays_more(name, cost):
  """Tokens over cost against every tree, with and without a limit of depth. Fails when a budget or depth
  is not looked at, or the cost is that of the budget and not of the tree.
  """
  for limit in (0, 2, MOST):
    tree = analysis.best_tree_under(ACCEPTANCES[name], MONOTONE[cost], MOST, limit)
    best = max(tokens / MONOTONE[cost](n, depth) for tokens, n, depth in valued(name) if depth <= limit)
    assert tree.tokens / MONOTONE[cost](tree.nodes, tree.depth) == pytest.approx(best, rel=1e-12)
    assert tree.depth <= limit


def test_a_dear_round_means_plain_decoding():
  """Nothing pays where a draft costs more than it gives. Fails when a tree is always returned."""
  tree = analysis.best_tree_under([0.5, 0.2], lambda nodes, depth: nodes**2, 16, 8)
  assert tree.parents == (-1,) and tree.tokens == 1


@pytest.mark.parametrize("rates", (0.8, [0.9, 0.5, 0.4], [0.5, 0.95], [0.0], 1.0))
@pytest.mark.parametrize("step", (0.0, 0.3, 2.0))
def test_no_window_beats_the_best(rates, step):
  """Against chain_tokens over costs, for functions and arrays alike.

  Fails when nodes and windows are mixed up, or the last rate does not hold for what is deeper.
  """
  most = 9
  by_position = np.resize(rates, most) if np.ndim(rates) == 0 else [*rates, *[rates[-1]] * most][:most]
  curve = [10, 10.5, 11, 16, 16.5, 17, 17.5, 24, 25, 26]
  want = [
    analysis.chain_tokens(by_position[:window]) / (curve[window] + (step * window + 1 if window else 0))
    for window in range(most + 1)
  ]
  draft = lambda window: step * window + 1
  got = analysis.best_window(rates, lambda nodes: curve[nodes - 1], draft, max_window=most)
  assert got == int(np.argmax(want))
  arrays = analysis.best_window(rates, curve, [draft(w) for w in range(1, most + 1)], max_window=most)
  assert arrays == got


def test_windows_from_a_calibration():
  """Plain decoding where drafts never hit; the longest where they always do and cost nothing."""
  flat = lambda nodes: 1.0
  assert analysis.best_window(0.0, flat, max_window=8) == 0
  assert analysis.best_window(1.0, flat, max_window=8) == 8
  assert analysis.best_window(0.5, flat, lambda window: 0.6 * window, max_window=8) == 0


@pytest.mark.parametrize(
  ("call", "words"),
  [
    (lambda: analysis.best_tree([0.5], 0), "nodes = 0; it must be a whole number of at least 1"),
    (lambda: analysis.best_tree([0.5], 4, max_depth=-1), "max_depth = -1"),
    (lambda: analysis.best_tree([0.6, 0.6], 4), "sums to 1.2"),
    (lambda: analysis.best_tree_under([0.5], lambda n, d: 0.0, 4, 4), r"cost_of\(1, 0\) = 0.0"),
    (lambda: analysis.best_window([], [1.0], max_window=0), "rates is empty"),
    (lambda: analysis.best_window(0.5, [1.0, 2.0], max_window=2), r"round_ms has the shape \(2,\); it must"),
    (lambda: analysis.best_window(0.5, [1.0, 0.0], max_window=1), "round_ms = 0.0"),
    (lambda: analysis.best_window(0.5, [1.0, 1.0], [float("nan")], max_window=1), "draft_ms = nan"),
    (lambda: analysis.best_window(0.5, [1.0], max_window=-1), "max_window = -1"),
  ],
)
def test_what_makes_no_sense_is_named(call, words):
  """Field, value and limit. Fails when a tree or window comes back."""
  with pytest.raises(ValueError, match=words):
    call()
