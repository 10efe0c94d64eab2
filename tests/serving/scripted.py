"""An engine without a model: it keeps rows as a device would, and refuses every plan that is not legal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from specjax.serving.plans import Plan, Prefix
from specjax.serving.requests import Reason, Request, Update
from specjax.serving.scheduler import SchedulerConfig

VOCABULARY = 200
# Tokens at which the scripted target's logits are no distribution.
BROKEN = 199


def token_at(seed: int, position: int) -> int:
  """The target's draw: a function of seed and position alone, as the noise of the loop is keyed."""
  return (seed * 7919 + position * 104729 + (seed ^ position) * 31) % 1009 % VOCABULARY


def solo(request: Request) -> tuple[tuple[int, ...], Reason]:
  """The answer of a request that is alone in the world."""
  emitted: list[int] = []
  while len(emitted) < request.max_new_tokens:
    token = token_at(request.sampling.seed, len(request.prompt) + len(emitted))
    if token == BROKEN:
      return tuple(emitted), Reason.FAILED
    emitted.append(token)
    if token in request.stop_ids:
      return tuple(emitted), Reason.STOP
  return tuple(emitted), Reason.LENGTH


@dataclasses.dataclass
class Row:
  request: Request
  text: list[int]
  cached: list[int]  # the tokens whose rows are in the cache


class ScriptedEngine:
  """Carries plans out and checks each against what its rows hold.

  Attributes:
    rows: what is in each row, None if nothing.
    emitted: request → all tokens it was ever given; a text that comes back must hold them.
    read: rows prefilled; copied: rows copied from prefixes; given: rows handed out.
  """

  def __init__(self, config: SchedulerConfig, accepts: Callable[[], int]):
    """
    Args:
      config: the scheduler's.
      accepts: how many drafts the next round of a row would accept at any depth.
    """
    self.config = config
    self.rows: list[Row | None] = [None] * config.slots
    self.emitted: dict[str, list[int]] = {}
    self.read = self.copied = self.given = 0
    self._accepts = accepts

  def step(self, plan: Plan, report_length: bool = True) -> list[Update]:
    """What happened, as a report has it.

    Args:
      plan: to be done.
      report_length: whether a row that has all its tokens says so.
    """
    config = self.config
    for eviction in plan.evict:
      assert self.rows[eviction.row].request.id == eviction.id, f"{eviction} of {self.rows[eviction.row]}"
      self.rows[eviction.row] = None
    for admission in plan.admit:
      request, row = admission.request, admission.row
      assert self.rows[row] is None, f"{admission}: the row is {self.rows[row].request.id}'s"
      assert list(admission.text) == [*request.prompt, *self.emitted.setdefault(request.id, [])]
      assert admission.emitted == len(self.emitted[request.id])
      copied = [] if admission.prefix is None else list(admission.prefix.source[: admission.cached])
      assert len(copied) == admission.cached <= len(admission.text) - 1
      self.rows[row] = Row(request, list(admission.text), copied)
      self.copied += len(copied)
      self.given += 1
    for chunk in plan.prefill:
      row = self.rows[chunk.row]
      assert row.request.id == chunk.id and chunk.start == len(row.cached)
      assert chunk.width in config.prefill_widths and chunk.start + chunk.width <= config.capacity
      assert 0 < chunk.count <= chunk.width and (chunk.count == chunk.width or chunk.last)
      row.cached += row.text[chunk.start : chunk.start + chunk.count]
      self.read += chunk.count
      assert chunk.last == (len(row.cached) == len(row.text) - 1)
    self._check_budgets(plan)
    updates = []
    for seat in plan.decode:
      row = self.rows[seat.row]
      assert row.request.id == seat.id
      assert row.cached == row.text[:-1], f"{seat} decodes on rows that are not its text's"
      updates.append(self._decode(row, plan, report_length))
    live = sum(len(row.text) for row in self.rows if row is not None)
    assert live <= config.kv_budget, f"{live} tokens are live; the budget is {config.kv_budget}"
    return updates

  def _check_budgets(self, plan: Plan) -> None:
    config = self.config
    assert plan.depth in {0, *(width.depth for width in config.widths)}
    nodes = max((width.nodes for width in config.widths if width.depth <= plan.depth), default=1)
    taken = sum(chunk.width for chunk in plan.prefill) + len(plan.decode) * plan.rounds * nodes
    assert taken == plan.tokens <= config.policies.prefill.tokens
    assert plan.rounds == (config.rounds_per_step if plan.decode else 0)

  def _decode(self, row: Row, plan: Plan, report_length: bool) -> Update:
    tokens, reason = [], None
    most = row.request.most_tokens
    for _ in range(plan.rounds):
      for _ in range(min(self._accepts(), plan.depth) + 1):
        if reason is not None or len(row.text) == most:
          break
        token = token_at(row.request.sampling.seed, len(row.text))
        if token == BROKEN:
          reason = Reason.FAILED
          break
        row.text.append(token)
        tokens.append(token)
        if token in row.request.stop_ids:
          reason = Reason.STOP
        elif len(row.text) == most and report_length:
          reason = Reason.LENGTH
    row.cached = row.text[:-1]
    self.emitted[row.request.id] += tokens
    logprobs = tuple(map(float, tokens)) if row.request.logprobs else None
    return Update(row.request.id, tuple(tokens), reason, drafted=plan.depth > 0, logprobs=logprobs)


class Prefixes:
  """Keeps the texts it is shown; finds the longest beginning that one of them shares."""

  def __init__(self):
    self.kept: list[tuple[int, ...]] = []
    self.asked = 0

  def __call__(self, request: Request, text: tuple[int, ...]) -> Prefix | None:
    self.asked += 1
    shared = lambda kept: next(
      (i for i, (a, b) in enumerate(zip(kept, text)) if a != b), min(len(kept), len(text))
    )
    best = max(self.kept, key=shared, default=())
    return Prefix(shared(best), best) if best else None
