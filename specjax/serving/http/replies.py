"""What clients are told, in OpenAI's objects: a whole answer, pieces of one, the usage. No web here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from specjax.checkpoints import Tokenizer
from specjax.serving.http.schema import ApiError, Call
from specjax.serving.requests import Reason, Update
from specjax.serving.sampler import Output
from specjax.text import Detokenizer

# What OpenAI says of a token that has no probability, which JSON cannot.
_LEAST_LOGPROB = -9999.0
_STATUS = {
  Reason.QUEUE_FULL: 429,
  Reason.TOO_LARGE: 400,
  Reason.FAILED: 500,
  Reason.CANCELLED: 503,
  Reason.SHUTDOWN: 503,
}


def ended_badly(update: Update) -> ApiError | None:
  """Why a request got no whole answer; None if it did, or goes on."""
  status = _STATUS.get(update.reason)
  if status is None:
    return None
  headers = {"Retry-After": "1"} if status == 429 else {}
  return ApiError(status, update.detail or f"ended: {update.reason}", code=update.reason, headers=headers)


class Reply:
  """The answer to one call, made of the engine's outputs in order."""

  def __init__(self, id: str, call: Call, created: int, tokenizer: Tokenizer):
    """
    Args:
      id: of the request.
      call: that is answered.
      created: Unix time.
      tokenizer: of the target, for the texts of single tokens.
    """
    self._call, self._tokenizer = call, tokenizer
    self._head = {"id": id, "created": created, "model": call.model}
    self._began = False
    self._offsets = Detokenizer(tokenizer)
    self._offset = 0

  # --- whole ---------------------------------------------------------------------------------------

  def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
    """The answer in one object.

    Args:
      outputs: all of them, the last one with the result.
    """
    text, last = "".join(output.text for output in outputs), outputs[-1]
    tokens = [token for output in outputs for token in output.update.tokens]
    values = [value for output in outputs for value in output.update.logprobs or ()]
    said = {"message": {"role": "assistant", "content": text}} if self._call.chat else {"text": text}
    return {
      **self._head,
      "object": "chat.completion" if self._call.chat else "text_completion",
      "choices": [self._choice(said, self._logprobs(tokens, values), last.update.reason)],
      "usage": usage(last),
      "speculation": speculation(last),
    }

  # --- in pieces -------------------------------------------------------------------------------------

  def pieces(self, output: Output) -> list[dict[str, Any]]:
    """What a client that streams is sent for an output: nothing while its text is not certain."""
    call, update, found = self._call, output.update, []
    if call.chat and not self._began:
      found.append(self._piece({"role": "assistant", "content": ""}))
    self._began = True
    logprobs = self._logprobs(update.tokens, update.logprobs or ())
    if output.text or logprobs:
      found.append(self._piece({"content": output.text} if call.chat else output.text, logprobs))
    if update.reason is not None:
      found.append(self._piece({} if call.chat else "", reason=update.reason))
      if call.include_usage:
        counts = {"usage": usage(output), "speculation": speculation(output)}
        found.append({**self._head, "object": self._object, "choices": [], **counts})
    return found

  @property
  def _object(self) -> str:
    return "chat.completion.chunk" if self._call.chat else "text_completion"

  def _piece(
    self, said: str | dict[str, str], logprobs: dict[str, Any] | None = None, reason: Reason | None = None
  ) -> dict[str, Any]:
    said = {"delta" if self._call.chat else "text": said}
    piece = {**self._head, "object": self._object, "choices": [self._choice(said, logprobs, reason)]}
    return {**piece, "usage": None} if self._call.include_usage else piece

  # --- both ------------------------------------------------------------------------------------------

  def _choice(
    self, said: dict[str, Any], logprobs: dict[str, Any] | None, reason: Reason | None
  ) -> dict[str, Any]:
    return {"index": 0, **said, "logprobs": logprobs, "finish_reason": reason}

  def _logprobs(self, tokens: Sequence[int], values: Sequence[float]) -> dict[str, Any] | None:
    """Of new tokens, in order; None where they are not asked for."""
    if not self._call.logprobs or not tokens:
      return None
    texts = [self._tokenizer.decode([token], skip_special=False) for token in tokens]
    values = [max(value, _LEAST_LOGPROB) for value in values]
    if self._call.chat:
      entry = lambda token, text, value: {
        "token": text,
        "logprob": value,
        "bytes": list(self._tokenizer.token_bytes(token)),
        "top_logprobs": [],
      }
      return {"content": [entry(*item) for item in zip(tokens, texts, values, strict=True)]}
    offsets = []
    for token in tokens:
      offsets.append(self._offset)
      self._offset += len(self._offsets.push(token))
    return {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}


def usage(last: Output) -> dict[str, Any]:
  """Counts of an answer that has ended."""
  prompt, new = last.result.prompt_tokens, len(last.result.tokens)
  return {
    "prompt_tokens": prompt,
    "completion_tokens": new,
    "total_tokens": prompt + new,
    "prompt_tokens_details": {"cached_tokens": last.cached_tokens},
  }


def speculation(last: Output) -> dict[str, Any]:
  """What speculation brought for an answer that has ended, which OpenAI has no field for."""
  row = last.result
  counts = {"rounds": row.rounds, "proposed_depth": sum(row.depth), "accepted": sum(row.accepted)}
  return {**counts, "tau": row.tau, "acceptance": row.acceptance_rate}


def event(value: dict[str, Any] | str) -> bytes:
  """A server-sent event."""
  text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
  return f"data: {text}\n\n".encode()
