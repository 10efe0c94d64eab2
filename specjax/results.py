"""What rounds did: the log on the device, and a row's result on the host."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import flax.struct
import jax
import numpy as np

Array = jax.Array


class Finish(enum.IntEnum):
  """Why a row ended; `NONE` while it runs or is empty."""

  NONE = 0
  STOP = 1
  LENGTH = 2
  ERROR = 3


@flax.struct.dataclass
class RoundLog:
  """What each round did, uint8 ``[B, C]`` at ``[row, round]``; ``rounds [B]`` of them are written.

  ``emitted`` counts tokens after stops and budgets cut the block, the bonus token included.
  """

  rounds: Array
  proposed: Array  # valid nodes but the root
  depth: Array  # of the deepest of them
  reached: Array  # drafts accepted, and one more if something was proposed behind the last of them
  accepted: Array
  emitted: Array
  nodes: Array  # that the target ran over, the root included
  width: Array  # which of the config's drafters the row asked, from 1; 0 is none of them
  overlap: Array  # float32 [B], sum of Σ min(p, q) over judged drafts
  judged: Array  # int32 [B]


@dataclasses.dataclass(frozen=True)
class RowResult:
  """One row, on the host. Per-round lists have one entry a target call.

  Attributes:
    tokens: new token ids.
    finish: ``stop``, ``length``, ``error``, or None while running.
    proposed: drafts a round, all nodes of a tree but the root.
    depth: of the deepest of them; for chains the same number.
    reached: depths of a round at which drafts were judged: the accepted ones, and one more if something
      was proposed behind the last of them.
    accepted: drafts accepted a round.
    emitted: tokens a round, the bonus included; what stops cut away is not counted.
    nodes: over which the target ran, the root included, proposed or not; 1 is plain decoding.
    width: which drafter of `DecodeConfig.drafters` was asked, from 1; 0 if a controller asked none.
    overlap: mean Σ min(p, q) over judged drafts (the expected acceptance there), None if unknown.
    logprobs: natural logarithm of each new token's probability, None if not asked for.
  """

  tokens: list[int]
  prompt_tokens: int
  finish: str | None
  proposed: list[int]
  depth: list[int]
  reached: list[int]
  accepted: list[int]
  emitted: list[int]
  nodes: list[int]
  width: list[int]
  overlap: float | None
  logprobs: list[float] | None

  @property
  def rounds(self) -> int:
    return len(self.emitted)

  @property
  def tau(self) -> float:
    """τ: emitted tokens a round, bonus included; plain decoding has 1. 0 without rounds."""
    return sum(self.emitted) / self.rounds if self.rounds else 0.0

  @property
  def acceptance_rate(self) -> float:
    """Accepted drafts / proposed depth; 0 when nothing was proposed."""
    return sum(self.accepted) / sum(self.depth) if sum(self.depth) else 0.0

  @property
  def accept_counts(self) -> list[int]:
    """``[a]``: rounds that accepted a drafts, up to the largest a."""
    return np.bincount(self.accepted, minlength=1).tolist() if self.accepted else [0]

  @property
  def reach_counts(self) -> list[int]:
    """``[d - 1]``: rounds that reached depth d: d - 1 accepted, and something proposed behind them."""
    return [sum(reached >= d for reached in self.reached) for d in range(1, max(self.reached, default=0) + 1)]


def results(state: Any) -> list[RowResult]:
  """Reads the rows of a `DecodeState` back. Copies what it needs: the state stays usable."""
  small = state.replace(cache=None, drafter=None, settings=None, processor=None, control=None)
  host = jax.device_get(small)
  rows = []
  for b in range(host.length.shape[0]):
    rounds, start, end = int(host.log.rounds[b]), int(host.prompt_length[b]), int(host.length[b])
    finish = Finish(int(host.finish[b]))
    judged = int(host.log.judged[b])
    rows.append(
      RowResult(
        tokens=host.tokens[b, start:end].tolist(),
        prompt_tokens=start,
        finish=None if finish is Finish.NONE else finish.name.lower(),
        proposed=host.log.proposed[b, :rounds].tolist(),
        depth=host.log.depth[b, :rounds].tolist(),
        reached=host.log.reached[b, :rounds].tolist(),
        accepted=host.log.accepted[b, :rounds].tolist(),
        emitted=host.log.emitted[b, :rounds].tolist(),
        nodes=host.log.nodes[b, :rounds].tolist(),
        width=host.log.width[b, :rounds].tolist(),
        overlap=float(host.log.overlap[b]) / judged if judged else None,
        logprobs=None if host.logprobs is None else host.logprobs[b, start:end].tolist(),
      )
    )
  return rows
