"""Each head's loss and held-out figures against loops over single samples and the *decoding* modules.

The reference shares no code with `training` but the samples: hidden states come from `Decoder.__call__`, what
a head says from its own `__call__` with a cache, sums from loops in numpy and float64.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax import cache as kv
from specjax.testing import tiny_model
from specjax.training.batches import Packed
from specjax.training.recipes import RANKS, RECIPES, TextStats, acceptance, make_recipe, reference
from specjax.training.recipes.base import Recipe
from specjax.training.recipes.eagle1 import disturbed
from specjax.training.recipes.recurrent import hidden_by_step
from specjax.training.recipes.sizes import on_raw_features
from specjax.training.step import Parts, with_features
from tests.training.texts import greedy_texts, random_texts

WIDTH, STEPS = 24, 3
LENGTHS = [13, 24, 9, 17, 20, 11]
VOCAB = 40  # of the draft
RECIPES_UNDER_TEST = {
  "distilled": f"distilled[layers=(1,),draft_vocab={VOCAB},output=own,judged={STEPS}]",
  "medusa": f"medusa[heads={STEPS},draft_vocab={VOCAB},decay=0.7]",
  "eagle": f"eagle[noise=0,feature_weight=0.7,token_weight=0.3,judged={STEPS},draft_vocab={VOCAB}]",
  "eagle3": f"eagle3[steps={STEPS},tap_layers=(0,1,2),start=1,draft_vocab={VOCAB}]",
  "block": f"block[size={STEPS},markov=5,layers=2,tap_layers=(0,1,2),draft_vocab={VOCAB}]",
  "early_exit": f"early_exit[exit=1,draft_vocab={VOCAB},judged={STEPS}]",
}


@functools.cache
def target():
  return tiny_model(0)


@functools.cache
def texts():
  """Half random, half the target's own, so that greedy rounds get somewhere."""
  random = random_texts(5, LENGTHS)
  own = greedy_texts(target(), random.padded(WIDTH)[:3, :4], WIDTH)
  random.samples[:3] = own.samples
  return random


@functools.cache
def head(name):
  """A recipe, and a head that is not at its start, where some parts are 0 or the target's."""
  recipe = make_recipe(RECIPES_UNDER_TEST[name])
  random = np.random.default_rng(2)
  counts, sizes = random.integers(0, 9, 61), random.uniform(0.5, 2.0, (4, 32)).astype(np.float32)
  module = recipe.init(target(), TextStats(counts, keep=(60,), sizes=sizes), nnx.Rngs(3))
  parts = Parts(module)
  noise = np.random.default_rng(4)
  shifted = {k: v + 0.05 * noise.standard_normal(v.shape).astype(np.float32) for k, v in parts.params.items()}
  return recipe, parts.merge(shifted, parts.rest)


@functools.cache
def packed(name):
  """The samples in rows, with the hidden states that the recipe wants."""
  rows = Packed(texts(), range(len(LENGTHS)), row_length=40)
  assert any(len(rows.samples_of(b)) > 1 for b in range(rows.num_rows))
  batch = jax.tree.map(jnp.asarray, rows.read([*range(rows.num_rows), -1]))
  return with_features(head(name)[0], target(), batch)


@functools.cache
def of_target():
  """Hidden states ``[samples, T, taps (0, 1, 2), D]`` and logits of the target over each sample alone."""
  forward = jax.jit(lambda m, x: m(x, m.init_cache(len(LENGTHS), WIDTH), taps=(0, 1, 2)))
  output = forward(target(), jnp.asarray(texts().padded(WIDTH)))
  return output.taps, np.asarray(output.logits, np.float64)


@jax.jit
def decoded_chains(module, embed, tokens, features):
  """A head on features as decoding uses it: chains of the text's tokens behind each row of a sample.

  Returns:
    What recurs, ``[samples, T - 1, STEPS, D]``, and logits.
  """
  n, length = tokens.shape
  embeddings = jnp.take(embed, tokens, axis=0)
  prefix = module(embeddings[:, 1:], features[:, :-1], module.init_cache(n, length + STEPS))
  rows = length - 1
  sample, at = jnp.repeat(jnp.arange(n), rows), jnp.tile(jnp.arange(rows), n)
  cut = lambda buffers: tuple(buffer[sample] for buffer in buffers)
  cache = kv.KVCache(cut(prefix.cache.k), cut(prefix.cache.v), at + 1)
  hidden, logits = prefix.hidden[sample, at][:, None], [prefix.logits[sample, at]]
  recurs = [hidden[:, 0]]
  for step in range(1, STEPS):
    following = embeddings[sample, jnp.minimum(at + 1 + step, length - 1)][:, None]
    output = module(following, hidden, cache)
    hidden, cache = output.hidden, kv.commit(output.cache, None, jnp.ones_like(at))
    recurs.append(hidden[:, 0])
    logits.append(output.logits[:, 0])
  shape = lambda x: jnp.stack(x, axis=1).reshape(n, rows, STEPS, -1)
  return shape(recurs), shape(logits)


@jax.jit
def decoded_blocks(module, embed, tokens, features):
  """A block head as decoding uses it: a pass behind every root of a sample, then the text's own tokens.

  Returns:
    Logits ``[samples, T, STEPS, Vd]``; entry ``[i, t]`` is of the root at t, d of the token at t + 1 + d.
  """
  n, length = tokens.shape
  sample, root = jnp.repeat(jnp.arange(n), length), jnp.tile(jnp.arange(length), n)
  cache = module.remember(features[sample], module.init_cache(n * length, length))
  logits = module(embed[tokens[sample, root]], cache.replace(length=root)).logits
  before = jnp.minimum(root[:, None] + jnp.arange(STEPS), length - 1)
  return module.conditioned(logits, tokens[sample[:, None], before]).reshape(n, length, STEPS, -1)


@functools.cache
def drafts(name):
  """``(sample, u, d)`` → logits of depth d of the chain whose first draft is the token at place u."""
  _, module = head(name)
  tokens = jnp.asarray(texts().padded(WIDTH))
  taps, _ = of_target()
  if name == "distilled":
    logits = np.asarray(jax.jit(lambda m, x: m(x, m.init_cache(*x.shape)).logits)(module, tokens))
    return lambda i, u, d: logits[i, u + d - 1]
  if name == "early_exit":
    forward = jax.jit(lambda m, x: m(x, m.init_cache(*x.shape[:2])).logits)
    logits = np.asarray(forward(module, taps[:, :, 1]))
    return lambda i, u, d: logits[i, u + d - 1]
  if name == "medusa":
    rows = jnp.take(target().head.weight[...], module.ids, axis=0)
    logits = np.asarray(module(target().norm(taps[:, :, 2]), lambda x: x @ rows.T))
    return lambda i, u, d: logits[i, u - 2, d]
  if name == "block":
    module = on_raw_features(module)
    logits = np.asarray(decoded_blocks(module, target().embed[...], tokens, module.fuse(taps)))
    return lambda i, u, d: logits[i, u - 1, d]
  logits = np.asarray(recurrent(name)[1])
  return lambda i, u, d: logits[i, u - 2, d]


@functools.cache
def recurrent(name):
  """What recurs in an EAGLE head's chains, and logits, as `decoded_chains` has them."""
  module, (taps, _) = on_raw_features(head(name)[1]), of_target()
  taps = taps if name == "eagle3" else taps[:, :, 2:]
  tokens = jnp.asarray(texts().padded(WIDTH))
  return decoded_chains(module, target().embed[...], tokens, module.fuse(taps))


def feature_loss(i, u):
  """SmoothL1 of what an EAGLE-1 head makes of the row before the root against the target's feature of it."""
  hidden = np.asarray(of_target()[0][i, u - 1, 2], np.float64)
  norm = np.asarray(target().norm.weight[...], np.float64)
  feature = norm * hidden / np.sqrt((hidden**2).mean() + target().config.norm_eps)
  far = np.abs(np.asarray(recurrent("eagle")[0][i, u - 2, 0], np.float64) - feature)
  return sum(0.5 * d * d if d < 1 else d - 0.5 for d in far) / len(far)


def softmax(x):
  e = np.exp(x - x.max())
  return e / e.sum()


def chains(name):
  """Every ``(sample, u, d)`` that counts: learned all the way, and something known before."""
  lag = head(name)[0].lag
  for i, sample in enumerate(texts().samples):
    for u in range(1 + lag, len(sample.tokens)):
      for d in range(STEPS):
        if u + d < len(sample.tokens) and sample.mask[u : u + d + 1].all():
          yield i, u, d


def learned():
  return sum(int(sample.mask[1:].sum()) for sample in texts().samples)


@pytest.mark.parametrize("name", RECIPES_UNDER_TEST)
def test_loss_is_that_of_the_loops(name):
  """Fails on a shift by one, an ignored mask, samples that see each other, another weight of a depth."""
  recipe, module = head(name)
  ids, logits = np.asarray(module.ids), of_target()[1]
  by_depth, counts, features = np.zeros(recipe.depth), np.zeros(recipe.depth), 0.0
  for i, u, d in chains(name):
    if d < recipe.depth:
      p = softmax(logits[i, u + d - 1][ids])
      q = softmax(drafts(name)(i, u, d).astype(np.float64))
      entropy = 0.0 if recipe.loss == "cross_entropy" else (p * np.log(p)).sum()
      by_depth[d] += entropy - (p * np.log(q)).sum()
      counts[d] += 1
      features += feature_loss(i, u) if name == "eagle" else 0.0
  loss = jax.jit(lambda module, frozen, batch: recipe.loss_sums(module, frozen, batch, None))
  total, sums = loss(module, target(), packed(name))
  np.testing.assert_array_equal(sums["count"], counts)
  np.testing.assert_allclose(sums["loss"], by_depth, rtol=1e-4)
  wanted = (by_depth * recipe.decay ** np.arange(recipe.depth)).sum()
  if name == "eagle":
    wanted = 0.3 * wanted + 0.7 * features
    np.testing.assert_allclose(sums["feature"], [features], rtol=1e-4)
  np.testing.assert_allclose(total, wanted, rtol=1e-4)
  assert (np.asarray(packed(name).counted) >= 0).sum() == learned()


@pytest.mark.parametrize("name", RECIPES_UNDER_TEST)
def test_held_out_figures_are_those_of_the_loops(name):
  """Agreement, acceptance round by round, Σ min(p, q) over the target's whole vocabulary, coverage."""
  recipe, module = head(name)
  ids, logits = np.asarray(module.ids), of_target()[1]
  expected = {key: np.zeros(STEPS) for key in ("count", "agreed", "overlap", "reached", "accepted")}
  expected |= {"tree_reached": np.zeros(STEPS), "ranks": np.zeros((STEPS, RANKS))}
  mass = 0.0

  def rank(i, u, d, token):
    q = drafts(name)(i, u, d)
    return (q > q[ids.tolist().index(token)]).sum() if token in ids else len(ids)

  choice = lambda i, u, d: ids[drafts(name)(i, u, d).argmax()]
  for i, u, d in chains(name):
    tokens = texts().samples[i].tokens
    best = lambda place, i=i: logits[i, place - 1].argmax()
    p = softmax(logits[i, u + d - 1])[ids]
    agreed = choice(i, u, d) == best(u + d)
    before = all(choice(i, u, e) == best(u + e) == tokens[u + e] for e in range(d))
    expected["count"][d] += 1
    expected["agreed"][d] += agreed
    expected["overlap"][d] += np.minimum(p, softmax(drafts(name)(i, u, d).astype(np.float64))).sum()
    expected["reached"][d] += before
    expected["accepted"][d] += before and agreed
    likeliest = [best(u + e) for e in range(d + 1)]
    if all(likeliest[e] == tokens[u + e] and rank(i, u, e, likeliest[e]) < RANKS for e in range(d)):
      expected["tree_reached"][d] += 1
      if (own := rank(i, u, d, likeliest[d])) < RANKS:
        expected["ranks"][d, own] += 1
    mass += p.sum() if d == 0 else 0.0

  @jax.jit
  def evaluate(module, frozen, batch):
    best, mass = reference(frozen, batch, module.ids)
    return recipe.evaluate(module, frozen, batch.replace(best=best, mass=mass))

  sums = evaluate(module, target(), packed(name))
  assert expected["reached"][1] > 0
  for key, values in expected.items():
    np.testing.assert_allclose(sums[key], values, rtol=1e-4, err_msg=key)
  np.testing.assert_allclose(sums["mass"], [mass], rtol=1e-4)


def test_training_time_test_is_decoding():
  """What recurs at every place and step, against `Eagle3.__call__` with a cache that is committed row by row.

  Fails without the diagonal, with a diagonal that sees other places, or at other rotary positions.
  """
  recipe, module = head("eagle3")
  decoded, _ = recurrent("eagle3")
  batch = packed("eagle3")

  @jax.jit
  def run(module, frozen, batch):
    raw = on_raw_features(module)
    return list(hidden_by_step(raw, frozen, batch, recipe.features(raw, batch), STEPS))

  steps = run(module, target(), batch)
  rows = Packed(texts(), range(len(LENGTHS)), row_length=40)
  for j, hidden in enumerate(steps):
    for b in range(rows.num_rows):
      for segment, i in enumerate(rows.samples_of(b), start=1):
        found = np.asarray(hidden)[b][np.asarray(batch.segments)[b] == segment]
        known = len(found) - 1 - j
        np.testing.assert_allclose(found[:known], decoded[i, :known, j], atol=1e-5)


def test_a_draft_that_is_the_target_has_no_loss():
  """All of its layers, its own output rows: KL 0, everything accepted."""
  recipe = make_recipe("distilled[layers=(0,1)]")
  module = recipe.init(target(), TextStats(np.ones(61)), nnx.Rngs(0))
  batch = packed("distilled")
  best, mass = reference(target(), batch, None)
  total, _ = recipe.loss_sums(module, target(), batch, None)
  figures = acceptance(recipe.evaluate(module, target(), batch.replace(best=best, mass=mass)))
  np.testing.assert_allclose(total, 0.0, atol=1e-3)
  assert figures["acceptance"] == [1.0] * 4 and figures["tau"] == 5.0
  assert figures["ranks"] == [[1.0] + [0.0] * (RANKS - 1)] * 4
  np.testing.assert_allclose([figures["coverage"], *figures["overlap"]], 1.0, atol=1e-5)


def test_fresh_heads_start_from_the_target():
  """Medusa's say what the target says of its hidden state; low-rank output layers come near its rows."""
  stats = TextStats(np.arange(61))
  module = make_recipe("medusa[heads=2,output=shared,draft_vocab=20]").init(target(), stats, nnx.Rngs(0))
  hidden = jnp.asarray(np.random.default_rng(0).standard_normal((5, 32)), jnp.float32)
  logits = target().unembed(hidden)[:, 41:]
  np.testing.assert_allclose(module(hidden), np.stack([logits] * 2, axis=1), rtol=1e-4, atol=1e-4)
  errors = []
  for rank in (4, 16, 32):
    head = make_recipe(f"eagle3[tap_layers=(0,1,2),rank={rank}]").init(target(), stats, nnx.Rngs(0))
    errors.append(float(jnp.abs(head.output(hidden) - target().unembed(hidden)).mean()))
  assert errors[0] > errors[1] > errors[2] and errors[2] < 1e-3
  adapter = make_recipe("early_exit[exit=1,draft_vocab=20]").init(target(), stats, nnx.Rngs(0))
  np.testing.assert_array_equal(adapter.attention.o.weight[...], target().layers[1].attention.o.weight[...])
  exact = target().unembed(target().norm(hidden))[:, 41:]
  np.testing.assert_allclose(adapter.unembed(hidden), exact, rtol=1e-4, atol=1e-5)
  assert not any("rows" in name for name in Parts(adapter).params)
  started = make_recipe("eagle3[tap_layers=(0,1,2),start=1]").init(target(), stats, nnx.Rngs(0))
  layer, chosen = started.layer, target().layers[1]
  np.testing.assert_array_equal(layer.attention.o.weight[...], chosen.attention.o.weight[...])
  np.testing.assert_array_equal(layer.attention.q.weight[...][:, 32:], chosen.attention.q.weight[...])
  first = target().layers[0].attention.q.weight[...]
  np.testing.assert_array_equal(layer.attention.q.weight[...][:, :32], first)
  np.testing.assert_allclose(started.fuse(of_target()[0]), of_target()[0][:, :, 2], rtol=1e-5)
  bound = make_recipe("eagle3[tap_layers=(0,1,2),output=target,draft_vocab=20]")
  module = bound.init(target(), stats, nnx.Rngs(0))
  assert [name for name in Parts(module).params if "output" in name] == ["output.readout"]
  np.testing.assert_allclose(module.output(hidden), logits, rtol=1e-4, atol=1e-4)


def test_blocks_start_from_the_target():
  """The layers of ``start``, the last tap as the feature, a Markov head that adds nothing."""
  sizes = np.random.default_rng(2).uniform(0.5, 2.0, (4, 32)).astype(np.float32)
  recipe = make_recipe("block[size=2,markov=3,tap_layers=(0,1,2),start=1,output=target,draft_vocab=20]")
  module = recipe.init(target(), TextStats(np.arange(61), sizes=sizes), nnx.Rngs(0))
  taps = of_target()[0]
  np.testing.assert_allclose(on_raw_features(module).fuse(taps), taps[:, :, 2], rtol=1e-5)
  mine, its = module.layers[0].attention, target().layers[1].attention
  np.testing.assert_array_equal(mine.o.weight[...], its.o.weight[...])
  assert not np.asarray(module.markov(jnp.arange(61))).any()
  # What is read of the target is not trained.
  names = set(Parts(module).params)
  assert "output.readout" in names and "output.weight" not in names and "masks" in names


@pytest.mark.parametrize("name", ("eagle", "eagle3", "block"))
def test_a_saved_head_is_gone_on_with(name):
  """What training divides inputs by is in the saved `fc`, and out of it again. Fails when it is left in."""
  recipe, module = head(name)
  saved, again = on_raw_features(module), on_raw_features(module)
  assert not hasattr(saved, "sizes") and hasattr(module, "sizes")
  again = recipe.go_on(nnx.clone(module), again)
  np.testing.assert_allclose(again.fc.weight[...], module.fc.weight[...], rtol=1e-6)
  x = jnp.asarray(np.random.default_rng(0).standard_normal((5, module.sizes.shape[0])), jnp.float32)
  np.testing.assert_allclose(saved.fc(x), module.fc(x / module.sizes[...]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("inputs", ("both", pytest.param("feature", marks=pytest.mark.slow)))
def test_an_eagle1_head_starts_as_a_layer_over_features(inputs):
  """Behind one position, where the final norm weighs all numbers alike: the layer's output as a feature.

  Fails when a norm is not folded in, what is added to x has the hidden state's size, or the embedding counts.
  """
  model = tiny_model(3)
  noise = np.random.default_rng(6)
  model.norm.weight = nnx.Param(jnp.full((32,), 1.7))
  layer = model.layers[0]
  for norm in (layer.attention_norm, layer.ff_norm):
    norm.weight = nnx.Param(jnp.asarray(noise.uniform(0.5, 2.0, 32), jnp.float32))
  hidden = jnp.asarray(9 * noise.standard_normal((1, 1, 32)), jnp.float32)
  size = float(jnp.sqrt(jnp.mean(hidden**2)))
  stats = TextStats(np.ones(61), sizes=np.full((1, 32), size, np.float32))
  module = make_recipe(f"eagle[start=0,inputs={inputs}]").init(model, stats, nnx.Rngs(0))

  @jax.jit
  def both(module, layer, embed):
    head = on_raw_features(module)
    v = jnp.repeat(layer.attention.v(layer.attention_norm(hidden)).reshape(1, 1, 2, 8), 2, axis=2)
    x = hidden + layer.attention.o(v.reshape(1, 1, -1))
    output = head(embed[None, :1], head.fuse(hidden[:, :, None]), head.init_cache(1, 8), logits=False)
    return output.hidden, x + layer.ff(layer.ff_norm(x))

  said, x = both(module, layer, model.embed[...])
  np.testing.assert_allclose(said, 1.7 / size * x, rtol=2e-3, atol=2e-3)
  # By the token alone: the embedding, as large as a feature.
  module = make_recipe("eagle[start=0,inputs=token]").init(model, stats, nnx.Rngs(0))
  x = on_raw_features(module).fc(model.embed[...])
  np.testing.assert_allclose(jnp.sqrt(jnp.mean(x**2)), 1.7, rtol=1e-3)


def test_noise_is_on_what_an_eagle1_head_sees_alone():
  """Within ± .1 · 512 / T of a sample of T tokens, another with another key; not on what is to be learned.

  Fails when padding or a row's length counts, the noise is that of the row, or the target's law has it, too.
  """
  batch = packed("eagle")
  features = jnp.zeros((*batch.tokens.shape, 32))
  noise = [np.asarray(disturbed(features, batch, 0.1, jax.random.key(i))) for i in range(2)]
  rows = Packed(texts(), range(len(LENGTHS)), row_length=40)
  for b in range(rows.num_rows):
    for segment, i in enumerate(rows.samples_of(b), start=1):
      found = noise[0][b][np.asarray(batch.segments)[b] == segment]
      most = 0.1 * 512 / len(texts().samples[i].tokens)
      assert len(found) == len(texts().samples[i].tokens) and 0.98 * most < np.abs(found).max() <= most
      assert abs(found.mean()) < 0.15 * most
  assert not np.isclose(*noise).all(axis=-1).any()
  assert disturbed(features, batch, 0.0, None) is features
  totals = []
  for inputs, level in (("token", 0), ("token", 9.0), ("both", 0), ("both", 9.0)):
    recipe = make_recipe(f"eagle[inputs={inputs},noise={level}]")
    module = recipe.init(target(), TextStats(np.ones(61)), nnx.Rngs(0))
    totals.append(float(recipe.loss_sums(module, target(), batch, jax.random.key(0))[0]))
  assert totals[0] == totals[1] and abs(totals[2] - totals[3]) > 1


@pytest.mark.parametrize(
  "name",
  [
    "eagle3[tap_layers=(0,1,2),{}]",
    "medusa[heads=2,{}]",
    "distilled[{}]",
    "block[tap_layers=(0,1,2),{}]",
    "block[tap_layers=(0,1,2),markov=2,{}]",
  ],
)
@pytest.mark.parametrize("output", ["target", "own"])
def test_the_draft_vocabulary_of_a_head_that_is_gone_on_with(name, output):
  """That of the new text, unless rows were trained, which keep their tokens. No weight is lost."""
  recipe = make_recipe(name.format(f"output={output},draft_vocab=20"))
  counts = np.arange(target().config.vocab_size)
  make = lambda counts, seed: recipe.init(target(), TextStats(counts), nnx.Rngs(seed))
  fresh, before = make(counts, 0), make(counts[::-1], 1)
  for part in jax.tree.leaves(nnx.state(before, nnx.Param), is_leaf=lambda x: isinstance(x, nnx.Variable)):
    part[...] = part[...] + 0.5
  new, old = np.asarray(fresh.ids), np.asarray(before.ids)
  params = jax.tree.map(np.asarray, nnx.state(before, nnx.Param))
  module = recipe.go_on(fresh, before)
  kept = output == "own" or "markov" in name
  assert set(new) != set(old) and module.ids.tolist() == (old if kept else new).tolist()
  jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, nnx.state(module, nnx.Param)), params)


def test_the_texts_tokens_as_labels():
  """``loss=tokens``: cross-entropy on the text; tokens that the draft vocabulary lacks do not count."""
  base, module = head("medusa")
  recipe = make_recipe(RECIPES_UNDER_TEST["medusa"].replace("decay", "loss=tokens,decay"))
  assert recipe.decay == base.decay
  ids = np.asarray(module.ids).tolist()
  total = count = 0.0
  for i, u, d in chains("medusa"):
    token = texts().samples[i].tokens[u + d]
    if token in ids:
      q = softmax(drafts("medusa")(i, u, d).astype(np.float64))
      total -= recipe.decay**d * np.log(q[ids.index(token)])
      count += 1
  value, sums = recipe.loss_sums(module, target(), packed("medusa"), None)
  np.testing.assert_allclose([value, sums["count"].sum()], [total, count], rtol=1e-4)


@pytest.mark.parametrize(
  ("text", "words"),
  [
    ("perplexity", "head = 'perplexity'"),
    ("distilled[loss=l2]", "loss = 'l2'"),
    ("distilled[decay=0]", "decay = 0"),
    ("eagle3[steps=0]", "steps = 0"),
    ("distilled[layers=(0,2)]", r"the target's are 0 … 1"),
    ("distilled[layers=few]", "layers = 'few'"),
    ("distilled[depth=2]", "depth"),
    ("distilled[output=target,rank=3]", "output_rank = 3"),
    ("medusa[judged=5]", "judged = 5"),
    ("medusa[draft_vocab=62]", "draft_vocab = 62"),
    ("medusa[output=mine]", "output = 'mine'"),
    ("eagle3", "fewer than 7 layers"),
    ("eagle3[tap_layers=(0,1,3)]", r"tap_layers = \(0, 1, 3\)"),
    ("eagle3[tap_layers=(0,1,2),d_ff=0]", "d_ff = 0"),
    ("eagle3[tap_layers=(0,1,2),start=2]", "start = 2"),
    ("eagle3[tap_layers=(0,1,2),start=0,d_ff=8]", "d_ff = 8"),
    ("eagle3[tap_layers=(0,1,2),rank=33]", "rank = 33"),
    ("eagle3[tap_layers=(0,1,2),output=target,rank=3]", "output_rank = 3"),
    ("eagle3[tap_layers=(0,1,2),output=mine]", "output = 'mine'"),
    ("block", "fewer than 7 layers"),
    ("block[size=0]", "size = 0"),
    ("block[size=1,tap_layers=(0,1)]", "block_size = 1"),
    ("block[markov=-1]", "markov = -1"),
    ("block[judged=5]", "judged = 5; a block has 4"),
    ("block[start=(0,1)]", r"start = \(0, 1\); it must name layers = 1"),
    ("block[start=2,tap_layers=(0,1)]", r"start = \(2,\); the target's layers are 0 … 1"),
    ("block[start=0,d_ff=8]", "d_ff = 8"),
    ("block[tap_layers=(0,3)]", r"tap_layers = \(0, 3\)"),
    ("block[tap_layers=(0,1),output=target,rank=3]", "output_rank = 3"),
    ("eagle3[tap_layers=2]", "tap_layers = 2"),
    ("eagle3[tap_layers=(2,1)]", "ascending"),
    ("eagle[inputs=none]", "inputs = 'none'"),
    ("eagle[noise=-1]", "noise = -1"),
    ("eagle[token_weight=high]", "token_weight = 'high'"),
    ("eagle[feature_weight=0,token_weight=0]", "feature_weight = token_weight = 0"),
    ("eagle[rank=3]", "rank = 3"),
    ("eagle[output=own]", "output = 'own'"),
    ("eagle[start=2]", "start = 2"),
    ("eagle[start=1,d_ff=8]", "d_ff = 8"),
    ("early_exit", "exit = None"),
    ("early_exit[exit=0]", "exit = 0"),
    ("early_exit[exit=2]", r"exit = 2; it must be in \[1, 1\]"),
    ("early_exit[exit=1,rank=3]", "rank = 3"),
    ("early_exit[exit=1,draft_vocab=62]", "draft_vocab = 62"),
  ],
)
def test_options_that_do_not_fit(text, words):
  """One error that names the option, the value and the limit, before anything compiles."""
  with pytest.raises(ValueError, match=words):
    make_recipe(text).init(target(), TextStats(np.ones(61)), nnx.Rngs(0))


def test_every_recipe_is_tested():
  # That which changes its target has loops of its own: `test_medusa2`.
  assert set(RECIPES_UNDER_TEST) | {"medusa2"} == set(RECIPES)
  assert all(issubclass(recipe, Recipe) for recipe in RECIPES.values())
