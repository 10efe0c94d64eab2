"""The sampler: what a request's row is begun with, and what its tokens become.

Tokens are drawn where the row decodes, by its own settings and seed (`sampling`, `processors`, the rule).
Here is the host's end of that: requests are checked and put into arrays; new tokens are cut at stop strings,
turned into text, and collected with their log-probabilities and the log of their rounds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from specjax.checkpoints import Tokenizer
from specjax.decode import MAX_STOP_IDS, DecodeConfig, Finish
from specjax.sampling import MIN_TEMPERATURE, Settings
from specjax.serving.programs import LOG_COLUMNS, Report, RowInputs
from specjax.serving.requests import Reason, Request, Update
from specjax.text import TextResult, TextRow, text_result

_REASONS = {
  Finish.NONE: None,
  Finish.STOP: Reason.STOP,
  Finish.LENGTH: Reason.LENGTH,
  Finish.ERROR: Reason.FAILED,
}
_ERROR = "the target's logits are no distribution: they hold NaN or infinity, or nothing is left of them"


@dataclasses.dataclass(frozen=True)
class Output:
  """What happened to a request, as its listener is told.

  Attributes:
    update: new tokens, their log-probabilities, and why it ended.
    text: new text that is certain; without a tokenizer nothing.
    result: once it has ended, all of it: tokens, rounds, text. Its ``finish`` is None where the update's
      reason is no `Finish`.
    cached_tokens: once it has ended, rows of its prompt that were copied from a kept prefix.
  """

  update: Update
  text: str = ""
  result: TextResult | None = None
  cached_tokens: int = 0


Listener = Callable[[Output], None]


@dataclasses.dataclass(eq=False)
class Answer:
  """What was said to a request so far.

  Attributes:
    request: which.
    listener: is told.
    row: its text; None without a tokenizer.
    tokens, logprobs: new ones.
    log: int ``[7, rounds]`` blocks of `LOG_COLUMNS`.
    piece: text that was not passed on yet.
    finish: why its row ended.
    cached_tokens: rows copied when it was first admitted; None before.
    carried: what a preempted row takes with it, see `programs.carry`.
  """

  request: Request
  listener: Listener
  row: TextRow | None
  tokens: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  log: list[np.ndarray] = dataclasses.field(default_factory=list)
  piece: str = ""
  finish: str | None = None
  cached_tokens: int | None = None
  carried: Any = None


class Sampler:
  """See the module."""

  def __init__(self, config: DecodeConfig, tokenizer: Tokenizer | None):
    self._config, self._tokenizer = config, tokenizer

  def answer(self, request: Request, listener: Listener) -> Answer:
    """An empty answer.

    Raises:
      ValueError: what the request asks for is not to be had here; names the field, the value and the limit.
    """
    config, sampling = self._config, request.sampling
    request.check_vocabulary(config.num_real_tokens)
    if request.logprobs and config.logprobs == "off":
      raise ValueError("logprobs = True; the engine's DecodeConfig has logprobs = 'off'")
    if request.stop_strings and self._tokenizer is None:
      raise ValueError(f"stop_strings = {request.stop_strings!r}; the engine has no tokenizer")
    if config.rule.needs == "argmax" and config.rule.lossless and sampling.temperature >= MIN_TEMPERATURE:
      raise ValueError(f"temperature = {sampling.temperature}; the rule {config.rule.name} needs 0")
    row = None
    if self._tokenizer is not None:
      row = TextRow(self._tokenizer, request.stop_strings, sampling.min_new_tokens)
    return Answer(request, listener, row)

  def inputs(self, request: Request, text: tuple[int, ...]) -> RowInputs:
    """What a row that holds ``text`` is begun with."""
    number = lambda value: np.full(1, value, np.int32)
    tokens = np.zeros((1, self._config.slots), np.int32)
    tokens[0, : len(text)] = text
    stops = np.full((1, MAX_STOP_IDS), -1, np.int32)
    stops[0, : len(request.stop_ids)] = request.stop_ids
    return RowInputs(
      tokens=tokens,
      length=number(len(text)),
      prompt_length=number(len(request.prompt)),
      limit=number(request.most_tokens),
      stop_ids=stops,
      settings=Settings.on_host(1, **request.sampling.fields()),
    )

  def take(self, answer: Answer, report: Report, row: int, drafted: bool) -> Update:
    """Adds what a row's rounds emitted to the answer, up to a stop string, and says what is new."""
    count, finish = int(report.emitted[row]), Finish(int(report.finish[row]))
    new, reason = report.tokens[row, :count].tolist(), _REASONS[finish]
    if answer.row is not None:
      before = answer.row.seen
      answer.piece += answer.row.push(new)
      if answer.row.stopped:
        new, reason = new[: answer.row.seen - before], Reason.STOP
    answer.tokens += new
    answer.log.append(report.log[row, :, : report.rounds[row]])
    logprobs = None
    if answer.request.logprobs:
      logprobs = report.logprobs[row, : len(new)].tolist()
      answer.logprobs += logprobs
      logprobs = tuple(logprobs)
    if reason is not None:
      answer.finish = Finish.STOP.name.lower() if reason is Reason.STOP else finish.name.lower()
    detail = _ERROR if reason is Reason.FAILED else ""
    return Update(answer.request.id, tuple(new), reason, drafted, logprobs, detail)

  def output(self, answer: Answer, update: Update) -> Output:
    """What the listener is told."""
    text, answer.piece = answer.piece, ""
    if update.reason is None:
      return Output(update, text)
    if answer.row is not None:
      text += answer.row.close()
    return Output(update, text, self._result(answer), answer.cached_tokens or 0)

  def _result(self, answer: Answer) -> TextResult:
    log = np.concatenate(answer.log, axis=1) if answer.log else np.zeros((len(LOG_COLUMNS), 0), int)
    result = TextResult(
      tokens=answer.tokens,
      prompt_tokens=len(answer.request.prompt),
      finish=answer.finish,
      **{name: column.tolist() for name, column in zip(LOG_COLUMNS, log)},
      overlap=None,
      logprobs=answer.logprobs if answer.request.logprobs else None,
      text="",
    )
    return result if answer.row is None else text_result(answer.row, result)
