"""What a load met: times of each request, and their percentiles. For measured and for simulated runs."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.serving.requests import Reason

PERCENTILES = (50, 95, 99)


@dataclasses.dataclass(frozen=True)
class Timing:
  """One request, from outside; seconds on one clock.

  Attributes:
    number: of its arrival.
    arrived_s: when it came.
    first_s: when its first new token came; None if none did.
    ended_s: when it ended.
    prompt_tokens: of its prompt.
    new_tokens: that it got.
    reason: why it ended.
    rounds: target calls that emitted for it, None if not known.
  """

  number: int
  arrived_s: float
  first_s: float | None
  ended_s: float
  prompt_tokens: int
  new_tokens: int
  reason: Reason
  rounds: int | None = None

  @property
  def ttft_s(self) -> float | None:
    """Time to the first token."""
    return None if self.first_s is None else self.first_s - self.arrived_s

  @property
  def tpot_s(self) -> float | None:
    """Time per output token behind the first; None for fewer than two."""
    return None if self.new_tokens < 2 else (self.ended_s - self.first_s) / (self.new_tokens - 1)

  @property
  def served(self) -> bool:
    """It ended as it should."""
    return self.reason in (Reason.STOP, Reason.LENGTH)


@dataclasses.dataclass(frozen=True)
class Limits:
  """What a user puts up with.

  Attributes:
    ttft_s: longest time to the first token.
    tpot_s: longest mean time per output token behind it.
  """

  ttft_s: float = float("inf")
  tpot_s: float = float("inf")

  def __post_init__(self):
    for field in ("ttft_s", "tpot_s"):
      if not getattr(self, field) > 0:
        raise ValueError(f"{field} = {getattr(self, field)}; it must be above 0")

  def met_by(self, timing: Timing) -> bool:
    """Whether a request was served within them."""
    slow = timing.ttft_s is not None and timing.ttft_s > self.ttft_s
    return timing.served and not slow and (timing.tpot_s is None or timing.tpot_s <= self.tpot_s)


@dataclasses.dataclass(frozen=True)
class Summary:
  """A load in numbers; percentiles ``{50: …, 95: …, 99: …}`` are of served requests, empty without any.

  Attributes:
    requests: all of them.
    reasons: how often each was an end.
    seconds: from the first arrival to the last end.
    tokens_a_second: new tokens of all requests.
    requests_a_second: that were served.
    ttft_s, tpot_s, latency_s: time to the first token, time per output token, time to the end.
    within: share of all requests that were served within the limits.
    goodput: such requests a second.
    tau: τ, emitted tokens a round, None if rounds are not known.
  """

  requests: int
  reasons: dict[str, int]
  seconds: float
  tokens_a_second: float
  requests_a_second: float
  ttft_s: dict[int, float]
  tpot_s: dict[int, float]
  latency_s: dict[int, float]
  within: float
  goodput: float
  tau: float | None

  def to_json(self) -> dict[str, Any]:
    """As JSON has it: keys are text."""
    plain = lambda value: (
      {str(key): item for key, item in value.items()} if isinstance(value, dict) else value
    )
    return {field.name: plain(getattr(self, field.name)) for field in dataclasses.fields(self)}


def summarize(timings: Sequence[Timing], limits: Limits | None = None) -> Summary:
  """A load in numbers.

  Args:
    timings: of all of its requests, refused ones too.
    limits: for ``within`` and ``goodput``; None: every served request is within.

  Raises:
    ValueError: no request.
  """
  if not timings:
    raise ValueError("timings is empty; at least one request is needed")
  limits = limits or Limits()
  seconds = max(timing.ended_s for timing in timings) - min(timing.arrived_s for timing in timings)
  served = [timing for timing in timings if timing.served]
  within = sum(map(limits.met_by, timings))
  rounds = [timing.rounds for timing in timings]
  tokens = sum(timing.new_tokens for timing in timings)
  a_second = lambda amount: amount / seconds if seconds else 0.0
  return Summary(
    requests=len(timings),
    reasons=dict(collections.Counter(timing.reason.value for timing in timings)),
    seconds=seconds,
    tokens_a_second=a_second(tokens),
    requests_a_second=a_second(len(served)),
    ttft_s=_percentiles([timing.ttft_s for timing in served]),
    tpot_s=_percentiles([timing.tpot_s for timing in served]),
    latency_s=_percentiles([timing.ended_s - timing.arrived_s for timing in served]),
    within=within / len(timings),
    goodput=a_second(within),
    tau=None if None in rounds or not sum(rounds) else tokens / sum(rounds),
  )


def _percentiles(values: Sequence[float | None]) -> dict[int, float]:
  known = [value for value in values if value is not None]
  return {share: float(np.percentile(known, share)) for share in PERCENTILES} if known else {}
