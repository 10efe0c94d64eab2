"""Loads: their laws, their seeds, and summaries of what they met."""

import math
import statistics

import numpy as np
import pytest

from specjax.serving.arrivals import (
  ARRIVALS,
  LENGTHS,
  Closed,
  Fixed,
  LogNormal,
  Paced,
  Poisson,
  Uniform,
  Workload,
  make_arrivals,
  make_lengths,
)
from specjax.serving.requests import Reason
from specjax.serving.summary import Limits, Timing, summarize

PROMPTS, NEW = Uniform(1, 100), LogNormal(20, 0.5, 1, 400)


def workload(arrivals, prompt=PROMPTS, requests=2000, seed=3):
  return Workload(arrivals=arrivals, prompt=prompt, new=NEW, requests=requests, seed=seed)


def test_poisson_gaps_are_exponential():
  """Mean and spread 1 / rate, and about as many arrivals in a second as the law has."""
  arrivals = workload(Poisson(rate=4.0)).start().take(math.inf)
  gaps = np.diff([0.0, *(arrival.time_s for arrival in arrivals)])
  assert len(arrivals) == 2000 and (gaps > 0).all()
  # Each is 1 / 4 with an error of a 45th part.
  assert gaps.mean() == pytest.approx(0.25, rel=0.07) and gaps.std() == pytest.approx(0.25, rel=0.1)
  counts = np.histogram([a.time_s for a in arrivals], bins=np.arange(0, 450, 1.0))[0]
  assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.2)


def test_lengths_have_their_laws():
  arrivals = workload(Paced(rate=2.0)).start().take(math.inf)
  assert [arrival.time_s for arrival in arrivals[:3]] == [0.0, 0.5, 1.0]
  prompts, new = zip(*((arrival.prompt_tokens, arrival.new_tokens) for arrival in arrivals))
  assert (min(prompts), max(prompts)) == (1, 100) and statistics.mean(prompts) == pytest.approx(
    50.5, rel=0.05
  )
  assert statistics.median(new) == pytest.approx(20, rel=0.05) and min(new) >= 1 and max(new) <= 400
  assert np.std(np.log(new)) == pytest.approx(0.5, rel=0.1)
  cut = LogNormal(50, 2.0, 40, 60)
  assert {min(max(length, 40), 60) for length in _draw(cut)} == set(_draw(cut)) and len(set(_draw(cut))) > 3


def _draw(law):
  return [a.prompt_tokens for a in workload(Paced(), prompt=law, requests=200).start().take(math.inf)]


def test_lengths_do_not_depend_on_arrivals():
  """The same request numbers have the same lengths, whoever comes when; another seed has others."""
  lengths = lambda arrivals, seed: [
    a[2:] for a in sorted(_all(workload(arrivals, requests=30, seed=seed)), key=lambda a: a.number)
  ]
  assert lengths(Poisson(1.0), 3) == lengths(Closed(2), 3) != lengths(Closed(2), 4)


def _all(load):
  """Everybody, in a world where each request ends a second after it came."""
  source, taken = load.start(), []
  while source.next_s is not None:
    now = source.next_s
    for arrival in source.take(now):
      taken.append(arrival)
      source.ended(now + 1.0)
  return taken


def test_a_closed_loop_sends_the_next_when_one_ended():
  source = workload(Closed(clients=2, think_s=0.5), requests=4).start()
  assert [arrival.number for arrival in source.take(0.0)] == [0, 1] and source.next_s is None
  source.ended(3.0)
  assert source.next_s == 3.5 and not source.take(3.4)
  source.ended(3.1)
  assert [(a.number, a.time_s) for a in source.take(9.0)] == [(2, 3.5), (3, 3.6)]
  source.ended(9.0)
  assert source.next_s is None and not source.take(math.inf)
  assert len(workload(Closed(clients=9), requests=4).start().take(0.0)) == 4


def test_open_loops_do_not_wait_for_ends():
  source = workload(Poisson(rate=1.0), requests=3).start()
  source.ended(0.0)
  assert len(source.take(math.inf)) == 3


def test_names():
  assert make_arrivals("closed[clients=8,think_s=0.5]") == Closed(8, 0.5)
  assert make_lengths("lognormal[median=30]") == LogNormal(median=30)
  assert make_lengths("fixed[tokens=7]") == Fixed(7)
  for name in ARRIVALS:
    assert make_arrivals(name).name == name
  for name in LENGTHS:
    assert make_lengths(name).name == name


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: make_arrivals("poison"), "arrivals = 'poison'; it must be one of poisson"),
    (lambda: make_arrivals("poisson[speed=1]"), "speed"),
    (lambda: make_lengths("poisson"), "lengths = 'poisson'"),
    (lambda: Poisson(rate=0.0), "poisson: rate = 0.0"),
    (lambda: Poisson(rate=math.nan), "poisson: rate = nan"),
    (lambda: Paced(rate=True), "paced: rate = True"),
    (lambda: Closed(clients=0), "closed: clients = 0"),
    (lambda: Closed(think_s=-1.0), "closed: think_s = -1.0"),
    (lambda: Fixed(1.5), "fixed: tokens = 1.5"),
    (lambda: Uniform(5, 4), "uniform: high = 4"),
    (lambda: LogNormal(median=0.5), "lognormal: median = 0.5"),
    (lambda: LogNormal(sigma=math.inf), "lognormal: sigma = inf"),
    (lambda: workload(Poisson(), requests=0), "requests = 0"),
    (lambda: workload(Poisson(), seed=-1), "seed = -1"),
    (lambda: Limits(ttft_s=0.0), "ttft_s = 0.0"),
    (lambda: summarize([]), "timings is empty"),
  ],
)
def test_wrong_arguments(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def timing(number, arrived, first, ended, tokens, reason=Reason.LENGTH, rounds=None):
  return Timing(number, arrived, first, ended, 5, tokens, reason, rounds)


def test_a_summary_by_hand():
  """Four requests: served, slow to begin, slow to go on, refused."""
  timings = [
    timing(0, 1.0, 1.5, 3.5, 5),  # TTFT .5, TPOT .5
    timing(1, 2.0, 4.0, 5.0, 3),  # 2, .5
    timing(2, 2.0, 2.5, 6.5, 3),  # .5, 2
    timing(3, 3.0, None, 3.0, 0, Reason.QUEUE_FULL),
  ]
  found = summarize(timings, Limits(ttft_s=1.0, tpot_s=1.0))
  assert (found.requests, found.seconds) == (4, 5.5)
  assert found.reasons == {"length": 3, "queue_full": 1}
  assert found.tokens_a_second == pytest.approx(11 / 5.5) and found.requests_a_second == pytest.approx(
    3 / 5.5
  )
  assert (found.within, found.goodput) == (0.25, pytest.approx(1 / 5.5))
  assert found.ttft_s[50] == 0.5 and found.ttft_s[95] == pytest.approx(0.5 + 0.9 * 1.5)
  assert found.tpot_s[50] == 0.5 and found.latency_s[50] == 3.0
  assert found.tau is None
  assert summarize(timings).within == 0.75
  assert found.to_json()["ttft_s"].keys() == {"50", "95", "99"}


def test_what_was_cut_short_is_not_served():
  """A cancelled or failed request counts for nobody's latency, its tokens for throughput."""
  ends = [Reason.CANCELLED, Reason.FAILED, Reason.SHUTDOWN]
  found = summarize([timing(i, 0.0, 1.0, 2.0, 4, reason, rounds=2) for i, reason in enumerate(ends)])
  assert found.ttft_s == found.tpot_s == found.latency_s == {} and found.within == 0
  assert found.tokens_a_second == 6.0 and found.tau == 2.0


def test_one_token_has_no_time_between_tokens():
  found = summarize([timing(0, 0.0, 1.0, 1.0, 1, Reason.STOP)], Limits(tpot_s=1e-9))
  assert found.tpot_s == {} and found.within == 1
