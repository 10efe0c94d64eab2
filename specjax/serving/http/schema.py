"""What clients may ask, in OpenAI's words: bodies in, requests or errors that name a field out. No web here.

Ranges are those of `requests.Sampling` and `requests.Request`, which are asked field by field. What is not
offered is refused by name, unless it asks for what happens anyway (``n = 1``); nothing is ignored but who
asks.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.serving.requests import Request, Sampling

# Fields of ours by their names there, as vLLM has those that OpenAI does not know.
_SAMPLING = {
  "temperature": "temperature",
  "top_p": "top_p",
  "top_k": "top_k",
  "min_p": "min_p",
  "seed": "seed",
  "presence_penalty": "presence_penalty",
  "frequency_penalty": "frequency_penalty",
  "repetition_penalty": "repetition_penalty",
  "logit_bias": "logit_bias",
  "min_tokens": "min_new_tokens",
}
_REQUEST = {
  "max_completion_tokens": "max_new_tokens",
  "max_tokens": "max_new_tokens",
  "stop": "stop_strings",
  "stop_token_ids": "stop_ids",
}
_THEIRS = {ours: there for there, ours in (_SAMPLING | _REQUEST | {"logprobs": "logprobs"}).items()}
# Not offered but with these values, which say what happens anyway.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
  "n": (1,),
  "best_of": (1,),
  "echo": (False,),
  "suffix": ("",),
  "tools": ([],),
  "tool_choice": ("none", "auto"),
  "parallel_tool_calls": (True, False),
  "functions": ([],),
  "function_call": ("none", "auto"),
  "response_format": ({"type": "text"},),
  "modalities": (["text"],),
  "audio": (),
  "prediction": (),
  "reasoning_effort": (),
  "web_search_options": (),
  "store": (False,),
  "service_tier": ("auto", "default"),
}
# They say who asks, and change nothing.
_ABOUT_WHO_ASKS = {"user": str, "safety_identifier": str, "prompt_cache_key": str, "metadata": dict}
_ROLES = ("system", "user", "assistant")
# What OpenAI says is taken where a completion does not say it.
_COMPLETION_TOKENS = 16
_TEMPERATURE = 1.0


class ApiError(Exception):
  """A request that is not served, as the client is told.

  Attributes:
    status: of HTTP.
    message: names the field, the value and the limit.
    param: the field, None if it is not about one.
    code: for programs, OpenAI's where there is one.
    headers: of the response, besides.
  """

  def __init__(
    self,
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
  ):
    super().__init__(message)
    self.status, self.message, self.param, self.code = status, message, param, code
    self.headers = dict(headers or {})

  @property
  def type(self) -> str:
    """OpenAI's kind of error."""
    if self.status == 429:
      return "rate_limit_error"
    return "server_error" if self.status >= 500 else "invalid_request_error"

  def body(self) -> dict[str, Any]:
    """OpenAI's error object."""
    return {
      "error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code},
    }


@dataclasses.dataclass(frozen=True)
class Call:
  """A body that was read and checked, before its text is made into tokens.

  Attributes:
    chat: `prompt` is a conversation, and the answer a message.
    model: that was asked for.
    prompt: a text, token ids, or messages ``{"role": …, "content": …}``.
    max_new_tokens: None: OpenAI's default.
    sampling: as asked; the seed is drawn where none was given.
    stop_strings, stop_ids: as asked.
    ignores_end: goes on behind the model's own ends.
    logprobs: asked for.
    stream: in pieces.
    include_usage: a last piece has the usage.
    given: names that the body has, by ours.
  """

  chat: bool
  model: str
  prompt: str | tuple[int, ...] | tuple[Mapping[str, str], ...]
  max_new_tokens: int | None
  sampling: Sampling
  stop_strings: tuple[str, ...]
  stop_ids: tuple[int, ...]
  ignores_end: bool
  logprobs: bool
  stream: bool
  include_usage: bool
  given: Mapping[str, str]

  @property
  def prompt_field(self) -> str:
    return "messages" if self.chat else "prompt"

  def request(
    self, id: str, tokens: Sequence[int], *, end_ids: Sequence[int], limit: int, prompt_limit: int
  ) -> Request:
    """The engine's request.

    Args:
      id: of it.
      tokens: of the prompt.
      end_ids: that end an answer of the model.
      limit: most tokens, prompt and answer together.
      prompt_limit: most tokens of the prompt.

    Raises:
      ApiError: it does not fit the limits.
    """
    room = limit - len(tokens)
    if room < 1 or len(tokens) > prompt_limit:
      message = f"{self.prompt_field} has {len(tokens)} tokens; the limit is {min(limit - 1, prompt_limit)}"
      raise _too_long(message, self.prompt_field)
    default = room if self.chat else min(_COMPLETION_TOKENS, room)
    budget = self.max_new_tokens or max(default, self.sampling.min_new_tokens)
    if budget > room:
      asked = self.given.get("max_new_tokens", self.given.get("min_new_tokens"))
      message = f"{asked} = {budget} behind {len(tokens)} tokens of {self.prompt_field}; the limit is {limit}"
      raise _too_long(message, asked)
    try:
      return Request(
        id=id,
        prompt=tokens,
        max_new_tokens=budget,
        stop_ids=(*self.stop_ids, *(() if self.ignores_end else end_ids)),
        stop_strings=self.stop_strings,
        sampling=self.sampling,
        logprobs=self.logprobs,
      )
    except ValueError as error:
      raise self.refused(error) from None

  def refused(self, error: ValueError) -> ApiError:
    """What requests or engine say about a field of theirs, about the client's."""
    message = str(error)
    names = {**_THEIRS, **self.given, "prompt": self.prompt_field}
    param = names.get(message.split(" ", 1)[0])
    for ours, there in names.items():
      message = message.replace(ours, there)
    return ApiError(400, message, param=param)


def parse(body: bytes, *, chat: bool) -> Call:
  """Reads the body of a completion, or of a chat completion.

  Raises:
    ApiError: 400 with the field that is wrong.
  """
  try:
    return _parse(body, chat)
  except RecursionError:
    raise ApiError(400, "the body is nested too deeply") from None


def _parse(body: bytes, chat: bool) -> Call:
  fields = _Fields(_json(body))
  model = fields.text("model")
  if model is None:
    raise ApiError(400, "model is missing; it must be a text", param="model")
  prompt = fields.messages() if chat else fields.prompt()
  sampling, given = fields.checked(Sampling, _SAMPLING)
  others, given_too = fields.checked(lambda **own: Request(id="checked", prompt=(0,), **own), _REQUEST)
  sampling = {"temperature": _TEMPERATURE, "seed": secrets.randbits(32), **sampling}
  stream = fields.flag("stream")
  call = Call(
    chat=chat,
    model=model,
    prompt=prompt,
    max_new_tokens=others.get("max_new_tokens"),
    sampling=Sampling(**sampling),
    stop_strings=others.get("stop_strings", ()),
    stop_ids=others.get("stop_ids", ()),
    ignores_end=fields.flag("ignore_eos"),
    logprobs=fields.logprobs(chat),
    stream=stream,
    include_usage=fields.include_usage(stream),
    given=given | given_too,
  )
  fields.done()
  return call


def _json(body: bytes) -> dict[str, Any]:
  try:
    value = json.loads(body.decode("utf-8"), parse_constant=_no_number)
  except UnicodeDecodeError as error:
    raise ApiError(400, f"the body is not UTF-8: byte {error.start} is {body[error.start]:#04x}") from None
  except ValueError as error:
    raise ApiError(400, f"the body is not JSON: {error}") from None
  if not isinstance(value, dict):
    raise ApiError(400, f"the body is {_short(value)}; it must be a JSON object")
  return value


def _no_number(name: str) -> float:
  raise ValueError(f"{name} is no number there")


class _Fields:
  """A body's fields, each taken once; null is as good as absent."""

  def __init__(self, values: dict[str, Any]):
    self._left = {name: value for name, value in values.items() if value is not None}

  def text(self, name: str) -> str | None:
    value = self._left.pop(name, None)
    return None if value is None else _text(name, value)

  def flag(self, name: str) -> bool:
    value = self._left.pop(name, False)
    if not isinstance(value, bool):
      raise _wrong(name, value, "true or false")
    return value

  def checked(self, make: Any, names: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Fields that ``make`` takes by other names, tried one by one.

    Returns:
      Values by our names, as they are kept, and the client's names by ours.
    """
    values, given = {}, {}
    for name, ours in names.items():
      if name not in self._left:
        continue
      value = _made_ours(name, self._left.pop(name))
      if ours in given:
        raise ApiError(400, f"{name} and {given[ours]} are both given; one of them is enough", param=name)
      try:
        # A least length is held against the request's own; here it is only a number.
        values[ours] = getattr(make(**{ours: value}), ours)
      except ValueError as error:
        raise ApiError(400, str(error).replace(ours, name), param=name) from None
      given[ours] = name
    return values, given

  def prompt(self) -> str | tuple[int, ...]:
    value = self._left.pop("prompt", None)
    if value is None:
      raise ApiError(400, "prompt is missing; it must be a text or token ids", param="prompt")
    if isinstance(value, list) and value and isinstance(value[0], str | list):
      if len(value) > 1:
        raise ApiError(400, f"prompt holds {len(value)} prompts; the limit is 1 a request", param="prompt")
      (value,) = value
    if isinstance(value, str):
      return _text("prompt", value)
    if not isinstance(value, list):
      raise _wrong("prompt", value, "a text or token ids")
    try:
      return Request(id="checked", prompt=value).prompt
    except ValueError as error:
      raise ApiError(400, str(error), param="prompt") from None

  def messages(self) -> tuple[Mapping[str, str], ...]:
    value = self._left.pop("messages", None)
    if not isinstance(value, list) or not value:
      raise _wrong("messages", value, "a list of at least one message")
    return tuple(_message(f"messages[{index}]", message) for index, message in enumerate(value))

  def logprobs(self, chat: bool) -> bool:
    """Whether those of the new tokens are asked for; those of others are not to be had."""
    if not chat:
      value = self._left.pop("logprobs", None)
      if value is not None and (isinstance(value, bool) or value != 0):
        raise _wrong("logprobs", value, "0: other tokens than those of the text are not offered")
      return value is not None
    asked, others = self.flag("logprobs"), self._left.pop("top_logprobs", 0)
    if isinstance(others, bool) or others != 0:
      raise _wrong("top_logprobs", others, "0: other tokens than those of the text are not offered")
    return asked

  def include_usage(self, stream: bool) -> bool:
    options = self._left.pop("stream_options", None)
    if options is None:
      return False
    if not isinstance(options, dict):
      raise _wrong("stream_options", options, "an object")
    if not stream:
      raise ApiError(400, "stream_options is given; it needs stream = true", param="stream_options")
    for name, value in options.items():
      if name != "include_usage":
        raise ApiError(400, f"stream_options.{_short(name)} is not known", param="stream_options")
      if value is not None and not isinstance(value, bool):
        raise _wrong("stream_options.include_usage", value, "true or false")
    return bool(options.get("include_usage"))

  def done(self) -> None:
    """Raises for what is left, unless it changes nothing."""
    for name, value in self._left.items():
      if name in _ABOUT_WHO_ASKS:
        if not isinstance(value, _ABOUT_WHO_ASKS[name]):
          raise _wrong(name, value, "a text" if _ABOUT_WHO_ASKS[name] is str else "an object")
      elif name not in _NEUTRAL:
        raise ApiError(400, f"{_short(name)} is not known", param=name[:60])
      elif not any(type(value) is type(same) and value == same for same in _NEUTRAL[name]):
        only = " or ".join(json.dumps(same) for same in _NEUTRAL[name])
        message = f"{name} = {_short(value)} is not offered" + (f"; only {only}" if only else "")
        raise ApiError(400, message, param=name)


def _message(name: str, value: Any) -> dict[str, str]:
  """Role and content; parts of text are joined."""
  if not isinstance(value, dict):
    raise _wrong(name, value, "an object")
  left = {key: item for key, item in value.items() if item is not None}
  role, content = left.pop("role", None), left.pop("content", None)
  if role not in _ROLES:
    raise _wrong(f"{name}.role", role, " or ".join(_ROLES))
  if isinstance(content, list):
    content = "".join(_part(f"{name}.content[{index}]", part) for index, part in enumerate(content))
  for key in left:
    raise ApiError(400, f"{name}.{_short(key)} is not offered", param=name)
  return {"role": role, "content": _text(f"{name}.content", content)}


def _part(name: str, value: Any) -> str:
  if not isinstance(value, dict) or value.get("type") != "text" or value.keys() != {"type", "text"}:
    raise _wrong(name, value, '{"type": "text", "text": …}')
  return _text(f"{name}.text", value["text"])


def _made_ours(name: str, value: Any) -> Any:
  """A value in the form in which ours has it; what cannot be stays what it is, to be refused."""
  if name == "stop" and isinstance(value, str):
    return (value,)
  if name == "top_k" and value == -1:
    return 0
  if name == "logit_bias" and isinstance(value, dict):
    # As JSON writes whole numbers, so that no two keys are one, and of few digits.
    readable = lambda key: len(key) <= 10 and key.isascii() and key.isdecimal() and str(int(key)) == key
    return {int(key) if readable(key) else key: bias for key, bias in value.items()}
  return value


def _text(name: str, value: Any) -> str:
  if not isinstance(value, str):
    raise _wrong(name, value, "a text")
  try:
    value.encode()
  except UnicodeEncodeError as error:
    message = f"{name} holds half a surrogate pair at character {error.start}; it must be Unicode text"
    raise ApiError(400, message, param=name) from None
  return value


def _wrong(name: str, value: Any, what: str) -> ApiError:
  return ApiError(400, f"{name} = {_short(value)}; it must be {what}", param=name)


def _too_long(message: str, param: str | None) -> ApiError:
  return ApiError(400, message, param=param, code="context_length_exceeded")


def _short(value: Any) -> str:
  text = json.dumps(value)
  return text if len(text) <= 60 else f"{text[:57]}..."
