"""The script: where data goes, resuming, more tokens, kinds of sources, one-line errors."""

import json
import os

import pytest
from absl import flags

from experiments import distill_data, runtime
from specjax.checkpoints import save_orbax
from specjax.training.data import Dataset, read_manifest
from tests.experiments.test_bad_flags import error_of
from tests.experiments.tiny import run_script
from tests.training.tiny import letters_model, letters_tokenizer

SMALL = ["--shard_samples=16", "--batch_size=4", "--question_tokens=12", "--answer_tokens=10"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
  path = str(tmp_path_factory.mktemp("models") / "letters")
  save_orbax(path, letters_model(), letters_tokenizer())
  return path


@pytest.fixture
def script(target, tmp_path, monkeypatch):
  """Runs it with the cache folder in ``tmp_path``; returns the exit code."""
  monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
  return lambda *more: run_script(distill_data, f"--model={target}", *more)


def jsonl(path, *values) -> str:
  path.write_text("".join(json.dumps(value) + "\n" for value in values))
  return str(path)


def test_writes_goes_on_and_is_found_again(script, tmp_path, monkeypatch, capsys):
  """By default into the cache folder; a second run with more tokens adds to it; a third has nothing to do."""
  questions = jsonl(tmp_path / "q.jsonl", {"turns": ["abc de", "fg"]}, {"prompt": "x"})
  common = [*SMALL, f"--evaluation={questions}"]
  assert script("--tokens=1", *common) == 0
  (name,) = os.listdir(tmp_path / "cache" / "distill")
  path = str(tmp_path / "cache" / "distill" / name)
  assert name.startswith("letters-")
  first = read_manifest(path)
  assert len(first["shards"]) == 1 and first["provenance"]["taps"] == [2, 1, 0, 2]
  made_with = first["shards"][0]["made_with"]
  assert made_with["model"].endswith("letters") and "jax" in made_with["versions"]
  capsys.readouterr()
  assert script("--tokens=120", *common) == 0
  out = capsys.readouterr()
  assert "answers:" in out.err and "tokens/s written" in out.err
  second = read_manifest(path)
  assert second["shards"][0] == first["shards"][0] and second["counts"]["answer_tokens"] >= 120
  assert f"{second['counts']['answer_tokens']:,}" in out.out and second["digest"] in out.out
  assert "of 3 evaluation questions share 13 tokens" in out.out
  with open(os.path.join(path, distill_data.LOG), encoding="utf-8") as file:
    rows = [json.loads(line) for line in file]
  assert [row["shard"] for row in rows] == [shard["file"] for shard in second["shards"]]
  assert all(
    row["written_tokens"] > row["answer_tokens"] > 0 and row["peak_memory_bytes"] > 0 for row in rows
  )
  monkeypatch.setattr(distill_data, "write", lambda *_, **__: pytest.fail("nothing is left to write"))
  assert script("--tokens=120", *common) == 0
  assert read_manifest(path) == second


def test_overlap_of_a_data_set_that_is_there(script, tmp_path, capsys):
  """A question that is a sample's answer is found; nothing is written: the folder is as it was."""
  path = str(tmp_path / "own")
  assert script("--tokens=1", "--nofeatures", f"--output={path}", *SMALL) == 0
  sample, before = Dataset.open(path)[0], sorted(os.listdir(path))
  answer = letters_tokenizer().decode(sample.tokens[sample.mask])
  evaluation = jsonl(tmp_path / "q.jsonl", {"turns": [answer]}, {"turns": ["0123456789"]})
  capsys.readouterr()
  assert script(f"--overlap_of={path}", f"--evaluation={evaluation}") == 0
  shown = capsys.readouterr().out
  line = next(line for line in shown.splitlines() if "of 2 evaluation questions share 13" in line)
  assert line.split()[-1] == "1" and sorted(os.listdir(path)) == before
  assert script(f"--overlap_of={path}") == 2
  assert "--overlap_of needs --evaluation" in error_of(capsys)


def test_other_settings_are_other_data(script, tmp_path, capsys):
  """Another seed has a folder of its own; in a folder that is named it is refused."""
  for seed in (0, 1):
    assert script("--tokens=1", "--nofeatures", f"--seed={seed}", *SMALL) == 0
  assert len(os.listdir(tmp_path / "cache" / "distill")) == 2
  output = f"--output={tmp_path / 'own'}"
  assert script("--tokens=1", "--nofeatures", output, *SMALL) == 0
  assert Dataset.open(str(tmp_path / "own")).features(0) is None
  capsys.readouterr()
  assert script("--tokens=1", "--nofeatures", "--seed=1", output, *SMALL) == 2
  assert "holds data with seed = 0; now it is 1" in error_of(capsys)
  assert script("--tokens=1", output, *SMALL) == 2
  assert "taps = None; now it is [2, 1, 0, 2]" in error_of(capsys)


def test_sources_from_a_file(script, tmp_path):
  """Answers kept, answered anew, continued."""
  turn = lambda who, value: {"from": who, "value": value}
  file = jsonl(
    tmp_path / "talks.jsonl",
    {"conversations": [turn("human", "ab"), turn("gpt", "the end")]},
    {"conversations": [turn("human", "once upon"), turn("gpt", "a time")]},
  )
  small = SMALL[:1]
  for number, more in enumerate(([], [*SMALL[1:], "--rewrite_answers"], [*SMALL[1:], "--base"])):
    output = str(tmp_path / str(number))
    assert script(f"--conversations={file}", f"--output={output}", "--nofeatures", *small, *more) == 0
  kept, answered, continued = (Dataset.open(str(tmp_path / str(number))) for number in range(3))
  tokenizer = letters_tokenizer()
  assert [tokenizer.decode(kept[i].tokens[kept[i].mask]) for i in (0, 1)] == ["the end", "a time"]
  assert [d.manifest["provenance"]["kind"] for d in (kept, answered, continued)] == [
    "conversations",
    "questions",
    "continuations",
  ]
  context = lambda sample: sample.tokens[~sample.mask].tolist()
  for i in range(len(answered)):
    question = ("ab", "once upon")[answered.number(i)]
    assert context(answered[i]) == tokenizer.encode_chat([{"role": "user", "content": question}])
  for i in range(len(continued)):
    assert context(continued[i]) == tokenizer.encode(("ab", "once upon")[continued.number(i)])


BAD = {
  "overlap_of": ("nowhere",),
  "tokens": ("0", "many"),
  "shard_samples": ("0", "1.5"),
  "features": ("maybe",),
  "question_tokens": ("0", "few", "100000|need "),
  "answer_tokens": ("0", "few", "100000|need "),
  "openings": ("no/such/file.txt|own, none or a file is needed", "/|/"),
  "questions_temperature": ("-1", "101", "nan", "hot"),
  "answer_temperatures": ("", "0,hot", "-1", "nan", "0,1000"),
  "conversations": ("no/such/file.jsonl|no/such/file.jsonl", "/|/"),
  "rewrite_answers": ("maybe", "true|--rewrite_answers needs --conversations"),
  "base": ("maybe", "true|--base needs --conversations"),
  "evaluation": ("no/such/file.jsonl|no/such/file.jsonl",),
  "quick": ("maybe",),
}
CASES = [(flag, *value.partition("|")[::2]) for flag, values in BAD.items() for value in values]


@pytest.mark.parametrize(("flag", "value", "words"), CASES)
def test_a_bad_value_is_one_line(script, monkeypatch, capsys, flag, value, words):
  """Fails when a value is clamped, or found out only after something long."""
  if words != "need ":  # which positions a model has is known when it is there
    monkeypatch.setattr(runtime, "_load", lambda *_: pytest.fail("a model was loaded"))
  monkeypatch.setattr(distill_data.distill, "write_shards", lambda *_, **__: pytest.fail("it began to write"))
  assert script(f"--{flag}={value}") == 2
  assert (words or flag) in error_of(capsys)


def test_every_flag_is_here():
  defined = {holder.name for holder in vars(distill_data).values() if isinstance(holder, flags.FlagHolder)}
  assert defined == set(BAD)


@pytest.mark.parametrize(
  ("bad", "words"),
  [
    (["--temperature=0.5"], "--temperature is not used by distill_data: see --answer_temperatures"),
    (["--max_new_tokens=5"], "--max_new_tokens is not used"),
    (["--max_length=100"], "--max_length is not used by distill_data for self: see --question_tokens"),
    (["--conversations=FILE", "--rewrite_answers", "--base"], "--rewrite_answers and --base"),
    (["--conversations=FILE", "--answer_tokens=7"], "--answer_tokens is not used by distill_data --conv"),
    (["--conversations=FILE", "--batch_size=7"], "--batch_size is not used by distill_data --conv"),
    (["--conversations=FILE", "--openings=none"], "--openings is not used by distill_data --conv"),
    (["--conversations=FILE", "--base", "--questions_temperature=1"], "--questions_temperature is not used"),
  ],
)
def test_flags_that_do_not_fit_each_other(script, tmp_path, monkeypatch, capsys, bad, words):
  file = jsonl(tmp_path / "talks.jsonl", {"prompt": "ab"})
  monkeypatch.setattr(runtime, "_load", lambda *_: pytest.fail("a model was loaded"))
  assert script(*(flag.replace("FILE", file) for flag in bad)) == 2
  assert words in error_of(capsys)


def test_a_model_without_a_chat_template(tmp_path, capsys):
  path = str(tmp_path / "base")
  save_orbax(path, letters_model(), letters_tokenizer(None))
  assert run_script(distill_data, f"--model={path}", "--tokens=1", *SMALL) == 2
  assert "has no chat template; continue texts: --conversations and --base" in error_of(capsys)


def test_a_disk_that_is_too_small(script, monkeypatch, capsys):
  usage = type("Usage", (), {"free": 1000})
  monkeypatch.setattr(distill_data.shutil, "disk_usage", lambda path: usage)
  assert script("--tokens=100000", *SMALL) == 2
  assert "--tokens=100000 needs" in (line := error_of(capsys)) and "--nofeatures needs far less" in line


def test_a_bad_line_of_a_file_is_named(script, tmp_path, capsys):
  file = jsonl(tmp_path / "talks.jsonl", {"prompt": "ab"}, {"messages": [{"role": "tool"}]})
  for flag in ("conversations", "evaluation"):
    assert script(f"--{flag}={file}") == 2
    assert "talks.jsonl, line 2: messages[0]: role = 'tool'; it must be one of" in error_of(capsys)


def test_quick(script, tmp_path, monkeypatch):
  """The settings that --quick stands for."""
  monkeypatch.setattr(distill_data, "write", lambda *_, **__: None)
  assert script("--quick", "--nofeatures", f"--output={tmp_path / 'quick'}") == 0
  settings = read_manifest(str(tmp_path / "quick"))["provenance"]["settings"]
  assert (settings["batch_size"], settings["question_tokens"], settings["answer_tokens"]) == (16, 48, 32)
