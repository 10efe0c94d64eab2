"""Eight host devices: float32 tokens are those of one device, greedy and sampled."""

import os
import pathlib
import subprocess
import sys


def test_eight_devices_say_what_one_says():
  """`tests/decode/eight_devices.py` in a process of its own: the device count is fixed when jax starts.

  Fails when a row's data crosses to a neighbour, or a sum over shards is missing.
  """
  root = pathlib.Path(__file__).parents[2]
  environment = {
    **os.environ,
    "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8",
    "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
  }
  done = subprocess.run(
    [sys.executable, "-m", "tests.decode.eight_devices"],
    cwd=root,
    env=environment,
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
  names = ["none", "prompt_lookup", "prompt_lookup_tree", "two_model_tree"]
  assert done.stdout.split() == names, done.stdout
