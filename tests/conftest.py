"""Settings of the whole run: JAX on CPU, one compilation cache for all of its processes."""

import atexit
import os
import pathlib
import shutil
import tempfile

import pytest

# Before jax is imported. Workers of pytest-xdist and subprocess tests inherit the folder, so equal
# programs compile once in a run; the process that made it removes it.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
  os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="specjax-test-cache-")
  atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
# The programs run for milliseconds and compile for seconds: LLVM's own passes are off, which halves
# the time of the suite. XLA's passes are what they are elsewhere. `XLA_FLAGS= pytest` leaves all on.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")


def pytest_configure(config):
  """Donation that has no effect doubles the memory (case O3): an error wherever it happens."""
  config.addinivalue_line("filterwarnings", "error:Some donated buffers were not usable")


# Linux gives a process 65530 memory mappings unless told otherwise.
_MAPPINGS = pathlib.Path("/proc/self/maps")
_MOST_MAPPINGS = 25_000


@pytest.fixture(autouse=True, scope="module")
def forgotten_programs():
  """Forgets compiled programs before their mappings run out: then XLA's next compile ends the process."""
  yield
  if _MAPPINGS.exists():
    with _MAPPINGS.open() as lines:
      count = sum(1 for _ in lines)
    if count > _MOST_MAPPINGS:
      import jax

      jax.clear_caches()
