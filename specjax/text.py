"""Prompts in, text out: prompt ids, incremental detokenization, stop strings, finish reasons.

Text is made from the bytes of a run of tokens, never token by token: a character may span tokens, and a
stop string may span tokens, rounds and slices. What a token stream means does not depend on how it was
cut into rounds: the text, the tokens and the finish reason are the same for every drafter and slice.
"""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode
from specjax.checkpoints import Tokenizer
from specjax.decode import DecodeConfig, DecodeState, Finish, RowResult, Weights
from specjax.sampling import Settings

# Rounds between two looks at the text: long enough to hide the host's part, short enough to stream well.
ROUNDS_PER_SLICE = 4


def encode_prompt(
  tokenizer: Tokenizer, prompt: str | Sequence[Mapping[str, Any]], *, chat: bool
) -> list[int]:
  """Ids of a prompt: the one way to build them, so that plain and speculative runs see the same.

  BOS comes once: from the chat template, or from `Tokenizer.encode` for a plain prompt.

  Args:
    tokenizer: of the target.
    prompt: a text, or a conversation of ``{"role": …, "content": …}`` messages.
    chat: a text becomes the user's message in the chat template; without it, it is continued as it is.

  Raises:
    ValueError: a conversation without ``chat``, or a prompt that gives no token.
  """
  if isinstance(prompt, str):
    ids = tokenizer.encode_chat([{"role": "user", "content": prompt}]) if chat else tokenizer.encode(prompt)
  elif chat:
    ids = tokenizer.encode_chat(prompt)
  else:
    raise ValueError("prompt is a conversation; without the chat template it must be a text")
  if not ids:
    raise ValueError("prompt is empty; it needs at least one token")
  return ids


class Detokenizer:
  """Text of a run of tokens as they arrive; an incomplete character is held back until it is whole.

  Special tokens give no text. The pieces joined, `flush` included, are `Tokenizer.decode` of the run;
  bytes that never become UTF-8 are U+FFFD.
  """

  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer = tokenizer
    self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    self._at_start = True

  def push(self, token: int) -> str:
    """The characters that ``token`` completes."""
    if self._tokenizer.is_special(token):
      return ""
    data = self._tokenizer.token_bytes(token)
    if self._at_start and data:
      self._at_start = False
      # Tokenizers of the sentencepiece kind drop the space before the first word of a text.
      if data.startswith(b" ") and not self._tokenizer.decode([token]).startswith(" "):
        data = data[1:]
    return self._utf8.decode(data)

  def flush(self) -> str:
    """What is left at the end: U+FFFD for an incomplete character, or nothing."""
    return self._utf8.decode(b"", final=True)


class TextRow:
  """The text of one row, cut before the first stop string.

  Text that may still become a stop string is held back. Of several stop strings the one that is
  complete first counts, which does not depend on how many tokens arrive at once. A stop string that is
  complete within the first ``min_new_tokens`` tokens does not count.

  Attributes:
    text: everything given out so far.
    seen: tokens looked at.
    stopped: whether a stop string was found; then ``seen`` ends with the token that completed it.
  """

  def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str] = (), min_new_tokens: int = 0):
    if isinstance(stop_strings, str) or any(not isinstance(s, str) or not s for s in stop_strings):
      raise ValueError(f"stop_strings = {stop_strings!r}; a sequence of texts that are not empty is needed")
    self._detokenizer = Detokenizer(tokenizer)
    self._stops = tuple(stop_strings)
    self._held = ""
    self._least = min_new_tokens
    self.text = ""
    self.seen = 0
    self.stopped = False

  def push(self, tokens: Sequence[int]) -> str:
    """Takes further tokens and returns the text that is certain now; nothing once stopped."""
    start = len(self.text)
    for token in tokens:
      if self.stopped:
        break
      self.seen += 1
      self._add(self._detokenizer.push(int(token)))
    return self.text[start:]

  def close(self) -> str:
    """The end of the run: returns what was held back."""
    start = len(self.text)
    if not self.stopped:
      self._add(self._detokenizer.flush())
    if not self.stopped:
      self.text, self._held = self.text + self._held, ""
    return self.text[start:]

  def _add(self, piece: str) -> None:
    held = self._held + piece
    # What was complete too early is passed over: a stop string must end in the new piece.
    within = lambda stop: max(len(self._held) + 1 - len(stop), 0)
    places = [(held.find(stop, within(stop)), len(stop)) for stop in self._stops]
    found = [(place + length, place) for place, length in places if place >= 0]
    if found and self.seen > self._least:
      self.stopped, self._held = True, ""
      self.text += held[: min(found)[1]]
      return
    keep = 0
    for stop in self._stops:
      longest = min(len(stop) - 1, len(held))
      keep = max(keep, next((n for n in range(longest, 0, -1) if held.endswith(stop[:n])), 0))
    certain = len(held) - keep
    self.text, self._held = self.text + held[:certain], held[certain:]


@dataclasses.dataclass(frozen=True)
class TextResult(RowResult):
  """A `RowResult` with its text. At a stop string the tokens end with the one that completed it."""

  text: str


def generate_text(
  weights: Weights,
  config: DecodeConfig,
  tokenizer: Tokenizer,
  prompts: Sequence[Sequence[int]],
  **options: Any,
) -> list[TextResult]:
  """Decodes a batch of prompts to the end.

  Args:
    weights: of target and drafter.
    config: static part.
    tokenizer: of the target.
    prompts: ids from `encode_prompt`, a sequence a row.
    **options: of `stream_text`. Without stop strings the whole run is one call.

  Raises:
    ValueError: naming the field, the value and the limit, before anything compiles.
  """
  run = _run(weights, config, tokenizer, prompts, streaming=False, **options)
  while True:
    try:
      next(run)
    except StopIteration as end:
      return end.value


def stream_text(
  weights: Weights, config: DecodeConfig, tokenizer: Tokenizer, prompt: Sequence[int], **options: Any
) -> Generator[str, None, TextResult]:
  """Decodes one prompt and yields its text in pieces that are never taken back.

  The same compiled program as `generate_text`, run for a few rounds at a time.

  Args:
    weights, config, tokenizer: as for `generate_text`.
    prompt: ids from `encode_prompt`.
    **options: ``settings`` (`Settings`, None is greedy), ``max_new_tokens`` (128), ``stop_ids`` (None
      takes the tokenizer's ends), ``stop_strings`` (none), ``rounds_per_slice``, and ``processor_state`` and
      ``mesh`` as in `decode.prefill`.

  Returns:
    The generator's return value (``result = yield from stream_text(…)``) is the `TextResult`.
  """
  run = _run(weights, config, tokenizer, [prompt], streaming=True, **options)
  while True:
    try:
      (piece,) = next(run)
    except StopIteration as end:
      return end.value[0]
    if piece:
      yield piece


def _run(
  weights: Weights,
  config: DecodeConfig,
  tokenizer: Tokenizer,
  prompts: Sequence[Sequence[int]],
  *,
  streaming: bool,
  settings: Settings | None = None,
  max_new_tokens: int | Sequence[int] = 128,
  stop_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
  stop_strings: Sequence[str] = (),
  processor_state: Any = None,
  rounds_per_slice: int = ROUNDS_PER_SLICE,
  mesh: jax.sharding.Mesh | None = None,
) -> Generator[list[str], None, list[TextResult]]:
  """Yields the new text of every row, slice by slice; returns the results."""
  if rounds_per_slice < 1:
    raise ValueError(f"rounds_per_slice = {rounds_per_slice}; it must be at least 1")
  least = np.zeros(len(prompts), int) if settings is None else np.asarray(settings.min_new_tokens)
  rows = [TextRow(tokenizer, stop_strings, count) for count in least.tolist()]
  state = decode.prefill(
    weights,
    config,
    prompts,
    settings=settings,
    max_new_tokens=max_new_tokens,
    stop_ids=tokenizer.eos_ids if stop_ids is None else stop_ids,
    processor_state=processor_state,
    mesh=mesh,
  )
  limit = rounds_per_slice if streaming or stop_strings else decode.ALL_ROUNDS
  active = True
  while active:
    state = decode.generate(weights, state, config, limit)
    state, pieces, active = _look(state, rows)
    yield pieces
  yield [row.close() for row in rows]
  return [text_result(row, result) for row, result in zip(rows, decode.results(state), strict=True)]


def _look(state: DecodeState, rows: Sequence[TextRow]) -> tuple[DecodeState, list[str], bool]:
  """Hands each row its new tokens, ends rows at a stop string, and says whether any still runs."""
  tokens, start, length, finish = jax.device_get(
    (state.tokens, state.prompt_length, state.length, state.finish)
  )
  before, finish = finish, np.array(finish)
  pieces = []
  for b, row in enumerate(rows):
    pieces.append(row.push(tokens[b, start[b] + row.seen : length[b]]))
    if row.stopped:
      finish[b] = Finish.STOP
  if (finish != before).any():
    # Placed as the old array was: another placement would compile the loop again.
    placed = jax.device_put(finish, state.finish.sharding) if state.finish.committed else jnp.asarray(finish)
    state = state.replace(finish=placed)
  return state, pieces, bool((finish == Finish.NONE).any())


def text_result(row: TextRow, result: RowResult) -> TextResult:
  """Joins a closed row's text with its result; at a stop string tokens and rounds are cut with it.

  Σ emitted stays the number of tokens. The overlap is known for whole runs only, so it is dropped
  with the first round that is.
  """
  values = {field.name: getattr(result, field.name) for field in dataclasses.fields(RowResult)}
  if row.stopped:
    emitted, left = [], row.seen
    for count in result.emitted:
      if left <= 0:
        break
      emitted.append(min(count, left))
      left -= count
    rounds = len(emitted)
    values.update(
      tokens=result.tokens[: row.seen],
      finish="stop",
      proposed=result.proposed[:rounds],
      depth=result.depth[:rounds],
      reached=result.reached[:rounds],
      accepted=result.accepted[:rounds],
      emitted=emitted,
      nodes=result.nodes[:rounds],
      width=result.width[:rounds],
      overlap=result.overlap if rounds == result.rounds else None,
      logprobs=None if result.logprobs is None else result.logprobs[: row.seen],
    )
  return TextResult(**values, text=row.text)
