"""Rows in flight: the target writes many texts in one static batch, and finished rows are replaced."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from specjax import decode
from specjax.base import Weights
from specjax.decode import DecodeConfig, DecodeState, Finish
from specjax.drafters import NoDrafter
from specjax.models import Decoder
from specjax.sampling import Settings
from specjax.training.features import Recorder
from specjax.verify import DrawAndFollow

# Rounds between two looks at which rows have ended: a row that has waits half of them on average.
_BURST = 16
# Rows to one prompt of a group that is prefilled together: small groups wait less for rows to end.
_GROUP_SHARE = 16
_CHUNK, _MOST_CHUNK = 32, 256


class Job(NamedTuple):
  """A text to be written.

  Attributes:
    number: names it.
    prompt: token ids.
    temperature: 0 is greedy.
    seed: of its noise.
  """

  number: int
  prompt: tuple[int, ...]
  temperature: float
  seed: int


class Written(NamedTuple):
  """A text that has ended.

  Attributes:
    number: of its job.
    tokens: int32 ``[T]``, the prompt's and the new ones.
    prompt_length: tokens of the prompt.
    finish: why it ended.
    taps: ``[T - 1, taps, D]``, features of all positions but the last; None if none were asked for.
  """

  number: int
  tokens: np.ndarray
  prompt_length: int
  finish: Finish
  taps: np.ndarray | None

  @property
  def new(self) -> np.ndarray:
    return self.tokens[self.prompt_length :]


class Slots:
  """A batch whose rows are handed from job to job. Nothing compiles behind `compile`.

  The order in which jobs get their rows is a function of the jobs alone, and noise is keyed by job: what
  is written can be written again, bit for bit, by the same program.
  """

  def __init__(
    self,
    model: Decoder,
    *,
    batch_size: int,
    prompt_limit: int,
    new_tokens: int,
    taps: tuple[int, ...] = (),
    group: int | None = None,
    implementation: str = "auto",
  ):
    """
    Args:
      model: the target.
      batch_size: rows.
      prompt_limit: most tokens of a prompt.
      new_tokens: most tokens to write behind it.
      taps: layers whose input is kept; none: no features.
      group: prompts that are prefilled together; None: a sixteenth of the rows.
      implementation: of `tree_attention`.

    Raises:
      ValueError: more tokens than the model has positions, or a group that does not fit the rows.
    """
    limit = prompt_limit + new_tokens
    if group is not None and not 1 <= group <= batch_size:
      raise ValueError(f"group = {group}; it must be in [1, {batch_size}], the rows")
    if limit > model.config.max_length:
      raise ValueError(
        f"prompts of {prompt_limit} and {new_tokens} new tokens need {limit} positions; "
        f"the model was made for {model.config.max_length}"
      )
    self._recorder = Recorder(taps, model.config.d_model) if taps else None
    widest = min(-(-max(prompt_limit - 1, 1) // _CHUNK) * _CHUNK, _MOST_CHUNK)
    self._config = DecodeConfig(
      drafter=self._recorder or NoDrafter(),
      rule=DrawAndFollow(),
      num_real_tokens=model.config.num_real_tokens,
      length_limit=limit,
      prefill_widths=tuple(range(_CHUNK, widest + 1, _CHUNK)),
      implementation=implementation,
      logprobs="off",
    )
    self._weights = Weights(model)
    self._batch, self._prompt_limit = batch_size, prompt_limit
    self._group = max(1, batch_size // _GROUP_SHARE) if group is None else group
    self._last: tuple[tuple, DecodeState] | None = None

  def compile(self) -> None:
    """Runs each program once."""
    state = decode.init_state(self._weights, self._config, self._batch)
    for width in self._config.prefill_widths:
      prompt = (0,) * min(width + 1, self._prompt_limit)
      source = self._prefill([Job(0, prompt, 0.0, 0)], 1, ())
      state = decode.insert_row(state, np.int32(0), source, np.int32(0))
      state = decode.generate(self._weights, state, self._config, 1)
    self._features(state, 0, 2)

  def run(
    self,
    jobs: Iterable[Job],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    features: bool = True,
    progress: Callable[[int], None] = lambda new_tokens: None,
  ) -> Iterator[Written]:
    """Writes the texts of all jobs; each is yielded when it has ended.

    Args:
      jobs: what to write.
      max_new_tokens: budget of each.
      stop_ids: ids that end a text; it keeps them.
      features: read those that were recorded.
      progress: is told how many tokens were written since it was last told.

    Raises:
      ValueError: a prompt that is empty or too long, an id that is none, or too many stop ids.
    """
    # Prompts of about one length are prefilled together; long texts begin early.
    queue = collections.deque(sorted(jobs, key=lambda job: (-len(job.prompt), job.number)))
    if queue and len(queue[0].prompt) > self._prompt_limit:
      longest = queue[0]
      raise ValueError(
        f"prompt of job {longest.number} has {len(longest.prompt)} tokens; the limit is {self._prompt_limit}"
      )
    running: dict[int, Job] = {}
    seen = np.zeros(self._batch, np.int64)
    state = decode.init_state(self._weights, self._config, self._batch)
    while queue or running:
      free = [row for row in range(self._batch) if row not in running]
      while queue and len(free) >= min(self._group, len(queue)):
        group = [queue.popleft() for _ in range(min(self._group, len(queue)))]
        source = self._prefill(group, max_new_tokens, tuple(stop_ids))
        for place, job in enumerate(group):
          row = free.pop(0)
          state = decode.insert_row(state, np.int32(row), source, np.int32(place))
          running[row], seen[row] = job, len(job.prompt)
      state = decode.generate(self._weights, state, self._config, _BURST)
      length, finish = jax.device_get((state.length, state.finish))
      rows = sorted(running)
      progress(int((length[rows] - seen[rows]).sum()))
      seen[rows] = length[rows]
      ended = [row for row in rows if finish[row] != Finish.NONE]
      tokens = jax.device_get(state.tokens) if ended else None
      for row in ended:
        job, reason = running.pop(row), Finish(int(finish[row]))
        text = tokens[row, : length[row]].copy()
        taps = self._features(state, row, len(text)) if features else None
        yield Written(job.number, text, len(job.prompt), reason, taps)

  def _prefill(self, group: list[Job], max_new_tokens: int, stop_ids: tuple[int, ...]) -> DecodeState:
    """Rows for a group of jobs, filled up with copies of its last one."""
    jobs = [*group, *[group[-1]] * (self._group - len(group))]
    settings = Settings.create(
      len(jobs), temperature=[job.temperature for job in jobs], seed=[job.seed for job in jobs]
    )
    asked = (tuple(job.prompt for job in jobs), max_new_tokens, stop_ids)
    if self._last is not None and self._last[0] == asked:
      return self._last[1].replace(settings=settings)  # a prefill draws nothing
    self._last = None
    source = decode.prefill(
      self._weights,
      self._config,
      asked[0],
      settings=settings,
      max_new_tokens=max_new_tokens,
      stop_ids=stop_ids,
    )
    self._last = asked, source
    return source

  def _features(self, state: DecodeState, row: int, length: int) -> np.ndarray | None:
    return None if self._recorder is None else self._recorder.read(state.drafter, row, length - 1)
