"""Requests: each wrong field is one clear error, and the limits are those of the decode loop."""

import math

import numpy as np
import pytest

from specjax.serving import requests
from specjax.serving.requests import Reason, Request, Sampling, Update


def test_a_request_is_kept_as_it_was_meant():
  request = Request(
    id="a",
    prompt=np.array([3, 4], np.int32),
    max_new_tokens=np.int64(7),
    stop_ids=[2],
    stop_strings=["\n\n", "stop"],
    sampling=Sampling(temperature=1, logit_bias={5: -2}),
  )
  assert request.prompt == (3, 4) and request.stop_ids == (2,) and request.stop_strings == ("\n\n", "stop")
  assert request.most_tokens == 9 and type(request.max_new_tokens) is int
  assert type(request.sampling.temperature) is float and dict(request.sampling.logit_bias) == {5: -2.0}
  request.check_vocabulary(6)
  with pytest.raises(ValueError, match="logit_bias holds the id 5; it must be below 5"):
    request.check_vocabulary(5)
  with pytest.raises(ValueError, match="prompt holds the id 4; it must be below 4"):
    request.check_vocabulary(4)


def request(**fields):
  return Request(**{"id": "a", "prompt": [1], **fields})


WRONG_REQUESTS = [
  ({"id": ""}, "id = ''"),
  ({"id": 3}, "id = 3"),
  ({"prompt": []}, "prompt is empty"),
  ({"prompt": "text"}, "prompt = 'text'"),
  ({"prompt": b"text"}, "prompt = b'text'"),
  ({"prompt": 5}, "prompt = 5"),
  ({"prompt": [1, -1]}, r"prompt\[1\] = -1; it must be a whole number in \[0, 2147483647\]"),
  ({"prompt": [1, 2.0]}, r"prompt\[1\] = 2.0"),
  ({"prompt": [True]}, r"prompt\[0\] = True"),
  ({"prompt": [10**30]}, r"prompt\[0\] = 1000"),
  ({"prompt": [None]}, r"prompt\[0\] = None"),
  ({"max_new_tokens": 0}, "max_new_tokens = 0"),
  ({"max_new_tokens": 1.5}, "max_new_tokens = 1.5"),
  ({"max_new_tokens": 10**30}, "max_new_tokens = 1000"),
  ({"stop_ids": range(9)}, "stop_ids has 9 ids; the limit is 8"),
  ({"stop_ids": 3}, "stop_ids = 3"),
  ({"stop_ids": [-2]}, r"stop_ids\[0\] = -2"),
  ({"stop_strings": "end"}, "stop_strings = 'end'"),
  ({"stop_strings": ["x", ""]}, r"stop_strings\[1\] = ''"),
  ({"stop_strings": [3]}, r"stop_strings\[0\] = 3"),
  ({"stop_strings": ["x" * 257]}, r"stop_strings\[0\] = 'xxx.*1 to 256 characters"),
  ({"stop_strings": ["x"] * 17}, "stop_strings has 17 texts; the limit is 16"),
  ({"sampling": {"temperature": 1.0}}, "sampling = "),
  (
    {"sampling": Sampling(min_new_tokens=9), "max_new_tokens": 8},
    "min_new_tokens = 9; .* max_new_tokens = 8",
  ),
  ({"logprobs": 1}, "logprobs = 1"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG_REQUESTS)
def test_wrong_requests(fields, message):
  with pytest.raises(ValueError, match=message):
    request(**fields)


# Beside each limit: what is just inside, and what is just outside of it.
EDGES = {
  "temperature": ((0.0, 1e4), (-0.1, 1.1e4, math.nan, math.inf, "1", None, True)),
  "top_k": ((0, 2**31 - 1), (-1, 2**31, 1.0, "1", False)),
  "top_p": ((0.0, 1.0), (-0.1, 1.1, math.nan)),
  "min_p": ((0.0, 1.0), (-0.1, 1.1, math.nan)),
  "seed": ((0, 2**32 - 1), (-1, 2**32, 0.5)),
  "repetition_penalty": ((1e-2, 1e2), (0.0, 101.0, math.nan)),
  "presence_penalty": ((-1e2, 1e2), (-101.0, 101.0, math.inf)),
  "frequency_penalty": ((-1e2, 1e2), (-101.0, 101.0, math.nan)),
  "min_new_tokens": ((0, 2**31 - 1), (-1, 2**31, 2.5)),
  "logit_bias": (
    ({}, {0: 1e4, 2**31 - 1: -1e4}, dict.fromkeys(range(64), 0.0)),
    (
      {-1: 0.0},
      {2**31: 0.0},
      {1.5: 0.0},
      {1: 1.1e4},
      {1: math.nan},
      dict.fromkeys(range(65), 0.0),
      [1],
      None,
    ),
  ),
}


@pytest.mark.parametrize("field", EDGES)
def test_sampling_has_limits(field):
  inside, outside = EDGES[field]
  for value in inside:
    assert getattr(Sampling(**{field: value}), field) == value
  for value in outside:
    with pytest.raises(ValueError, match=field):
      Sampling(**{field: value})


def test_the_limits_are_those_of_the_loop():
  """Fails when a request passes that a row of the loop refuses, or the other way round."""
  from specjax import sampling, state

  assert (requests.MAX_STOP_IDS, requests.MAX_LOGIT_BIAS) == (state.MAX_STOP_IDS, sampling.MAX_LOGIT_BIAS)
  assert Sampling().fields().keys() == EDGES.keys()
  for field, (inside, outside) in EDGES.items():
    for value in inside:
      sampling.Settings.create(1, **Sampling(**{field: value}).fields())
    for value in outside:
      if value not in ("1", None, True, False):  # what kinds of values there are is each one's own business
        with pytest.raises(ValueError):
          sampling.Settings.create(1, **Sampling().fields() | {field: value})


def test_updates_have_a_logprob_for_each_token():
  assert Update("a", (1, 2), logprobs=(-0.5, -1.0)).logprobs == (-0.5, -1.0)
  with pytest.raises(ValueError, match="logprobs has 1 entries for 2 tokens of request 'a'"):
    Update("a", (1, 2), logprobs=(-0.5,))


def test_reasons_are_words():
  """They are what a client reads."""
  assert [reason for reason in Reason if reason.refused] == ["queue_full", "too_large"]
  assert f"{Reason.STOP}" == "stop"
