"""Programs on eight host devices, in a process of their own: the device count is fixed when jax starts."""

import os
import pathlib
import subprocess
import sys


def on_eight_devices(module: str, *arguments: str) -> list[str]:
  """Runs ``python -m module`` and returns the words it printed; a failure is an assertion with its output."""
  root = pathlib.Path(__file__).parents[1]
  environment = {
    **os.environ,
    "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8",
    "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
  }
  done = subprocess.run(
    [sys.executable, "-m", module, *arguments],
    cwd=root,
    env=environment,
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
  return done.stdout.split()
