"""Self-distillation: the target writes the text that its drafters are trained on.

From the chat template up to the user's turn it writes a question, as if it were the user; then it answers it.
So nothing is needed but the target, and answers follow its own law: greedy ones and sampled ones in turn.
Questions may come from a file instead, and a base model continues beginnings. Everything is written by the
decode loop, plainly, in a batch whose finished rows are replaced (`Slots`); features are recorded meanwhile.

Sample number i has its own seeds, and a shard holds the samples ``[s · n, (s + 1) · n)``: a killed run that
writes a shard again writes the same bits.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.checkpoints import LoadedModel
from specjax.checkpoints.fill import path_of
from specjax.decode import Finish
from specjax.models import Decoder
from specjax.training import openings, overlap
from specjax.training.conversations import Conversation, to_sample
from specjax.training.data import Sample
from specjax.training.features import features_of
from specjax.training.openings import Opening
from specjax.training.overlap import Evaluation, Filter
from specjax.training.questions import begin, question_of, user_turn
from specjax.training.slots import Job, Slots, Written
from specjax.training.writer import ShardWriter

# What a sample's noise is for: part of its seed.
_QUESTION, _ANSWER, _OPENING = 0, 1, 2
_SEAMS = 4

Progress = Callable[[str, int], None]
Kept = tuple[int, Sample, tuple[int, int], np.ndarray | None]


@dataclasses.dataclass(frozen=True)
class Recipe:
  """How a data set is made. What is written depends on all of it.

  Attributes:
    question_tokens: most tokens of a question beside its opening, or of a beginning that is continued.
    answer_tokens: most new tokens of an answer.
    question_temperature: at which questions are sampled.
    answer_temperatures: sample i is answered at number ``i % len`` of them; 0 is greedy.
    seed: of everything.
    batch_size: rows that are written together.
    shard_samples: sample numbers of a shard, those that are dropped included.
    taps: layers whose input is stored as features; none: no features.
    openings: of the questions that the target writes; a question has one of them.
  """

  question_tokens: int = 96
  answer_tokens: int = 256
  question_temperature: float = 0.9
  answer_temperatures: tuple[float, ...] = (0.0, 0.7)
  seed: int = 0
  batch_size: int = 64
  shard_samples: int = 1024
  taps: tuple[int, ...] = ()
  openings: tuple[Opening, ...] = (Opening(),)

  def __post_init__(self):
    for name in ("question_tokens", "answer_tokens", "batch_size", "shard_samples"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} = {getattr(self, name)}; it must be at least 1")
    for name in ("answer_temperatures", "openings"):
      if not getattr(self, name):
        raise ValueError(f"{name} is empty; at least one is needed")
    for name, values in (
      ("question_temperature", [self.question_temperature]),
      ("answer_temperatures", self.answer_temperatures),
    ):
      for value in values:
        if not 0 <= value <= 100:
          raise ValueError(f"{name} holds {value}; it must be in [0, 100]")
    if self.seed < 0:
      raise ValueError(f"seed = {self.seed}; it must be at least 0")


def seed_of(recipe_seed: int, number: int, purpose: int) -> int:
  """The seed of a sample's question or answer: 32 bits that no other sample is likely to have."""
  return int(np.random.SeedSequence([recipe_seed, number, purpose]).generate_state(1)[0])


def model_digest(model: Decoder) -> str:
  """SHA-256 of a model's parameters, in the order of their names."""
  parameters = {path_of(path): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model))}
  digest = hashlib.sha256()
  for name in sorted(parameters):
    value = np.asarray(parameters[name])
    digest.update(f"{name} {value.dtype} {value.shape}\n".encode())
    digest.update(np.ascontiguousarray(value).tobytes())
  return digest.hexdigest()


def provenance(
  loaded: LoadedModel,
  recipe: Recipe,
  kind: str,
  *,
  file_sha256: str | None = None,
  length_limit: int | None = None,
  evaluation: Evaluation | None = None,
) -> dict[str, Any]:
  """What a data set is made from; its digest tells data sets apart.

  Args:
    loaded: the target.
    recipe: how.
    kind: ``self`` (questions and answers), ``questions`` (answers to a file's), ``continuations`` (of a
      file's texts), ``conversations`` (a file's, as they are).
    file_sha256: of that file.
    length_limit: most tokens of a conversation.
    evaluation: whose questions are kept out.
  """
  template = loaded.tokenizer.chat_template
  settings = dataclasses.asdict(recipe)
  taps, seed = settings.pop("taps"), settings.pop("seed")
  del settings["openings"]
  return {
    "kind": kind,
    "model": {
      "sha256": model_digest(loaded.model),
      "dtype": jnp.dtype(loaded.model.dtype).name,
      "chat_template_sha256": None if template is None else hashlib.sha256(template.encode()).hexdigest(),
    },
    "settings": settings,
    "seed": seed,
    "openings_sha256": openings.digest(recipe.openings) if kind == "self" else None,
    "file_sha256": file_sha256,
    "length_limit": length_limit,
    "evaluation": None if evaluation is None else {"sha256": evaluation.digest, "n": list(evaluation.sizes)},
    "taps": list(taps) or None,
    "tap_width": loaded.config.d_model if taps else None,
  }


class Distillation:
  """Samples that the target writes."""

  def __init__(
    self,
    loaded: LoadedModel,
    recipe: Recipe,
    *,
    texts: Sequence[str | None] | None = None,
    chat: bool = True,
    implementation: str = "auto",
    progress: Progress = lambda stage, tokens: None,
  ):
    """
    Args:
      loaded: the target.
      recipe: how.
      texts: questions to answer, None where a line has none; without ``chat`` beginnings to continue. None:
        the target writes questions itself.
      chat: texts are questions, put in the chat template.
      implementation: of `tree_attention`.
      progress: is told the stage, ``questions`` or ``answers``, and how many tokens were written.

    Raises:
      ValueError: settings that the model or its chat template cannot serve.
    """
    if texts is None and not chat:
      raise ValueError("texts is None; a model without a chat template needs beginnings to continue")
    self._tokenizer, self._recipe, self._texts, self._chat = loaded.tokenizer, recipe, texts, chat
    self._progress = progress
    self._turn = user_turn(loaded.tokenizer) if chat else None
    self._prompt_limit = recipe.question_tokens + (self._turn.overhead if chat else 0)
    if texts is None:
      self._prompt_limit += self._longest_frame()
    self.slots = Slots(
      loaded.model,
      batch_size=recipe.batch_size,
      prompt_limit=self._prompt_limit,
      # One buffer and one program for both stages.
      new_tokens=max(recipe.answer_tokens, recipe.question_tokens if texts is None else 0),
      taps=recipe.taps,
      implementation=implementation,
    )

  def __call__(self, numbers: range, keep: Filter) -> Iterator[Kept]:
    """The samples of these numbers that are kept, in order."""
    prompts: dict[int, tuple[int, ...]] = {}
    texts: dict[int, str] = {}
    hashes: dict[int, int] = {}
    for number, text in self._questions(numbers, keep):
      prompt = self._prompt(text)
      if len(prompt) > self._prompt_limit:
        keep.dropped["question_too_long"] += 1
      elif (key := keep.question(text)) is not None:
        prompts[number], texts[number], hashes[number] = prompt, text, key
    written = {row.number: row for row in self._answers(prompts)}
    for number in list(prompts):
      row = written.pop(number)
      answer = self._tokenizer.decode(row.new)
      if row.finish is Finish.ERROR or not answer.strip():
        keep.dropped["error" if row.finish is Finish.ERROR else "empty_answer"] += 1
      elif (key := keep.answer(answer)) is not None:
        keep.count(texts[number], answer)
        keep.noted["answers_cut"] += row.finish is Finish.LENGTH
        mask = np.arange(len(row.tokens)) >= row.prompt_length
        yield number, Sample(row.tokens, mask), (hashes[number], key), row.taps

  def _prompt(self, text: str) -> tuple[int, ...]:
    if self._chat:
      return tuple(self._tokenizer.encode_chat([{"role": "user", "content": text}]))
    return tuple(self._tokenizer.encode(text)[: self._recipe.question_tokens])

  def _questions(self, numbers: range, keep: Filter) -> Iterator[tuple[int, str]]:
    if self._texts is not None:
      for number in numbers:
        if self._texts[number] is None:
          keep.dropped["no_question"] += 1
        else:
          yield number, self._texts[number]
      return
    recipe, turn, tokenizer = self._recipe, self._turn, self._tokenizer
    chosen = {
      number: openings.choose(recipe.openings, seed_of(recipe.seed, number, _OPENING)) for number in numbers
    }
    jobs = [
      Job(
        number,
        begin(tokenizer, turn, opening),
        recipe.question_temperature,
        seed_of(recipe.seed, number, _QUESTION),
      )
      for number, opening in chosen.items()
    ]
    rows = self._write("questions", jobs, recipe.question_tokens, turn.stop_ids, features=False)
    for row in sorted(rows, key=lambda row: row.number):
      text, fault = question_of(tokenizer, turn, chosen[row.number], row)
      if text is None:
        keep.dropped[fault] += 1
      else:
        yield row.number, text

  def _longest_frame(self) -> int:
    """Tokens of a question beside those that the target writes, at most."""
    frames = {o.before + o.after for opening in self._recipe.openings for o in opening.every()}
    longest = max(len(self._tokenizer.encode(frame, add_bos=False)) for frame in frames)
    # Where words meet they may be cut into tokens in another way.
    return longest + _SEAMS if longest else 0

  def _answers(self, prompts: dict[int, tuple[int, ...]]) -> Iterable[Written]:
    recipe = self._recipe
    temperature = lambda number: recipe.answer_temperatures[number % len(recipe.answer_temperatures)]
    jobs = [
      Job(number, prompt, temperature(number), seed_of(recipe.seed, number, _ANSWER))
      for number, prompt in prompts.items()
    ]
    return self._write("answers", jobs, recipe.answer_tokens, self._tokenizer.eos_ids)

  def _write(self, stage: str, jobs: list[Job], most: int, stop_ids: Sequence[int], features: bool = True):
    tell = lambda tokens: self._progress(stage, tokens)
    return self.slots.run(jobs, max_new_tokens=most, stop_ids=stop_ids, features=features, progress=tell)


class Conversations:
  """Samples of conversations from a file, their answers as they are."""

  def __init__(
    self,
    loaded: LoadedModel,
    recipe: Recipe,
    conversations: Sequence[Conversation],
    *,
    length_limit: int,
    implementation: str = "auto",
    progress: Progress = lambda stage, tokens: None,
  ):
    """
    Args:
      loaded: the target.
      recipe: of it the shards and the taps count.
      conversations: from the file.
      length_limit: most tokens of a sample; longer conversations are cut.
      implementation: of `tree_attention`.
      progress: is told ``answers`` and how many of their tokens are done.

    Raises:
      ValueError: more tokens than the model has positions.
    """
    most = loaded.config.max_length
    if not 2 <= length_limit <= most:
      raise ValueError(f"length_limit = {length_limit}; it must be in [2, {most}], the model's positions")
    self._loaded, self._recipe, self._conversations = loaded, recipe, conversations
    self._limit, self._implementation, self._progress = length_limit, implementation, progress

  def __call__(self, numbers: range, keep: Filter) -> Iterator[Kept]:
    """The samples of these numbers that are kept, in order."""
    kept: list[tuple[int, Sample, tuple[int, int]]] = []
    for number in numbers:
      messages = self._conversations[number].in_turn
      sample = to_sample(self._loaded.tokenizer, messages, self._limit)
      if sample is None:
        keep.dropped["no_answer"] += 1
        continue
      asked, said = (
        "\n".join(message["content"] for message in messages if message["role"] == role)
        for role in ("user", "assistant")
      )
      question = keep.question(asked)
      answer = None if question is None else keep.answer(said)
      if answer is not None:
        keep.count(asked, said)
        kept.append((number, sample, (question, answer)))
    features = self._features([sample for _, sample, _ in kept])
    for (number, sample, hashes), of_sample in zip(kept, features, strict=True):
      self._progress("answers", int(sample.mask.sum()))
      yield number, sample, hashes, of_sample

  def _features(self, samples: Sequence[Sample]) -> Iterable[np.ndarray | None]:
    if not self._recipe.taps:
      return [None] * len(samples)
    return features_of(
      self._loaded.model,
      [sample.tokens for sample in samples],
      self._recipe.taps,
      length_limit=self._limit,
      implementation=self._implementation,
    )


def write_shards(
  writer: ShardWriter,
  make: Callable[[range, Filter], Iterable[Kept]],
  *,
  tokens: int,
  shard_samples: int,
  size: int | None = None,
  evaluation: Evaluation | None = None,
  made_with: Mapping[str, Any] | None = None,
  on_shard: Callable[[dict[str, Any]], None] = lambda entry: None,
) -> None:
  """Writes shards until there are so many answer tokens, or the source has no more.

  Args:
    writer: of the data set; it may have shards already.
    make: `Distillation` or `Conversations`.
    tokens: of answers, in all shards; the last shard may go beyond.
    shard_samples: sample numbers of a shard.
    size: of the source; None is without end.
    evaluation: whose questions are kept out.
    made_with: versions and device, for the manifest.
    on_shard: is given each new shard's entry.

  Raises:
    ValueError: of a source without end nothing was kept in a whole shard.
  """
  while writer.answer_tokens < tokens:
    first = len(writer.shards) * shard_samples
    last = first + shard_samples if size is None else min(first + shard_samples, size)
    if first >= last:
      return
    keep = Filter(writer.hashes, evaluation)
    for number, sample, hashes, features in make(range(first, last), keep):
      writer.add(sample, number=number, hashes=hashes, features=features)
    if size is None and not writer.pending:
      raise ValueError(f"none of {shard_samples} samples was kept: {dict(keep.dropped)}")
    info = keep.info()
    on_shard(writer.commit(info, overlap.report([*writer.infos, info], evaluation), made_with))
