"""Data sets on disk: what is written is read, shards are whole or absent, damage is one clear error."""

import json
import os

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from specjax.training.data import Dataset, Sample, digest_of, read_manifest
from specjax.training.writer import ShardWriter, length_statistics

PROVENANCE = {
  "kind": "self",
  "seed": 3,
  "settings": {"temperatures": (0.0, 0.7)},
  "taps": None,
  "tap_width": None,
}
WITH_TAPS = PROVENANCE | {"taps": [2, 1], "tap_width": 4}
# Tokens of samples, and how many of them are an answer's: two shards.
SHARDS = [[(5, 2), (1, 1), (7, 4)], [(3, 3), (6, 1)]]


def sample(number: int, length: int, answer: int) -> Sample:
  tokens = np.arange(length, dtype=np.int32) + 100 * number
  return Sample(tokens, np.arange(length) >= length - answer)


def features(number: int, length: int) -> np.ndarray:
  values = np.arange((length - 1) * 8).reshape(length - 1, 2, 4) + number
  return values.astype(jnp.bfloat16)


def write(path, provenance=PROVENANCE, shards=SHARDS) -> ShardWriter:
  """Writes what is missing."""
  writer = ShardWriter(str(path), provenance)
  for index in range(len(writer.shards), len(shards)):
    first = sum(map(len, shards[:index]))
    for number, (length, answer) in enumerate(shards[index], start=first):
      taps = features(number, length) if provenance["taps"] else None
      writer.add(sample(number, length, answer), number=number, hashes=(number, 2**64 - 1), features=taps)
    writer.commit({"dropped": {}, "of": index}, {"shards so far": index + 1})
  return writer


def files(path) -> dict[str, bytes]:
  return {name: path.joinpath(name).read_bytes() for name in sorted(os.listdir(path))}


def manifest_of(path) -> dict:
  return json.loads(path.joinpath("manifest.json").read_text())


@pytest.mark.parametrize("provenance", [PROVENANCE, WITH_TAPS], ids=["tokens", "with features"])
def test_what_was_written_is_read(tmp_path, provenance):
  writer = write(tmp_path, provenance)
  data = Dataset.open(str(tmp_path))
  every = [pair for shard in SHARDS for pair in shard]
  assert len(data) == len(every) == 5
  for number, (length, answer) in enumerate(every):
    expected = sample(number, length, answer)
    assert data[number].tokens.dtype == np.int32 and data[number].mask.dtype == bool
    np.testing.assert_array_equal(data[number].tokens, expected.tokens)
    np.testing.assert_array_equal(data[number].mask, expected.mask)
    assert data.number(number) == number
    found = data.features(number)
    if provenance["taps"] is None:
      assert found is None
    else:
      assert found.dtype == jnp.bfloat16
      np.testing.assert_array_equal(found, features(number, length))
  with pytest.raises(IndexError, match="sample 5; there are samples 0 to 4"):
    data[5]
  manifest = data.manifest
  assert manifest["counts"] == {"samples": 5, "tokens": 22, "answer_tokens": 11}
  assert manifest["answer_lengths"] == length_statistics([2, 1, 4, 3, 1])
  assert manifest["provenance"] == json.loads(json.dumps(provenance))
  assert manifest["report"] == {"shards so far": 2} and [s["info"]["of"] for s in manifest["shards"]] == [
    0,
    1,
  ]
  assert data.digest == manifest["digest"] and len(data.digest) == 64
  assert writer.hashes == [(number, 2**64 - 1) for number in range(5)]


def test_others_read_a_shard(tmp_path):
  """Its tensors and types, by the library of the format; the last position of a sample has zeros."""
  write(tmp_path, WITH_TAPS)
  with safetensors.safe_open(str(tmp_path / "shard-00000.safetensors"), "np") as file:
    tensors = {name: file.get_tensor(name) for name in file.keys()}
    about = json.loads(file.metadata()["specjax"])
  assert {name: (str(t.dtype), t.shape) for name, t in tensors.items()} == {
    "tokens": ("int32", (13,)),
    "mask": ("uint8", (13,)),
    "starts": ("int64", (4,)),
    "numbers": ("int64", (3,)),
    "hashes": ("uint64", (3, 2)),
    "taps": ("bfloat16", (13, 2, 4)),
  }
  assert tensors["starts"].tolist() == [0, 5, 6, 13]
  assert not tensors["taps"][[4, 5, 12]].any() and tensors["taps"][3].any()
  assert about["provenance"]["seed"] == 3 and about["shard"] == 0


@pytest.mark.parametrize("after", ["first shard", "shard without manifest", "part of a shard"])
def test_a_killed_writer_goes_on_to_the_same_bits(tmp_path, after):
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  write(whole)
  write(killed, shards=SHARDS[:1])
  if after == "shard without manifest":
    killed.joinpath("shard-00001.safetensors").write_bytes(
      whole.joinpath("shard-00001.safetensors").read_bytes()
    )
  elif after == "part of a shard":
    killed.joinpath("shard-00001.safetensors.part").write_bytes(b"torn")
  writer = write(killed)
  assert files(killed) == files(whole)
  assert writer.answer_tokens == 11 and writer.hashes == write(whole).hashes


def test_from_the_first_missing_shard_on(tmp_path):
  """A shard that was deleted is written again, and those behind it: they may depend on it."""
  write(tmp_path)
  before = files(tmp_path)
  tmp_path.joinpath("shard-00000.safetensors").unlink()
  assert ShardWriter(str(tmp_path), PROVENANCE).shards == []
  write(tmp_path)
  assert files(tmp_path) == before


def test_an_empty_shard_counts(tmp_path):
  """Everything in it was dropped; the numbers behind it stay."""
  write(tmp_path, shards=[SHARDS[0], [], SHARDS[1]])
  data = Dataset.open(str(tmp_path))
  assert len(data) == 5 and data[3].tokens.tolist() == sample(3, 3, 3).tokens.tolist()
  assert ShardWriter(str(tmp_path), PROVENANCE).answer_tokens == 11


def test_nothing_yet(tmp_path):
  ShardWriter(str(tmp_path), PROVENANCE)
  with pytest.raises(ValueError, match="no sample yet"):
    Dataset.open(str(tmp_path))
  assert read_manifest(str(tmp_path))["shards"] == []


def flipped(path):
  data = bytearray(path.read_bytes())
  data[-1] ^= 1
  path.write_bytes(bytes(data))


DAMAGE = {
  "a bit": (lambda path: flipped(path / "shard-00001.safetensors"), "shard-00001.safetensors: SHA-256 is"),
  "a byte less": (
    lambda path: os.truncate(path / "shard-00001.safetensors", 100),
    "shard-00001.safetensors: 100 bytes",
  ),
  "a manifest cut off": (
    lambda path: os.truncate(path / "manifest.json", 50),
    "manifest.json: not valid JSON",
  ),
}


def test_folders_follow_each_other(tmp_path):
  """Of later ones, what an earlier one has is left out; other models and features are refused.

  Fails when samples are read from the wrong shard behind one that was left out.
  """
  first, second = tmp_path / "first", tmp_path / "second"
  write(first, WITH_TAPS)
  writer = ShardWriter(str(second), WITH_TAPS | {"seed": 4})
  for number, hashes in enumerate([(1, 20), (21, 22), (23, 2**64 - 1), (25, 26)], start=10):
    writer.add(sample(number, 4, 2), number=number, hashes=hashes, features=features(number, 4))
  writer.commit({"dropped": {}}, {})
  data = Dataset.open(str(first), str(second))
  assert [data.number(i) for i in range(len(data))] == [0, 1, 2, 3, 4, 11, 13]
  for i in range(len(data)):
    np.testing.assert_array_equal(data[i].tokens[:1], [100 * data.number(i)])
    np.testing.assert_array_equal(data.features(i), features(data.number(i), len(data[i].tokens)))
  alone = [Dataset.open(str(path)) for path in (first, second)]
  assert [len(part) for part in alone] == [5, 4]  # within a folder the writer has looked already
  assert data.digest == digest_of([part.digest for part in alone]) and data.manifest == alone[0].manifest
  write(tmp_path / "plain")
  with pytest.raises(ValueError, match=r"plain: taps = None; that of .*first is \[2, 1\]"):
    Dataset.open(str(first), str(tmp_path / "plain"))


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_one_error(tmp_path, how):
  """For those who read and for those who go on writing."""
  write(tmp_path)
  damage, words = DAMAGE[how]
  damage(tmp_path)
  for use in (Dataset.open, lambda path: ShardWriter(path, PROVENANCE)):
    with pytest.raises(ValueError, match=words):
      use(str(tmp_path))


def test_a_missing_shard_is_an_error_for_readers(tmp_path):
  write(tmp_path)
  tmp_path.joinpath("shard-00001.safetensors").unlink()
  with pytest.raises(ValueError, match=r"shard-00001.safetensors: no such file, but manifest.json names it"):
    Dataset.open(str(tmp_path))


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"format": 2}, "format = 2; this version reads 1"),
    ({"shards": None}, "shards = None; it must be of type list"),
    ({"counts": 3}, "counts = 3; it must be of type dict"),
    ({"digest": "0" * 64}, "its shards give"),
    ({"shards": [7]}, "shard 0 = 7; an object is needed"),
    ({"shards": [{"file": "shard-00000.safetensors"}]}, "shard 0: sha256 = None; it must be of type str"),
  ],
)
def test_manifests_that_do_not_hold_together(tmp_path, change, words):
  write(tmp_path)
  tmp_path.joinpath("manifest.json").write_text(json.dumps(manifest_of(tmp_path) | change))
  with pytest.raises(ValueError, match=words):
    Dataset.open(str(tmp_path))


@pytest.mark.parametrize(
  ("field", "value", "words"),
  [
    ("file", "../other.safetensors", "file = '../other.safetensors'; it must be 'shard-00000.safetensors'"),
    ("samples", 9, "samples = 3, manifest.json says 9"),
    ("answer_tokens", 9, "answer_tokens = 7, manifest.json says 9"),
  ],
)
def test_entries_that_do_not_fit_their_shards(tmp_path, field, value, words):
  write(tmp_path)
  manifest = manifest_of(tmp_path)
  manifest["shards"][0][field] = value
  tmp_path.joinpath("manifest.json").write_text(json.dumps(manifest))
  with pytest.raises(ValueError, match=words):
    Dataset.open(str(tmp_path))


def test_folders_of_something_else(tmp_path):
  tmp_path.joinpath("letter.txt").write_text("dear")
  with pytest.raises(ValueError, match=r"holds no data set \(letter.txt\)"):
    ShardWriter(str(tmp_path), PROVENANCE)
  with pytest.raises(ValueError, match=r"no manifest.json; this is not a data set"):
    Dataset.open(str(tmp_path))
  with pytest.raises(ValueError, match="making the folder"):
    ShardWriter("/dev/null/data", PROVENANCE)


def test_another_provenance_is_refused_by_name(tmp_path):
  write(tmp_path)
  with pytest.raises(ValueError, match=r"holds data with seed = 3; now it is 4\. Name a new folder"):
    ShardWriter(str(tmp_path), PROVENANCE | {"seed": 4})


@pytest.mark.parametrize(
  ("provenance", "taps", "words"),
  [
    (WITH_TAPS, None, r"features of shape None; taps = \[2, 1\] need \(2, 2, 4\)"),
    (WITH_TAPS, features(0, 4), r"features of shape \(3, 2, 4\)"),
    (PROVENANCE, features(0, 3), "taps = None need None"),
  ],
)
def test_samples_that_do_not_fit(tmp_path, provenance, taps, words):
  writer = ShardWriter(str(tmp_path), provenance)
  with pytest.raises(ValueError, match=words):
    writer.add(sample(0, 3, 1), number=0, features=taps)
  with pytest.raises(ValueError, match=r"sample 7 has 3 tokens and a mask of shape \(2,\)"):
    writer.add(Sample(np.zeros(3, np.int32), np.ones(2, bool)), number=7)


def test_digests_do_not_depend_on_order():
  assert digest_of({"a": 1, "b": [2.0]}) == digest_of({"b": [2.0], "a": 1}) != digest_of({"a": 1, "b": [2.5]})
