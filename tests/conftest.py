"""Settings of the whole run: JAX on CPU, one compilation cache for all of its processes."""

import atexit
import os
import shutil
import tempfile

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
