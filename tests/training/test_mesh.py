"""Data-parallel over eight host devices: loss and gradients are those of one."""

import os
import pathlib
import subprocess
import sys

import pytest

MEDUSA = "medusa[heads=2,draft_vocab=30]"
OTHERS = "distilled[layers=(0,)]", "eagle3[steps=2,tap_layers=(0,1,2)]"


@pytest.mark.parametrize("heads", [(MEDUSA,), pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_eight_devices_learn_what_one_learns(heads):
  """`tests/training/eight_devices.py` in a process of its own: the device count is fixed when jax starts.

  Fails when a device takes the mean over its own rows, or a sum over devices is missing.
  """
  root = pathlib.Path(__file__).parents[2]
  environment = {
    **os.environ,
    "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8",
    "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
  }
  done = subprocess.run(
    [sys.executable, "-m", "tests.training.eight_devices", *heads],
    cwd=root,
    env=environment,
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
  assert done.stdout.split() == [*(head.partition("[")[0] for head in heads), "step"], done.stdout
