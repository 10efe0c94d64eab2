"""Policies by name, and what each says to a load."""

import pytest

from specjax.serving.policies import (
  PREFILL_POLICIES,
  SPECULATION_POLICIES,
  Always,
  Below,
  Interleave,
  Load,
  Never,
  Policies,
  PrefillFirst,
  Windows,
  make_policies,
)


def load(decoding, prefilling=0):
  return Load(decoding, prefilling, 0, 16)


def test_names_make_policies_and_come_back():
  """Fails when a name or an option is lost between a flag and a result file."""
  for text, policies in (
    ("interleave", Policies()),
    ("prefill_first[tokens=64]+never", Policies(PrefillFirst(64), Never())),
    ("below[rows=3]", Policies(speculation=Below(3))),
    (
      "windows[table=((1,5),(9,0))]+interleave[tokens=99]",
      Policies(Interleave(99), Windows(((1, 5), (9, 0)))),
    ),
  ):
    assert make_policies(text) == policies == make_policies(policies.name)
  for prefill in PREFILL_POLICIES:
    for speculation in SPECULATION_POLICIES:
      made = make_policies(f"{prefill}+{speculation}")
      assert (made.prefill.name, made.speculation.name) == (prefill, speculation)
      assert make_policies(made.name) == made
      assert hash(made) == hash(make_policies(made.name))


def test_who_decodes_beside_prompts():
  assert [PrefillFirst().decodes(load(3, reading)) for reading in (0, 1)] == [True, False]
  assert [Interleave().decodes(load(3, reading)) for reading in (0, 1)] == [True, True]


def test_how_deep():
  """By how many rows decode; a table holds from its row on, and for nobody what it holds for one."""
  depths = lambda policy: [policy.depth(load(rows)) for rows in (0, 1, 3, 4, 7, 8, 16)]
  assert depths(Always()) == [None] * 7
  assert depths(Never()) == [0] * 7
  assert depths(Below(4)) == [None, None, None, 0, 0, 0, 0]
  assert depths(Windows(((1, 7), (4, 3), (8, 0)))) == [7, 7, 7, 3, 3, 0, 0]


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("interleaved", "policy = 'interleaved'; it must be one of prefill_first, interleave, always"),
    ("", "policy = ''"),
    ("never+below", "names two for speculation"),
    ("prefill_first+interleave", "names two for prefill"),
    ("interleave[tokens=0]", "interleave: tokens = 0"),
    ("prefill_first[tokens=many]", "prefill_first: tokens = 'many'"),
    ("below[rows=True]", "below: rows = True"),
    ("always[rows=3]", "rows"),
    ("windows[table=()]", "windows: table"),
    ("windows[table=3]", "windows: table"),
    ("windows[table=((2,3),)]", "ascending from 1"),
    ("windows[table=((1,3),(1,0))]", "ascending from 1"),
    ("windows[table=((1,3),(4,-1))]", "depth at least 0"),
    ("windows[table=((1,3,4),)]", "pairs"),
    ("windows[table=((1,2.5),)]", "pairs"),
  ],
)
def test_wrong_policies(text, message):
  with pytest.raises(ValueError) as raised:
    make_policies(text)
  assert message in str(raised.value)
