"""Loads, by name: who comes when, with how long a prompt, for how many tokens. No jax.

The load bench and the simulation are given the same `Workload`, so what is predicted and what is measured
belong to the same requests: lengths depend on the seed and a request's number alone, gaps on the seed.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
from typing import Any, ClassVar, NamedTuple, Protocol

from specjax import options


class Arrival(NamedTuple):
  """A request that is to come.

  Attributes:
    time_s: when, in seconds from the start.
    number: from 0.
    prompt_tokens: of its prompt, at least 1.
    new_tokens: that it asks for, at least 1.
  """

  time_s: float
  number: int
  prompt_tokens: int
  new_tokens: int


class Arrivals(Protocol):
  """A process of arrivals."""

  name: ClassVar[str]

  def times(self, requests: int, chance: random.Random) -> list[float]:
    """Seconds at which at most ``requests`` come whatever happens, ascending."""
    ...

  def after(self, ended_s: float) -> float | None:
    """When somebody comes because a request ended; None: nobody does."""
    ...


@dataclasses.dataclass(frozen=True)
class Poisson:
  """Open loop: independent users, ``rate`` requests a second on average."""

  rate: float = 1.0

  name: ClassVar[str] = "poisson"

  def __post_init__(self):
    _between(self, "rate", 1e-6, 1e6)

  def times(self, requests: int, chance: random.Random) -> list[float]:
    now, times = 0.0, []
    for _ in range(requests):
      now += chance.expovariate(self.rate)
      times.append(now)
    return times

  def after(self, ended_s: float) -> None:
    return None


@dataclasses.dataclass(frozen=True)
class Paced:
  """Open loop: one request every ``1 / rate`` seconds, the first at 0."""

  rate: float = 1.0

  name: ClassVar[str] = "paced"

  def __post_init__(self):
    _between(self, "rate", 1e-6, 1e6)

  def times(self, requests: int, chance: random.Random) -> list[float]:
    return [number / self.rate for number in range(requests)]

  def after(self, ended_s: float) -> None:
    return None


@dataclasses.dataclass(frozen=True)
class Closed:
  """Closed loop: so many clients, each sends its next request ``think_s`` seconds after an answer."""

  clients: int = 4
  think_s: float = 0.0

  name: ClassVar[str] = "closed"

  def __post_init__(self):
    _whole(self, "clients", 1)
    _between(self, "think_s", 0.0, 1e6)

  def times(self, requests: int, chance: random.Random) -> list[float]:
    return [0.0] * min(self.clients, requests)

  def after(self, ended_s: float) -> float:
    return ended_s + self.think_s


class Lengths(Protocol):
  """A law of numbers of tokens."""

  name: ClassVar[str]

  def draw(self, chance: random.Random) -> int:
    """At least 1."""
    ...


@dataclasses.dataclass(frozen=True)
class Fixed:
  """Always the same."""

  tokens: int = 64

  name: ClassVar[str] = "fixed"

  def __post_init__(self):
    _whole(self, "tokens", 1)

  def draw(self, chance: random.Random) -> int:
    return self.tokens


@dataclasses.dataclass(frozen=True)
class Uniform:
  """Each number from ``low`` to ``high`` as often as any other."""

  low: int = 16
  high: int = 256

  name: ClassVar[str] = "uniform"

  def __post_init__(self):
    _whole(self, "low", 1)
    _whole(self, "high", self.low)

  def draw(self, chance: random.Random) -> int:
    return chance.randint(self.low, self.high)


@dataclasses.dataclass(frozen=True)
class LogNormal:
  """Many short, few long ones: ``median · exp(sigma · N(0, 1))``, cut to ``low … high``."""

  median: float = 64.0
  sigma: float = 0.8
  low: int = 1
  high: int = 1024

  name: ClassVar[str] = "lognormal"

  def __post_init__(self):
    _whole(self, "low", 1)
    _whole(self, "high", self.low)
    _between(self, "median", 1.0, 1e9)
    _between(self, "sigma", 0.0, 10.0)

  def draw(self, chance: random.Random) -> int:
    drawn = self.median * math.exp(self.sigma * chance.gauss(0.0, 1.0))
    return round(min(max(drawn, self.low), self.high))


ARRIVALS: dict[str, type[Arrivals]] = {law.name: law for law in (Poisson, Paced, Closed)}
LENGTHS: dict[str, type[Lengths]] = {law.name: law for law in (Fixed, Uniform, LogNormal)}


def make_arrivals(text: str) -> Arrivals:
  """``"poisson[rate=2.5]"`` → `Poisson`.

  Raises:
    ValueError: an unknown name, or options it does not take.
  """
  return _make("arrivals", text, ARRIVALS)


def make_lengths(text: str) -> Lengths:
  """``"uniform[low=8,high=64]"`` → `Uniform`.

  Raises:
    ValueError: an unknown name, or options it does not take.
  """
  return _make("lengths", text, LENGTHS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """A load.

  Attributes:
    arrivals: when requests come.
    prompt: tokens of prompts.
    new: tokens that are asked for.
    requests: how many there are, at least 1.
    seed: of gaps and lengths.
  """

  arrivals: Arrivals
  prompt: Lengths
  new: Lengths
  requests: int
  seed: int = 0

  def __post_init__(self):
    for field, least in (("requests", 1), ("seed", 0)):
      value = getattr(self, field)
      if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{field} = {value!r}; it must be a whole number of at least {least}")

  def start(self) -> Source:
    """The load from its beginning."""
    return Source(self)


class Source:
  """A load that runs. The caller has the clock: seconds from the start, never going back."""

  def __init__(self, workload: Workload):
    self._workload = workload
    self._coming: list[Arrival] = []
    self._made = 0
    chance = random.Random(f"gaps {workload.seed}")
    for time_s in workload.arrivals.times(workload.requests, chance):
      self._add(time_s)

  @property
  def next_s(self) -> float | None:
    """When the next one comes; None: nobody does unless a request ends first."""
    return self._coming[0].time_s if self._coming else None

  def take(self, now_s: float) -> list[Arrival]:
    """Who has come by now and was not taken before, in order."""
    taken = []
    while self._coming and self._coming[0].time_s <= now_s:
      taken.append(heapq.heappop(self._coming))
    return taken

  def ended(self, now_s: float) -> None:
    """A request has ended, or was refused: in a closed loop the next one comes."""
    time_s = self._workload.arrivals.after(now_s)
    if time_s is not None and self._made < self._workload.requests:
      self._add(time_s)

  def _add(self, time_s: float) -> None:
    chance = random.Random(f"lengths {self._workload.seed} {self._made}")
    prompt, new = self._workload.prompt.draw(chance), self._workload.new.draw(chance)
    heapq.heappush(self._coming, Arrival(time_s, self._made, prompt, new))
    self._made += 1


def _make(what: str, text: str, laws: dict[str, Any]) -> Any:
  name, own = options.parse(what, text)
  if name not in laws:
    raise ValueError(f"{what} = {text!r}; it must be one of {', '.join(laws)}")
  return options.make(what, text, laws[name], own)


def _whole(law: Any, field: str, least: int) -> None:
  value = getattr(law, field)
  if not isinstance(value, int) or isinstance(value, bool) or value < least:
    raise ValueError(f"{law.name}: {field} = {value!r}; it must be a whole number of at least {least}")


def _between(law: Any, field: str, low: float, high: float) -> None:
  value = getattr(law, field)
  if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
    raise ValueError(f"{law.name}: {field} = {value!r}; it must be a number in [{low:g}, {high:g}]")
