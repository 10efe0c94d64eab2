"""The draft executor and the verify executor: the host's ends of the compiled round.

Draft, verify and accept are one program (`decode.run_rounds`), which chooses the width of each round by
`DecodeConfig.control`. What the host says is how deep drafts may be; what it hears is what was drafted,
verified and emitted, in one small array.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from specjax import decode
from specjax.base import Weights
from specjax.control import Fixed
from specjax.decode import DecodeConfig, DecodeState
from specjax.serving import programs
from specjax.serving.config import Width
from specjax.serving.kv_manager import KVManager, Lane
from specjax.serving.programs import LOG_COLUMNS, Report, RowInputs

_DEPTH = LOG_COLUMNS.index("depth")


class DraftExecutor:
  """Which drafts there may be, and for whom there were any."""

  def __init__(self, config: DecodeConfig):
    drafting = max(tree.max_depth for tree in config.trees) > 0
    if drafting and config.control is None:
      # Rounds in which nothing may be drafted, or nothing is found, are to cost what plain ones do.
      config = dataclasses.replace(config, control=Fixed())
    self.config = config
    self.widths = tuple(Width(tree.max_depth, tree.num_nodes) for tree in config.trees if tree.max_depth > 0)

  def drafted(self, report: Report) -> list[bool]:
    """Of each row, whether anything was proposed for it."""
    depth = report.log[:, _DEPTH]
    return ((depth > 0) & (np.arange(depth.shape[1]) < report.rounds[:, None])).any(axis=1).tolist()


class VerifyExecutor:
  """Runs the target: over chunks of prompts, and over what was drafted."""

  def __init__(
    self, weights: Weights, config: DecodeConfig, rounds: int, beliefs: Mapping[int, Any] | None = None
  ):
    """
    Args:
      weights, config: of decoding.
      rounds: most rounds of a call.
      beliefs: of the controller, for batches of each size; None: those of the weights for all.
    """
    self._weights, self._config, self._rounds = weights, config, rounds
    self._tokens = programs.most_tokens(config, rounds)
    parts = (weights.target, weights.drafter, weights.processor)
    self._of_size = {size: Weights(*parts, believed) for size, believed in (beliefs or {}).items()}

  def read(self, lane: Lane, start: int, count: int, width: int) -> None:
    """Runs ``count`` positions of a lane's text from ``start`` on, padded to ``width``."""
    lane.state, lane.marks[start + count] = programs.read(
      self._weights, lane.state, np.int32(start), self._config, width
    )

  def run(self, kv: KVManager, rounds: int, depth: int) -> jax.Array:
    """Starts rounds of all rows that are in the batch, and empties those that are gone.

    Args:
      kv: has the rows.
      rounds: at most.
      depth: of the deepest draft.

    Returns:
      What `report` waits for.
    """
    gone = kv.take_gone()
    kv.state, packed = self._run(kv.state, gone, rounds, depth)
    return packed

  def _run(self, state: DecodeState, gone: np.ndarray, rounds: int, depth: int):
    weights = self._of_size.get(len(gone), self._weights)
    return programs.run(weights, state, gone, np.int32(rounds), np.int32(depth), self._config, self._rounds)

  def report(self, packed: jax.Array) -> Report:
    """What the rounds did, once they are done."""
    return programs.unpack(packed, self._tokens, self._rounds)

  def warm_up(self, kv: KVManager, inputs: RowInputs) -> None:
    """Runs every program that serving runs once, on states of its own.

    Args:
      kv: whose sizes the batch may have.
      inputs: of a text of two tokens.
    """
    weights, config = self._weights, self._config
    one, other = (Lane(programs.empty(weights, config, 1), inputs.tokens[0, :2]) for _ in range(2))
    for carried in (programs.carry(one.state, np.int32(0)), None):
      one.state = programs.begin(weights, one.state, inputs, carried, config)
    for width in config.prefill_widths:
      self.read(one, 0, 1, width)
    programs.copy_prefix(other.state, one.state, one.marks[1])
    zero = np.int32(0)
    for size in kv.sizes:
      state = decode.insert_row(programs.empty(weights, config, size), zero, one.state, zero)
      programs.carry(state, zero)
      state, packed = self._run(state, np.zeros(size, bool), 0, 0)
      self.report(packed)
      for moved in kv.sizes:
        decode.insert_row(programs.empty(weights, config, moved), zero, state, zero)
