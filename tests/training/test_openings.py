"""Beginnings of user turns: their files, their draws, and the questions that are written into them."""

import collections

import numpy as np
import pytest

from specjax.decode import Finish
from specjax.training import openings
from specjax.training.openings import Opening
from specjax.training.questions import begin, question_of, user_turn
from specjax.training.slots import Written
from tests.training.tiny import letters_tokenizer


@pytest.mark.parametrize(
  ("line", "expected"),
  [
    ("{text}", Opening()),
    ("Why {text}?", Opening("Why", "?")),
    (r"Sum up:\n\n{document}\n\nIn short.", Opening("Sum up:\n\n", "\n\nIn short.", True)),
  ],
)
def test_a_line(line, expected):
  assert openings.parse(line) == expected


@pytest.mark.parametrize(
  ("text", "words"),
  [
    ("{text}\nno mark\n", "line 2: opening 'no mark' holds no mark"),
    ("\n\n{text} and {document}", "line 3: .*or several"),
    (" \n", "no line in it"),
  ],
)
def test_files_that_are_wrong(tmp_path, text, words):
  path = tmp_path / "openings.txt"
  path.write_text(text)
  with pytest.raises(ValueError, match=words):
    openings.read(str(path))
  path.write_bytes(b"\xff\xfe{text}")
  with pytest.raises(ValueError, match=r"openings\.txt"):
    openings.read(str(path))


def test_draws_follow_the_lines():
  """Lines alike, one that is there twice twice; topics alike within a line. χ², p above 1e-4."""
  lines = [openings.parse(line) for line in ("a {text}", "a {text}", "b {topic} {document}", "{text}")]
  topics = len(lines[2].every())
  assert len(set(lines[2].every())) == topics > 50 and lines[0].every() == [lines[0]]
  draws = 5_000
  counts = collections.Counter(openings.choose(lines, seed) for seed in range(draws))
  shares = {lines[0]: 1 / 2, lines[3]: 1 / 4} | {one: 1 / 4 / topics for one in lines[2].every()}
  assert set(counts) == set(shares)
  excess = sum((counts[one] - draws * share) ** 2 / (draws * share) for one, share in shares.items())
  freedom = len(shares) - 1
  assert abs(excess - freedom) < 4 * np.sqrt(2 * freedom)
  assert openings.choose(lines, 7) == openings.choose(lines, 7)


def test_our_own():
  """All marks are filled, and few turns are left to the target alone."""
  own = openings.read(openings.OWN)
  every = [one for opening in own for one in opening.every()]
  assert not any("{" in one.before + one.after for one in every if "```" not in one.before)
  free = sum(opening == Opening() for opening in own)
  assert 0 < free < len(own) / 5 and sum(opening.cut for opening in own) > len(own) / 6
  assert openings.digest(own) != openings.digest(own[1:]) != openings.digest(own[1:][::-1])


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("One. Two! Thr", "One. Two!"),
    ("a\nb c", "a"),
    ("no end", ""),
    ("", ""),
    ('He said "so." And', 'He said "so."'),
  ],
)
def test_whole_sentences(text, expected):
  assert openings.whole_sentences(text) == expected


END = Finish.STOP


@pytest.mark.parametrize(
  ("opening", "new", "finish", "expected"),
  [
    (Opening("why", " now"), " is the sun", END, "why is the sun now"),
    (Opening("why"), "ab", END, (None, "question_too_short")),
    (Opening("why"), " is the sun so far", Finish.LENGTH, (None, "question_too_long")),
    (Opening("read\n", "\nwell", True), "the sun\nthe mo", Finish.LENGTH, "read\nthe sun\nwell"),
    (Opening("read\n", "\nwell", True), "the sun and the moon", END, "read\nthe sun and the moon\nwell"),
    (Opening("read\n", "", True), "the sun and the moon", Finish.LENGTH, (None, "question_too_long")),
  ],
)
def test_questions_within_their_opening(opening, new, finish, expected):
  """The opening's words come first, once; only documents are cut.

  Fails when the space between the opening and the first word is lost, or the end of a turn stays.
  """
  tokenizer = letters_tokenizer()
  turn = user_turn(tokenizer)
  prompt = begin(tokenizer, turn, opening)
  assert tokenizer.decode(prompt) == tokenizer.decode(turn.before) + opening.before
  ids = tokenizer.encode(new, add_bos=False) + ([turn.stop_ids[0]] if finish is END else [])
  row = Written(0, np.array([*prompt, *ids], np.int32), len(prompt), finish, None)
  found = question_of(tokenizer, turn, opening, row)
  assert found == (expected if isinstance(expected, tuple) else (expected, ""))


def test_no_opening_is_the_turn_itself():
  tokenizer = letters_tokenizer()
  turn = user_turn(tokenizer)
  assert begin(tokenizer, turn, Opening()) == turn.before
