"""Every shared flag out of its range: one line that names it, exit code 2, nothing loaded or compiled."""

import json

import pytest
import tokenizers
from absl import flags

from experiments import flags as shared
from experiments import generate, measure, runtime
from specjax.checkpoints import Tokenizer, save_orbax
from specjax.testing import tiny_model
from tests.experiments.tiny import BOS, END, VOCAB, byte_tokenizer, run_script

# Values by flag; what the line must hold besides is behind the last bar (else the flag's name does).
BAD = {
  "model": ("nowhere|nowhere", "hf:|hf:", "no/such/model.gguf|no/such/model.gguf"),
  "draft_model": ("nowhere|--draft_model",),
  "drafter_path": (
    "no/such/folder|'no/such/folder' is not a folder",
    ",|'' is not a folder",
    "/|is not used by",
  ),
  "drafter": (
    "magic",
    "prompt_lookup[",
    "prompt_lookup[window]",
    "a b:c",
    "two_model|--draft_model",
    "eagle[nodes=8,beam=3]|needs --drafter_path",
    "eagle3|--drafter=eagle3 needs --drafter_path",
    "medusa[tree=((0,),)]|needs --drafter_path",
    "adaptive[of=eagle3]|needs --drafter_path",
    "self_speculation|it needs layers=N or skips=FILE",
    "self_speculation[layers=0]|layers = 0",
    "self_speculation[layers=few]|layers = 'few'",
    "self_speculation[skips=2]|skips = 2",
    "early_exit|needs --drafter_path",
    "none",
  ),
  "window": ("-1", "128", "0|--window=0", "two"),
  "rule": (
    "greedly",
    "",
    "greedy[",
    "greedy[strict=1]",
    "typical_acceptance[epsilon=2]",
    "typical_acceptance[delta=0]",
    "lenient_speculative_sampling[lenience=0]",
    "synthetic[rates=(0.5,2)]",
    "synthetic[rates=()]",
    "synthetic[rates=much]",
  ),
  "draft_policy": ("beam",),
  "temperature": ("-1", "nan", "inf", "1e5", "hot"),
  "top_k": ("-1", "2147483648", "2.5", "few"),
  "top_p": ("-0.1", "1.1", "nan", "most"),
  "min_p": ("-0.1", "1.1", "nan", "some"),
  "repetition_penalty": ("0", "-1", "101", "nan", "much"),
  "presence_penalty": ("-101", "101", "nan", "much"),
  "frequency_penalty": ("-101", "101", "nan", "much"),
  "logit_bias": ("7", "a:1", "7:b", "7:1,7:2", "-1:1", "7:1e9", "7:nan"),
  "min_new_tokens": ("-1", "1.5", "129|--min_new_tokens=129 is more than --max_new_tokens=128"),
  "seed": ("-1", "2147483649", "0.5"),
  "logprobs": ("all",),
  "dtype": ("float16",),
  "attention": ("fast",),
  "mesh": ("data", "data:0", "rows:2", "data:1,data:1", "data:4096|4096 devices"),
  "max_new_tokens": ("0", "-3", "1.5"),
  "max_length": ("1", "0", "long"),
  "batch_size": ("0", "4097", "many"),
  "warmup": ("-1",),
  "repeats": ("0",),
  "output": ("/dev/null/run|/dev/null/run",),
  "chat": ("maybe",),
  "calibration": ("/|is a folder",),
  "compilation_cache": ("/dev/null/compiled|/dev/null/compiled",),
}
CASES = [
  (flag, *(value.rpartition("|")[::2] if "|" in value else (value, "")))
  for flag, values in BAD.items()
  for value in values
]
# Whether they name something is known only when it is opened.
OPENED = ("model",)


def error_of(capsys) -> str:
  """The one line on standard error that says what is wrong."""
  (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
  return line[line.index("error:") :]


@pytest.mark.parametrize(("flag", "value", "words"), CASES)
def test_a_bad_value_is_one_line(monkeypatch, capsys, flag, value, words):
  """Fails when a value is clamped, or found out only after a model was loaded."""
  if flag not in OPENED:
    monkeypatch.setattr(runtime, "_load", lambda *_: pytest.fail("a model was loaded"))
  monkeypatch.setattr(measure, "compile_method", lambda *_: pytest.fail("something was compiled"))
  assert run_script(generate, f"--{flag}={value}") == 2
  assert (words or flag) in error_of(capsys)


def test_every_shared_flag_is_here():
  """A flag that is added needs a value that is wrong. Fails when one is left out, or is gone."""
  defined = {flag.name for flag in flags.FLAGS.flags_by_module_dict()[shared.__name__]}
  assert defined - set(BAD) == set() and set(BAD) - defined == set()


@pytest.mark.parametrize(
  ("bad", "words"),
  [
    (["--draft_model=x", "--drafter=prompt_lookup"], "--draft_model is not used by prompt_lookup"),
    (["--window=2"], "--window = 2 is not used: a controller chooses among several"),
    (["--window=2", "--drafter=adaptive[of=prompt_lookup]"], "--window=2 is not used: --drafter=adaptive"),
    (["--rule=greedy", "--temperature=0.5"], "--rule=greedy needs --temperature=0"),
    (["--drafter=two_model"], "--drafter=two_model needs --draft_model"),
    (["--prompt=a", "--prompt_file=b"], "--prompt and --prompt_file"),
  ],
)
def test_flags_that_do_not_fit_each_other(monkeypatch, capsys, bad, words):
  """Both are named. Fails when one of them is ignored in silence."""
  monkeypatch.setattr(runtime, "_load", lambda *_: pytest.fail("a model was loaded"))
  assert run_script(generate, *bad) == 2
  assert words in error_of(capsys)


def test_l1_vocabularies_that_do_not_match(models, tmp_path, monkeypatch, capsys):
  """Two models of one size whose tokenizers give one id two strings: an error that names the id.

  Fails when only sizes are compared: then every draft is another word than it was meant to be.
  """
  description = json.loads(byte_tokenizer()._inner.to_str())
  vocabulary = description["model"]["vocab"]
  vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
  inner = tokenizers.Tokenizer.from_str(json.dumps(description))
  draft = str(tmp_path / "draft")
  save_orbax(draft, tiny_model(1, vocab_size=VOCAB), Tokenizer(inner, bos_id=BOS, eos_ids=(END,)))
  monkeypatch.setattr(measure, "compile_method", lambda *_: pytest.fail("something was compiled"))
  asked = [f"--model={models[0]}", f"--draft_model={draft}", "--drafter=two_model"]
  assert run_script(generate, *asked) == 2
  assert f"id {ord('A')} is 'A' in the target and 'B' in the draft" in error_of(capsys)
