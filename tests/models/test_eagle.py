"""EAGLE heads by themselves: blocks, trees, rows, types, config. Their numbers: `test_heads_eagle{1,3}`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax.models import Eagle1, Eagle1Config, Eagle3, Eagle3Config, default_tap_layers
from specjax.models.output import Bound
from specjax.testing import tiny_config, tiny_model
from specjax.tree import TokenTree

NOISE = np.random.default_rng(0)
EMBEDDINGS = NOISE.standard_normal((1, 24, 24)).astype(np.float32)
FEATURES = NOISE.standard_normal((1, 24, 32)).astype(np.float32)
TREE = TokenTree((-1, 0, 0, 1, 2, 2, 5, 4))


def config(**changes):
  layer = tiny_config(num_layers=1)
  return Eagle3Config(**{"decoder": layer, "target_width": 24, "tap_layers": (0, 1, 2), **changes})


def head_of(c=None, ids=None, dtype=jnp.float32):
  return Eagle3(config() if c is None else c, ids=ids, dtype=dtype, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def head():
  return head_of()


@jax.jit
def forward(head, embeddings, features, cache, depths=None, ancestors=None, scratch=0):
  return head(embeddings, features, cache, depths=depths, ancestors=ancestors, scratch=scratch)


causal = jax.jit(lambda head, embeddings, features, cache: head(embeddings, features, cache))


def prefixed(head, n, batch=1):
  """The first n rows in the cache of each sequence."""
  rows = lambda x: np.repeat(x[:, :n], batch, 0)
  cache = causal(head, rows(EMBEDDINGS), rows(FEATURES), head.init_cache(batch, 64)).cache
  return cache.replace(length=jnp.full((batch,), n, jnp.int32))


def test_q3_blocks_of_any_size_are_the_same_rows(head):
  """Rows at once, or in blocks behind the committed prefix: the same states, logits and cache rows.

  Fails when a row's rotary position or what it sees depends on how it was fed.
  """
  whole = causal(head, EMBEDDINGS[:, :12], FEATURES[:, :12], head.init_cache(1, 64))
  assert (
    whole.cache.length[0] == 0 and whole.hidden.shape == (1, 12, 32) and whole.logits.shape == (1, 12, 61)
  )
  cache, at = head.init_cache(1, 64), 0
  for width in (5, 1, 6):
    output = causal(head, EMBEDDINGS[:, at : at + width], FEATURES[:, at : at + width], cache)
    np.testing.assert_allclose(output.hidden, whole.hidden[:, at : at + width], atol=1e-5)
    np.testing.assert_allclose(output.logits, whole.logits[:, at : at + width], atol=1e-5)
    at += width
    cache = output.cache.replace(length=jnp.asarray([at], jnp.int32))
  for mine, its in zip((*cache.k, *cache.v), (*whole.cache.k, *whole.cache.v)):
    np.testing.assert_allclose(mine[:, :, :12], its[:, :, :12], atol=1e-5)


def test_rows_of_a_batch_have_their_own_length(head):
  """Ragged prefixes: each sequence as if it were alone. Fails when one position serves all."""
  lengths = np.array([7, 3], np.int32)
  cache = prefixed(head, 7, batch=2).replace(length=jnp.asarray(lengths))
  at = lengths[:, None] + np.arange(2)
  output = causal(head, EMBEDDINGS[0, at], FEATURES[0, at], cache)
  for row, n in enumerate(lengths):
    alone = causal(head, EMBEDDINGS[:, : n + 2], FEATURES[:, : n + 2], head.init_cache(1, 64))
    np.testing.assert_allclose(output.hidden[row], alone.hidden[0, n:], atol=1e-5)


def test_q2_each_branch_of_a_tree_is_a_chain(head):
  """Nodes of a tree at once, and each path as a chain of its own: the same states.

  Fails when a sibling is seen or positions go by node number.
  """
  e, f = EMBEDDINGS[:, 9 : 9 + TREE.num_nodes], FEATURES[:, 9 : 9 + TREE.num_nodes]
  output = forward(head, e, f, prefixed(head, 9), TREE.depths, TREE.ancestors)
  alone = causal(head, e[0, TREE.paths], f[0, TREE.paths], prefixed(head, 9, TREE.num_nodes))
  for node, depth in enumerate(TREE.depths):
    np.testing.assert_allclose(output.hidden[0, node], alone.hidden[node, depth], atol=1e-5)
    np.testing.assert_allclose(output.logits[0, node], alone.logits[node, depth], atol=1e-5)
    np.testing.assert_allclose(
      output.cache.k[0][0, :, 9 + node], alone.cache.k[0][node, :, 9 + depth], atol=1e-5
    )


def test_a_tree_grown_level_by_level_carries_states_from_parents(head):
  """What a drafter does: each node's feature is its parent's state; each path alone gives the same.

  Fails when a level overwrites another, or when a state goes to another node's children.
  """
  e = EMBEDDINGS[:, 9 : 9 + TREE.num_nodes]
  cache, states = prefixed(head, 9), np.zeros((TREE.num_nodes, 32), np.float32)
  for level in map(list, TREE.levels):
    parents = np.array([TREE.parents[node] for node in level])
    features = np.where(parents[:, None] < 0, FEATURES[0, 9], states[parents])
    # The head takes nodes in the order of their rows: levels of this tree are in the order of nodes.
    where = (TREE.depths[level], TREE.ancestors[level], level[0])
    output = forward(head, e[:, level], features[None], cache, *where)
    states[level], cache = output.hidden[0], output.cache
  assert [node for level in TREE.levels for node in level] == list(range(TREE.num_nodes))
  for node in (3, 6, 7):
    cache, state = prefixed(head, 9), FEATURES[0, 9]
    for step in TREE.paths[node, : TREE.depths[node] + 1]:
      output = causal(head, e[:, step : step + 1], state[None, None], cache)
      state, cache = np.asarray(output.hidden[0, 0]), output.cache.replace(length=cache.length + 1)
    np.testing.assert_allclose(state, states[node], atol=1e-5)
  with pytest.raises(ValueError, match="pass ancestors and depths"):
    head(e, FEATURES[:, : TREE.num_nodes], cache, scratch=2)


def test_features_are_fused_from_the_taps_in_order(head):
  """``fc`` of the three side by side, low to high."""
  taps = NOISE.standard_normal((2, 5, 3, 24)).astype(np.float32)
  expected = np.concatenate([taps[:, :, i] for i in range(3)], axis=-1) @ np.asarray(head.fc.weight[...]).T
  np.testing.assert_allclose(head.fuse(jnp.asarray(taps)), expected, atol=1e-5)


def test_the_two_halves_of_the_layer_are_the_layer(head):
  """`enter` and `finish` with attention of one's own (one row sees itself: its value) give the state."""
  e, f = jnp.asarray(EMBEDDINGS[:, :1]), jnp.asarray(FEATURES[:, :1])
  residual, q, k, v = head.enter(e, f)
  assert q.shape == (1, 1, 4, 8) and k.shape == v.shape == (1, 1, 2, 8)
  state = head.layer.finish(residual, jnp.repeat(v, 2, axis=2))
  np.testing.assert_allclose(state, causal(head, e, f, head.init_cache(1, 8)).hidden, atol=1e-5)


def test_types_and_draft_vocabulary():
  """bf16 parameters take float32 inputs; logits are float32 over the draft vocabulary."""
  head = head_of(config(draft_vocab_size=3, output_rank=2), ids=[7, 8, 60], dtype=jnp.bfloat16)
  cache = head.init_cache(1, 8)
  output = causal(head, EMBEDDINGS[:, :2], FEATURES[:, :2], cache)
  assert output.logits.dtype == jnp.float32 and output.logits.shape == (1, 2, 3)
  assert output.hidden.dtype == cache.k[0].dtype == head.dtype == jnp.bfloat16
  assert head.fuse(jnp.ones((1, 2, 3, 24))).dtype == jnp.bfloat16
  np.testing.assert_array_equal(head.ids, [7, 8, 60])
  assert head_of().ids is None
  silent = head(EMBEDDINGS[:, :2], FEATURES[:, :2], cache, logits=False)
  assert silent.logits is None


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(decoder=tiny_config()), "decoder.num_layers = 2; it must be 1"),
    (dict(target_width=0), "target_width = 0"),
    (dict(tap_layers=()), r"tap_layers = \(\)"),
    (dict(tap_layers=(0, 2, 1)), "ascending"),
    (dict(tap_layers=(-1, 2, 3)), "below 0"),
    (dict(draft_vocab_size=62), r"draft_vocab_size = 62.*\[1, vocab_size = 61\]"),
    (dict(output_rank=0), "output_rank = 0"),
  ],
)
def test_configs_are_checked(changes, message):
  with pytest.raises(ValueError, match=message):
    config(**changes)


def test_configs_against_targets():
  target = tiny_config(num_layers=4, d_model=24)
  config().check_target(target)
  for bad, message in (
    (target.replace(d_model=32), "of width 24; the target's have 32"),
    (target.replace(vocab_size=64), "vocab_size = 61; the target's is 64"),
    (target.replace(num_layers=1), r"tap_layers = \(0, 1, 2\); the target has 1 layers"),
  ):
    with pytest.raises(ValueError, match=message):
      config().check_target(bad)
  with pytest.raises(ValueError, match=r"3 ids are given, config.draft_vocab_size = None"):
    head_of(ids=[1, 2, 3])
  assert default_tap_layers(30) == (2, 15, 27) and default_tap_layers(7) == (2, 3, 4)
  with pytest.raises(ValueError, match="num_layers = 6"):
    default_tap_layers(6)


# --- EAGLE-1 ---------------------------------------------------------------------------------------


def eagle1(target, ids=None, dtype=jnp.float32, **changes):
  layer = tiny_config(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=6, d_ff=20)
  return Eagle1(Eagle1Config(layer, 2, **changes), target, ids=ids, dtype=dtype, rngs=nnx.Rngs(0))


def test_the_targets_norm_and_rows_are_bound():
  """Not copied, not trained; of a draft vocabulary its rows. A feature read out is what the target says."""
  target = tiny_model(0)
  target.norm.weight = nnx.Param(jnp.linspace(0.5, 1.5, 32))
  head = eagle1(target)
  assert head.output.weight[...] is target.head.weight[...]
  bound = nnx.to_flat_state(nnx.state(head, Bound))
  assert {path for path, _ in bound} == {("norm", "weight"), ("output", "weight")}
  hidden = jnp.asarray(FEATURES[0, :5])
  said = target.unembed(target.norm(hidden))
  feature = head.fuse(hidden[:, None])
  np.testing.assert_allclose(head.read(feature), said, rtol=1e-5, atol=1e-5)
  few = eagle1(target, ids=[7, 8, 60], draft_vocab_size=3, dtype=jnp.bfloat16)
  assert few.fuse(hidden[:, None]).dtype == jnp.bfloat16 and few.ids.tolist() == [7, 8, 60]
  np.testing.assert_allclose(few.read(feature.astype(jnp.bfloat16)), said[:, [7, 8, 60]], atol=0.2)
  assert few.read(feature.astype(jnp.bfloat16)).dtype == jnp.float32


@pytest.mark.parametrize("inputs", ("both", "token", "feature"))
def test_inputs_are_what_a_row_sees(inputs):
  """Fails when a head for the comparison of inputs sees the other one, or the two are swapped."""
  head = eagle1(tiny_model(0), inputs=inputs)
  e, f = (jnp.asarray(x[:, :4, :32]) for x in (NOISE.standard_normal((1, 24, 32)), FEATURES))
  run = lambda e, f: np.asarray(causal(head, e, f, head.init_cache(1, 8)).hidden)
  assert head.fc.weight.shape == (32, 64 if inputs == "both" else 32)
  base = run(e, f)
  assert np.array_equal(base, run(e + 1, f)) == (inputs == "feature")
  assert np.array_equal(base, run(e, f + 1)) == (inputs == "token")


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(decoder=tiny_config()), "decoder.num_layers = 2; it must be 1"),
    (dict(target_layers=0), "target_layers = 0"),
    (dict(inputs="none"), "inputs = 'none'; it must be one of both, token, feature"),
    (dict(draft_vocab_size=62), r"draft_vocab_size = 62.*\[1, vocab_size = 61\]"),
    (dict(decoder=tiny_config(num_layers=1, d_model=24)), "made for d_model = 24; the target has 32"),
    (dict(decoder=tiny_config(num_layers=1, vocab_size=64)), "made for vocab_size = 64; the target has 61"),
    (dict(target_layers=3), "made for num_layers = 3; the target has 2"),
  ],
)
def test_eagle1_configs_are_checked(changes, message):
  values = {"decoder": tiny_config(num_layers=1), "target_layers": 2, **changes}
  with pytest.raises(ValueError, match=message):
    Eagle1Config(**values).check_target(tiny_config())
