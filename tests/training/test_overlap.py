"""n-grams shared with evaluation questions, and duplicates, on sentences made by hand."""

import pytest

from specjax.training.overlap import Evaluation, Filter, normalised, report, text_hash

FOX = "The quick brown fox jumps over the lazy dog"
PIE = "How do I bake an apple pie for nine hungry children before noon on a rainy day"
SHORT = "Why?"
_words: dict[str, int] = {}


def encode(text: str) -> list[int]:
  """A word is a token."""
  return [_words.setdefault(word, len(_words)) for word in text.split()]


def evaluation(sizes=(3, 5), questions=(FOX, PIE, SHORT)) -> Evaluation:
  return Evaluation(questions, encode, sizes=sizes, digest="d")


@pytest.mark.parametrize(
  ("text", "shared"),
  [
    ("a quick brown fox ran over the lazy dog", {3: {0}, 5: set()}),
    ("I saw a QUICK  brown\nFox jumps over it", {3: {0}, 5: {0}}),
    ("quick brown dog over the hungry children", {3: set(), 5: set()}),
    ("over the lazy dog; bake an apple", {3: {0, 1}, 5: set()}),
    (FOX, {3: {0}, 5: {0}}),
    ("why?", {3: {2}, 5: {2}}),
    ("why not?", {3: set(), 5: set()}),
    ("", {3: set(), 5: set()}),
  ],
)
def test_which_questions_share_n_tokens_in_a_row(text, shared):
  """Case and white space do not count; a short question counts only if it is the whole text."""
  if ";" in text:
    text = text.replace(";", "")
  assert evaluation().shared(text) == shared


def test_every_place_of_a_long_text_is_looked_at():
  """The shared run stands at the very end, at the very beginning, and is exactly n long."""
  run = " ".join(PIE.split()[4:17])
  assert len(run.split()) == 13
  own = evaluation((8, 13))
  filler = " ".join(f"w{i}" for i in range(40))
  for text in (f"{filler} {run}", f"{run} {filler}", run):
    assert own.shared(text) == {8: {1}, 13: {1}}
  twelve = " ".join(run.split()[1:])
  assert own.shared(f"{filler} {twelve} {filler}") == {8: {1}, 13: set()}


@pytest.mark.parametrize(
  ("fields", "words"),
  [({"questions": ()}, "questions is empty"), ({"sizes": (5, 3)}, "sizes"), ({"sizes": (0,)}, "sizes")],
)
def test_evaluations_that_make_no_sense(fields, words):
  with pytest.raises(ValueError, match=words):
    evaluation(**fields)


def test_duplicates_of_this_shard_and_of_those_before():
  before = [(text_hash("Old question"), text_hash("old answer"))]
  keep = Filter(before)
  assert keep.question("old   QUESTION") is None and keep.question("new question") == text_hash(
    "new question"
  )
  assert keep.question("New question ") is None
  # Questions and answers are kept apart.
  assert keep.answer("new question") is not None and keep.answer("Old answer") is None
  assert keep.info() == {"dropped": {"duplicate_answer": 1, "duplicate_question": 2}}


def test_questions_of_the_evaluation_are_dropped_and_the_rest_is_counted():
  """By the longest n-grams alone; what is kept is counted once a sample, whichever text shares."""
  keep = Filter([], evaluation())
  assert keep.question("see a quick brown fox jumps over") is None
  for question, answer in (
    ("was it a quick brown fox", "it jumps over the lazy dog again"),  # 3 in both texts, 5 in the answer
    ("lazy days", "bake an apple"),
    ("nothing", "at all"),
  ):
    assert keep.question(question) is not None
    keep.count(question, answer)
  keep.noted["answers_cut"] += 2
  info = keep.info()
  assert info == {
    "dropped": {"question_of_evaluation": 1},
    "answers_cut": 2,
    "sharing": {"3": {"questions": [0, 1], "samples": 2}, "5": {"questions": [0], "samples": 1}},
  }
  other = {
    "dropped": {"question_of_evaluation": 2, "error": 1},
    "answers_cut": 1,
    "sharing": {"3": {"questions": [1, 2], "samples": 4}, "5": {"questions": [], "samples": 0}},
  }
  assert report([info, other], evaluation()) == {
    "dropped": {"error": 1, "question_of_evaluation": 3},
    "answers_cut": 3,
    "evaluation": {
      "questions": 3,
      "sharing_n_grams": {"3": {"questions": 3, "samples": 6}, "5": {"questions": 1, "samples": 1}},
    },
  }


def test_without_an_evaluation_the_report_says_so():
  keep = Filter([])
  keep.count("a", "b")
  assert report([keep.info()], None) == {"dropped": {}, "evaluation": None}


def test_normalised():
  assert normalised("  Straße\n\tÉ ") == "strasse é" and text_hash("A b") == text_hash("a  B") != text_hash(
    "ab"
  )
