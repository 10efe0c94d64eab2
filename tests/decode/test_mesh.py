"""Eight host devices: float32 tokens are those of one device, greedy and sampled."""

from tests.devices import on_eight_devices


def test_eight_devices_say_what_one_says():
  """Fails when a row's data crosses to a neighbour, or a sum over shards is missing."""
  found = on_eight_devices("tests.decode.eight_devices")
  assert found == ["none", "prompt_lookup", "prompt_lookup_tree", "two_model_tree"]
