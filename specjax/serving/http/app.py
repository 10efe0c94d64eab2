"""The application: routes, who may ask, how much, and answers whole or in pieces. Needs starlette."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specjax.checkpoints import Tokenizer
from specjax.serving.http import metrics, replies, schema
from specjax.serving.http.replies import Reply
from specjax.serving.http.runner import Runner, Unavailable
from specjax.serving.http.schema import ApiError, Call
from specjax.serving.requests import Request
from specjax.serving.sampler import Output
from specjax.text import encode_prompt


@dataclasses.dataclass(frozen=True)
class Limits:
  """What a client may take.

  Attributes:
    body_bytes: of a request.
    prompt_tokens: of a prompt; None: what the engine's length limit leaves.
    concurrency: completions at once, from the first byte of the body to the last of the answer.
    patience_s: for a client to send its body, and to take each piece of an answer.

  Raises:
    ValueError: naming the field, the value and the limit.
  """

  body_bytes: int = 1 << 20
  prompt_tokens: int | None = None
  concurrency: int = 256
  patience_s: float = 30.0

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if value is not None and not value > 0:
        raise ValueError(f"{field.name} = {value}; it must be above 0")


class ClientLeft(Exception):
  """Nobody listens any more."""


class Service:
  """What the routes share: an engine that runs, a tokenizer, limits."""

  def __init__(
    self, runner: Runner, tokenizer: Tokenizer, name: str, *, limits: Limits | None = None, key: str = ""
  ):
    """
    Args:
      runner: has the engine, which has the same tokenizer.
      tokenizer: of the target.
      name: of the model, as clients ask for it.
      limits: None are the defaults.
      key: that clients must have, as a bearer token; empty: none.
    """
    self.runner, self.tokenizer, self.name = runner, tokenizer, name
    self.limits, self.key = limits or Limits(), key
    self.created = int(time.time())
    config = runner.engine.scheduler.config
    self.length_limit = min(config.length_limit, config.kv_budget)
    self._taken = 0

  @property
  def model(self) -> dict[str, Any]:
    about = {"id": self.name, "object": "model", "created": self.created, "owned_by": "specjax"}
    return {**about, "max_model_len": self.length_limit}

  def check_model(self, name: str) -> None:
    """Raises ApiError for one that is not here."""
    if name != self.name:
      message = f"model = {name[:60]!r} is not here; it must be {self.name!r}"
      raise ApiError(404, message, param="model", code="model_not_found")

  @contextlib.contextmanager
  def place(self) -> Iterator[None]:
    """One of the places for completions at once.

    Raises:
      ApiError: 429, all are taken.
    """
    if self._taken >= self.limits.concurrency:
      message = f"{self._taken} requests are served; the limit is {self.limits.concurrency}"
      raise ApiError(429, message, code="too_many_requests", headers={"Retry-After": "1"})
    self._taken += 1
    try:
      yield
    finally:
      self._taken -= 1

  def read(self, body: bytes, *, chat: bool) -> tuple[Call, Request]:
    """What a body asks for, and the engine's request for it.

    Raises:
      ApiError: it is wrong, or cannot be asked of this model.
    """
    call = schema.parse(body, chat=chat)
    self.check_model(call.model)
    tokens = call.prompt
    if chat or isinstance(tokens, str):
      try:
        tokens = encode_prompt(self.tokenizer, tokens, chat=chat)
      except ValueError as error:
        raise ApiError(400, f"{call.prompt_field}: {error}", param=call.prompt_field) from None
    request = call.request(
      f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
      tokens,
      end_ids=self.tokenizer.eos_ids,
      limit=self.length_limit,
      prompt_limit=self.limits.prompt_tokens or self.length_limit,
    )
    return call, request


def make_app(service: Service) -> Starlette:
  """The ASGI application."""
  runner = service.runner

  async def models(request: HttpRequest) -> Response:
    return JSONResponse({"object": "list", "data": [service.model]})

  async def model(request: HttpRequest) -> Response:
    service.check_model(request.path_params["name"])
    return JSONResponse(service.model)

  async def health(request: HttpRequest) -> Response:
    trouble = runner.trouble
    if trouble is None:
      return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "unavailable", "detail": trouble}, status_code=503)

  async def counts(request: HttpRequest) -> Response:
    text = runner.metrics.render(up=runner.trouble is None)
    return Response(text, headers={"content-type": metrics.CONTENT_TYPE})

  async def wrong(request: HttpRequest, error: ApiError) -> Response:
    return _response(error)

  async def wrong_place(request: HttpRequest, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path[:60]}: {error.detail}"
    return _response(ApiError(error.status_code, message, headers=error.headers))

  async def bug(request: HttpRequest, error: Exception) -> Response:
    return _response(ApiError(500, "something went wrong in the server; its log has the details"))

  return Starlette(
    routes=[
      Route("/v1/completions", _Completions(service, chat=False), methods=["POST"]),
      Route("/v1/chat/completions", _Completions(service, chat=True), methods=["POST"]),
      Route("/v1/models", models),
      Route("/v1/models/{name:path}", model),
      Route("/health", health),
      Route("/metrics", counts),
    ],
    middleware=[Middleware(_Gate, service=service)],
    exception_handlers={ApiError: wrong, HTTPException: wrong_place, Exception: bug},
  )


def _response(error: ApiError) -> Response:
  # In ASCII: a client's field may have a name that is no Unicode text.
  body = json.dumps(error.body())
  return Response(body, error.status, error.headers, media_type="application/json")


class _Gate:
  """Lets those in who have the key, if one is needed, and counts responses. Health is for everybody."""

  def __init__(self, app: ASGIApp, service: Service):
    self._app, self._metrics = app, service.runner.metrics
    self._expected = f"Bearer {service.key}".encode() if service.key else b""

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    async def counted(message: Message) -> None:
      if message["type"] == "http.response.start":
        self._metrics.responded(message["status"])
      await send(message)

    app = self._app
    if self._expected and scope["path"] != "/health":
      given = Headers(scope=scope).get("authorization", "").encode("latin-1")
      if not hmac.compare_digest(given, self._expected):
        body = ApiError(
          401, "the Authorization header has no key that is known", code="invalid_api_key"
        ).body()
        app = JSONResponse(body, status_code=401, headers={"WWW-Authenticate": "Bearer"})
    await app(scope, receive, counted)


class _Completions:
  """Both kinds of completions."""

  def __init__(self, service: Service, *, chat: bool):
    self._service, self._chat = service, chat

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    service = self._service
    with contextlib.suppress(ClientLeft), service.place():
      body = await _body(Headers(scope=scope), receive, service.limits)
      # In a thread: a long prompt takes a while, and the others' pieces do not wait for it.
      call, request = await run_in_threadpool(service.read, body, chat=self._chat)
      reply = Reply(request.id, call, int(time.time()), service.tokenizer)
      async with contextlib.aclosing(_outputs(service.runner, request, call, receive)) as outputs:
        if call.stream:
          await _stream(reply, outputs, send, service.limits.patience_s)
        else:
          whole = reply.whole([output async for output in outputs])
          await JSONResponse(whole)(scope, receive, _patient(send, service.limits.patience_s))


async def _body(headers: Headers, receive: Receive, limits: Limits) -> bytes:
  """The body, which is JSON by its own account.

  Raises:
    ApiError: it is something else, too large or too slow.
    ClientLeft: before it was there.
  """
  kind = headers.get("content-type", "").partition(";")[0].strip().lower()
  close = {"Connection": "close"}
  if kind != "application/json":
    # Also keeps out other sites' pages: a browser asks before it sends this type, and is not answered.
    message = f"Content-Type = {kind[:60]!r}; it must be application/json"
    raise ApiError(415, message, param="Content-Type", headers=close)
  too_large = ApiError(413, f"the body is larger than {limits.body_bytes} bytes, the limit", headers=close)
  announced = headers.get("content-length", "0")
  if announced.isdecimal() and int(announced) > limits.body_bytes:
    raise too_large
  body = bytearray()
  try:
    async with asyncio.timeout(limits.patience_s):
      while True:
        message = await receive()
        if message["type"] == "http.disconnect":
          raise ClientLeft
        body += message.get("body", b"")
        if len(body) > limits.body_bytes:
          raise too_large
        if not message.get("more_body"):
          return bytes(body)
  except TimeoutError:
    text = f"the body was not there within {limits.patience_s:g} s"
    raise ApiError(408, text, headers=close) from None


async def _outputs(runner: Runner, request: Request, call: Call, receive: Receive) -> AsyncIterator[Output]:
  """What the engine says to a request, to its end. Whoever stops listening before has it cancelled.

  Raises:
    ApiError: it is refused, or has ended without a whole answer.
    ClientLeft: the connection is gone.
  """
  loop, told = asyncio.get_running_loop(), asyncio.Queue()
  listener = lambda output: loop.call_soon_threadsafe(told.put_nowait, output)
  try:
    runner.submit(request, listener)
  except ValueError as error:
    raise call.refused(error) from None
  except Unavailable as error:
    raise ApiError(503, str(error), code="unavailable") from None
  leaving = asyncio.ensure_future(_gone(receive))
  leaving.add_done_callback(lambda _: told.put_nowait(None))
  output = None
  try:
    while output is None or output.update.reason is None:
      output = await told.get()
      if output is None:
        raise ClientLeft
      error = replies.ended_badly(output.update)
      if error is not None:
        raise error
      yield output
  finally:
    leaving.cancel()
    if output is None or output.update.reason is None:
      runner.cancel(request.id)


async def _gone(receive: Receive) -> None:
  """Returns when the client has left."""
  while (await receive())["type"] != "http.disconnect":
    pass


async def _stream(reply: Reply, outputs: AsyncIterator[Output], send: Send, patience_s: float) -> None:
  """Server-sent events. What is refused before the first is an error like any other."""
  send, begun = _patient(send, patience_s), False

  async def write(data: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})

  try:
    async for output in outputs:
      if not begun:
        begun = True
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
      data = b"".join(map(replies.event, reply.pieces(output)))
      if data:
        await write(data)
  except ApiError as error:
    if not begun:
      raise
    await write(replies.event(error.body()))
  await write(replies.event("[DONE]"), more=False)


def _patient(send: Send, seconds: float) -> Send:
  """``send`` to a client that takes what it is sent.

  Raises:
    ClientLeft: it does not.
  """

  async def sent(message: Message) -> None:
    try:
      async with asyncio.timeout(seconds):
        await send(message)
    except TimeoutError:
      raise ClientLeft from None

  return sent
