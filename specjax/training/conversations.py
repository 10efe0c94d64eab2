"""Conversations from JSONL files, and samples of those whose answers are kept as they are.

A line is one JSON object with one of the fields

- ``conversations``: ShareGPT's list of ``{"from": "human" | "gpt" | "system", "value": text}``;
- ``messages``: a list of ``{"role": "user" | "assistant" | "system", "content": text}``;
- ``turns``: Spec-Bench's list of the user's messages;
- ``prompt`` or ``text``: one text.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.checkpoints import Tokenizer
from specjax.training.data import Sample

_ROLES = {
  "user": "user",
  "human": "user",
  "assistant": "assistant",
  "gpt": "assistant",
  "chatgpt": "assistant",
  "system": "system",
}
# Field of a conversation → names of a message's role and text.
_LISTS = {"conversations": ("from", "value"), "messages": ("role", "content")}
_TEXTS = ("prompt", "text")
_FIELDS = (*_LISTS, "turns", *_TEXTS)

Message = dict[str, str]


class Conversation(NamedTuple):
  """One line of a file.

  Attributes:
    line: its number, from 1.
    messages: ``{"role": …, "content": …}`` in the file's order.
  """

  line: int
  messages: tuple[Message, ...]

  @property
  def question(self) -> str | None:
    """The user's first message; None if there is none, or nothing in it."""
    users = (message["content"] for message in self.messages if message["role"] == "user")
    return next(users, "").strip() or None

  @property
  def in_turn(self) -> tuple[Message, ...]:
    """What of it is a conversation: perhaps a system message, then user and assistant in turn.

    Answers before the first question are left out. It ends before the first message that is empty or out
    of turn, and with an answer, if there is one.
    """
    system = self.messages[:1] if self.messages[:1] and self.messages[0]["role"] == "system" else ()
    rest = itertools.dropwhile(lambda message: message["role"] == "assistant", self.messages[len(system) :])
    turns: list[Message] = []
    for message, role in zip(rest, itertools.cycle(("user", "assistant"))):
      if message["role"] != role or not message["content"].strip():
        break
      turns.append(message)
    return (*system, *turns[: len(turns) // 2 * 2])


def read(path: str) -> list[Conversation]:
  """Conversations in the file's order.

  Raises:
    ValueError: naming file, line, field and value.
  """
  found = []
  with open(path, "rb") as file:
    for number, line in enumerate(file, start=1):
      if line.strip():
        found.append(Conversation(number, _messages(line, f"{path}, line {number}")))
  if not found:
    raise ValueError(f"{path}: no conversations")
  return found


def file_digest(path: str) -> str:
  """SHA-256 of a file."""
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _messages(line: bytes, where: str) -> tuple[Message, ...]:
  try:
    fields: Any = json.loads(line)
  except ValueError as error:  # bytes that are no UTF-8 among them
    raise ValueError(f"{where}: not JSON ({error})") from None
  if not isinstance(fields, dict) or not any(name in fields for name in _FIELDS):
    raise ValueError(f"{where}: an object with one of the fields {', '.join(_FIELDS)} is needed")
  name = next(name for name in _FIELDS if name in fields)
  value = fields[name]
  if name in _TEXTS:
    return ({"role": "user", "content": _text(value, f"{where}: {name}")},)
  if not isinstance(value, list) or not value:
    raise ValueError(f"{where}: {name} = {_short(value)}; a list that is not empty is needed")
  places = [(f"{where}: {name}[{i}]", item) for i, item in enumerate(value)]
  if name == "turns":
    return tuple({"role": "user", "content": _text(item, place)} for place, item in places)
  return tuple(_message(item, *_LISTS[name], place) for place, item in places)


def _message(item: Any, role_field: str, text_field: str, where: str) -> Message:
  if not isinstance(item, dict):
    raise ValueError(f"{where} = {_short(item)}; an object with {role_field} and {text_field} is needed")
  role = item.get(role_field)
  if not isinstance(role, str) or role not in _ROLES:
    raise ValueError(f"{where}: {role_field} = {_short(role)}; it must be one of {', '.join(_ROLES)}")
  return {"role": _ROLES[role], "content": _text(item.get(text_field), f"{where}: {text_field}")}


def _text(value: Any, where: str) -> str:
  if not isinstance(value, str):
    raise ValueError(f"{where} = {_short(value)}; a text is needed")
  try:
    value.encode()
  except UnicodeEncodeError:
    raise ValueError(f"{where} holds half of a character (a lone surrogate)") from None
  return value


def _short(value: Any) -> str:
  text = repr(value)
  return text if len(text) <= 60 else f"{text[:57]}…"


def to_sample(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]], limit: int) -> Sample | None:
  """Tokens of a conversation in the chat template; the mask is on its answers.

  The conversation is encoded as a whole. An answer begins where the prompt for it ends, and ends with its
  end-of-turn token; what the template writes behind that is context.

  Args:
    tokenizer: of the target.
    messages: as `Conversation.in_turn` gives them.
    limit: most tokens; the rest is cut off.

  Returns:
    None if no token of an answer is left.
  """
  answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
  if not answers:
    return None
  whole = _rendered(tokenizer, messages[: answers[-1] + 1])
  starts = [_common(tokenizer.encode_chat(messages[:i]), whole) for i in answers]
  mask = np.zeros(len(whole), bool)
  for i, start, bound in zip(answers, starts, [*starts[1:], len(whole)], strict=True):
    ends = [at + 1 for at in range(start, bound) if whole[at] in tokenizer.eos_ids]
    # Without an end of turn, up to where the template goes on.
    end = ends[0] if ends else _common(_rendered(tokenizer, messages[: i + 1]), whole)
    mask[start:end] = True
  sample = Sample(np.array(whole[:limit], np.int32), mask[:limit])
  return sample if sample.mask.any() else None


def _rendered(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> list[int]:
  text = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
  return tokenizer.encode(text, add_bos=False)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
  """How many ids two sequences begin with alike."""
  same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second))
  return sum(1 for _ in same)
