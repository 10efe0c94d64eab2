"""Data-parallel over eight host devices: loss and gradients are those of one."""

import pytest

from tests.devices import on_eight_devices

MEDUSA = "medusa[heads=2,draft_vocab=30]"
OTHERS = (
  "distilled[layers=(0,)]",
  "early_exit[exit=1]",
  "block[size=2,markov=2,tap_layers=(0,1)]",
  "medusa2[heads=2,lora=2]",
  "eagle3[steps=2,tap_layers=(0,1,2)]",
)


@pytest.mark.parametrize("heads", [(MEDUSA,), pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_eight_devices_learn_what_one_learns(heads):
  """Fails when a device takes the mean over its own rows, or a sum over devices is missing."""
  found = on_eight_devices("tests.training.eight_devices", *heads)
  assert found == [*(head.partition("[")[0] for head in heads), "step"]
