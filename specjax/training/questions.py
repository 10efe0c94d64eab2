"""The user's turn of a chat template, and questions that the target writes into it."""

from __future__ import annotations

from typing import NamedTuple

from specjax.checkpoints import Tokenizer
from specjax.decode import MAX_STOP_IDS, Finish
from specjax.training.openings import Opening, whole_sentences
from specjax.training.slots import Written

# Stands for the user's words while the template is taken apart.
_MARK = "QXJVWZK"
# Fewer tokens are no question.
_LEAST = 4


class UserTurn(NamedTuple):
  """How a chat template frames the user's words.

  Attributes:
    before: ids up to them.
    text: what these ids stand for, and maybe a space.
    stop_ids: ids that end them, the tokenizer's ends among them.
    closing: text that ends them, in a template that has no token for it; else empty.
    overhead: ids of a prompt beside theirs, or a few more.
  """

  before: tuple[int, ...]
  text: str
  stop_ids: tuple[int, ...]
  closing: str
  overhead: int


def user_turn(tokenizer: Tokenizer) -> UserTurn:
  """Takes the chat template apart.

  Raises:
    ValueError: a template that changes the user's words, or has nothing before or behind them.
  """
  messages = [{"role": "user", "content": _MARK}]
  before, *after = tokenizer.apply_chat_template(messages).split(_MARK)
  if len(after) != 1:
    raise ValueError(f"chat template: it holds the user's words {len(after)} times; once is needed")
  special = next((i for i in tokenizer.encode(after[0], add_bos=False) if tokenizer.is_special(i)), None)
  closing = after[0] if special is None else after[0].partition(tokenizer.id_to_token(special))[0]
  stops = tuple(sorted({*tokenizer.eos_ids, *(() if special is None else (special,))}))
  if not closing.strip() and special is None:
    raise ValueError("chat template: nothing follows the user's words, so they have no end")
  if len(stops) > MAX_STOP_IDS:
    raise ValueError(f"tokenizer: {len(stops)} ids end a text; the limit is {MAX_STOP_IDS}")
  # A space before the words belongs to their first token.
  ids = tokenizer.encode(before.rstrip(" "), add_bos=False)
  if not ids:
    raise ValueError("chat template: nothing stands before the user's words, so nothing can be continued")
  return UserTurn(tuple(ids), before, stops, closing.strip(), len(tokenizer.encode_chat(messages)))


def begin(tokenizer: Tokenizer, turn: UserTurn, opening: Opening) -> tuple[int, ...]:
  """Ids up to where the target writes."""
  if not opening.before:
    return turn.before
  return tuple(tokenizer.encode(turn.text + opening.before, add_bos=False))


def question_of(
  tokenizer: Tokenizer, turn: UserTurn, opening: Opening, written: Written
) -> tuple[str | None, str]:
  """The text of a question that the target wrote, its opening included, or None and what is wrong with it."""
  ids = written.new.tolist()
  ended = written.finish is Finish.STOP
  if written.finish is Finish.ERROR:
    return None, "error"
  ids = ids[:-1] if ended else ids
  if any(tokenizer.is_special(i) for i in ids):
    return None, "special_token_in_question"
  # Decoded by itself, the first word may lose the space before it.
  before = tokenizer.encode(opening.before, add_bos=False) if opening.before else []
  text, found, _ = tokenizer.decode([*before, *ids]).partition(turn.closing or "\0")
  words = text.removeprefix(opening.before)
  if not ended and not found:
    words = whole_sentences(words) if opening.cut else ""
    if not words:
      return None, "question_too_long"
  if len(ids) < _LEAST or not words.strip():
    return None, "question_too_short"
  text = opening.around(words)
  return (None, "question_not_text") if "\ufffd" in text else (text, "")
