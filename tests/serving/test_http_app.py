"""The web server over a scripted engine: who may ask, how much, who leaves, what breaks, how it ends."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from specjax.serving.http.app import Limits
from specjax.serving.http.server import bind
from specjax.serving.requests import Reason
from tests.serving import http_rig as rig

GOOD = {"model": rig.MODEL, "prompt": "x", "max_tokens": 3}
LONG = GOOD | {"max_tokens": 90, "stream": True}


@pytest.fixture(scope="module")
def engine():
  return rig.ScriptedEngine()


@pytest.fixture(scope="module")
def client(engine):
  limits = dict(body_bytes=20_000, prompt_tokens=50, patience_s=rig.HANGS_S)
  with rig.scripted(engine, **limits) as serving:
    yield serving.client


def raw(client: httpx.Client, data: bytes) -> socket.socket:
  """A connection that sent some bytes."""
  connection = socket.create_connection((client.base_url.host, client.base_url.port), rig.HANGS_S)
  connection.sendall(data)
  return connection


def post(body: bytes, length: int | None = None, kind: str = "application/json") -> bytes:
  length = len(body) if length is None else length
  head = (
    f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\r\n"
  )
  return head.encode() + body


def ended(engine: rig.ScriptedEngine) -> dict:
  """How its requests ended, in their order."""
  return [engine.ended[id] for id in engine.submitted]


# --- what is asked and answered ------------------------------------------------------------------------


def test_models_and_health(client):
  (model,) = client.get("/v1/models").json()["data"]
  assert (model["id"], model["object"], model["max_model_len"]) == (rig.MODEL, "model", 96)
  assert client.get(f"/v1/models/{rig.MODEL}").json() == model
  assert client.get("/health").json() == {"status": "ok"}
  assert client.head("/health").status_code == 200


def test_a_whole_answer_and_one_in_pieces_are_the_same(client):
  whole = rig.completion(client, max_tokens=5).json()
  assert whole["choices"][0]["text"] == "abcde" and whole["choices"][0]["finish_reason"] == "length"
  usage = {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}
  assert usage.items() <= whole["usage"].items()
  assert whole["speculation"] == {
    "rounds": 5,
    "proposed_depth": 5,
    "accepted": 0,
    "tau": 1.0,
    "acceptance": 0.0,
  }
  options = {"stream": True, "stream_options": {"include_usage": True}}
  response = rig.completion(client, max_tokens=5, **options)
  assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
  *pieces, last, end = rig.events(response)
  assert end == "[DONE]" and last["choices"] == []
  assert (last["usage"], last["speculation"]) == (whole["usage"], whole["speculation"])
  assert all(piece["usage"] is None for piece in pieces)
  assert "".join(piece["choices"][0]["text"] for piece in pieces) == "abcde"
  reasons = [piece["choices"][0]["finish_reason"] for piece in pieces]
  assert reasons[-1] == "length" and set(reasons[:-1]) == {None}
  without = list(rig.events(rig.completion(client, stream=True)))
  assert all("usage" not in piece for piece in without[:-1])


# --- what is not to be had -------------------------------------------------------------------------------

PLACES = [
  ("GET", "/", 404),
  ("GET", "/v1/nothing", 404),
  ("GET", "/v1/completions", 405),
  ("POST", "/v1/models", 405),
  ("GET", "/v1/models/other", 404),
  ("GET", "/v1/models/%ff%00", 404),
]


@pytest.mark.parametrize(("method", "path", "status"), PLACES)
def test_wrong_places_are_errors_of_openais_form(client, method, path, status):
  response = client.request(method, path)
  assert response.status_code == status and rig.error_of(response)["type"] == "invalid_request_error"


JSON = {"content-type": "application/json"}
HOSTILE = [
  (b"", JSON, 400, None),
  (b"{", JSON, 400, None),
  (b'{"model": "tiny", "prompt": "\xff"}', JSON, 400, None),
  (b'{"model": "tiny", "prompt": "x", "top_p": NaN}', JSON, 400, None),
  (b"[" * 15_000, JSON, 400, None),
  (b'{"model": "tiny", "prompt": "x", "\\ud800": 1}', JSON, 400, "\ud800"),
  (b'{"model": "tiny", "prompt": "x", "seed": ' + b"9" * 4000 + b"}", JSON, 400, "seed"),
  (b'{"model": "tiny", "prompt": "x", "max_tokens": 1e400}', JSON, 400, "max_tokens"),
  (b'{"model": "tiny", "prompt": 7}', JSON, 400, "prompt"),
  (b'{"model": "tiny", "prompt": []}', JSON, 400, "prompt"),
  (json.dumps(GOOD | {"prompt": "y" * 50}).encode(), JSON, 400, "prompt"),
  (json.dumps(GOOD | {"prompt": [1] * 51}).encode(), JSON, 400, "prompt"),
  (json.dumps(GOOD | {"max_tokens": 95}).encode(), JSON, 400, "max_tokens"),
  (json.dumps(GOOD | {"model": "other"}).encode(), JSON, 404, "model"),
  (json.dumps(GOOD | {"temperature": 3}).encode(), JSON, 400, "temperature"),
  (json.dumps(GOOD | {"tools": [{}]}).encode(), JSON, 400, "tools"),
  (json.dumps(GOOD | {"n": 2, "stream": True}).encode(), JSON, 400, "n"),
  (b" " * 20_001, JSON, 413, None),
  (json.dumps(GOOD).encode(), {"content-type": "text/plain"}, 415, "Content-Type"),
  (json.dumps(GOOD).encode(), {}, 415, "Content-Type"),
  (json.dumps(GOOD).encode(), {"content-type": "application/x-www-form-urlencoded"}, 415, "Content-Type"),
]


@pytest.mark.parametrize(("body", "headers", "status", "param"), HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_requests_get_an_error_and_the_next_one_an_answer(
  client, engine, body, headers, status, param
):
  """Fails when one of them is a 5xx, reaches the engine, or costs the server its life."""
  before = len(engine.submitted)
  response = client.post("/v1/completions", content=body, headers=headers)
  assert response.status_code == status
  error = rig.error_of(response)
  assert error["param"] == param and error["type"] == "invalid_request_error"
  assert len(engine.submitted) == before
  assert rig.completion(client).json()["choices"][0]["text"] == "abc"


def test_a_body_without_a_length_is_counted(client):
  """A chunked body that grows over the limit is refused while it comes."""
  response = client.post("/v1/completions", content=(b" " * 1000 for _ in range(30)), headers=JSON)
  assert response.status_code == 413 and "20000 bytes" in rig.error_of(response)["message"]


def test_a_large_body_is_refused_before_it_is_sent(client):
  """Its announced length is enough, and the connection is closed: nothing more of it is read."""
  connection = raw(client, post(b"{", length=10**12))
  answer = b""
  while piece := connection.recv(4096):
    answer += piece
  assert answer.startswith(b"HTTP/1.1 413") and b"connection: close" in answer.lower()


@pytest.mark.parametrize(
  "data",
  [b"\x00\xff\xfe\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nA" * 4],
)
def test_what_is_no_http_is_cut_off(client, data):
  connection = raw(client, data + b"\r\n\r\n")
  assert connection.recv(4096).startswith(b"HTTP/1.1 4")
  connection.close()
  assert rig.completion(client).status_code == 200


def test_a_body_that_does_not_come_is_not_waited_for():
  """A client that sends half of it holds its place no longer than its patience."""
  with rig.scripted(rig.ScriptedEngine(), concurrency=1, patience_s=0.05) as serving:
    client = serving.client
    connection = raw(client, post(b"{", length=100))
    assert connection.recv(4096).startswith(b"HTTP/1.1 408")
    connection.close()
    assert rig.completion(client).status_code == 200


def test_a_key_is_needed_for_all_but_health():
  with rig.scripted(rig.ScriptedEngine(), key="secret") as serving:
    client = serving.client
    for given in (
      None,
      "Bearer wrong",
      "Bearer secret2",
      "Bearer",
      "secret",
      "Basic secret",
      "Bearer s\xe9cret",
    ):
      headers = {} if given is None else {"authorization": given.encode("latin-1")}
      for path in ("/v1/models", "/metrics", "/nowhere"):
        response = client.get(path, headers=headers)
        assert response.status_code == 401 and rig.error_of(response)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    assert rig.completion(client).status_code == 401
    assert client.get("/health").status_code == 200
    client.headers["authorization"] = "Bearer secret"
    assert rig.completion(client).status_code == 200


# --- how much --------------------------------------------------------------------------------------------


def test_more_than_the_limit_at_once_are_told_so():
  """The places are given back. Fails when a refused or an ended request keeps one."""
  engine = rig.ScriptedEngine(free=False)
  with rig.scripted(engine, concurrency=2) as serving, ThreadPoolExecutor(2) as pool:
    client = serving.client
    first = [pool.submit(rig.completion, client) for _ in range(2)]
    engine.until(lambda engine: len(engine.submitted) == 2)
    response = rig.completion(client)
    assert response.status_code == 429 and rig.error_of(response)["type"] == "rate_limit_error"
    assert "the limit is 2" in rig.error_of(response)["message"] and response.headers["retry-after"]
    engine.free = True
    assert [future.result().status_code for future in first] == [200, 200]
    assert [rig.completion(client).status_code for _ in range(3)] == [200] * 3


@pytest.mark.parametrize("stream", (False, True))
def test_a_full_queue_is_a_429(stream):
  """A status of its own when the answer is to be streamed, too: nothing was sent before."""
  engine = rig.ScriptedEngine(slots=1, queue_limit=1, free=False)
  with rig.scripted(engine) as serving, ThreadPoolExecutor(2) as pool:
    client = serving.client
    first = []
    for count in (1, 2):  # one gets the row, then one waits
      first.append(pool.submit(rig.completion, client))
      engine.until(lambda engine, count=count: len(engine.submitted) == count)
    engine.steps.release()
    response = rig.completion(client, stream=stream)
    assert response.status_code == 429 and rig.error_of(response)["code"] == "queue_full"
    engine.free = True
    assert [future.result().status_code for future in first] == [200, 200]


# --- who leaves ------------------------------------------------------------------------------------------


def test_a_client_that_leaves_in_the_middle_frees_its_row():
  """Cancelled in the engine, and the next one is served. Fails when it decodes on for nobody."""
  engine = rig.ScriptedEngine(slots=1, free=False)
  with rig.scripted(engine) as serving:
    client, said = serving.client, []
    engine.steps.release()
    with client.stream("POST", "/v1/completions", json=LONG) as response:
      for event in rig.events(response, engine.steps.release):
        said.append(event["choices"][0]["text"])
        if len(said) == 3:
          break
    assert said == ["a", "b", "c"]
    engine.until(lambda engine: engine.cancelled)
    engine.free = True
    assert rig.completion(client).json()["choices"][0]["text"] == "abc"
    assert ended(engine) == [Reason.CANCELLED, Reason.LENGTH]


@pytest.mark.parametrize("stream", (False, True))
def test_a_client_that_leaves_before_the_first_token_frees_its_place(stream):
  """While it waits, nothing is sent that would show that it has gone."""
  engine = rig.ScriptedEngine(free=False)
  with rig.scripted(engine, concurrency=1) as serving:
    client = serving.client
    connection = raw(client, post(json.dumps(GOOD | {"stream": stream}).encode()))
    engine.until(lambda engine: engine.submitted)
    connection.close()
    engine.until(lambda engine: engine.cancelled)
    engine.free = True
    assert rig.completion(client).status_code == 200
    assert ended(engine) == [Reason.CANCELLED, Reason.LENGTH]


def test_a_client_that_has_its_answer_cancels_nothing(client, engine):
  assert rig.completion(client).status_code == 200
  assert not engine.cancelled


# --- what breaks, and the end ----------------------------------------------------------------------------


def test_a_broken_engine_is_told_of():
  """Live requests get an error, later ones a 503; health and metrics say so, models are there still."""
  engine = rig.ScriptedEngine(free=False)
  with rig.scripted(engine) as serving, ThreadPoolExecutor(1) as pool:
    client = serving.client
    engine.steps.release()
    with client.stream("POST", "/v1/completions", json=LONG) as response:
      stream = rig.events(response)
      assert next(stream)["choices"][0]["text"] == "a"
      whole = pool.submit(rig.completion, client)
      engine.until(lambda engine: len(engine.submitted) == 2)
      engine.fault = RuntimeError("lost")
      engine.steps.release()
      error, end = stream
    assert error["error"]["type"] == "server_error" and "lost" in error["error"]["message"]
    assert end == "[DONE]" and whole.result().status_code == 500
    for _ in range(2):
      response = rig.completion(client)
      assert response.status_code == 503 and "engine broke" in rig.error_of(response)["message"]
    health = client.get("/health")
    assert health.status_code == 503 and "lost" in health.json()["detail"]
    assert "specjax_up 0" in client.get("/metrics").text
    assert client.get("/v1/models").status_code == 200


@pytest.mark.parametrize("drain_s", (0.0, rig.HANGS_S))
def test_the_end_finishes_or_cancels(drain_s):
  """Live requests get their answers, or are told that there are none; `serving` asserts that it ends."""
  engine = rig.ScriptedEngine(free=False)
  with ThreadPoolExecutor(2) as pool:
    with rig.scripted(engine, drain_s=drain_s) as serving:
      client = serving.client
      asked = [pool.submit(rig.completion, client, max_tokens=20, stream=stream) for stream in (False, True)]
      engine.until(lambda engine: len(engine.submitted) == 2)
      threading.Timer(0.2, lambda: setattr(engine, "free", True)).start()
      serving.end()
    whole, stream = (future.result() for future in asked)
  if drain_s:
    assert whole.json()["usage"]["completion_tokens"] == 20
    assert list(rig.events(stream))[-1] == "[DONE]"
    assert ended(engine) == [Reason.LENGTH] * 2
  else:
    assert whole.status_code == stream.status_code == 503
    assert rig.error_of(whole)["code"] == "shutdown"
    assert ended(engine) == [Reason.SHUTDOWN] * 2


def test_addresses_that_are_not_to_be_had(client):
  for host, port in (("999.1.1.1", 0), ("127.0.0.1", client.base_url.port)):
    with pytest.raises(OSError, match=f"host = '{host}', port = {port}"):
      listener = bind(host, port)
      listener.listen()


@pytest.mark.parametrize("field", ("body_bytes", "prompt_tokens", "concurrency", "patience_s"))
def test_limits_are_above_zero(field):
  with pytest.raises(ValueError, match=f"{field} = 0; it must be above 0"):
    Limits(**{field: 0})


# --- what is counted -------------------------------------------------------------------------------------


def test_metrics_add_up():
  """Read with Prometheus's own parser: every request once, by its reason, and tokens as they were told.

  Fails when a kind of end is not counted, a bucket is not cumulative, or the text is not Prometheus's.
  """
  engine = rig.ScriptedEngine(slots=1, queue_limit=0)
  with rig.scripted(engine) as serving:
    client = serving.client
    sent = [rig.completion(client, max_tokens=count).status_code for count in (1, 4, 0, 7)]
    assert sent == [200, 200, 400, 200]
    engine.free = False
    with ThreadPoolExecutor(1) as pool:
      last = pool.submit(rig.completion, client, max_tokens=3)
      engine.until(lambda engine: len(engine.submitted) == 4)
      assert rig.completion(client).status_code == 429
      engine.free = True
      assert last.result().status_code == 200
    rig.completion(client)  # the step behind the last token is counted, too
    samples = rig.metrics(client)
  ends = {reason.value: 0 for reason in Reason} | {"length": 5, "queue_full": 1}
  for reason, count in ends.items():
    assert samples["specjax_requests_total", f"reason={reason}"] == count
  for status, count in {200: 5, 400: 1, 429: 1}.items():
    assert samples["specjax_http_responses_total", f"status={status}"] == count
  assert samples["specjax_up", ""] == 1
  assert samples["specjax_rounds_total", ""] == samples["specjax_round_tokens_total", ""] == 1 + 4 + 7 + 3 + 3
  assert samples["specjax_tau", ""] == 1 and samples["specjax_acceptance", ""] == 0
  assert samples["specjax_requests_waiting", ""] == 0 and samples["specjax_kv_tokens_limit", ""] == 96
  assert samples["specjax_time_to_first_token_seconds_count", ""] == 5
  assert samples["specjax_time_per_output_token_seconds_count", ""] == 4
  for name in ("first_token", "output_token"):
    kind = f"specjax_time_{'to' if name == 'first_token' else 'per'}_{name}_seconds"
    buckets = [value for (key, _), value in samples.items() if key == f"{kind}_bucket"]
    assert buckets == sorted(buckets) and buckets[-1] == samples[f"{kind}_count", ""]


def test_the_parser_finds_every_kind(client):
  families = list(text_string_to_metric_families(client.get("/metrics").text))
  kinds = {family.name: family.type for family in families}
  assert len(kinds) == 20 and "unknown" not in kinds.values() and all(family.samples for family in families)
