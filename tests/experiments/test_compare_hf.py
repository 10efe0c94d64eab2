"""specjax beside transformers: figures from rows, turns and resuming with a stand-in, then the real thing."""

import os

import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from flax import nnx

from experiments import compare_hf, measure, results, runtime
from experiments.transformers_side import Answer, Transformers, parse_mode
from specjax.checkpoints import load_model
from specjax.models import DraftConfig, DraftDecoder
from tests.experiments.tiny import END, VOCAB, run_script

PROMPTS = '{"prompt": "the hen and the hen and"}\n{"prompt": "abcabcabc abcabc"}\n{"prompt": "oh"}\n'


# --- figures ---------------------------------------------------------------------------------------


def row(question, drafter, tokens, rounds, first, prefill_s, decode_s, ids=None):
  return {
    "question_id": question,
    "turn": 0,
    "category": "a",
    "drafter": drafter,
    "new_tokens": tokens,
    "rounds": rounds,
    "first_tokens": first,
    "prefill_s": prefill_s,
    "decode_s": decode_s,
    "token_ids": ids or list(range(tokens)),
  }


ROWS = [
  row(1, "none", 10, 10, 0, 1.0, 1.0),
  row(1, "prompt_lookup", 10, 4, 0, 1.0, 0.5),
  row(1, "two_model", 10, 5, 0, 0.2, 0.6),
  row(1, "transformers:plain", 10, 10, 1, 2.0, 2.0),
  row(1, "transformers:prompt_lookup", 10, 6, 4, 2.0, 1.0),
  row(1, "transformers:assisted", 10, 5, 3, 1.0, 2.0, [7] * 10),
  row(1, "transformers:assisted[tokens=4]", 10, 5, 1, 3.0, 2.0),
  row(2, "none", 4, 4, 0, 1.0, 9.0),  # not answered by the others: left out
]


def test_rates_leave_out_what_came_with_the_prompt():
  """Tokens of the prompt's forward are no tokens of decoding, and its seconds are prefill.

  Fails when they are counted (transformers would look faster) or the questions are not the same for all.
  """
  lines = {line[0]: line for line in compare_hf.method_table(ROWS)}
  assert lines["specjax:plain"][1:7] == ["10", "1.00", "10.0", "5.0", f"{10 / 4.5:.2f} x", "2.00 x"]
  assert lines["specjax:prompt_lookup"][7:] == ["2.00 x", f"{2 / 1.5:.2f} x", "1 of 1"]
  assert lines["transformers:plain"][3:7] == ["4.5", "2.5", "1.00 x", "1.00 x"]
  assert lines["transformers:prompt_lookup"][3:5] == ["6.0", f"{10 / 3:.1f}"]
  assert lines["transformers:assisted"][-1] == "0 of 1"


def test_the_best_of_each_side_is_compared():
  """Which is best is asked for each rate and kind. Fails when a plain one, or not the best, is taken."""
  decode, whole = compare_hf.verdicts(ROWS)
  assert decode == (
    f"decode only: specjax plain is {10 / 4.5:.2f} x transformers plain; prompt_lookup is {20 / 4.5:.2f} x "
    f"transformers plain, {20 / 6:.2f} x its prompt_lookup, {20 / 4.5:.2f} x its assisted[tokens=4]"
  )
  assert whole.endswith(
    "two_model is 5.00 x transformers plain, 3.75 x its prompt_lookup, 3.75 x its assisted"
  )


def test_modes_have_transformers_defaults():
  assert parse_mode("prompt_lookup").settings == {
    "prompt_lookup_num_tokens": 10,
    "max_matching_ngram_size": 2,
  }
  assert parse_mode("assisted[tokens=4,confidence=0]").settings == {
    "num_assistant_tokens": 4,
    "assistant_confidence_threshold": 0,
    "num_assistant_tokens_schedule": "constant",
  }


# --- wrong flags -----------------------------------------------------------------------------------

BAD = {
  "ours": ("magic|'magic' is no method", "prompt_lookup[|prompt_lookup[", "two_model|two_model needs"),
  "theirs": (
    "beam|theirs = 'beam'",
    "plain[tokens=2]|plain does not take tokens",
    "prompt_lookup[tokens=0]|tokens = 0; it must be an integer",
    "prompt_lookup[max_ngram=few]|max_ngram = 'few'",
    "assisted[confidence=1]|confidence = 1; it must be a number in [0, 1)",
    "assisted[schedule=slow]|schedule = 'slow'",
    "assisted[draft=x]|assisted does not take draft",
    "assisted|assisted needs a draft model",
  ),
  "quick": ("maybe|quick",),
  "output": ("|--output is empty",),
  "temperature": ("0.5|leave --temperature alone",),
  "batch_size": ("2|leave --batch_size alone",),
  "drafter": ("none|leave --drafter alone",),
  "mesh": ("data:1|leave --mesh alone",),
}
CASES = [(flag, *value.partition("|")[::2]) for flag, values in BAD.items() for value in values]


@pytest.mark.parametrize(("flag", "value", "words"), CASES)
def test_a_bad_value_is_one_line(monkeypatch, capsys, tmp_path, flag, value, words):
  monkeypatch.setattr(runtime, "_load", lambda *_: pytest.fail("a model was loaded"))
  arguments = {"output": str(tmp_path / "run"), flag: value}
  assert run_script(compare_hf, *(f"--{name}={text}" for name, text in arguments.items())) == 2
  (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
  assert words in line


def test_every_flag_is_here():
  defined = {flag.name for flag in flags.FLAGS.get_flags_for_module(compare_hf)}
  assert defined - set(BAD) == set()


# --- the script ------------------------------------------------------------------------------------


@pytest.fixture
def asked(tmp_path):
  path = tmp_path / "questions.jsonl"
  path.write_text(PROMPTS)
  return str(path)


class StandIn:
  """In transformers' place: says the end at once."""

  versions = {"transformers": "none"}

  def __init__(self, target, draft, *, stop_ids, dtype, threads):
    assert (list(stop_ids), dtype) == ([END], "float32") and threads >= 1

  def run(self, mode, prompt, max_new_tokens):
    assert max_new_tokens == 6
    return Answer([END], 1, 1, 0.5, 0.0)


def test_methods_take_turns_and_a_kill_costs_one_question(models, asked, tmp_path, monkeypatch, capsys):
  """Fails when one side always goes first, a finished row is run again, or a text that parts goes unsaid."""
  asked_in_order = []

  def noted(function, name):
    return lambda *given: asked_in_order.append(name(*given)) or function(*given)

  monkeypatch.setattr(compare_hf, "Transformers", StandIn)
  monkeypatch.setattr(StandIn, "run", noted(StandIn.run, lambda _, mode, *__: f"transformers:{mode.name}"))
  timed = measure.run_timed
  monkeypatch.setattr(measure, "run_timed", noted(timed, lambda _, method, *__: method.name))
  output = str(tmp_path / "run")
  given = [f"--model={models[0]}", f"--questions={asked}", f"--output={output}", "--nochat"]
  given += ["--ours=prompt_lookup", "--theirs=prompt_lookup[tokens=4]", "--max_new_tokens=6", "--warmup=0"]
  assert run_script(compare_hf, *given) == 0
  out = capsys.readouterr().out
  rows, info = results.read_rows(output), results.read_run(output)
  names = ["none", "prompt_lookup", "transformers:plain", "transformers:prompt_lookup[tokens=4]"]
  assert {(r["question_id"], r["drafter"]) for r in rows} == {(q, name) for q in (1, 2, 3) for name in names}
  assert asked_in_order == [*names, *names[1:], names[0], *names[2:], *names[:2]]  # who goes first changes
  assert info["compiles_while_timing"] == 0 and info["threads"] == info["cpu_count"]
  assert {d["drafter"] for d in info["differences"]} == set(names[2:]) and len(info["differences"]) == 6
  assert "0 of 3" in out and "3 of 3" in out and "nan" not in out
  path = os.path.join(output, results.ROWS_FILE)
  with open(path, "rb") as file:
    lines = file.read().splitlines(keepends=True)
  with open(path, "wb") as file:
    file.write(b"".join(lines[:9]) + lines[9][:30])
  asked_in_order.clear()
  assert run_script(compare_hf, *given) == 0
  again = results.read_rows(output)
  assert again[:9] == rows[:9] and len(again) == 12
  assert sorted(asked_in_order) == names[1:]
  assert results.read_run(output)["differences"] == info["differences"]


def test_a_prompt_that_does_not_fit_is_an_error(models, asked, tmp_path, capsys):
  given = [f"--model={models[0]}", f"--questions={asked}", "--nochat", "--ours=none", "--max_length=20"]
  assert run_script(compare_hf, *given, f"--output={tmp_path / 'run'}", "--max_new_tokens=8") == 2
  assert "the limit is 20" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parity
def test_both_sides_say_the_same(models, asked, tmp_path, capsys):
  """All methods of both sides give plain decoding's text, and the draft is used there, too."""
  output = str(tmp_path / "run")
  given = [f"--model={models[0]}", f"--draft_model={models[1]}", f"--questions={asked}", "--nochat"]
  given += ["--theirs=prompt_lookup,assisted,assisted[tokens=3,confidence=0,schedule=heuristic]"]
  assert run_script(compare_hf, *given, f"--output={output}", "--ours=two_model", "--max_new_tokens=24") == 0
  rows, info = results.read_rows(output), results.read_run(output)
  methods = {r["drafter"] for r in rows}
  assert len(methods) == 6 and len(rows) == 18 and info["differences"] == []
  assert info["draft_model"] == models[1] and info["compiles_while_timing"] == 0
  for method in methods:
    mine = [r for r in rows if r["drafter"] == method]
    tokens, rounds = (sum(r[name] for r in mine) for name in ("new_tokens", "rounds"))
    drafted = "two_model" in method or "assisted" in method
    assert tokens > rounds if drafted else "lookup" in method or tokens == rounds
    assert all(r["first_tokens"] >= method.startswith("transformers") for r in mine)
  out = capsys.readouterr().out
  assert "3 of 3" in out and "0 of 3" not in out and "x its assisted" in out
  # --quick asks less.
  assert run_script(compare_hf, *given, f"--output={tmp_path / 'quick'}", "--ours=two_model", "--quick") == 0
  rows = results.read_rows(str(tmp_path / "quick"))
  assert len(rows) == 12 and max(r["new_tokens"] for r in rows) <= 16


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize(
  "options", [dict(ids=range(3, 200, 2)), dict(ids=range(3, 200, 2), output="own", output_rank=5), {}]
)
def test_a_distilled_draft_is_the_same_model_there(models, options):
  """Its logits over the draft vocabulary in both; nothing else can be drafted.

  Fails when rows stand for other tokens, or transformers drafts with the target's whole head.
  """
  import torch

  target = load_model(models[0])
  ids = None if "ids" not in options else np.array(options["ids"], np.int32)
  layers = target.config.replace(num_layers=1)
  rest = {name: value for name, value in options.items() if name != "ids"}
  config = DraftConfig(layers, draft_vocab_size=None if ids is None else len(ids), **rest)
  draft = DraftDecoder(config, target.model, ids=ids, dtype=jnp.float32, rngs=nnx.Rngs(3))
  theirs = Transformers(target.model, draft, stop_ids=[END], dtype="float32", threads=1)
  tokens = np.random.default_rng(0).integers(0, 250, (1, 9))
  ours = np.asarray(draft(jnp.asarray(tokens), draft.init_cache(1, 16)).logits)
  with torch.no_grad():
    said = theirs.draft(torch.tensor(tokens)).logits.numpy()
  assert said.shape[-1] == VOCAB
  inside = np.arange(VOCAB) if ids is None else ids
  np.testing.assert_allclose(said[..., inside], ours, atol=1e-4)
  assert np.isneginf(np.delete(said, inside, -1)).all()
  answer = theirs.run(parse_mode("assisted[tokens=3,confidence=0]"), tokens[0].tolist(), 12)
  plain = theirs.run(parse_mode("plain"), tokens[0].tolist(), 12)
  assert answer.tokens == plain.tokens and plain.rounds == len(plain.tokens)
