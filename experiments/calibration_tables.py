"""From the rows of `calibrate` to a `CostTable`, and its tables. Needs no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments import results
from specjax.analysis import CostTable, chain_tokens
from specjax.decode import RowResult

Row = Mapping[str, Any]


def acceptance_of(rows: Sequence[RowResult]) -> dict[str, Any]:
  """Acceptance over all rounds of some rows.

  Returns:
    ``rounds``; ``proposing``, the share of them that proposed anything; ``rates`` by position: of the rounds
    that proposed something and accepted all before it the share that accepted there. A draft that ended
    early counts as not accepted, as it does for a controller.
  """
  rounds = sum(row.rounds for row in rows)
  proposing = sum(depth > 0 for row in rows for depth in row.depth)
  deepest = max((depth for row in rows for depth in row.depth), default=0)
  rates = []
  for depth in range(1, deepest + 1):
    before = [accepted >= depth - 1 for row in rows for accepted, d in zip(row.accepted, row.depth) if d]
    reached = sum(before)
    rates.append(results.ratio(sum(value >= depth for row in rows for value in row.accepted), reached))
  return {"rounds": rounds, "proposing": results.ratio(proposing, rounds), "rates": rates}


def table_of(rows: Sequence[Row], key: Mapping[str, Any], made: str) -> CostTable:
  """The calibration that the rows of a whole run make.

  Raises:
    ValueError: cases are missing, or a time that cannot be.
  """
  by_part: dict[str, dict[tuple, Row]] = {}
  for row in rows:
    by_part.setdefault(row["part"], {})[row["batch"], row["live"], row["of"]] = row
  (call,) = by_part["call"].values()
  rounds = by_part["round"]
  batches, lives, nodes = (sorted({case[axis] for case in rounds}) for axis in range(3))
  at_first = lambda part: {of: row["ms"] for (_, _, of), row in by_part[part].items()}
  # A timed call has the host's share once, and so many rounds; noise must not leave less than half of it.
  # A draft is a difference of two such calls.
  share = call["ms"] / call["turns"]
  alone = lambda row: max(row["ms"] - share, row["ms"] / 2)
  accept = {of: alone(row) for (_, _, of), row in by_part["accept"].items()}
  drafts = {}
  for drafter, catch_up in at_first("catch_up").items():
    found = {(batch, live): row for (batch, live, of), row in by_part["draft"].items() if of == drafter}
    one = next(iter(found.values()))
    drafts[drafter] = {
      "nodes": one["nodes"],
      "depth": one["depth"],
      "draft_ms": [[max(found[batch, live]["ms"], 0.0) for live in lives] for batch in batches],
      "catch_up_ms": catch_up,
      "head": one.get("head"),
    }
  fields = ("temperature", "proposing", "rates", "rounds")
  return CostTable(
    made=made,
    key=key,
    batches=batches,
    lives=lives,
    nodes=nodes,
    round_ms=[[[alone(rounds[b, live, n]) for n in nodes] for live in lives] for b in batches],
    accept_ms=[accept[n] for n in nodes],
    prefill_ms=at_first("prefill"),
    call_ms=call["ms"],
    drafts=drafts,
    acceptance={
      of: {field: row[field] for field in fields} for (_, _, of), row in by_part.get("acceptance", {}).items()
    },
  )


def expected_tokens(acceptance: Row) -> float:
  """τ that measured acceptance by position gives, rounds that propose nothing included."""
  return 1 + acceptance["proposing"] * (chain_tokens(acceptance["rates"]) - 1)


def mean_acceptance(acceptance: Row) -> float:
  """Accepted drafts over judged ones: rates weighted by the share of rounds that reach them."""
  judged = accepted = 0.0
  reach = 1.0
  for rate in acceptance["rates"]:
    judged += reach
    reach *= float(rate)
    accepted += reach
  return results.ratio(accepted, judged)


def expected_rate(table: CostTable, drafter: str, *, batch: int, live: int) -> float:
  """Tokens a second of a row at the measured acceptance. A round without a proposal costs a plain one."""
  acceptance = table.acceptance[drafter]
  where = dict(batch=batch, live=live)
  share = acceptance["proposing"]
  verify = share * table.round_ms_at(table.drafts[drafter]["nodes"], **where)
  ms = verify + (1 - share) * table.round_ms_at(1, **where) + table.draft_ms_at(drafter, **where)
  return 1e3 * expected_tokens(acceptance) / ms


def show(table: CostTable) -> None:
  """Prints the tables."""
  columns = [(batch, live) for batch in table.batches.tolist() for live in table.lives.tolist()]
  header = [f"{batch} × {live}" for batch, live in columns]
  print("\nRounds with a free draft, relative to a plain round of the same batch × live tokens")
  plain = [f"{table.round_ms_at(1, batch=b, live=live):.2f}" for b, live in columns]
  lines = [["plain, ms", *plain]]
  for nodes in table.nodes.tolist():
    ratios = [f"{table.relative(nodes, batch=b, live=live):.3f}" for b, live in columns]
    lines.append([f"{nodes} nodes", *ratios])
  results.table(["round", *header], lines)
  print("\nDrafts: ms, and c = a draft step over a plain round")
  lines = []
  for drafter, cost in table.drafts.items():
    at = [dict(batch=b, live=live) for b, live in columns]
    lines.append([f"{drafter}, ms", *(f"{table.draft_ms_at(drafter, **w):.2f}" for w in at), None])
    unseen = f"{cost['catch_up_ms']:.2f}"
    lines.append(["  c", *(f"{table.draft_cost(drafter, **w):.4f}" for w in at), unseen])
  results.table(["draft", *header, "catch-up, ms a token"], lines)
  share = [f"{nodes}: {ms:.2f}" for nodes, ms in zip(table.nodes.tolist(), table.accept_ms, strict=True)]
  print(f"\nrule and commit, ms by nodes: {', '.join(share)}")
  chunks = [f"{width}: {ms:.1f}" for width, ms in table.prefill_ms.items()]
  print(f"prefill chunk, ms by width: {', '.join(chunks)}; a call of no rounds {table.call_ms:.2f} ms")
  _show_acceptance(table)


def _show_acceptance(table: CostTable) -> None:
  batch, live = int(table.batches[0]), int(table.lives[0])
  plain = 1e3 / table.round_ms_at(1, batch=batch, live=live)
  for drafter, found in table.acceptance.items():
    if drafter not in table.drafts:
      continue
    rates = ", ".join(f"{rate:.2f}" for rate in found["rates"])
    fast = expected_rate(table, drafter, batch=batch, live=live)
    print(
      f"{drafter}: proposes in {found['proposing']:.0%} of {found['rounds']} rounds, accepted by position "
      f"{rates or 'nothing'} (temperature {found['temperature']:g}); at {live} live tokens this gives "
      f"{expected_tokens(found):.2f} tokens a round and {fast:.1f} tokens/s, plain {plain:.1f}"
    )
