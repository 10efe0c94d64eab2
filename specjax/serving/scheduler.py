"""Who gets a row, and what a step does: continuous batching over static slots, plain Python.

An engine has B slots (rows of one static batch) of ``length_limit`` tokens each. Step by step it asks for a
`plan`, carries it out, and `report`s; in between requests come and go. The scheduler never sees a clock, a
device or a text, so all of it can be tested, and run against a table of costs (`simulate`).

**Order.** First come, first served: nobody overtakes, so requests with a row are always older than those
without. When the KV budget runs out the youngest loses its row, waits again at the head of the queue, and
comes back by recomputation: its prompt and what it had emitted are prefilled. Noise is keyed by seed and
position, so it goes on as if nothing had happened. The oldest never loses its row: everybody's turn comes.

**KV budget.** Counted in tokens over all rows. A row's *text* (prompt and emitted tokens) counts from its
admission on, read or not; a step *grows* a row by ``rounds × (depth of the plan + 1)`` tokens at most, or by
what is left of the request's own budget if that is less. All texts and their growth fit the budget after
every plan, so what is live never exceeds it: the plan's depth is lowered until they do, and where not even
plain rounds fit, the youngest goes. Admission asks for more, so that who comes in does not go at once: each
row *claims* its text and the growth at the deepest draft or, if that is more, ``reserved_share`` of the
tokens it may still emit; with a share of 1 nobody is ever preempted. Rows copied from a kept prefix count
for each row that has them; kept prefixes themselves, and the scratch rows of a round, lie outside
(`DecodeConfig.slots`).

**Token budget.** The widths of a step's prompt chunks, and for each decoding row the nodes of its rounds, are
together at most the prefill policy's ``tokens``: what the target runs over, padding included. The deepest
draft is lowered until decoding leaves room for a chunk of the narrowest width, so prompts always get on.
Copied prefixes cost nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable

from specjax.serving.config import SchedulerConfig, Width
from specjax.serving.entries import Counts, Entry
from specjax.serving.plans import Admission, Chunk, Eviction, Plan, PrefixLookup, Seat
from specjax.serving.policies import Load
from specjax.serving.requests import Phase, Reason, Request, Update

__all__ = ["Counts", "Entry", "Scheduler", "SchedulerConfig", "Width"]


class Scheduler:
  """See the module. Not thread-safe: the thread that runs the engine owns it."""

  def __init__(self, config: SchedulerConfig, prefix: PrefixLookup = lambda request, text: None):
    """
    Args:
      config: what is fixed.
      prefix: finds rows that are kept already; None: nothing is.
    """
    self.config = config
    self.counts = Counts()
    self._prefix = prefix
    self._deepest = config.deepest_planned
    self._live: dict[str, Entry] = {}
    self._waiting: collections.deque[Entry] = collections.deque()
    self._rows: list[Entry | None] = [None] * config.slots
    self._vacated: list[Eviction] = []
    self._open: Plan | None = None
    self._at_work: dict[str, Entry] = {}  # who had a row when the plan was made
    self.closed = False

  # --- who comes and goes --------------------------------------------------------------------------

  def submit(self, request: Request) -> list[Update]:
    """Takes a request in. Its end, if it is refused.

    Raises:
      ValueError: a live request has its id.
    """
    if request.id in self._live:
      raise ValueError(f"id = {request.id!r}; a request of that name has not ended")
    self.counts.submitted += 1
    limit = min(self.config.length_limit, self.config.kv_budget)
    if self.closed:
      return [self._count(Update(request.id, reason=Reason.SHUTDOWN, detail="the server shuts down"))]
    if request.most_tokens > limit:
      detail = (
        f"prompt of {len(request.prompt)} tokens and max_new_tokens = {request.max_new_tokens} "
        f"make {request.most_tokens}; the limit is {limit}"
      )
      return [self._count(Update(request.id, reason=Reason.TOO_LARGE, detail=detail))]
    # Who can have a row at once does not queue.
    if len(self._waiting) >= self.config.queue_limit + self._free_rows:
      detail = f"{len(self._waiting)} requests wait; the limit is {self.config.queue_limit}"
      return [self._count(Update(request.id, reason=Reason.QUEUE_FULL, detail=detail))]
    entry = Entry(request, self.counts.submitted)
    self._live[request.id] = entry
    self._waiting.append(entry)
    return []

  def cancel(self, id: str) -> list[Update]:
    """Ends a request in any phase; one that has ended, or never was, is left alone."""
    entry = self._live.get(id)
    return [] if entry is None else [self._end(entry, Update(id, reason=Reason.CANCELLED))]

  def shutdown(self, *, finish: bool) -> list[Update]:
    """Takes nothing more in. What is live goes on to its end, or ends here."""
    self.closed = True
    live = [] if finish else list(self._live.values())
    end = lambda entry: Update(entry.request.id, reason=Reason.SHUTDOWN, detail="the server shuts down")
    return [self._end(entry, end(entry)) for entry in live]

  # --- a step ----------------------------------------------------------------------------------------

  def plan(self) -> Plan:
    """What the engine is to do next.

    Raises:
      RuntimeError: the plan before was not reported.
    """
    if self._open is not None:
      raise RuntimeError(f"plan {self._open.number} was not reported")
    evict = [*self._take_vacated(), *self._preempt()]
    admit = self._admit()
    prefill, decoding, depth = self._divide()
    rounds = self.config.rounds_per_step if decoding else 0
    for entry in decoding:
      entry.phase = Phase.SPECULATING if depth else Phase.FALLBACK
    self._open = Plan(
      number=self.counts.steps,
      evict=tuple(evict),
      admit=tuple(admit),
      prefill=tuple(prefill),
      decode=tuple(Seat(entry.row, entry.request.id) for entry in decoding),
      depth=depth,
      rounds=rounds,
      tokens=sum(chunk.width for chunk in prefill) + len(decoding) * rounds * self.config.nodes(depth),
    )
    self._at_work = {entry.request.id: entry for entry in self._residents()}
    return self._open

  def report(self, updates: Iterable[Update]) -> list[Update]:
    """What the engine did. Returns what is to be passed on, ends included.

    Each row that decoded reports once: at least one token, or a reason, which is stop, length or failed. A
    row that only read its prompt reports only if it failed. Requests that ended in the meantime need no
    report, and what is said about them is dropped. A request that has all its tokens ends with length.

    Raises:
      RuntimeError: there is no plan.
      ValueError: a report that does not fit the plan; nothing of it is taken.
    """
    if self._open is None:
      raise RuntimeError("there is no plan to report on")
    plan, found = self._open, {}
    decoded = {seat.id for seat in plan.decode}
    known = decoded | {chunk.id for chunk in plan.prefill}
    # A name may be another request's by now.
    live = {id: entry for id, entry in self._at_work.items() if self._live.get(id) is entry}
    for update in updates:
      if update.id not in known or update.id in found:
        times = "once" if update.id in known else "not"
        raise ValueError(f"report on {update.id!r}; the plan has it {times}")
      self._check(update, update.id in decoded, live.get(update.id))
      found[update.id] = update
    missing = (decoded & live.keys()) - found.keys()
    if missing:
      raise ValueError(f"no report on {', '.join(sorted(missing))}, which the plan has decode")
    self._open = None
    self.counts.steps += 1
    for chunk in plan.prefill:
      self.counts.prompt_tokens += chunk.count
      if chunk.id in live:
        live[chunk.id].cached += chunk.count
    return [self._take(live[id], update) for id, update in found.items() if id in live]

  # --- what can be seen ------------------------------------------------------------------------------

  @property
  def idle(self) -> bool:
    """Nothing is live."""
    return not self._live

  @property
  def waiting(self) -> int:
    """Requests without a row."""
    return len(self._waiting)

  @property
  def running(self) -> int:
    """Requests with a row."""
    return len(self._residents())

  @property
  def live(self) -> int:
    """Tokens of the texts that have a row: what counts against the KV budget."""
    return sum(entry.length for entry in self._residents())

  def phase(self, id: str) -> Phase:
    """Where a request is; one that is not live has finished."""
    return self._live[id].phase if id in self._live else Phase.FINISHED

  @property
  def entries(self) -> tuple[Entry, ...]:
    """All that live, oldest first; to be read, not written."""
    return tuple(self._live.values())

  # --- inside ----------------------------------------------------------------------------------------

  def _residents(self) -> list[Entry]:
    """Who has a row, oldest first."""
    return sorted((entry for entry in self._rows if entry is not None), key=lambda entry: entry.number)

  @property
  def _free_rows(self) -> int:
    return self._rows.count(None)

  def _grown(self, entry: Entry, depth: int) -> int:
    """Tokens of a text after a step at most, if it drafts so deep."""
    return entry.length + min(self.config.rounds_per_step * (depth + 1), entry.left)

  def _claimed(self, entry: Entry) -> int:
    reserved = entry.length + math.ceil(self.config.reserved_share * entry.left)
    return max(self._grown(entry, self._deepest), reserved)

  def _take_vacated(self) -> list[Eviction]:
    vacated, self._vacated = self._vacated, []
    return vacated

  def _vacate(self, entry: Entry, *, preempted: bool) -> Eviction:
    eviction = Eviction(entry.row, entry.request.id, preempted)
    self._rows[entry.row] = None
    entry.row, entry.cached = None, 0
    return eviction

  def _preempt(self) -> list[Eviction]:
    """The youngest give up their rows until a plain step of the others fits."""
    residents, evictions = self._residents(), []
    while not self._fits(residents, 0):
      youngest = residents.pop()
      evictions.append(self._vacate(youngest, preempted=True))
      youngest.phase = Phase.WAITING
      youngest.preemptions += 1
      self.counts.preemptions += 1
      self._waiting.appendleft(youngest)
    return evictions

  def _fits(self, residents: list[Entry], depth: int) -> bool:
    return sum(self._grown(entry, depth) for entry in residents) <= self.config.kv_budget

  def _admit(self) -> list[Admission]:
    """The oldest that wait get the first free rows, as far as claims fit the budget."""
    admissions = []
    claimed = sum(map(self._claimed, self._residents()))
    free = [row for row, entry in enumerate(self._rows) if entry is None]
    while self._waiting and free:
      entry = self._waiting[0]
      claimed += self._claimed(entry)
      if claimed > self.config.kv_budget:
        break
      text = (*entry.request.prompt, *entry.emitted)
      prefix = self._prefix(entry.request, text)
      entry.cached = 0 if prefix is None else self._usable(prefix.tokens, len(text) - 1)
      self._waiting.popleft()
      entry.row = free.pop(0)
      entry.phase = Phase.PREFILL
      self._rows[entry.row] = entry
      self.counts.admissions += 1
      self.counts.prefix_tokens += entry.cached
      admissions.append(
        Admission(entry.row, entry.request, text, entry.cached, prefix if entry.cached else None)
      )
    return admissions

  def _usable(self, kept: int, needed: int) -> int:
    """Rows of a kept prefix that are copied: all that are needed, or whole chunks of the narrowest width."""
    narrowest = self.config.prefill_widths[0]
    return needed if kept >= needed else max(kept, 0) // narrowest * narrowest

  def _divide(self) -> tuple[list[Chunk], list[Entry], int]:
    """The step's budget: chunks, who decodes, and how deep."""
    residents, rounds = self._residents(), self.config.rounds_per_step
    ready = [entry for entry in residents if not entry.to_read]
    reading = [entry for entry in residents if entry.to_read]
    load = Load(len(ready), len(reading), len(self._waiting), self.config.slots)
    left = self.config.policies.prefill.tokens
    decodes = self.config.policies.prefill.decodes(load)
    decoding = list(ready) if decodes else []
    depth = self._depth(load, left - (self.config.prefill_widths[0] if reading else 0))
    a_row = rounds * self.config.nodes(depth)
    left -= a_row * len(decoding)
    prefill: list[Chunk] = []
    for entry in reading:
      chunks = self._chunks(entry, left)
      prefill += chunks
      left -= sum(chunk.width for chunk in chunks)
      # Who is read to the end decodes at once, if there is room.
      if decodes and chunks and chunks[-1].last and left >= a_row:
        decoding.append(entry)
        left -= a_row
    if not decoding:
      return prefill, decoding, 0
    together = self._depth(load._replace(decoding=len(decoding)), self.config.policies.prefill.tokens)
    return prefill, decoding, min(depth, together)

  def _depth(self, load: Load, tokens: int) -> int:
    """The deepest draft that the policy, the KV budget, and a budget for the decoding rows allow."""
    limit = self.config.policies.speculation.depth(load)
    nodes = tokens // (max(load.decoding, 1) * self.config.rounds_per_step)
    depths = sorted({width.depth for width in self.config.widths if limit is None or width.depth <= limit})
    allowed = lambda depth: self.config.nodes(depth) <= nodes and self._fits(self._residents(), depth)
    return next((depth for depth in reversed(depths) if allowed(depth)), 0)

  def _chunks(self, entry: Entry, tokens: int) -> list[Chunk]:
    """Chunks of a text's next rows whose widths fit ``tokens``: the last rows padded, those before not."""
    chunks, start, left = [], entry.cached, entry.to_read
    while left:
      room = min(tokens, self.config.capacity - start)
      fitting = [width for width in self.config.prefill_widths if width <= room]
      if not fitting:
        break
      width = next((width for width in fitting if width >= left), fitting[-1])
      count = min(width, left)
      left, tokens = left - count, tokens - width
      chunks.append(Chunk(entry.row, entry.request.id, start, count, width, last=not left))
      start += count
    return chunks

  def _check(self, update: Update, decoded: bool, entry: Entry | None) -> None:
    """Raises ValueError for an update that cannot follow from the plan."""
    what = f"report on {update.id!r}"
    allowed = (Reason.STOP, Reason.LENGTH, Reason.FAILED) if decoded else (Reason.FAILED,)
    if update.reason is not None and update.reason not in allowed:
      raise ValueError(f"{what}: reason = {update.reason}; it must be one of {', '.join(allowed)}")
    if update.tokens and not decoded:
      raise ValueError(f"{what}: {len(update.tokens)} tokens, but the plan does not have it decode")
    if not update.tokens and update.reason is None:
      raise ValueError(f"{what}: it neither emits a token nor ends")
    if entry is None:  # it has ended: nothing is taken from it
      return
    most = min(self._open.rounds * (self._open.depth + 1), entry.left)
    if len(update.tokens) > most:
      raise ValueError(f"{what}: {len(update.tokens)} tokens; it may emit {most}")
    if update.reason is Reason.LENGTH and len(update.tokens) < entry.left:
      raise ValueError(f"{what}: reason = length with {entry.left - len(update.tokens)} tokens left")

  def _take(self, entry: Entry, update: Update) -> Update:
    """Books what a live request emitted."""
    entry.emitted += update.tokens
    self.counts.emitted += len(update.tokens)
    if update.reason is None and not entry.left:
      update = dataclasses.replace(update, reason=Reason.LENGTH)
    if update.reason is not None:
      return self._end(entry, update)
    entry.cached = entry.length - 1
    entry.phase = Phase.SPECULATING if update.drafted else Phase.FALLBACK
    return update

  def _end(self, entry: Entry, update: Update) -> Update:
    """The one place where a live request ends."""
    del self._live[entry.request.id]
    if entry.row is None:
      self._waiting.remove(entry)
    else:
      self._vacated.append(self._vacate(entry, preempted=False))
    entry.phase = Phase.FINISHED
    return self._count(update)

  def _count(self, update: Update) -> Update:
    self.counts.ended[update.reason] += 1
    return update
