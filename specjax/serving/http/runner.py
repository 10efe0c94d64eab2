"""The thread that steps an engine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from specjax.serving.engine import Engine
from specjax.serving.http.metrics import Metrics
from specjax.serving.requests import Request
from specjax.serving.sampler import Listener, Output
from specjax.serving.summary import Timing

_LOG = logging.getLogger(__name__)
# How long one waits for what should be over at once: a step that goes on, a thread that ends.
_MOMENT_S = 5.0


class Unavailable(Exception):
  """Nothing is served here any more; says why."""


class Runner:
  """Steps an engine in a thread of its own, and measures what its requests meet.

  Attributes:
    engine: that is stepped.
    metrics: are kept.
  """

  def __init__(
    self, engine: Engine, metrics: Metrics | None = None, clock: Callable[[], float] = time.perf_counter
  ):
    self.engine, self.metrics = engine, metrics or Metrics()
    self._clock = clock
    self._lock = threading.Lock()
    self._closing = self._over = False
    self._broken: str | None = None
    self._number = 0
    # A step that never returns must not keep the process.
    self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

  def start(self) -> None:
    self._thread.start()

  @property
  def trouble(self) -> str | None:
    """Why nothing new is served; None while it is."""
    if self._broken is not None:
      return f"the engine broke: {self._broken}"
    return "the server shuts down" if self._closing else None

  def submit(self, request: Request, listener: Listener) -> None:
    """Hands a request to the engine.

    Args:
      request: as `Engine.submit` takes it.
      listener: is called by the thread that steps.

    Raises:
      Unavailable: the engine is broken, or has ended.
      ValueError: of `Engine.submit`.
    """
    with self._lock:
      self._number += 1
      heard = self._timed(self._number, request, listener)
      if self._over:
        raise Unavailable(self.trouble)
      try:
        self.engine.submit(request, heard)
      except RuntimeError as error:
        raise Unavailable(str(error)) from None

  def cancel(self, id: str) -> None:
    self.engine.cancel(id)

  def close(self, *, finish: bool) -> None:
    """Takes nothing more in. What is live goes on to its end, or ends at the next step."""
    self._closing = True
    self.engine.shutdown(finish=finish)

  def stop(self, seconds: float) -> bool:
    """Waits until all has ended, and the thread with it.

    Args:
      seconds: after which what is live is cancelled.

    Returns:
      Whether the thread has ended; it has not if a step does not return.
    """
    self.close(finish=seconds > 0)
    self._thread.join(seconds)
    if self._thread.is_alive():
      self.close(finish=False)
      self._thread.join(_MOMENT_S)
    return not self._thread.is_alive()

  def _work(self) -> None:
    try:
      while not self._done():
        if self.engine.wait(_MOMENT_S):
          step = self.engine.step()
          if step is not None:
            self.metrics.stepped(step.phases.values(), self.engine.scheduler)
    except Exception as error:
      _LOG.exception("the engine broke")
      with self._lock:
        self._broken, self._over = f"{type(error).__name__}: {error}", True

  def _done(self) -> bool:
    """Whether nothing is left to do. Who submits afterwards is told so, and not left waiting."""
    with self._lock:
      self._over = self._closing and not self.engine.busy
      return self._over

  def _timed(self, number: int, request: Request, listener: Listener) -> Listener:
    """A listener that notes times, and never raises: the engine would take that for its own end."""
    arrived, first = self._clock(), None

    def heard(output: Output) -> None:
      nonlocal first
      try:
        now, reason = self._clock(), output.update.reason
        if first is None and output.update.tokens:
          first = now
        if reason is not None:
          counts = (len(request.prompt), len(output.result.tokens))
          self.metrics.ended(output, Timing(number, arrived, first, now, *counts, reason))
        listener(output)
      except Exception:
        _LOG.exception("request %s: its listener failed", request.id)

    return heard
