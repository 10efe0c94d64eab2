"""Trained heads in the scripts: which drafter gets which, what is wrong about them, what tells them apart."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments import calibrate, generate, loops, measure, results, runtime
from experiments import heads as trained
from experiments.footprint import footprint
from experiments.methods import parse_method
from specjax.checkpoints import (
  load_model,
  save_block,
  save_draft,
  save_eagle1,
  save_eagle3,
  save_early_exit,
  save_medusa,
  shipped,
)
from specjax.models import (
  DraftConfig,
  DraftDecoder,
  Eagle1,
  Eagle3,
  EarlyExit,
  EarlyExitConfig,
  MedusaConfig,
  MedusaHeads,
)
from tests import heads
from tests.experiments.test_bad_flags import error_of
from tests.experiments.tiny import VOCAB, parsed, run_script

IDS = np.arange(0, VOCAB, 2)


@pytest.fixture(scope="module")
def folders(models, tmp_path_factory):
  """A folder of each kind, for the tiny target."""
  target, rngs = load_model(models[0]).model, nnx.Rngs(0)
  of = str(tmp_path_factory.mktemp("heads"))
  kinds = ("eagle", "eagle3", "medusa", "draft", "block", "early_exit", "other")
  paths = {kind: os.path.join(of, kind) for kind in kinds}
  config = heads.eagle1_config(target.config, IDS)
  save_eagle1(paths["eagle"], Eagle1(config, target, ids=IDS, dtype=jnp.float32, rngs=rngs))
  config = heads.eagle3_config(target.config, IDS)
  save_eagle3(paths["eagle3"], Eagle3(config, ids=IDS, dtype=jnp.float32, rngs=rngs))
  save_eagle3(paths["other"], Eagle3(config, ids=IDS, dtype=jnp.float32, rngs=rngs))
  config = EarlyExitConfig(target.config.replace(num_layers=1), 1, draft_vocab_size=len(IDS))
  save_early_exit(paths["early_exit"], EarlyExit(config, target, ids=IDS, dtype=jnp.float32, rngs=rngs))
  config = MedusaConfig(target.config.d_model, VOCAB, 3)
  save_medusa(paths["medusa"], MedusaHeads(config, dtype=jnp.float32, rngs=rngs))
  save_block(paths["block"], heads.block_head(target.config, IDS))
  config = DraftConfig(target.config.replace(num_layers=1, max_length=256), draft_vocab_size=len(IDS))
  save_draft(paths["draft"], DraftDecoder(config, target, ids=IDS, dtype=jnp.float32, rngs=rngs))
  return paths


def flags_of(models, folders, *kinds):
  return [f"--model={models[0]}", "--drafter_path=" + ",".join(folders[kind] for kind in kinds)]


def test_each_drafter_gets_its_head(models, folders):
  """All kinds in one run. Fails when a head goes to another drafter, or a shape does not come from it."""
  eagles = ["adaptive[of=eagle3]", "eagle[nodes=8,beam=3,window=4,expand=confidence,rerank=False]"]
  names = [*eagles, "adaptive[of=medusa]", "two_model", "none", "prompt_lookup"]
  names += ["adaptive[of=early_exit[confidence=0.4]]", "adaptive[of=block]"]
  with parsed(*flags_of(models, folders, "eagle", "eagle3", "medusa", "draft", "early_exit", "block")):
    job = runtime.load_job(names)
    methods = [runtime.make_method(job, name, 128) for name in names]
    eagle3, eagle, medusa, two_model, plain, lookup, early, block = methods
    sampled = parse_method("eagle3[nodes=8,beam=3]")
    assert sampled.takes_window and not parse_method("medusa[tree=((0,),)]").takes_window
  weights, drafters = eagle3.weights.drafter, eagle3.config.drafters
  assert weights.head.config.tap_layers == drafters[0].taps == heads.TAPS
  assert weights.embed is job.target.model.embed[...]
  assert [d.tree.num_nodes for d in drafters] == [4, 4, 8]
  assert [d.is_dynamic for d in drafters] == [False, True, True]
  assert {d.policy for d in drafters} == {"top_k"} and drafters[0].max_length == 512
  np.testing.assert_array_equal(weights.head.ids, IDS)
  weights, drafter = eagle.weights.drafter, eagle.config.drafter
  assert isinstance(weights.head, Eagle1) and drafter.taps == (2,) and drafter.name == "eagle"
  assert (drafter.expand, drafter.rerank, drafter.tree.num_nodes) == ("confidence", False, 8)
  assert medusa.weights.drafter.heads.config.num_heads == 3 and medusa.config.drafter.taps == (2,)
  assert medusa.weights.drafter.rows.shape == (VOCAB, 32)
  assert [d.tree.num_nodes for d in medusa.config.drafters] == [4, 8]
  assert block.weights.drafter.embed is job.target.model.embed[...]
  assert [(d.block_size, d.taps, d.tree.num_nodes) for d in block.config.drafters] == [
    (5, heads.TAPS, 4),
    (5, heads.TAPS, 8),
  ]
  assert isinstance(two_model.weights.drafter, DraftDecoder) and two_model.config.drafter.max_length == 256
  assert plain.weights.drafter is None is lookup.weights.drafter
  assert eagle3.beliefs.startswith("assumed")
  (short, long), weights = early.config.drafters, early.weights.drafter
  assert (short.exit, short.taps, short.confidence) == (1, (1,), 0.4) and early.window == long.tree.max_depth
  assert weights.layers.config.num_layers == 1
  assert weights.layers.embed[...] is job.target.model.embed[...]


def test_footprints_by_hand(models, folders):
  """Fails when the target's arrays are counted as the draft's, a cache is not, or what does not grow is."""
  names = [
    "none",
    "prompt_lookup",
    "self_speculation[layers=1]",
    "eagle3",
    "medusa",
    "two_model",
    "early_exit",
  ]
  with parsed(*flags_of(models, folders, "eagle3", "medusa", "draft", "early_exit")):
    job = runtime.load_job(names)
    found = {name: footprint(job, runtime.make_method(job, name, 128)) for name in names}
  target, c = job.target.model, job.target.config
  row = lambda of: 2 * of.num_kv_heads * of.head_dim * 4  # keys and values of a layer, float32
  for name in ("none", "prompt_lookup", "self_speculation[layers=1]", "medusa"):
    assert found[name]["token_bytes"] == 0
  for name in ("none", "prompt_lookup", "self_speculation[layers=1]"):
    assert found[name]["weight_bytes"] == found[name]["parameters"] == 0 and found[name]["head"] is None
  for name, kind in (("eagle3", "eagle3"), ("two_model", "draft"), ("early_exit", "early_exit")):
    assert found[name]["token_bytes"] == row(job.heads[kind].config.decoder)
  assert found["none"]["target_token_bytes"] == row(c) * c.num_layers
  assert found["none"]["target_bytes"] == sum(leaf.nbytes for leaf in jax.tree.leaves(target))
  head = job.heads["eagle3"].module
  assert found["eagle3"]["weight_bytes"] == sum(leaf.nbytes for leaf in jax.tree.leaves(head))
  parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(head, nnx.Param)))
  assert found["eagle3"]["parameters"] == parameters
  assert found["eagle3"]["head"] == {"digest": trained.digest(job.heads["eagle3"])}
  # Beside its cache a row keeps a ring of features, their tokens and two lengths.
  width = job.heads["eagle3"].config.decoder.d_model
  assert found["eagle3"]["row_bytes"] == 16 * (width * 4 + 4) + 2 * 4


def test_dynamic_trees_are_deterministic_at_any_temperature(models, folders):
  """The chain samples, and one rule takes both. Fails when the tree is given the chains' policy."""
  with parsed(*flags_of(models, folders, "eagle3"), "--temperature=0.8"):
    job = runtime.load_job(["adaptive[of=eagle3]"])
    method = runtime.make_method(job, "adaptive[of=eagle3]", 128)
  assert [d.policy for d in method.config.drafters] == ["sample", "top_k", "top_k"]
  assert method.config.rule.name == "traversal_verification"


@pytest.mark.parametrize(
  ("kinds", "drafter", "words"),
  [
    (("eagle3",), "prompt_lookup", "--drafter_path is not used by prompt_lookup"),
    (("medusa",), "eagle3", "holds a head of kind medusa, which no drafter takes"),
    (("eagle3",), "eagle", "holds a head of kind eagle3, which no drafter takes"),
    (("eagle",), "eagle3", "holds a head of kind eagle, which no drafter takes"),
    (("eagle",), "eagle[nodes=9,beam=2,window=3,rerank=False]", "nodes = 9"),
    (("medusa",), "two_model", "holds a head of kind medusa, which no drafter takes"),
    (("eagle3", "other"), "eagle3", "both hold a head of kind eagle3"),
    (("eagle3", "medusa"), "eagle3", "holds a head of kind medusa, which no drafter takes"),
    (("medusa",), "medusa[window=4]", "the tree is 4 deep; there are 3 heads"),
    (("eagle3",), "eagle3[window=16]", "ring = 16"),
    (("block",), "block[window=6]", "6 deep; the head says 5 tokens"),
    (("block",), "eagle3", "holds a head of kind block, which no drafter takes"),
  ],
)
def test_heads_that_do_not_fit_are_one_line(models, folders, monkeypatch, capsys, kinds, drafter, words):
  """Fails when a head is left out in silence, or found out only after something compiled."""
  monkeypatch.setattr(measure, "compile_method", lambda *_: pytest.fail("something was compiled"))
  assert run_script(generate, *flags_of(models, folders, *kinds), f"--drafter={drafter}") == 2
  assert words in error_of(capsys)


def test_two_sources_of_a_draft_are_one_too_many(models, folders, capsys):
  asked = [*flags_of(models, folders, "draft"), f"--draft_model={models[1]}", "--drafter=two_model"]
  assert run_script(generate, *asked) == 2
  assert "one is enough" in error_of(capsys)


def test_a_calibration_belongs_to_its_heads(models, folders):
  """What a head holds is noted with its drafts, not where it lies; the key is that of runs without heads.

  Fails when costs or acceptance of another head are believed.
  """
  found, keys = {}, []
  for kind in ("eagle3", "other"):
    with parsed(*flags_of(models, folders, kind)):
      job = runtime.load_job(["eagle3"])
      found[kind] = runtime.head_digest(job, "eagle3[window=2]")
      keys.append(runtime.calibration_key(job))
  assert found["eagle3"] != found["other"] and runtime.head_digest(job, "prompt_lookup") is None
  with parsed(*flags_of(models, folders, "eagle3")):
    assert runtime.head_digest(runtime.load_job(["eagle3"]), "eagle3") == found["eagle3"]
  with parsed(f"--model={models[0]}"):
    keys.append(runtime.calibration_key(runtime.load_job(["none"])))
  assert keys[0] == keys[1] == keys[2]
  moved = jax.tree.map(lambda x: x, job.heads["eagle3"].module)
  assert trained.digest(job.heads["eagle3"]) == trained.digest(
    type(job.heads["eagle3"])("eagle3", moved, job.heads["eagle3"].config, "elsewhere")
  )


def test_shipped_heads_need_no_path(models, folders, tmp_path, monkeypatch):
  """Of the target's name, each kind that is needed; --drafter_path comes first.

  Fails when a head of another target is taken, or one that no method needs is loaded.
  """
  (tmp_path / "shipped" / "tiny").mkdir(parents=True)
  for kind in ("eagle3", "draft"):
    os.symlink(folders[kind], tmp_path / "shipped" / "tiny" / kind)
  monkeypatch.setattr(shipped, "FOLDER", str(tmp_path / "shipped"))
  loading = runtime.load_model
  monkeypatch.setattr(runtime, "load_model", lambda _, **options: loading(models[0], **options))
  source = lambda job, kind: os.path.realpath(job.heads[kind].source)
  with parsed("--model=tiny"):
    job = runtime.load_job(["none", "adaptive[of=eagle3]"])
    assert set(job.heads) == {"eagle3"} and source(job, "eagle3") == os.path.realpath(folders["eagle3"])
    assert set(runtime.load_job(["two_model"]).heads) == {"draft"}
    with pytest.raises(ValueError, match="drafter medusa needs --drafter_path"):
      runtime.load_job(["medusa"])
  with parsed("--model=tiny", f"--drafter_path={folders['other']}"):
    assert source(runtime.load_job(["eagle3"]), "eagle3") == os.path.realpath(folders["other"])
  with parsed("--model=tiny", f"--draft_model={models[1]}"):
    job = runtime.load_job(["two_model"])
    assert not job.heads and job.draft is not None


def test_what_a_head_has_not_been_fed_is_timed(models, folders, monkeypatch):
  """Its rows go back and its features do not: so many are pending. Fails when both do, or neither does."""
  seen = []

  def draft(state, *_):
    seen.append(
      [int(np.asarray(x)[0]) for x in (state.length, state.drafter.cache.length, state.drafter.seen)]
    )
    return state

  monkeypatch.setattr(loops, "draft", draft)
  plan = calibrate.Plan(("eagle3[window=2]",), (1,), (8, 20), (1,), passes=1, turns=1, tokens=1)
  with parsed(*flags_of(models, folders, "eagle3")):
    costs = calibrate.Calibration(plan, [], runtime.load_job(["eagle3"]))
    found = costs.catch_up(calibrate.Case("catch_up", 1, 20, "eagle3[window=2]"))
  assert [20, 19, 19] in seen and [20, 1, 19] in seen and found["unseen"] == 18


@pytest.mark.slow
@pytest.mark.parametrize(
  ("drafter", "kind"),
  [
    ("eagle[nodes=6,beam=2]", "eagle"),
    ("eagle3[nodes=6,beam=2]", "eagle3"),
    ("medusa", "medusa"),
    ("two_model", "draft"),
    ("eagle3", "eagle3"),
    ("block", "block"),
    ("block[nodes=6,beam=2]", "block"),
  ],
)
def test_generate_with_a_head(models, folders, capsys, drafter, kind, tmp_path):
  """The text is plain's, and something is proposed. Fails when a head does not come as far as the loop."""
  asked = [*flags_of(models, folders, kind), f"--drafter={drafter}", "--prompt=so the hen and the hen"]
  output = str(tmp_path / "run")
  assert run_script(generate, *asked, "--max_new_tokens=16", f"--output={output}") == 0
  out, rows = capsys.readouterr().out, results.read_rows(output)
  assert "identical         yes, all" in out and "nan" not in out
  assert rows[-1]["proposed"] > 0
