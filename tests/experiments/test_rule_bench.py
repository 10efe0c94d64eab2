"""The bench of rules: exact laws against brute force, the same drafts for all, resuming, one-line errors."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import results, rule_bench, rule_figures, runtime
from specjax import decode, text
from specjax.base import Proposal
from specjax.checkpoints import load_model
from specjax.drafters import make_drafter
from specjax.sampling import Settings
from specjax.tree import TokenTree
from specjax.verify import make_rule
from tests.experiments.tiny import VOCAB, run_script

P = np.array([0.5, 0.05, 0.25, 0.0, 0.2])
Q = np.array([0.1, 0.4, 0.3, 0.15, 0.05])
LENIENCES = (1.0, 0.6, 0.2)
CHAIN, TREE = "two_model[policy=sample]", "two_model[branching=(2,2),policy=sample_without_replacement]"
PROMPTS = ("the hen the hen", "abcabcab")
COPY = "prompt_lookup[matches=3,nodes=7,min_ngram=1]"


def first_tokens(rule, seeds: int) -> np.ndarray:
  """Law of the first emitted token, from the rule itself: every draft, so many seeds each."""
  rows = jnp.asarray(np.stack([P, P]), jnp.float32)[None]
  settings = Settings.create(seeds, temperature=1.0, seed=np.arange(seeds))
  law = np.zeros(len(P))
  for token in range(len(P)):
    proposal = Proposal(
      jnp.tile(jnp.array([[0, token]]), (seeds, 1)),
      jnp.ones((seeds, 2), bool),
      jnp.tile(jnp.asarray(Q, jnp.float32)[None, None], (seeds, 2, 1)),
      TokenTree.chain(1),
      "sampled",
    )
    verdict = rule(jnp.tile(rows, (seeds, 1, 1)), proposal, settings, jnp.full((seeds,), 9))
    first = np.where(np.asarray(verdict.accepted) > 0, token, np.asarray(verdict.next_token))
    law += Q[token] * np.bincount(first, minlength=len(P)) / seeds
  return law


@pytest.mark.parametrize("lenience", LENIENCES)
def test_lenient_law(lenience):
  """By cases: each draft, accepted or not, then each token of the residual; and what the rule does."""
  residual = np.maximum(P - Q, 0) / np.maximum(P - Q, 0).sum()
  expected = np.zeros(len(P))
  for x in range(len(P)):
    chance = min(1.0, P[x] / (lenience * Q[x]))
    expected[x] += Q[x] * chance
    for y in range(len(P)):
      expected[y] += Q[x] * (1 - chance) * residual[y]
  law = rule_figures.lenient_law(P, Q, lenience)
  np.testing.assert_allclose(law, expected, atol=1e-12)
  rule = make_rule("lenient_speculative_sampling", lenience=lenience)
  np.testing.assert_allclose(rule_figures.first_law(rule, P, Q), first_tokens(rule, 4000), atol=0.02)
  if lenience == 1.0:
    np.testing.assert_allclose(law, P, atol=1e-12)
  np.testing.assert_allclose(rule_figures.lenient_law(P, P, lenience), P, atol=1e-12)


@pytest.mark.parametrize("epsilon", (0.01, 0.09, 0.22, 0.9))
def test_typical_law(epsilon):
  """The rule draws nothing, so its own decisions give the law exactly."""
  rule = make_rule("typical_acceptance", epsilon=epsilon, delta=epsilon**0.5)
  law = rule_figures.first_law(rule, P, Q)
  np.testing.assert_allclose(law, first_tokens(rule, 1), atol=1e-7)
  assert np.isfinite(rule_figures.divergence(law, P)) and law[3] == 0


def test_measures_of_a_law():
  """Against sums over the vocabulary, token by token."""
  law = rule_figures.lenient_law(P, Q, 0.3)
  some = [x for x in range(len(P)) if law[x] > 0]
  kl = sum(law[x] * (np.log(law[x]) - np.log(P[x])) for x in some)
  assert rule_figures.divergence(law, P) == pytest.approx(kl) and kl > 0
  with np.errstate(divide="ignore"):
    log_p = np.log(P)
  assert rule_figures.surprise(P, log_p) == pytest.approx(rule_figures.entropy(P))
  assert rule_figures.surprise(law, log_p) == pytest.approx(-sum(law[x] * np.log(P[x]) for x in some))
  assert rule_figures.divergence(P, P) == 0
  assert rule_figures.mean_and_error([3.0]) == (3.0, None)
  mean, error = rule_figures.difference({1: 2.0, 2: 4.0, 3: 9.0}, {1: 1.0, 2: 1.0})
  assert (mean, error) == (2.0, pytest.approx(1.0))


# --- the script ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench(models, tmp_path_factory):
  """Runs the script with some flags; returns the exit code."""
  asked = tmp_path_factory.mktemp("rules") / "questions.jsonl"
  asked.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))

  def run(output, *more):
    return run_script(
      rule_bench,
      f"--model={models[0]}",
      f"--draft_model={models[1]}",
      f"--questions={asked}",
      f"--proposals={CHAIN},{TREE},{COPY}",
      "--temperatures=1.0",
      "--window=3",
      "--stride=5",
      "--drafts=2",
      "--noises=24",
      "--lenience=1,0.4",
      "--epsilon=0.1",
      f"--output={output}",
      *more,
    )

  return run


@pytest.fixture(scope="module")
def first(bench, tmp_path_factory):
  path = str(tmp_path_factory.mktemp("runs") / "first")
  assert bench(path) == 0
  return path


@pytest.mark.slow
def test_every_rule_that_takes_a_proposal_judges_it(first):
  rows = results.read_rows(first)
  rules = {
    proposal: {r["rule"] for r in rows if r["proposal"] == proposal} for proposal in (CHAIN, TREE, COPY)
  }
  trees = {"draw_and_follow", "recursive_rejection", "traversal_verification"}
  chains = trees | {"speculative_sampling", "block_verification"}
  lossy = ["lenience=1.0", "lenience=0.4"]
  lossy = {f"lenient_speculative_sampling[{o}]" for o in lossy} | {
    "typical_acceptance[epsilon=0.1,delta=0.3162]"
  }
  assert rules == {CHAIN: chains | lossy, TREE: trees, COPY: trees}
  keys = [(r["question_id"], r["position"], r["proposal"], r["rule"]) for r in rows]
  assert len(set(keys)) == len(keys) and {r["position"] for r in rows} <= {5, 10}
  for r in rows:
    counts = r["accept_counts"]
    assert sum(counts) == r["drafts"] * (1 if "typical" in r["rule"] else 24)
    assert r["drafts"] == (1 if r["proposal"] == COPY else 2)
    assert r["tokens"] == pytest.approx(1 + np.dot(counts, range(len(counts))) / sum(counts))


@pytest.mark.slow
def test_rules_are_paired(first):
  """Same drafts and seeds: rules that are one on chains agree context by context, as do lossless and l = 1.

  Fails when a rule is given another proposal, other seeds, or a state that an earlier rule has changed.
  """
  rows = results.read_rows(first)
  figures = lambda rule: rule_figures.by_context(rows, proposal=CHAIN, rule=rule)
  assert figures("lenient_speculative_sampling[lenience=1.0]") == figures("speculative_sampling")
  assert figures("recursive_rejection") == pytest.approx(figures("speculative_sampling"))
  assert figures("traversal_verification") == pytest.approx(figures("block_verification"))
  assert figures("block_verification") != figures("draw_and_follow")
  exact = rule_figures.by_context(rows, "divergence", rule="lenient_speculative_sampling[lenience=1.0]")
  assert exact and max(exact.values()) < 1e-9
  assert sum(rule_figures.by_context(rows, "proposed", proposal=COPY).values()) > 0
  overlaps = rule_figures.by_context(rows, "overlap", proposal=CHAIN)
  assert overlaps and all(0 < value <= 1 for value in overlaps.values())


@pytest.mark.slow
def test_the_rows_behind_a_context_are_those_of_its_text(first, models):
  """Σ min(p, q) from plain forwards of both models over the text.

  Fails when going back leaves a cache with rows of later drafts, or the draft model skips what was sampled.
  """
  rows = results.read_rows(first)
  target, draft = map(load_model, models)
  overlaps = rule_figures.by_context(rows, "overlap", proposal=CHAIN)
  config = decode.DecodeConfig(make_drafter("none"), make_rule("draw_and_follow"), VOCAB, 128)
  weights = decode.Weights(target.model)
  probs = jax.jit(lambda model, ids: jax.nn.softmax(model(ids, model.init_cache(1, 128)).logits[0]))
  for number, prompt in enumerate(PROMPTS):
    ids = text.encode_prompt(target.tokenizer, prompt, chat=True)
    settings = Settings.create(1, temperature=1.0, seed=int(rule_bench._seeds(1, number)[0]))
    state = decode.prefill(weights, config, [ids], settings=settings, max_new_tokens=10)
    ids = ids + decode.results(decode.generate(weights, state, config))[0].tokens
    shared = np.minimum(*(probs(loaded.model, jnp.array([ids])) for loaded in (target, draft))).sum(axis=-1)
    mine = {position: value for (question, position), value in overlaps.items() if question == number + 1}
    assert mine
    for position, value in mine.items():
      assert value == pytest.approx(shared[len(ids) - 10 + position - 1], abs=1e-4)


@pytest.mark.slow
def test_resumes_after_a_kill_with_the_same_numbers(bench, first, tmp_path, capsys, monkeypatch):
  """Torn in the middle of a proposal's rules: these are judged again, the others stay; then only tables."""
  output = str(tmp_path / "killed")
  os.makedirs(output)
  for name in (results.FLAGS_FILE, results.RUN_FILE, results.ROWS_FILE):
    with open(os.path.join(first, name), "rb") as file:
      data = file.read()
    if name == results.ROWS_FILE:
      lines = data.splitlines(keepends=True)
      data = b"".join(lines[:3]) + lines[3][:20]
    with open(os.path.join(output, name), "wb") as file:
      file.write(data)
  assert bench(output) == 0
  assert results.read_rows(output) == results.read_rows(first)
  monkeypatch.setattr(runtime, "load_job", lambda *_: pytest.fail("a model was loaded"))
  capsys.readouterr()
  assert bench(output) == 0
  out = capsys.readouterr().out
  assert "block_verification − speculative_sampling" in out and "KL(law ‖ p)" in out and "nan" not in out


@pytest.mark.slow
def test_plot(bench, first, tmp_path):
  path = tmp_path / "rules.png"
  assert bench(first, f"--plot={path}") == 0
  assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
  ("flag", "words"),
  [
    ("--temperatures=1,hot", "--temperatures = '1,hot'"),
    ("--temperatures=-1", "--temperatures"),
    ("--temperatures=1,1.0", "none twice"),
    ("--proposals=none", "'none'; it must be two_model or prompt_lookup"),
    ("--proposals=two_model[policy=beam]", "policy = 'beam'"),
    ("--proposals=two_model[branching=(2,2,2,2)]", "window = 3"),
    ("--proposals=prompt_lookup[nodes=7]", "nodes = 7"),
    ("--proposals=", "it must be two_model or prompt_lookup"),
    ("--lenience=0", "lenience = 0.0"),
    ("--epsilon=2", "--epsilon = '2'"),
    ("--contexts=0", "contexts"),
    ("--noises=0", "noises"),
    ("--drafts=0", "drafts"),
    ("--draft_layers=1", "--draft_layers and --draft_model"),
    ("--temperature=1", "--temperature is not used"),
    ("--plot=/no/such/folder/rules.png", "/no/such/folder"),
    ("--output=", "--output is empty"),
  ],
)
def test_a_bad_flag_is_one_line(bench, tmp_path, monkeypatch, capsys, flag, words):
  monkeypatch.setattr(runtime, "load_job", lambda *_: pytest.fail("a model was loaded"))
  output = tmp_path / "run"
  assert bench(output, flag) == 2
  (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
  assert words in line and not output.exists()


@pytest.mark.slow
def test_the_targets_own_layers_draft(models, tmp_path, capsys):
  """Without a draft model; a layer count that leaves nothing out is refused."""
  asked = tmp_path / "questions.jsonl"
  asked.write_text('{"prompt": "the hen the hen"}\n')
  common = [
    f"--model={models[0]}",
    f"--questions={asked}",
    f"--proposals={CHAIN}",
    "--window=3",
    "--stride=3",
  ]
  common += ["--quick", "--noises=24", "--lenience=1", "--epsilon=0.1"]
  output = str(tmp_path / "run")
  assert run_script(rule_bench, *common, "--temperatures=1.0", f"--output={output}") == 0
  assert results.read_rows(output)[0]["overlap"] > 0
  assert run_script(rule_bench, *common, "--draft_layers=99", f"--output={tmp_path / 'other'}") == 2
  assert "num_layers = 99" in capsys.readouterr().err
