"""What keeps a sample out: texts that are there already, and questions that models are evaluated on."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

# 13 in a row are what GPT-3's authors called contamination (Brown et al. 2020, appendix C); 8 are alike.
SIZES = (8, 13)


def normalised(text: str) -> str:
  """Without differences of case and of white space."""
  return " ".join(text.casefold().split())


def text_hash(text: str) -> int:
  """64 bits of the normalised text."""
  return int.from_bytes(hashlib.blake2b(normalised(text).encode(), digest_size=8).digest(), "little")


class Evaluation:
  """Questions that no training text should hold, by n-grams of tokens of their normalised texts.

  Attributes:
    questions: how many there are.
    sizes: n, ascending.
    digest: of the file they are from.
  """

  def __init__(
    self,
    questions: Sequence[str],
    encode: Callable[[str], Sequence[int]],
    *,
    sizes: tuple[int, ...] = SIZES,
    digest: str = "",
  ):
    """
    Args:
      questions: their texts.
      encode: text → token ids, without BOS.

    Raises:
      ValueError: no question, or sizes that do not ascend from at least 1.
    """
    if not questions:
      raise ValueError("questions is empty; an evaluation needs at least one")
    if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
      raise ValueError(f"sizes = {sizes}; they must ascend from at least 1")
    self.questions, self.sizes, self.digest = len(questions), sizes, digest
    self._encode = encode
    self._hashes = {text_hash(question): number for number, question in enumerate(questions)}
    self._index: dict[int, dict[tuple[int, ...], list[int]]] = {}
    texts = [self._ids(question) for question in questions]
    for size in sizes:
      places = self._index[size] = defaultdict(list)
      for number, ids in enumerate(texts):
        for gram in set(_grams(ids, size)):
          places[gram].append(number)

  def shared(self, text: str) -> dict[int, set[int]]:
    """``{n: numbers of the questions that share n tokens in a row with the text}``.

    A question that equals the text shares n-grams of every size, however short it is.
    """
    ids = self._ids(text)
    same = {self._hashes[key]} if (key := text_hash(text)) in self._hashes else set()
    return {
      size: same.union(*(self._index[size][gram] for gram in _grams(ids, size) if gram in self._index[size]))
      for size in self.sizes
    }

  def _ids(self, text: str) -> tuple[int, ...]:
    # Behind a space the first word has the ids that it has within a text.
    return tuple(self._encode(f" {normalised(text)}"))


def _grams(ids: Sequence[int], size: int) -> Iterable[tuple[int, ...]]:
  return (tuple(ids[i : i + size]) for i in range(len(ids) - size + 1))


class Filter:
  """Decides which samples of a shard are kept, and counts.

  It knows the samples before them, so its decisions are a function of these and of the order of the shard.
  """

  def __init__(self, kept: Iterable[tuple[int, int]], evaluation: Evaluation | None = None):
    """
    Args:
      kept: hashes of question and answer of all samples in shards before this one.
      evaluation: samples whose question shares its longest n-grams are dropped.
    """
    pairs = list(kept)
    self._seen = {"question": {pair[0] for pair in pairs}, "answer": {pair[1] for pair in pairs}}
    self._evaluation = evaluation
    self.dropped: Counter[str] = Counter()
    self.noted: Counter[str] = Counter()
    sizes = evaluation.sizes if evaluation is not None else ()
    self._sharing: dict[int, set[int]] = {size: set() for size in sizes}
    self._samples: Counter[int] = Counter({size: 0 for size in sizes})

  def question(self, text: str) -> int | None:
    """The hash of a question that is new and not of the evaluation; else None, and it counts as dropped."""
    key = self._new("question", text)
    if key is None or self._evaluation is None:
      return key
    if self._evaluation.shared(text)[self._evaluation.sizes[-1]]:
      self.dropped["question_of_evaluation"] += 1
      return None
    return key

  def answer(self, text: str) -> int | None:
    """The same for an answer, which may hold what it will."""
    return self._new("answer", text)

  def _new(self, what: str, text: str) -> int | None:
    key = text_hash(text)
    if key in self._seen[what]:
      self.dropped[f"duplicate_{what}"] += 1
      return None
    self._seen[what].add(key)
    return key

  def count(self, *texts: str) -> None:
    """Counts what a sample that is kept shares with the evaluation, in any of its texts."""
    if self._evaluation is None:
      return
    found = [self._evaluation.shared(text) for text in texts]
    for size, numbers in self._sharing.items():
      of_size = set().union(*(shared[size] for shared in found))
      numbers |= of_size
      self._samples[size] += bool(of_size)

  def info(self) -> dict[str, Any]:
    """What was dropped, noted and shared, for the shard's entry in the manifest."""
    info: dict[str, Any] = {"dropped": dict(sorted(self.dropped.items())), **dict(sorted(self.noted.items()))}
    if self._evaluation is not None:
      info["sharing"] = {
        str(size): {"questions": sorted(numbers), "samples": self._samples[size]}
        for size, numbers in self._sharing.items()
      }
    return info


def report(infos: Sequence[Mapping[str, Any]], evaluation: Evaluation | None) -> dict[str, Any]:
  """Sums over the shards' `Filter.info`: counts, and how many questions share n-grams with any sample.

  Without an evaluation ``evaluation`` is None: nothing was checked.
  """
  dropped: Counter[str] = Counter()
  noted: Counter[str] = Counter()
  for info in infos:
    dropped.update(info["dropped"])
    noted.update({name: count for name, count in info.items() if isinstance(count, int)})
  found: dict[str, Any] = {"dropped": dict(sorted(dropped.items())), **dict(sorted(noted.items()))}
  if evaluation is None:
    return found | {"evaluation": None}
  sharing = {}
  for size in map(str, evaluation.sizes):
    parts = [info["sharing"][size] for info in infos]
    sharing[size] = {
      "questions": len(set().union(*(part["questions"] for part in parts))),
      "samples": sum(part["samples"] for part in parts),
    }
  return found | {"evaluation": {"questions": evaluation.questions, "sharing_n_grams": sharing}}
