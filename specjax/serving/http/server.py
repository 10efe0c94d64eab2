"""The web server around the application: uvicorn, and an end that always comes. Needs uvicorn."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import uvicorn

from specjax.serving.http.app import Service, make_app

# For connections to close, after what live requests get.
_CLOSING_S = 5


def bind(host: str, port: int) -> socket.socket:
  """A socket at an address, which is not listened at yet.

  Args:
    host: name or address.
    port: 0 takes a free one.

  Raises:
    OSError: naming the address: there is no such host, or the port is taken.
  """
  try:
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
  except OSError as error:
    raise OSError(f"host = {host!r}, port = {port}: {error.strerror or error}") from None
  return listener


class Server(uvicorn.Server):
  """Serves until a signal comes, or ``should_exit`` is set; then ends within a bounded time.

  Attributes:
    url: where it listens.
  """

  def __init__(
    self,
    service: Service,
    listener: socket.socket,
    *,
    drain_s: float = 0.0,
    ready: Callable[[str], None] = lambda url: None,
  ):
    """
    Args:
      service: whose runner this starts and stops.
      listener: of `bind`; closed at the end.
      drain_s: what live requests get to finish in when the server ends; 0 cancels them.
      ready: is told the address once it is listened at.
    """
    super().__init__(
      uvicorn.Config(
        make_app(service),
        http="h11",
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=round(drain_s) + _CLOSING_S,
      )
    )
    self._runner, self._listener = service.runner, listener
    self._drain_s, self._ready = drain_s, ready
    host, port = listener.getsockname()[:2]
    self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

  async def serve(self, sockets: list[socket.socket] | None = None) -> None:
    await super().serve([self._listener])

  async def startup(self, sockets: list[socket.socket] | None = None) -> None:
    self._runner.start()
    await super().startup(sockets)
    self._ready(self.url)

  async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
    """Live requests end while their connections are still there to be told so."""
    stopping = asyncio.create_task(asyncio.to_thread(self._runner.stop, self._drain_s))
    await super().shutdown(sockets)
    if self.force_exit:  # a second Ctrl-C
      self._runner.close(finish=False)
    await stopping
