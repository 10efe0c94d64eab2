"""Timed runs, compile counts, and the comparison with plain decoding.

Times are wall times of finished work: every timed part ends with `jax.block_until_ready`, and every
program it needs has been compiled before.
"""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments.runtime import Job, Method, make_settings
from specjax import decode
from specjax.decode import DecodeState, Finish, RowResult
from specjax.models import Decoder
from specjax.sampling import Settings

# Below this share of the logit scale two tokens count as tied: float32 sums taken in another order differ.
TIE = 1e-4
# Rounds of one method before the next has its turn: about half a second here, where a call costs 1 ms.
TURN = 16
_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"
_compiled = 0


def _count(event: str, duration: float, **_) -> None:
  global _compiled
  _compiled += event == _BACKEND_COMPILE


jax.monitoring.register_event_duration_secs_listener(_count)


def compile_count() -> int:
  """Programs compiled, or taken from the compilation cache, since this module was imported."""
  return _compiled


def peak_memory() -> int:
  """Most bytes of memory that this process has held on the host."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak if sys.platform == "darwin" else peak * 1024


@dataclasses.dataclass(frozen=True)
class Timed:
  """One run of a batch.

  Attributes:
    rows: results, one a prompt.
    prefill_s, decode_s: seconds of the whole batch.
    compiles: programs compiled meanwhile; anything but 0 spoils the times.
  """

  rows: list[RowResult]
  prefill_s: float
  decode_s: float
  compiles: int

  @property
  def new_tokens(self) -> int:
    return sum(len(row.tokens) for row in self.rows)


def prefill(
  job: Job, method: Method, prompts, max_new_tokens, settings: Settings | None = None
) -> DecodeState:
  """Prefills a batch, with the settings of the flags unless others are given."""
  return decode.prefill(
    method.weights,
    method.config,
    prompts,
    settings=make_settings(len(prompts), max_new_tokens) if settings is None else settings,
    max_new_tokens=max_new_tokens,
    stop_ids=job.stop_ids,
    mesh=job.mesh,
  )


def run_timed(job: Job, method: Method, prompts, max_new_tokens) -> Timed:
  """Prefills and decodes a batch, blocking on each; ``max_new_tokens`` is one or one a row."""
  compiles = compile_count()
  start = time.perf_counter()
  state = prefill(job, method, prompts, max_new_tokens)
  jax.block_until_ready(state)
  prefilled = time.perf_counter()
  state = decode.generate(method.weights, state, method.config)
  jax.block_until_ready(state)
  done = time.perf_counter()
  compiles = compile_count() - compiles
  return Timed(decode.results(state), prefilled - start, done - prefilled, compiles)


def run_in_turns(
  job: Job, methods: Sequence[Method], prompts, max_new_tokens, rounds: int = TURN
) -> list[Timed]:
  """`run_timed` of several methods at once, see `in_turns`: one `Timed` a method, in order."""
  compiles = compile_count()
  states, prefill_s = [], []
  for method in methods:
    start = time.perf_counter()
    states.append(jax.block_until_ready(prefill(job, method, prompts, max_new_tokens)))
    prefill_s.append(time.perf_counter() - start)
  decode_s = in_turns(methods, states, rounds)
  compiles = compile_count() - compiles
  timed = zip(states, prefill_s, decode_s, strict=True)
  return [Timed(decode.results(state), before, behind, compiles) for state, before, behind in timed]


def in_turns(methods: Sequence[Method], states: list[DecodeState], rounds: int = TURN) -> list[float]:
  """Decodes every state to its end, so many rounds of each in turn; seconds of each.

  A machine whose speed drifts within seconds is then the same machine for all of them, and ratios hold.
  Every other cycle goes backwards, so that none is always behind another.

  Args:
    methods: how, one a state.
    states: replaced by those behind the last round.
    rounds: of a turn.
  """
  seconds = [0.0] * len(states)
  running = [i for i, state in enumerate(states) if unfinished(state)]
  while running:
    for i in running:
      start = time.perf_counter()
      state = decode.generate(methods[i].weights, states[i], methods[i].config, rounds)
      states[i] = jax.block_until_ready(state)
      seconds[i] += time.perf_counter() - start
    running = [i for i in reversed(running) if unfinished(states[i])]
  return seconds


def unfinished(state: DecodeState) -> bool:
  """Whether a row is active; on the host, where nothing compiles for it."""
  return bool(((np.asarray(state.finish) == Finish.NONE) & (np.asarray(state.length) > 0)).any())


def compile_method(job: Job, method: Method, prompt_lengths: Sequence[int], batch: int) -> float:
  """Compiles everything that runs over prompts of these lengths need; returns the seconds it took.

  A prefill chunk compiles once a width, and again where the state comes from an earlier chunk and lies
  on its device for good; a prompt is prefilled for each such case. The loop is compiled by calls of zero
  rounds, from a prefill and from an earlier call.
  """
  began = time.perf_counter()
  covered: set[tuple[bool, int]] = set()
  shortest = min(prompt_lengths)
  for length in [shortest, *sorted(set(prompt_lengths))]:
    chunks = {(start > 0, width) for start, width in decode.prefill_chunks(length - 1, method.config)}
    if length != shortest and chunks <= covered:
      continue
    covered |= chunks
    state = prefill(job, method, [[0] * length] * batch, 1, Settings.create(batch))
  for _ in range(2):
    state = decode.generate(method.weights, state, method.config, 0)
  jax.block_until_ready(state)
  return time.perf_counter() - began


@dataclasses.dataclass(frozen=True)
class Difference:
  """Where two runs part.

  Attributes:
    position: index among the new tokens.
    margin: distance of the two tokens' logits under the plain model, as a share of the largest
      absolute logit there; None when one run has no token at the position, or the runs are sampled.
  """

  position: int
  margin: float | None

  @property
  def tie(self) -> bool:
    return self.margin is not None and self.margin < TIE

  def __str__(self) -> str:
    if self.margin is None:
      return f"differs from token {self.position} on"
    what = "a tie" if self.tie else "not a tie"
    return f"differs from token {self.position} on; margin {self.margin:.1e} of the logit scale: {what}"


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
  """Index of the first token that differs or is missing, None when the runs are identical."""
  if list(plain) == list(other):
    return None
  pairs = enumerate(zip(plain, other, strict=False))
  return next((i for i, (a, b) in pairs if a != b), min(len(plain), len(other)))


def compare(
  model: Decoder, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int], *, margins: bool
) -> Difference | None:
  """None when the runs are identical; otherwise where they part and by how much.

  Args:
    model: the target.
    prompt: ids.
    plain, other: new tokens of the two runs.
    margins: both are greedy, so that logits explain the choice.
  """
  at = first_difference(plain, other)
  if at is None:
    return None
  if not margins or at >= min(len(plain), len(other)):
    return Difference(at, None)
  return Difference(at, logit_margin(model, [*prompt, *plain[:at]], plain[at], other[at]))


def logit_margin(model: Decoder, tokens: Sequence[int], one: int, two: int) -> float:
  """``|logit[one] - logit[two]| / max |logit|`` behind ``tokens``, from one plain forward."""
  width = -(-len(tokens) // 128) * 128  # few shapes to compile
  padded = np.zeros((1, width), np.int32)
  padded[0, : len(tokens)] = tokens
  logits = _last_logits(model, jnp.asarray(padded), len(tokens) - 1)
  return float(jnp.abs(logits[one] - logits[two]) / jnp.max(jnp.abs(logits)))


@jax.jit
def _last_logits(model, tokens, last):
  hidden = model(tokens, model.init_cache(1, tokens.shape[1]), logits=False).hidden[0]
  return model.unembed(model.norm(jax.lax.dynamic_index_in_dim(hidden, last, keepdims=False)))
