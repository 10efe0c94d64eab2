"""Conversations: layouts of lines, what is wrong with a line, turns, and where answers lie in the tokens."""

import json

import pytest

from specjax.training.conversations import Conversation, file_digest, read, to_sample
from tests.training.tiny import END, START, letters_tokenizer

USER = lambda text: {"role": "user", "content": text}
ASSISTANT = lambda text: {"role": "assistant", "content": text}
SYSTEM = lambda text: {"role": "system", "content": text}


def lines(path, *values) -> str:
  """Each is a line: a text as it is, anything else as JSON."""
  file = path / "file.jsonl"
  texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
  file.write_text("\n".join(texts) + "\n")
  return str(file)


def test_layouts(tmp_path):
  human = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]
  path = lines(
    tmp_path,
    {"id": "x", "conversations": human},
    "",
    {"messages": [SYSTEM("be brief"), USER("hi"), ASSISTANT("ho")]},
    {"question_id": 81, "category": "writing", "turns": ["first", "second"]},
    {"prompt": "go on"},
    {"text": "once upon"},
  )
  assert read(path) == [
    Conversation(1, (USER("hi"), ASSISTANT("ho"))),
    Conversation(3, (SYSTEM("be brief"), USER("hi"), ASSISTANT("ho"))),
    Conversation(4, (USER("first"), USER("second"))),
    Conversation(5, (USER("go on"),)),
    Conversation(6, (USER("once upon"),)),
  ]
  assert [c.question for c in read(path)] == ["hi", "hi", "first", "go on", "once upon"]
  assert len(file_digest(path)) == 64


@pytest.mark.parametrize(
  ("line", "words"),
  [
    ("{", "line 2: not JSON"),
    ("[]", "line 2: an object with one of the fields conversations, messages, turns, prompt, text is needed"),
    ({"turn": []}, "line 2: an object with one of the fields"),
    ({"turns": []}, r"line 2: turns = \[\]; a list that is not empty is needed"),
    ({"turns": "hi"}, "line 2: turns = 'hi'; a list"),
    ({"turns": ["a", 7]}, r"line 2: turns\[1\] = 7; a text is needed"),
    ({"prompt": None}, "line 2: prompt = None; a text is needed"),
    (
      {"conversations": ["hi"]},
      r"line 2: conversations\[0\] = 'hi'; an object with from and value is needed",
    ),
    (
      {"conversations": [{"value": "hi"}]},
      r"line 2: conversations\[0\]: from = None; it must be one of user,",
    ),
    ({"conversations": [{"from": "tool", "value": "x"}]}, r"conversations\[0\]: from = 'tool'"),
    ({"messages": [USER("a"), {"role": "assistant"}]}, r"messages\[1\]: content = None; a text is needed"),
    ('{"prompt": "\\ud800"}', "line 2: prompt holds half of a character"),
    ({"turns": {"a": "long " * 30}}, "turns = .{57}…; a list"),
  ],
)
def test_a_bad_line_is_named(tmp_path, line, words):
  with pytest.raises(ValueError, match=f"file.jsonl, .*{words}" if "line" in words else words):
    read(lines(tmp_path, {"prompt": "fine"}, line))


def test_bytes_that_are_no_text(tmp_path):
  file = tmp_path / "file.jsonl"
  file.write_bytes(b'{"prompt": "\xff"}\n')
  with pytest.raises(ValueError, match=r"file.jsonl, line 1: not JSON"):
    read(str(file))


def test_an_empty_file(tmp_path):
  with pytest.raises(ValueError, match="no conversations"):
    read(lines(tmp_path, "", ""))


@pytest.mark.parametrize(
  ("messages", "kept"),
  [
    ((USER("a"), ASSISTANT("b"), USER("c"), ASSISTANT("d")), 4),
    ((SYSTEM("s"), USER("a"), ASSISTANT("b"), USER("c")), 3),
    ((ASSISTANT("hello"), USER("a"), ASSISTANT("b")), (1, 2)),
    ((USER("a"), USER("b"), ASSISTANT("c")), 0),
    ((USER("a"), ASSISTANT("b"), USER(" "), ASSISTANT("d")), 2),
    ((USER("a"), ASSISTANT("b"), SYSTEM("s"), USER("c")), 2),
    ((USER("a"), ASSISTANT("")), 0),
    ((SYSTEM("s"),), (0,)),
  ],
)
def test_turns(messages, kept):
  """A system message, then question and answer in turn; nothing behind what breaks that, no last question."""
  expected = messages[:kept] if isinstance(kept, int) else tuple(messages[i] for i in kept)
  assert Conversation(1, messages).in_turn == expected


def ids(text: str) -> list[int]:
  return letters_tokenizer().encode(text)


def test_the_mask_is_on_answers_and_their_ends():
  """Two answers. Fails when the template's words, a question, or the newline behind an end are learned."""
  tokenizer = letters_tokenizer()
  found = to_sample(tokenizer, (USER("ab"), ASSISTANT("the end"), USER("c"), ASSISTANT("d")), 100)
  context = [START, *ids("user\nab"), END, *ids("\n"), START, *ids("assistant\n")]
  second = [*ids("\n"), START, *ids("user\nc"), END, *ids("\n"), START, *ids("assistant\n")]
  parts = [(context, False), ([*ids("the end"), END], True), (second, False), ([*ids("d"), END], True)]
  parts.append((ids("\n"), False))
  assert found.tokens.tolist() == [token for part, _ in parts for token in part]
  assert found.mask.tolist() == [learned for part, learned in parts for _ in part]


def test_a_long_conversation_is_cut():
  tokenizer = letters_tokenizer()
  messages = (USER("ab"), ASSISTANT("the end"))
  whole = to_sample(tokenizer, messages, 100)
  begin = int(whole.mask.argmax())
  cut = to_sample(tokenizer, messages, begin + 2)
  assert cut.tokens.tolist() == whole.tokens[: begin + 2].tolist() and cut.mask.tolist()[-3:] == [
    False,
    True,
    True,
  ]
  assert to_sample(tokenizer, messages, begin) is None
  assert to_sample(tokenizer, (USER("ab"),), 100) is None


def test_a_template_without_ends_of_turn():
  """Then an answer goes up to where the template goes on."""
  template = (
    "{% for m in messages %}{% if m['role'] == 'user' %}u {{ m['content'] }} a{% else %} {{ m['content'] }}"
    "{% endif %}{% endfor %}"
  )
  found = to_sample(letters_tokenizer(template), (USER("b"), ASSISTANT("cd"), USER("e"), ASSISTANT("f")), 100)
  assert found.tokens.tolist() == ids("u b a cdu e a f")
  learned = [token for token, yes in zip(found.tokens.tolist(), found.mask.tolist(), strict=True) if yes]
  assert learned == ids(" cd") + ids(" f")


def test_an_answer_whose_first_token_joins_the_prompts_last():
  """``t`` and ``h`` are one token: it counts as the answer's, which it is part of."""
  template = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'user' %}t{% endif %}{% endfor %}"
  found = to_sample(letters_tokenizer(template), (USER("a"), ASSISTANT("hb")), 100)
  assert found.tokens.tolist() == ids("athb") and found.mask.tolist() == [False, True, True]
