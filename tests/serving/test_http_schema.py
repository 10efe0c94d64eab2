"""What clients may ask: fields and their limits, what is refused and by which name. No engine."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.serving.http.schema import ApiError, parse
from specjax.serving.requests import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, Request, Sampling

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}
LIMITS = dict(end_ids=(9,), limit=64, prompt_limit=40)


def read(fields, chat=False):
  return parse(json.dumps((CHAT if chat else TEXT) | fields).encode(), chat=chat)


def refused(fields, chat=False):
  with pytest.raises(ApiError) as raised:
    read(fields, chat)
  assert raised.value.status == 400
  return raised.value


def test_every_field_arrives():
  """Each field of a body where the engine looks for it. Fails when one is dropped or goes elsewhere."""
  sampling = dict(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, seed=12, presence_penalty=-0.5)
  sampling |= dict(frequency_penalty=0.5, repetition_penalty=1.2)
  fields = dict(
    max_tokens=20, min_tokens=3, stop=["a", "bc"], stop_token_ids=[5], logit_bias={"7": -2}, logprobs=0
  )
  call = read(sampling | fields | {"user": "me", "metadata": {"a": "b"}})
  assert call.request("id", (1, 2), **LIMITS) == Request(
    id="id",
    prompt=(1, 2),
    max_new_tokens=20,
    stop_ids=(5, 9),
    stop_strings=("a", "bc"),
    sampling=Sampling(min_new_tokens=3, logit_bias={7: -2.0}, **sampling),
    logprobs=True,
  )
  assert not call.stream and not call.include_usage
  options = {"stream": True, "stream_options": {"include_usage": True}}
  call = read({"max_completion_tokens": 4, "logprobs": True, "top_k": -1, "stop": "z", **options}, chat=True)
  assert call.stream and call.include_usage and call.logprobs and call.prompt == tuple(CHAT["messages"])
  assert (call.max_new_tokens, call.stop_strings, call.sampling.top_k) == (4, ("z",), 0)
  assert read({"ignore_eos": True}).request("id", (1,), **LIMITS).stop_ids == ()


def test_what_is_not_said_is_openais_default():
  """Temperature 1, another seed each time, 16 tokens or all there is room for."""
  calls = [read({}) for _ in range(2)]
  assert calls[0].sampling.temperature == 1 and len({call.sampling.seed for call in calls}) == 2
  assert calls[0].request("id", (1,) * 10, **LIMITS).max_new_tokens == 16
  assert calls[0].request("id", (1,) * 10, **LIMITS | {"limit": 20}).max_new_tokens == 10
  assert read({}, chat=True).request("id", (1,) * 10, **LIMITS).max_new_tokens == 54
  assert read({"min_tokens": 30}).request("id", (1,) * 10, **LIMITS).max_new_tokens == 30


@pytest.mark.parametrize(
  ("prompt", "want"),
  [("a text", "a text"), (["one"], "one"), ([3, 4], (3, 4)), ([[3, 4]], (3, 4)), ("", "")],
)
def test_prompts(prompt, want):
  assert read({"prompt": prompt}).prompt == want


def test_parts_of_a_message_are_joined():
  parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
  messages = [{"role": "system", "content": "s", "name": None}, {"role": "user", "content": parts}]
  call = read({"messages": messages}, chat=True)
  assert call.prompt == ({"role": "system", "content": "s"}, {"role": "user", "content": "ab"})


NOT_OFFERED = {
  "n": 2,
  "best_of": 2,
  "echo": True,
  "suffix": "end",
  "tools": [{"type": "function", "function": {"name": "f"}}],
  "tool_choice": "required",
  "functions": [{"name": "f"}],
  "function_call": {"name": "f"},
  "response_format": {"type": "json_object"},
  "modalities": ["text", "audio"],
  "audio": {"voice": "x"},
  "prediction": {"type": "content", "content": "x"},
  "reasoning_effort": "low",
  "web_search_options": {},
  "store": True,
  "service_tier": "flex",
  "use_beam_search": True,
}


@pytest.mark.parametrize(("field", "value"), NOT_OFFERED.items())
@pytest.mark.parametrize("chat", (False, True))
def test_what_is_not_offered_is_refused_by_name(field, value, chat):
  """Fails when a wish is ignored in silence."""
  error = refused({field: value}, chat)
  assert error.param == field and field in error.message


def test_what_changes_nothing_is_taken():
  same = dict(n=1, best_of=1, echo=False, suffix=None, tools=[], tool_choice="none", store=False, stop=None)
  assert read(same).stop_strings == ()
  assert read({"response_format": {"type": "text"}, "top_logprobs": 0}, chat=True)
  for truth in (True, 1.0, "1"):  # a number that equals 1 for Python only
    assert refused({"n": truth}).param == "n"


WRONG = {
  "model": (None, 7, ["m"]),
  "prompt": (
    None,
    7,
    {},
    [],
    ["a", "b"],
    [[1], [2]],
    ["a", 3],
    [1, "a"],
    [-1],
    [2**31],
    [1.0],
    [True],
    [None],
  ),
  "temperature": (-1, "hot", [], True, 1e5, 10**400, "NaN"),
  "top_p": (-0.1, 1.1, "most"),
  "top_k": (-2, 2**31, 2.5),
  "min_p": (-0.1, 1.1),
  "seed": (-1, 2**32, 0.5, "x"),
  "presence_penalty": (-101, 101, "x"),
  "frequency_penalty": (-101, 101),
  "repetition_penalty": (0, 101),
  "logit_bias": (
    7,
    [],
    {"a": 1},
    {"7": "b"},
    {"-1": 1},
    {"7": 1e9},
    {"07": 1},
    {"٧": 1},
    {str(i): 1 for i in range(MAX_LOGIT_BIAS + 1)},
    {"9" * 5000: 1},
  ),
  "min_tokens": (-1, 1.5, 2**31),
  "max_tokens": (0, -1, 1.5, "3", 2**31, True),
  "max_completion_tokens": (0, "x"),
  "stop": (7, "", [""], ["a", 7], "x" * 257, ["x"] * (MAX_STOP_STRINGS + 1), {}),
  "stop_token_ids": (7, ["a"], [-1], list(range(9))),
  "ignore_eos": (1, "yes"),
  "stream": (1, "true"),
  "stream_options": (True, {"include_usage": True}),
  "user": (7,),
  "metadata": ("x",),
  "logprobs": (5, True, "0"),
}
CASES = [(field, value) for field, values in WRONG.items() for value in values]


@pytest.mark.parametrize(("field", "value"), CASES, ids=lambda item: repr(item)[:40])
def test_a_wrong_value_names_its_field(field, value):
  """Fails when a value is clamped, converted, or taken for another field's."""
  error = refused({field: value})
  assert error.param == field and error.message.startswith((field, f"id in {field}"))
  assert len(error.message) < 250


MESSAGES = (
  None,
  [],
  "hi",
  ["hi"],
  [{}],
  [{"role": "user"}],
  [{"content": "x"}],
  [{"role": "wizard", "content": "x"}],
  [{"role": ["user"], "content": "x"}],
  [{"role": "user", "content": 7}],
  [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
  [{"role": "user", "content": [{"type": "text"}]}],
  [{"role": "user", "content": ["x"]}],
  [{"role": "assistant", "content": "x", "tool_calls": [{}]}],
  [{"role": "user", "content": "\ud800"}],
)


@pytest.mark.parametrize("messages", MESSAGES, ids=lambda item: repr(item)[:60])
def test_wrong_messages_are_named(messages):
  error = refused({"messages": messages}, chat=True)
  assert error.param.startswith("messages") and error.message.startswith(error.param)


@pytest.mark.parametrize("fields", ({"top_logprobs": 3, "logprobs": True}, {"top_logprobs": True}))
def test_log_probabilities_of_other_tokens_are_not_offered(fields):
  assert refused(fields, chat=True).param == "top_logprobs"


def test_fields_that_do_not_fit_each_other():
  assert refused({"max_tokens": 3, "max_completion_tokens": 3}).param == "max_tokens"
  options = {"stream": True, "stream_options": {"include_obfuscation": True}}
  assert "include_obfuscation" in refused(options).message
  with pytest.raises(ApiError, match="min_tokens = 9; it must be at most max_tokens = 3") as raised:
    read({"min_tokens": 9, "max_tokens": 3}).request("id", (1,), **LIMITS)
  assert raised.value.param == "min_tokens"
  with pytest.raises(ApiError, match="stop_token_ids has 9 ids; the limit is 8") as raised:
    read({"stop_token_ids": list(range(8))}).request("id", (1,), **LIMITS)
  assert raised.value.param == "stop_token_ids"


@pytest.mark.parametrize(
  ("fields", "tokens", "param", "words"),
  [
    ({}, 41, "prompt", "prompt has 41 tokens; the limit is 40"),
    ({"max_tokens": 1}, 64, "prompt", "prompt has 64 tokens"),
    ({"max_tokens": 45}, 20, "max_tokens", "max_tokens = 45 behind 20 tokens of prompt; the limit is 64"),
    ({"min_tokens": 50}, 20, "min_tokens", "min_tokens = 50 behind 20"),
  ],
)
def test_what_does_not_fit_says_so(fields, tokens, param, words):
  """Nothing is cut to fit. Fails when a prompt or a budget is shortened in silence."""
  with pytest.raises(ApiError, match=words) as raised:
    read(fields).request("id", (1,) * tokens, **LIMITS)
  assert (raised.value.status, raised.value.param) == (400, param)
  assert raised.value.code == "context_length_exceeded"


def test_what_the_engine_refuses_has_the_clients_words():
  call = read({"max_completion_tokens": 5}, chat=True)
  error = call.refused(ValueError("temperature = 1.0; the rule greedy needs 0"))
  assert (error.status, error.param) == (400, "temperature")
  error = call.refused(ValueError("prompt holds the id 61; it must be below 61"))
  assert (error.param, error.message) == ("messages", "messages holds the id 61; it must be below 61")
  error = call.refused(ValueError("max_new_tokens = 5; no"))
  assert (error.param, error.message) == ("max_completion_tokens", "max_completion_tokens = 5; no")


BODIES = (
  b"",
  b"{",
  b"7",
  b"null",
  b"[]",
  b'"prompt"',
  b'{"model": "m", "prompt": "x", }',
  b'{"model": "m", "prompt": "x", "temperature": NaN}',
  b'{"model": "m", "prompt": "x", "temperature": -Infinity}',
  b'{"model": "m", "prompt": "x", "temperature": 1e999}',
  b'{"model": "m", "prompt": "x", "seed": ' + b"9" * 5000 + b"}",
  b'{"model": "m", "prompt": "\xff\xfe"}',
  b'{"model": "m", "prompt": "\\ud800"}',
  '{"model": "m", "prompt": "x"}'.encode("utf-16"),
  b"[" * 100_000,
  b'{"a":' * 100_000,
  b'{"model": "m", "prompt": "x", "temperature": ' + b"[" * 900 + b"]" * 900 + b"}",
)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: repr(body)[:40])
@pytest.mark.parametrize("chat", (False, True))
def test_bodies_that_are_none(body, chat):
  """Each is an error that says what is wrong; none raises anything else."""
  with pytest.raises(ApiError) as raised:
    parse(body, chat=chat)
  assert raised.value.status == 400 and raised.value.message


NAMES = st.sampled_from([*WRONG, *NOT_OFFERED, "messages", "", "é", "\x00", "__class__"])
TEXTS = st.text("aZ7 {é\x00\u2028\U0001f600\ud800", max_size=6)
VALUES = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
  lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
  max_leaves=6,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(fields=st.dictionaries(NAMES, VALUES, max_size=5), chat=st.booleans())
def test_any_fields_are_a_call_or_an_error(fields, chat):
  """Whatever JSON says: a request the engine takes, or one error of the client's."""
  try:
    call = read(fields, chat)
    call.request("id", (1, 2), **LIMITS)
  except ApiError as error:
    assert error.status == 400 and json.dumps(error.body(), allow_nan=False)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(body=st.binary(max_size=60))
def test_any_bytes_are_an_error(body):
  with pytest.raises(ApiError):
    parse(body, chat=False)
