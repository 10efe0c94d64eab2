"""Eight host devices: float32 tokens are those of one device, greedy and sampled."""

import pytest

from tests.devices import on_eight_devices

DRAFTERS = ("none", "prompt_lookup", "prompt_lookup_tree", "two_model_tree")


@pytest.mark.parametrize("names", (DRAFTERS, pytest.param(("block",), marks=pytest.mark.slow)), ids="-".join)
def test_eight_devices_say_what_one_says(names):
  """Fails when a row's data crosses to a neighbour, or a sum over shards is missing."""
  assert on_eight_devices("tests.decode.eight_devices", *names) == list(names)
