"""The server's script: its flags, the engine they make, how it begins and ends, and after a kill."""

import os
import signal
import socket
import subprocess
import sys
import threading
import types

import httpx
import pytest

from experiments import flags as shared
from experiments import runtime, serve
from specjax.checkpoints import load_model
from specjax.control import Beliefs
from tests.experiments.tiny import byte_tokenizer, parsed, run_script
from tests.serving import http_rig as rig


def job_of(models, drafter):
  return runtime.Job(load_model(models[0]), None, None, True, {}, drafters=(drafter,))


def test_flags_make_the_engine(models):
  """Each where it belongs. Fails when one is not passed on, or the rule takes temperature 0 alone."""
  drafter = "adaptive[of=prompt_lookup[window=2]|prompt_lookup[window=4]]"
  given = ["--slots=6", "--policies=prefill_first[tokens=300]+below[rows=3]", "--kv_budget=500"]
  given += ["--rounds_per_step=3", "--queue_limit=7", "--max_length=200", "--logprobs=raw"]
  with parsed(*given, "--kept_prefixes=2"):
    engine = serve.make_engine(job_of(models, drafter))
  config = engine.scheduler.config
  assert (config.slots, config.length_limit, config.kv_budget) == (6, 200, 500)
  assert (config.rounds_per_step, config.queue_limit) == (3, 7)
  assert config.policies.name == "prefill_first[tokens=300]+below[rows=3]"
  assert [width.depth for width in config.widths] == [2, 4]
  assert (engine.config.rule.name, engine.config.logprobs) == ("draw_and_follow", "raw")
  with parsed("--rule=greedy", "--slots=1"):
    assert serve.make_engine(job_of(models, "prompt_lookup")).config.rule.name == "greedy"
  with parsed("--slots=300"), pytest.raises(ValueError, match="interleave: tokens = 256; 300 slots"):
    serve.make_engine(job_of(models, "none"))


def test_beliefs_are_those_of_each_batch_size(models, monkeypatch):
  """A controller that adapts is told what rounds cost at the size that runs."""
  made = {}
  monkeypatch.setattr(serve, "Engine", lambda weights, config, **options: made.update(options))
  with parsed("--slots=6"):
    serve.make_engine(job_of(models, "adaptive[of=prompt_lookup]"))
  assert made["batches"] == (1, 4) and list(made["beliefs"]) == [1, 4, 6]
  assert all(isinstance(beliefs, Beliefs) for beliefs in made["beliefs"].values())
  with parsed("--slots=6", "--batch_sizes="):
    serve.make_engine(job_of(models, "prompt_lookup"))
  assert made["batches"] == () and made["beliefs"] is None


@pytest.fixture
def scripted(monkeypatch):
  """Nothing is loaded or compiled: a scripted engine stands there."""
  engine = rig.ScriptedEngine()
  engine.warm_up = lambda: None
  engine.config = types.SimpleNamespace(rule=types.SimpleNamespace(name="scripted"))
  target = types.SimpleNamespace(tokenizer=byte_tokenizer())
  monkeypatch.setattr(serve, "describe", lambda rule: rule.name)
  monkeypatch.setattr(
    runtime, "load_job", lambda drafters: types.SimpleNamespace(target=target, drafters=drafters)
  )
  monkeypatch.setattr(serve, "make_engine", lambda job: engine)
  return engine


def test_it_serves_until_it_is_told_to_end(scripted, tmp_path, capsys):
  """The address is printed, limits and key are those of the flags, Ctrl-C is a good end."""
  key = tmp_path / "key"
  key.write_text("secret\n")
  with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
  seen = {}

  def ask():
    transport = httpx.HTTPTransport(retries=20)
    headers = {"authorization": "Bearer secret"}
    with httpx.Client(
      base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=rig.HANGS_S, headers=headers
    ) as client:
      seen["models"] = client.get("/v1/models").json()["data"][0]["id"]
      seen["text"] = rig.completion(client, model="here").json()["choices"][0]["text"]
      seen["large"] = rig.completion(client, model="here", prompt="x" * 600).status_code
      seen["long"] = rig.completion(client, model="here", prompt="x" * 30).status_code
      seen["no key"] = client.get("/v1/models", headers={"authorization": "no"}).status_code
    os.kill(os.getpid(), signal.SIGINT)

  thread = threading.Thread(target=ask)
  thread.start()
  flags = [f"--port={port}", f"--api_key_file={key}", "--served_name=here", "--drain_s=0"]
  assert run_script(serve, *flags, "--max_body_bytes=500", "--max_prompt_tokens=20") == 0
  thread.join(rig.HANGS_S)
  assert seen == {"models": "here", "text": "abc", "large": 413, "long": 400, "no key": 401}
  said = capsys.readouterr()
  assert f"serving at http://127.0.0.1:{port}/v1" in said.out and "warning" not in said.err


def test_others_without_a_key_are_warned_of(scripted, monkeypatch, capsys):
  monkeypatch.setattr(serve, "make_server", lambda *_: types.SimpleNamespace(run=lambda: None))
  assert run_script(serve, "--host=0.0.0.0", "--port=0") == 0
  assert "warning: --host=0.0.0.0 lets others in, and there is no key" in capsys.readouterr().err


def test_without_the_extra_it_says_what_to_install(scripted, monkeypatch, capsys):
  """Fails when a missing package is a traceback, or found after a model was loaded."""
  monkeypatch.setitem(sys.modules, "specjax.serving.http.server", None)
  assert run_script(serve) == 2
  assert 'pip install -e ".[serve]"' in capsys.readouterr().err


BAD = {
  "slots": ("0", "4097", "many"),
  "batch_sizes": ("0", "4,2", "x", "8|--batch_sizes = 8; all must be below --slots = 8"),
  "policies": (
    "fast",
    "interleave+prefill_first",
    "interleave[tokens=0]|tokens = 0",
    "below[rows=x]|rows = 'x'",
    "windows[table=7]|table = 7",
    "interleave[",
  ),
  "rounds_per_step": ("0", "65"),
  "kv_budget": ("1", "much"),
  "kept_prefixes": ("-1",),
  "queue_limit": ("-1",),
  "host": ("999.1.1.1",),
  "port": ("-1", "65536", "http"),
  "api_key_file": ("no/such/file|no/such/file", "/|directory", f"{__file__}|must hold one key"),
  "served_name": (" a", "a\nb"),
  "max_body_bytes": ("0",),
  "max_prompt_tokens": ("0",),
  "max_requests": ("0",),
  "patience_s": ("0", "-1", "nan", "long"),
  "drain_s": ("-1", "nan"),
  "temperature": ("0.5|--temperature is not used by serve",),
  "batch_size": ("2|--batch_size is not used by serve",),
  "mesh": ("data:1|--mesh is not used by serve",),
}
CASES = [(flag, *value.partition("|")[::2]) for flag, values in BAD.items() for value in values]


@pytest.mark.parametrize(("flag", "value", "words"), CASES)
def test_a_bad_value_is_one_line(monkeypatch, capsys, flag, value, words):
  """Before anything is loaded."""
  monkeypatch.setattr(runtime, "_load", lambda *_: pytest.fail("a model was loaded"))
  flags = {"port": "0"} | {flag: value}
  assert run_script(serve, *(f"--{name}={text}" for name, text in flags.items())) == 2
  (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
  assert (words or flag) in line


def test_a_port_that_is_taken_is_one_line(monkeypatch, capsys):
  monkeypatch.setattr(runtime, "_load", lambda *_: pytest.fail("a model was loaded"))
  with socket.create_server(("127.0.0.1", 0)) as taken:
    port = taken.getsockname()[1]
    assert run_script(serve, f"--port={port}") == 2
  assert f"error: host = '127.0.0.1', port = {port}" in capsys.readouterr().err


def test_every_flag_is_here():
  defined = {flag.name for flag in serve.flags.FLAGS.get_flags_for_module(serve)}
  assert defined - set(BAD) == set()
  assert {flag.name for flag in serve.flags.FLAGS.get_flags_for_module(shared)} >= set(serve.USED)


@pytest.mark.slow
def test_killed_under_load_and_started_again(models):
  """A kill leaves nothing behind; SIGTERM under load ends live streams with an error or their end."""
  command = [sys.executable, "-m", "experiments.serve", f"--model={models[0]}", "--port=0", "--slots=2"]
  command += ["--drafter=prompt_lookup", "--max_length=128", "--drain_s=0"]
  texts = []
  for how in (signal.SIGKILL, signal.SIGTERM):
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
      url = next(line for line in process.stdout if line.startswith("serving at ")).split()[-1]
      good = {"model": models[0], "prompt": "abcabc", "max_tokens": 20, "temperature": 0}
      with httpx.Client(timeout=rig.HANGS_S) as client:
        texts.append(client.post(f"{url}/completions", json=good).json()["choices"][0]["text"])
        long = good | {"stream": True, "max_tokens": 100}
        with client.stream("POST", f"{url}/completions", json=long) as response:
          lines = response.iter_lines()
          next(lines)
          process.send_signal(how)
          if how == signal.SIGTERM:
            assert [line for line in lines if line][-1] == "data: [DONE]"
      process.wait(rig.HANGS_S)
    finally:
      process.kill()
      process.wait()
  assert texts[0] == texts[1]
