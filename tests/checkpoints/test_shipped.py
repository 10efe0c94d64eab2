"""The heads that come with the package: small, whole, and told how they were made."""

import json
import os

import pytest
import safetensors

from specjax.checkpoints import package, shipped
from specjax.training.records import METRICS

TARGETS = [name for name in package.PACKAGED if shipped.shipped_heads(name)]
MOST_BYTES = 24_000_000


@pytest.mark.parametrize("target", TARGETS)
def test_shipped_heads_are_small_and_known(target):
  """bfloat16, with the command, the seed, the data and the log that made them.

  Fails when a head is replaced by hand, without its training's records.
  """
  heads = shipped.shipped_heads(target)
  assert set(heads) <= set(shipped.KINDS) and "eagle3" in heads
  walked = [(at, name) for folder in heads.values() for at, _, names in os.walk(folder) for name in names]
  assert sum(os.path.getsize(os.path.join(*file)) for file in walked) <= MOST_BYTES
  for kind, folder in heads.items():
    made = json.load(open(os.path.join(folder, shipped.TRAINING)))
    settings = made["settings"]
    assert settings["--model"] == target and len(settings["model_sha256"]) == 64
    assert settings["--head"] and settings["--seed"] is not None and len(settings["--data"]) == 64
    assert made["result"]["tokens"] > 0 and made["about"]["versions"]["jax"]
    rows = [json.loads(line) for line in open(os.path.join(folder, METRICS))]
    assert rows[-1]["tokens"] == made["result"]["tokens"]
    judged = [row["held_out"] for row in rows if row.get("held_out")]
    assert judged[-1] == made["result"]["held_out"] and judged[-1]["tau"] > judged[0]["tau"]
    (file,) = (name for name in os.listdir(folder) if name.endswith(".safetensors"))
    with safetensors.safe_open(os.path.join(folder, file), "np") as tensors:
      types = {tensors.get_slice(name).get_dtype() for name in tensors.keys()}
    assert types <= {"BF16", "I64", "I32", "BOOL"}, (kind, types)


@pytest.mark.parametrize("target", TARGETS)
def test_the_recorded_table_is_of_these_heads(target):
  """Speedups at both temperatures; the method that is named best is one of them. Fails on a stale table."""
  table = shipped.shipped_results(target)
  if table is None:
    pytest.skip("heads without a table yet")
  for found in table["methods"].values():
    for of_temperature in found.values():
      assert of_temperature["tau"] >= 1 and of_temperature["speedup"] > 0
  assert table["best"] in table["methods"] and table["commands"] and table["device"]
