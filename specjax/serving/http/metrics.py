"""What a server counts, as Prometheus reads it (text format 0.0.4).

The few lines of that format are written here: all counts are the scheduler's or the results', so a client
library would only be handed finished numbers. The tests read them with its parser. No jax.
"""

from __future__ import annotations

import bisect
import collections
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from specjax.serving.requests import Phase, Reason
from specjax.serving.summary import Timing

if TYPE_CHECKING:
  from specjax.serving.sampler import Output
  from specjax.serving.scheduler import Scheduler

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_RUNNING = (Phase.PREFILL, Phase.SPECULATING, Phase.FALLBACK)


class Histogram:
  """Counts of values up to bounds."""

  def __init__(self, bounds: Sequence[float]):
    self._bounds = tuple(bounds)
    self._counts = [0] * (len(bounds) + 1)
    self._sum = 0.0

  def observe(self, value: float) -> None:
    self._counts[bisect.bisect_left(self._bounds, value)] += 1
    self._sum += value

  def samples(self) -> Iterable[tuple[str, Mapping[str, str], float]]:
    total = 0
    for bound, count in zip((*self._bounds, math.inf), self._counts, strict=True):
      total += count
      yield "_bucket", {"le": _number(bound)}, total
    yield "_sum", {}, self._sum
    yield "_count", {}, total


class Metrics:
  """Counts since the server began. May be called from any thread."""

  def __init__(self):
    self._lock = threading.Lock()
    self._reasons: collections.Counter[Reason] = collections.Counter()
    self._responses: collections.Counter[int] = collections.Counter()
    self._ttft, self._tpot = Histogram(TTFT_BUCKETS), Histogram(TPOT_BUCKETS)
    self._rounds = self._round_tokens = self._depth = self._accepted = 0
    self._phases: collections.Counter[Phase] = collections.Counter()
    self._kv_tokens = self._kv_limit = self._waiting = 0
    self._counts = dict.fromkeys(("prompt", "prefix", "generated", "preemptions", "steps"), 0)

  def responded(self, status: int) -> None:
    """A response began."""
    with self._lock:
      self._responses[status] += 1

  def ended(self, output: Output, timing: Timing) -> None:
    """A request got its last output."""
    row = output.result
    with self._lock:
      self._reasons[timing.reason] += 1
      self._rounds += row.rounds
      self._round_tokens += sum(row.emitted)
      self._depth += sum(row.depth)
      self._accepted += sum(row.accepted)
      for histogram, value in ((self._ttft, timing.ttft_s), (self._tpot, timing.tpot_s)):
        if value is not None:
          histogram.observe(value)

  def stepped(self, phases: Iterable[Phase], scheduler: Scheduler) -> None:
    """A step was done; called by the thread that did it.

    Args:
      phases: of all that live.
      scheduler: its books.
    """
    counts = scheduler.counts
    with self._lock:
      self._phases = collections.Counter(phases)
      self._kv_tokens, self._kv_limit = scheduler.live, scheduler.config.kv_budget
      self._waiting = scheduler.waiting
      self._counts = {
        "prompt": counts.prompt_tokens,
        "prefix": counts.prefix_tokens,
        "generated": counts.emitted,
        "preemptions": counts.preemptions,
        "steps": counts.steps,
      }

  def render(self, *, up: bool) -> str:
    """All of it, one metric after the other.

    Args:
      up: whether the engine serves.
    """
    with self._lock:
      counts, one = self._counts, lambda value: [("", {}, value)]
      by = lambda label, of, keys: [("", {label: str(key)}, of[key]) for key in keys]
      share = lambda part, whole: part / whole if whole else math.nan
      kinds = [
        ("up", "gauge", "1 while the engine serves.", one(int(up))),
        ("requests", "counter", "Ended, by reason.", by("reason", self._reasons, Reason)),
        ("http_responses", "counter", "By status.", by("status", self._responses, sorted(self._responses))),
        ("requests_waiting", "gauge", "Without a row.", one(self._waiting)),
        ("requests_running", "gauge", "With a row, by phase.", by("phase", self._phases, _RUNNING)),
        ("kv_tokens", "gauge", "Tokens of texts that have a row.", one(self._kv_tokens)),
        ("kv_tokens_limit", "gauge", "The KV budget.", one(self._kv_limit)),
        ("prompt_tokens", "counter", "Prefilled, after preemptions again.", one(counts["prompt"])),
        ("prefix_tokens", "counter", "Copied from a kept prefix instead.", one(counts["prefix"])),
        ("generated_tokens", "counter", "Passed on.", one(counts["generated"])),
        ("preemptions", "counter", "Rows taken from requests.", one(counts["preemptions"])),
        ("steps", "counter", "Of the engine.", one(counts["steps"])),
        ("rounds", "counter", "Target calls of ended requests.", one(self._rounds)),
        ("round_tokens", "counter", "Emitted in these rounds.", one(self._round_tokens)),
        ("draft_depth", "counter", "Depths proposed in these rounds.", one(self._depth)),
        ("draft_accepted", "counter", "Drafts accepted of these.", one(self._accepted)),
        ("tau", "gauge", "Tokens a round, of ended requests.", one(share(self._round_tokens, self._rounds))),
        ("acceptance", "gauge", "Accepted / proposed depth.", one(share(self._accepted, self._depth))),
        ("time_to_first_token_seconds", "histogram", "From submission.", self._ttft.samples()),
        ("time_per_output_token_seconds", "histogram", "Behind the first.", self._tpot.samples()),
      ]
      return "".join(line for kind in kinds for line in _lines(*kind))


def _lines(
  name: str, kind: str, about: str, samples: Iterable[tuple[str, Mapping[str, str], float]]
) -> Iterable[str]:
  name = f"specjax_{name}" + ("_total" if kind == "counter" else "")
  yield f"# HELP {name} {about}\n# TYPE {name} {kind}\n"
  for suffix, labels, value in samples:
    # Labels are names of ours and numbers: nothing to escape.
    inside = ",".join(f'{label}="{text}"' for label, text in labels.items())
    yield f"{name}{suffix}{{{inside}}} {_number(value)}\n" if inside else f"{name}{suffix} {_number(value)}\n"


def _number(value: float) -> str:
  return {math.inf: "+Inf"}.get(value, "NaN" if value != value else repr(value))
