"""The official client against a real engine: it reads what each request says alone, decoded plainly."""

import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from specjax import decode
from specjax.drafters import make_drafter
from specjax.sampling import Settings
from specjax.serving.engine import Engine
from specjax.serving.http.app import Service
from specjax.serving.http.runner import Runner
from specjax.testing import tiny_model
from specjax.text import generate_text
from specjax.verify import make_rule
from tests.experiments.tiny import END, VOCAB, byte_tokenizer
from tests.serving import http_rig as rig

KEY = "secret"
TOKENIZER = byte_tokenizer()
PLAIN = decode.DecodeConfig(
  drafter=make_drafter("none"),
  rule=make_rule("draw_and_follow"),
  num_real_tokens=VOCAB,
  length_limit=96,
  prefill_widths=(16,),
)
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the hen and the hen"}]


@functools.cache
def weights():
  return decode.Weights(tiny_model(0, vocab_size=VOCAB, num_layers=1))


@pytest.fixture(scope="module")
def serving():
  config = dataclasses.replace(PLAIN, drafter=make_drafter("prompt_lookup", window=4))
  engine = Engine(weights(), config, slots=3, tokenizer=TOKENIZER, rounds_per_step=2)
  with rig.Serving(Service(Runner(engine), TOKENIZER, rig.MODEL, key=KEY)) as serving:
    yield serving


@pytest.fixture(scope="module")
def client(serving):
  # The first answers wait for compiles.
  options = dict(api_key=KEY, max_retries=0, timeout=20 * rig.HANGS_S)
  with openai.OpenAI(base_url=f"{serving.server.url}/v1", **options) as client:
    yield client


def solo(ids, *, max_new_tokens, stop_strings=(), **settings):
  """A prompt by itself, plainly."""
  options = dict(max_new_tokens=max_new_tokens, stop_strings=stop_strings, stop_ids=(END,))
  settings = Settings.create(1, **settings)
  (row,) = generate_text(weights(), PLAIN, TOKENIZER, [ids], settings=settings, **options)
  return row


# What the client says, and what `solo` calls it.
REQUESTS = [
  (dict(prompt="abcabcabc", max_tokens=30, temperature=0), {}),
  (dict(prompt="the hen", max_tokens=24, temperature=0.9, seed=7, top_p=0.9), {}),
  (dict(prompt=[97, 98, 99, 97, 98], max_tokens=20, temperature=1.2, seed=3), {}),
  (dict(prompt="xyz", max_tokens=25, temperature=0, presence_penalty=0.7, frequency_penalty=0.4), {}),
  (dict(prompt="q", max_tokens=18, temperature=1, seed=5), dict(top_k=4, min_p=0.05)),
  (dict(prompt="w" * 40, max_tokens=12, temperature=0, logit_bias={"65": 4.0}), {}),
  (dict(prompt="s", max_tokens=20, temperature=0, logit_bias={str(END): 50.0}), dict(min_tokens=4)),
]


def ask(client, request, **more):
  asked, extra = request
  return client.completions.create(model=rig.MODEL, **asked, extra_body=extra, **more)


def alone(request):
  asked, extra = request
  settings = {key: value for key, value in asked.items() if key not in ("prompt", "max_tokens")} | extra
  if "min_tokens" in settings:
    settings["min_new_tokens"] = settings.pop("min_tokens")
  if "logit_bias" in settings:
    settings["logit_bias"] = {int(token): bias for token, bias in settings["logit_bias"].items()}
  prompt = asked["prompt"]
  ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
  return solo(ids, max_new_tokens=asked["max_tokens"], **settings)


def test_many_at_once_say_what_each_says_alone(client):
  """Text, reason and counts, whole and in pieces, whatever else runs beside them."""
  with ThreadPoolExecutor(4) as pool:
    whole = list(pool.map(lambda request: ask(client, request), REQUESTS))
    usage = {"include_usage": True}
    streams = list(
      pool.map(lambda request: list(ask(client, request, stream=True, stream_options=usage)), REQUESTS)
    )
  reasons = set()
  for request, said, pieces in zip(REQUESTS, whole, streams, strict=True):
    want, (choice,) = alone(request), said.choices
    assert (choice.text, choice.finish_reason) == (want.text, want.finish)
    assert said.usage.completion_tokens == len(want.tokens)
    assert said.usage.prompt_tokens == want.prompt_tokens
    assert said.usage.total_tokens == len(want.tokens) + want.prompt_tokens
    assert said.speculation["tau"] == len(want.tokens) / said.speculation["rounds"]
    *texts, last = pieces
    assert "".join(piece.choices[0].text for piece in texts) == want.text
    assert texts[-1].choices[0].finish_reason == want.finish and last.choices == []
    assert last.usage.completion_tokens == len(want.tokens)
    assert len({piece.id for piece in pieces} | {said.id}) == 2
    reasons.add(want.finish)
  assert reasons == {"stop", "length"}
  assert any(said.speculation["accepted"] for said in whole)


def test_chat(client):
  """The template's prompt; whole and in pieces. A stop string ends it and is not said."""
  ids = TOKENIZER.encode_chat(MESSAGES)
  want = solo(ids, max_new_tokens=40)
  stop = want.text[5:7]
  short = solo(ids, max_new_tokens=40, stop_strings=(stop,))
  asked = dict(model=rig.MODEL, messages=MESSAGES, temperature=0, max_completion_tokens=40)
  said = client.chat.completions.create(**asked)
  (choice,) = said.choices
  assert (choice.message.role, choice.message.content) == ("assistant", want.text)
  assert (choice.finish_reason, said.object) == (want.finish, "chat.completion")
  assert said.usage.prompt_tokens == len(ids)
  pieces = list(client.chat.completions.create(**asked, stop=stop, stream=True))
  assert [piece.choices[0].delta.role for piece in pieces] == ["assistant", *[None] * (len(pieces) - 1)]
  assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == short.text
  assert [piece.choices[0].finish_reason for piece in pieces[-2:]] == [None, "stop"]
  assert stop not in short.text and want.text.startswith(short.text)
  everything = client.chat.completions.create(model=rig.MODEL, messages=MESSAGES, temperature=0)
  assert everything.usage.total_tokens == 96 or everything.choices[0].finish_reason == "stop"


def test_log_probabilities(client):
  """Of the tokens of the text, in both forms; those of a stream are those of the whole."""
  settings = dict(temperature=0.8, seed=11)
  ids = TOKENIZER.encode("the hen")
  want = solo(ids, max_new_tokens=12, **settings)
  asked = dict(model=rig.MODEL, prompt="the hen", max_tokens=12, logprobs=0, **settings)
  (choice,) = client.completions.create(**asked).choices
  found = choice.logprobs
  assert found.token_logprobs == pytest.approx(want.logprobs, abs=1e-4)
  assert found.tokens == [TOKENIZER.decode([token], skip_special=False) for token in want.tokens]
  assert found.text_offset[0] == 0 and found.text_offset == sorted(found.text_offset)
  pieces = [piece.choices[0].logprobs for piece in client.completions.create(**asked, stream=True)]
  assert [value for piece in pieces if piece for value in piece.token_logprobs] == found.token_logprobs
  assert [value for piece in pieces if piece for value in piece.text_offset] == found.text_offset
  ids = TOKENIZER.encode_chat(MESSAGES)
  want = solo(ids, max_new_tokens=12, **settings)
  asked = dict(model=rig.MODEL, messages=MESSAGES, max_tokens=12, logprobs=True, **settings)
  entries = client.chat.completions.create(**asked).choices[0].logprobs.content
  assert [entry.logprob for entry in entries] == pytest.approx(want.logprobs, abs=1e-4)
  assert [bytes(entry.bytes) for entry in entries] == [TOKENIZER.token_bytes(token) for token in want.tokens]
  streamed = client.chat.completions.create(**asked, stream=True)
  parts = [piece.choices[0].logprobs for piece in streamed]
  assert [entry for part in parts if part for entry in part.content] == entries


def test_a_seed_says_the_same_again_and_none_does_not(client):
  text = lambda **more: (
    client.completions.create(model=rig.MODEL, prompt="a", max_tokens=20, **more).choices[0].text
  )
  assert text(seed=4) == text(seed=4)
  assert len({text() for _ in range(4)}) > 1


def test_a_shared_beginning_is_copied_and_said_so(client):
  """Usage has how many of the prompt's tokens were not read again."""
  prompt = "a long beginning that two prompts share, "
  for end in ("one", "two"):
    said = client.completions.create(model=rig.MODEL, prompt=prompt + end, max_tokens=4, temperature=0)
  assert said.usage.prompt_tokens_details.cached_tokens >= 16
  want = solo(TOKENIZER.encode(prompt + "two"), max_new_tokens=4)
  assert said.choices[0].text == want.text


WRONG = [
  (openai.BadRequestError, "n", dict(n=2)),
  (openai.BadRequestError, "best_of", dict(best_of=3)),
  (openai.BadRequestError, "temperature", dict(temperature=-1)),
  (openai.BadRequestError, "prompt", dict(prompt=[VOCAB])),
  (openai.BadRequestError, "logit_bias", dict(logit_bias={str(VOCAB): 1})),
  (openai.BadRequestError, "prompt", dict(prompt="y" * 96)),
  (openai.BadRequestError, "max_tokens", dict(max_tokens=95)),
  (openai.BadRequestError, "logprobs", dict(logprobs=3)),
  (openai.NotFoundError, "model", dict(model="other")),
]


@pytest.mark.parametrize(("kind", "param", "fields"), WRONG)
@pytest.mark.parametrize("stream", (False, True))
def test_errors_are_the_clients(client, kind, param, fields, stream):
  """The client's own classes, with the field; the engine goes on."""
  with pytest.raises(kind) as raised:
    client.completions.create(**dict(model=rig.MODEL, prompt="x") | fields, stream=stream)
  assert raised.value.param == param
  assert raised.value.type == "invalid_request_error"


def test_models_and_keys(client, serving):
  assert [model.id for model in client.models.list()] == [rig.MODEL]
  assert client.models.retrieve(rig.MODEL).owned_by == "specjax"
  with pytest.raises(openai.NotFoundError):
    client.models.retrieve("other")
  with pytest.raises(openai.AuthenticationError):
    client.with_options(api_key="wrong").models.list()
