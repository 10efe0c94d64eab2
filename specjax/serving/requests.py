"""What a server is asked for, and what becomes of it: requests, phases, reasons, updates. No jax."""

from __future__ import annotations

import dataclasses
import enum
import math
import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

# As `state.MAX_STOP_IDS` and `sampling.MAX_LOGIT_BIAS`; a test holds them together.
MAX_STOP_IDS = 8
MAX_LOGIT_BIAS = 64
# A text that is looked for in every answer must be short.
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256


class Reason(enum.StrEnum):
  """Why a request ended. Every request gets exactly one."""

  STOP = "stop"  # a stop id, a stop string, or a processor that is complete
  LENGTH = "length"  # all tokens it asked for
  CANCELLED = "cancelled"  # by who asked
  QUEUE_FULL = "queue_full"  # refused: too many wait already
  TOO_LARGE = "too_large"  # refused: it could never fit
  FAILED = "failed"  # the target's logits were no distribution, or the engine broke
  SHUTDOWN = "shutdown"  # the server ends

  @property
  def refused(self) -> bool:
    """It never got in."""
    return self in (Reason.QUEUE_FULL, Reason.TOO_LARGE)


class Phase(enum.StrEnum):
  """Where a request is. A preempted one waits again."""

  WAITING = "waiting"
  PREFILL = "prefill"
  SPECULATING = "speculating"  # drafts are made and verified for it
  FALLBACK = "fallback"  # plain decoding: nothing may be drafted, or nothing was
  FINISHED = "finished"


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How tokens are drawn: one row of `sampling.Settings`, whose fields, meanings and limits these are.

  ``Settings.create(1, **sampling.fields())`` makes it.

  Raises:
    ValueError: naming the field, the value and the limit.
  """

  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  seed: int = 0
  repetition_penalty: float = 1.0
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0
  min_new_tokens: int = 0
  logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    put = lambda field, value: object.__setattr__(self, field, value)
    for field, low, high in (
      ("temperature", 0.0, 1e4),
      ("top_p", 0.0, 1.0),
      ("min_p", 0.0, 1.0),
      ("repetition_penalty", 1e-2, 1e2),
      ("presence_penalty", -1e2, 1e2),
      ("frequency_penalty", -1e2, 1e2),
    ):
      put(field, _number(field, getattr(self, field), low, high))
    for field, high in (("top_k", 2**31 - 1), ("seed", 2**32 - 1), ("min_new_tokens", 2**31 - 1)):
      put(field, _whole(field, getattr(self, field), 0, high))
    if not isinstance(self.logit_bias, Mapping):
      raise ValueError(f"logit_bias = {_short(self.logit_bias)}; it must map ids to numbers")
    if len(self.logit_bias) > MAX_LOGIT_BIAS:
      raise ValueError(f"logit_bias has {len(self.logit_bias)} ids; the limit is {MAX_LOGIT_BIAS}")
    bias = {
      _whole("id in logit_bias", token, 0, 2**31 - 1): _number(f"logit_bias[{token}]", value, -1e4, 1e4)
      for token, value in self.logit_bias.items()
    }
    put("logit_bias", MappingProxyType(bias))

  def fields(self) -> dict[str, Any]:
    """Arguments of `sampling.Settings.create`."""
    return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """A prompt, and how to go on from it.

  Attributes:
    id: names it; unique among those that have not ended.
    prompt: token ids, at least one.
    max_new_tokens: most tokens to emit, at least 1.
    stop_ids: ids that end it; the answer keeps them.
    stop_strings: texts that end it; the answer is cut before them. The scheduler does not look at text: who
      detokenizes reports the end.
    sampling: how tokens are drawn.
    logprobs: whether the log-probability of each new token is asked for.

  Raises:
    ValueError: naming the field, the value and the limit.
  """

  id: str
  prompt: Sequence[int]
  max_new_tokens: int = 128
  stop_ids: Sequence[int] = ()
  stop_strings: Sequence[str] = ()
  sampling: Sampling = dataclasses.field(default_factory=Sampling)
  logprobs: bool = False

  def __post_init__(self):
    put = lambda field, value: object.__setattr__(self, field, value)
    if not isinstance(self.id, str) or not self.id:
      raise ValueError(f"id = {_short(self.id)}; it must be a text that is not empty")
    put("prompt", _ids("prompt", self.prompt))
    if not self.prompt:
      raise ValueError("prompt is empty; it needs at least one token")
    put("max_new_tokens", _whole("max_new_tokens", self.max_new_tokens, 1, 2**31 - 1))
    put("stop_ids", _ids("stop_ids", self.stop_ids))
    if len(self.stop_ids) > MAX_STOP_IDS:
      raise ValueError(f"stop_ids has {len(self.stop_ids)} ids; the limit is {MAX_STOP_IDS}")
    put("stop_strings", _texts("stop_strings", self.stop_strings))
    if not isinstance(self.sampling, Sampling):
      raise ValueError(f"sampling = {_short(self.sampling)}; it must be a Sampling")
    if self.sampling.min_new_tokens > self.max_new_tokens:
      raise ValueError(
        f"min_new_tokens = {self.sampling.min_new_tokens}; it must be at most "
        f"max_new_tokens = {self.max_new_tokens}"
      )
    if not isinstance(self.logprobs, bool):
      raise ValueError(f"logprobs = {_short(self.logprobs)}; it must be True or False")

  @property
  def most_tokens(self) -> int:
    """Tokens that it may come to, prompt included."""
    return len(self.prompt) + self.max_new_tokens

  def check_vocabulary(self, num_real_tokens: int) -> None:
    """Raises ValueError where an id that is read is not in the target's vocabulary.

    A stop id that is not is no error: it never comes.
    """
    for field, ids in (("prompt", self.prompt), ("logit_bias", self.sampling.logit_bias)):
      largest = max(ids, default=0)
      if largest >= num_real_tokens:
        raise ValueError(f"{field} holds the id {largest}; it must be below {num_real_tokens}")


@dataclasses.dataclass(frozen=True)
class Update:
  """What happened to a request: an engine's report, and what is passed on to who asked.

  Attributes:
    id: of the request.
    tokens: new ones, in order.
    reason: why it ended; None while it goes on.
    drafted: whether anything was proposed for it.
    logprobs: of the tokens, if they were asked for.
    detail: a sentence about the reason, where it needs one.
  """

  id: str
  tokens: tuple[int, ...] = ()
  reason: Reason | None = None
  drafted: bool = False
  logprobs: tuple[float, ...] | None = None
  detail: str = ""

  def __post_init__(self):
    if self.logprobs is not None and len(self.logprobs) != len(self.tokens):
      raise ValueError(
        f"logprobs has {len(self.logprobs)} entries for {len(self.tokens)} tokens of request {self.id!r}"
      )


def _short(value: Any) -> str:
  text = repr(value)
  return text if len(text) <= 60 else f"{text[:57]}..."


def _number(field: str, value: Any, low: float, high: float) -> float:
  if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
    raise ValueError(f"{field} = {_short(value)}; it must be a number in [{low:g}, {high:g}]")
  return float(value)


def _whole(field: str, value: Any, low: int, high: float = math.inf) -> int:
  """The value as an int; what counts as one is what can be an index, but no boolean."""
  try:
    number = None if isinstance(value, bool) else operator.index(value)
  except TypeError:
    number = None
  if number is None or not low <= number <= high:
    raise ValueError(f"{field} = {_short(value)}; it must be a whole number in [{low}, {high}]")
  return number


def _ids(field: str, value: Any) -> tuple[int, ...]:
  if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
    raise ValueError(f"{field} = {_short(value)}; it must be a sequence of token ids")
  return tuple(_whole(f"{field}[{index}]", token, 0, 2**31 - 1) for index, token in enumerate(value))


def _texts(field: str, value: Any) -> tuple[str, ...]:
  if isinstance(value, str) or not isinstance(value, Sequence):
    raise ValueError(f"{field} = {_short(value)}; it must be a sequence of texts")
  if len(value) > MAX_STOP_STRINGS:
    raise ValueError(f"{field} has {len(value)} texts; the limit is {MAX_STOP_STRINGS}")
  for index, text in enumerate(value):
    if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARACTERS:
      raise ValueError(
        f"{field}[{index}] = {_short(text)}; it must be a text of 1 to {MAX_STOP_CHARACTERS} characters"
      )
  return tuple(value)
