"""Speedups from expected tokens and costs: the papers' formulas, and a device's own table.

Costs without a unit are in plain rounds: 1 is one target call for one token.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from specjax.analysis.checks import above, at_least, share, whole
from specjax.analysis.costs import CostTable
from specjax.analysis.expected import iid_tokens


def leviathan_speedup(alpha: float, window: int, c: float) -> float:
  """``E / (γ c + 1)`` with E of eq. 1 (Leviathan et al. 2023, theorem 3.8).

  It takes verifying γ + 1 tokens for as fast as a plain step.

  Args:
    alpha: α, expected acceptance of a draft.
    window: γ, drafts a round.
    c: one draft step over one plain step of the target, at least 0.
  """
  at_least("c", c, 0)
  return iid_tokens(alpha, window) / (window * c + 1)


def leviathan_condition(alpha: float, c: float) -> bool:
  """Whether α > c: then some γ gains, and γ = 1 alone by (1 + α) / (1 + c) (corollary 3.9)."""
  share("alpha", alpha)
  at_least("c", c, 0)
  return alpha > c


def operations_factor(alpha: float, window: int, c_hat: float) -> float:
  """How many times the arithmetic of plain decoding a token takes (theorem 3.11).

  ``(1 - α)(γ ĉ + γ + 1) / (1 - α^(γ + 1))``.

  Args:
    alpha: α, expected acceptance of a draft.
    window: γ, drafts a round.
    c_hat: ĉ, operations of the draft a token over those of the target.
  """
  at_least("c_hat", c_hat, 0)
  return (window * c_hat + window + 1) / iid_tokens(alpha, window)


def memory_bytes_a_token(
  *,
  parameter_bytes: float,
  kv_bytes_a_token: float,
  live: float,
  tokens_a_round: float = 1.0,
  draft_parameter_bytes: float = 0,
  draft_kv_bytes_a_token: float = 0,
  draft_steps: int = 0,
) -> float:
  """Bytes that are read for each emitted token, one row, each weight and live cache row once a call.

  A round reads the target's weights and cache once, however many tokens it emits: with E tokens a round
  these reads are E times fewer a token (Leviathan et al. 2023, section 3.4). The draft's come on top,
  once a step.

  Args:
    parameter_bytes: of the target's weights that a call reads.
    kv_bytes_a_token: of the target's cache, all layers.
    live: committed tokens.
    tokens_a_round: at least 1.
    draft_parameter_bytes: of the draft's weights.
    draft_kv_bytes_a_token: of the draft's cache.
    draft_steps: calls of the draft a round.
  """
  asked = dict(locals())
  for name, value in asked.items():
    at_least(name, value, 1 if name == "tokens_a_round" else 0)
  target = parameter_bytes + live * kv_bytes_a_token
  draft = draft_steps * (draft_parameter_bytes + live * draft_kv_bytes_a_token)
  return (target + draft) / tokens_a_round


def speedup(
  tokens_a_round: float,
  *,
  verify: float,
  draft: float = 0.0,
  overhead: float = 0.0,
  prefill: float = 0.0,
  response: float | None = None,
) -> float:
  """Plain time over speculative time, costs in plain rounds.

  Args:
    tokens_a_round: expected or measured tokens, above 0.
    verify: the target's round over the nodes, above 0.
    draft: all steps of a round's draft.
    overhead: what else a round takes.
    prefill: of the prompt, which both pay.
    response: new tokens; needed where there is a prefill to share among them.
  """
  above("tokens_a_round", tokens_a_round, 0)
  above("verify", verify, 0)
  for name, value in (("draft", draft), ("overhead", overhead), ("prefill", prefill)):
    at_least(name, value, 0)
  a_token = (verify + draft + overhead) / tokens_a_round
  if response is None:
    if prefill:
      raise ValueError(f"prefill = {prefill} needs response, the number of new tokens")
    return 1 / a_token
  above("response", response, 0)
  return (prefill + response) / (prefill + response * a_token)


@dataclasses.dataclass(frozen=True)
class Prediction:
  """Seconds of one response, as a table of costs has them.

  Attributes:
    prefill_s: of the prompt, the same for both.
    decode_s: speculative decoding.
    plain_s: plain decoding of the same number of tokens.
  """

  prefill_s: float
  decode_s: float
  plain_s: float

  @property
  def speedup(self) -> float:
    """Plain over speculative, decode alone."""
    return self.plain_s / self.decode_s

  @property
  def speedup_with_prefill(self) -> float:
    """Plain over speculative, with the prompt."""
    return (self.plain_s + self.prefill_s) / (self.decode_s + self.prefill_s)


def predicted_seconds(
  table: CostTable,
  *,
  prompt_tokens: int,
  new_tokens: int,
  node_counts: Mapping[int | str, int],
  drafted: Mapping[str, int] = MappingProxyType({}),
  missed: int = 0,
  batch: int = 1,
  prefill_widths: Sequence[int] = (),
  calls: int = 1,
) -> Prediction:
  """Time of a response, round by round, as its live length grows from the prompt's to the end.

  Rounds of all widths are taken to be spread evenly over the response. A round costs what ``table`` has
  for its nodes, batch and live length; a drafted one the drafter's cost on top.

  Args:
    table: costs of the device.
    prompt_tokens: committed tokens before the first round, at least 1.
    new_tokens: of the response, at least 1.
    node_counts: nodes verified → rounds (keys may be text, as JSON has them).
    drafted: drafter, a key of the table's drafts → rounds that called it; other rounds drafted nothing.
    missed: tokens of such rounds that a later draft had to catch up on.
    batch: rows decoded together; seconds are those of the whole batch.
    prefill_widths: widths of the prompt's chunks; none: a prefill of 0.
    calls: of the compiled loop, for both.

  Raises:
    ValueError: no round, more drafted ones than rounds, or a drafter that is not in the table.
  """
  whole("prompt_tokens", prompt_tokens, 1)
  whole("new_tokens", new_tokens, 1)
  counts = {int(nodes): whole(f"node_counts[{nodes}]", n, 0) for nodes, n in node_counts.items()}
  rounds = sum(counts.values())
  if not rounds:
    raise ValueError(f"node_counts = {dict(node_counts)}; it must have a round")
  calls_of = {name: whole(f"drafted[{name!r}]", n, 0) for name, n in drafted.items()}
  if sum(calls_of.values()) > rounds:
    raise ValueError(f"drafted = {dict(drafted)}; it must be at most the {rounds} rounds")
  plain_lives = prompt_tokens + np.arange(new_tokens)
  lives = prompt_tokens + np.arange(rounds) * (new_tokens / rounds)
  ms = math.fsum(
    count * table.round_ms_at(nodes, batch=batch, live=lives).mean() for nodes, count in counts.items()
  )
  for name, n in calls_of.items():
    ms += n * table.draft_ms_at(name, batch=batch, live=lives).mean()
  ms += whole("missed", missed, 0) * max(
    (table.drafts[name]["catch_up_ms"] for name, n in calls_of.items() if n), default=0.0
  )
  plain_ms = table.round_ms_at(1, batch=batch, live=plain_lives).sum()
  host_ms = whole("calls", calls, 1) * table.call_ms
  return Prediction(
    prefill_s=table.prefill_ms_of(prefill_widths) / 1e3,
    decode_s=float(ms + host_ms) / 1e3,
    plain_s=float(plain_ms + host_ms) / 1e3,
  )
