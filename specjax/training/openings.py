"""Beginnings of user turns, so that the target writes questions of many kinds.

Left alone, a small target writes short questions that are all alike. An opening gives it the first words of a
user's turn, and maybe the last ones: ``"Summarize this report about tides.\\n\\n{document}"``. The target
writes what stands in for the mark, and then answers the whole turn. ``openings.txt`` has the project's own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence

import numpy as np

# What the target writes: `TEXT` up to its own end, `DOCUMENT` up to an end of a sentence.
TEXT, DOCUMENT = "{text}", "{document}"
TOPIC = "{topic}"
OWN = os.path.join(os.path.dirname(__file__), "openings.txt")
_ENDS = (".", "!", "?", "…", '."', "\n")
_TOPICS = tuple(
  " ".join(topic.split())
  for topic in """
  tides; bread; bees; bicycles; volcanoes; opera; chess; the printing press; glaciers; democracy; vaccines;
  jazz; railways; coral reefs; the stock market; sleep; gardens; bridges; whales; magnets; poetry; football;
  tea; clocks; earthquakes; migration; solar power; cathedrals; dinosaurs; advertising; antibiotics;
  deserts; encryption; rivers; marathon running; photography; cheese; satellites; trade unions; the Roman
  army; robots; monsoon rain; novels; owls; inflation; space telescopes; school lunches; pottery; a small
  town's mayor; a lost dog; elections; a flood; hospitals; a new museum; climate; a film festival; ferries;
  wolves; tennis; a court case; oil prices; a rescue at sea; the brain; mathematics; castles; fashion;
  nuclear energy; forests; a family holiday; insurance; dance; farming; the moon; lasers
  """.split(";")
)


@dataclasses.dataclass(frozen=True)
class Opening:
  """A frame around the words that the target writes as a user.

  Attributes:
    before: words that the turn begins with.
    after: words behind what the target writes.
    cut: what is too long is cut at the end of a sentence; else it is dropped.
  """

  before: str = ""
  after: str = ""
  cut: bool = False

  def every(self) -> list[Opening]:
    """This opening with each of our topics; itself if it names none."""
    topics = _TOPICS if TOPIC in self.before + self.after else ("",)
    named = lambda topic: (words.replace(TOPIC, topic) for words in (self.before, self.after))
    return [Opening(*named(topic), self.cut) for topic in topics]

  def around(self, written: str) -> str:
    """The whole turn."""
    return f"{self.before}{written}{self.after}".strip()


def parse(line: str) -> Opening:
  """An opening from its line: words, one ``{text}`` or ``{document}``, words.

  Raises:
    ValueError: a line with no mark or several.
  """
  line = line.replace("\\n", "\n")
  if line.count(TEXT) + line.count(DOCUMENT) != 1:
    raise ValueError(f"opening {line!r} holds no mark, or several; one {TEXT} or {DOCUMENT} is needed")
  cut = DOCUMENT in line
  before, _, after = line.partition(DOCUMENT if cut else TEXT)
  # A space before a word belongs to its token: the target writes it.
  return Opening(before.rstrip(" "), after, cut)


def read(path: str) -> tuple[Opening, ...]:
  """Openings of a text file, one a line, in which ``\\n`` ends a line of the turn; empty lines do not count.

  A line that is there twice is twice as likely. ``{topic}`` stands for one of our topics.

  Raises:
    ValueError: a file that cannot be read, holds none, or a line that is none.
  """
  try:
    with open(path, encoding="utf-8") as file:
      lines = file.read().splitlines()
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f"openings {path!r}: {error}") from error
  found = []
  for number, line in enumerate(lines, start=1):
    if line.strip():
      try:
        found.append(parse(line))
      except ValueError as error:
        raise ValueError(f"{path}, line {number}: {error}") from error
  if not found:
    raise ValueError(f"openings {path!r}: no line in it")
  return tuple(found)


def digest(openings: Sequence[Opening]) -> str:
  """Tells lists of openings apart: what is written depends on all of them, and on the topics."""
  plain = [*map(dataclasses.astuple, openings), _TOPICS]
  return hashlib.sha256(json.dumps(plain).encode()).hexdigest()


def choose(openings: Sequence[Opening], seed: int) -> Opening:
  """One of them, all alike likely, its ``{topic}`` one of ours."""
  noise = np.random.default_rng(seed)
  chosen = openings[noise.integers(len(openings))].every()
  return chosen[noise.integers(len(chosen))]


def whole_sentences(text: str) -> str:
  """A text that was cut off, up to its last end of a sentence; empty without one."""
  return text[: max(text.rfind(end) + len(end) if end in text else 0 for end in _ENDS)].rstrip()
