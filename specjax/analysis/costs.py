"""What rounds cost on one device for one target: a calibration file, read, written and interpolated."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax.analysis.checks import at_least, numbers, shares, short, whole

SCHEMA = 1
KEY_FIELDS = (
  "platform",
  "device_kind",
  "cpu",
  "cpu_count",
  "device_count",
  "model",
  "parameters",
  "dtype",
  "attention",
  "specjax",
  "jax",
  "jaxlib",
)
_DRAFT_FIELDS = ("nodes", "depth", "draft_ms", "catch_up_ms")
_ACCEPTANCE_FIELDS = ("temperature", "proposing", "rates", "rounds")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class CostTable:
  """Milliseconds of rounds by batch, live length (committed tokens) and nodes verified.

  The fields are those of the file, which is JSON; sequences become numpy arrays and are checked.

  Attributes:
    made: when it was measured, ISO 8601.
    key: what it was measured on; `KEY_FIELDS` must all be there.
    batches: int ``[B]``, ascending.
    lives: int ``[L]``, ascending.
    nodes: int ``[N]``, ascending, the first is 1 (plain decoding).
    round_ms: float ``[B, L, N]``: a whole round (verify, rule, commit, loop) whose draft is free.
    accept_ms: float ``[N]``: what rule and commit have of it, at the first batch.
    prefill_ms: chunk width → milliseconds of a prefill chunk, at the first batch.
    call_ms: host time of a call of the loop that does no round.
    drafts: drafter as in ``--drafter`` → ``nodes`` it has verified, ``depth`` of them, ``draft_ms [B, L]``
      and ``catch_up_ms``, milliseconds a committed token that it has not seen yet; ``head``, a digest of the
      trained head it was measured with, null without.
    acceptance: drafter → ``temperature``, ``proposing`` (share of rounds with a draft), ``rates`` by
      position and the ``rounds`` they were measured on.
    schema: of the file.

  Raises:
    ValueError: a field that is missing, malformed, out of range or of another shape.
  """

  made: str
  key: Mapping[str, Any]
  batches: np.ndarray
  lives: np.ndarray
  nodes: np.ndarray
  round_ms: np.ndarray
  accept_ms: np.ndarray
  prefill_ms: Mapping[int, float]
  call_ms: float
  drafts: Mapping[str, Mapping[str, Any]]
  acceptance: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
  schema: int = SCHEMA

  def __post_init__(self):
    put = lambda field, value: object.__setattr__(self, field, value)
    if self.schema != SCHEMA:
      raise ValueError(f"schema = {self.schema!r}; this version reads {SCHEMA}")
    if not isinstance(self.made, str):
      raise ValueError(f"made = {self.made!r}; it must be a date and time as text")
    put("key", _fields_of("key", self.key, KEY_FIELDS))
    for field in ("batches", "lives", "nodes"):
      put(field, _axis(field, getattr(self, field)))
    if self.nodes[0] != 1:
      raise ValueError(f"nodes[0] = {self.nodes[0]}; it must be 1 (plain decoding)")
    shape = (len(self.batches), len(self.lives), len(self.nodes))
    put("round_ms", _times("round_ms", self.round_ms, shape, positive=True))
    put("accept_ms", _times("accept_ms", self.accept_ms, shape[2:]))
    put("call_ms", float(_times("call_ms", self.call_ms, ())))
    put("prefill_ms", _prefill(self.prefill_ms))
    put("drafts", {name: _draft(name, cost, shape[:2]) for name, cost in _named("drafts", self.drafts)})
    measured = _named("acceptance", self.acceptance)
    put("acceptance", {name: _acceptance(name, value) for name, value in measured})

  @classmethod
  def read(cls, path: str) -> CostTable:
    """The calibration in a file.

    Raises:
      ValueError: no such file, or one that is malformed; the message names the file.
    """
    try:
      with open(path, encoding="utf-8") as file:
        data = json.load(file)
    except OSError as error:
      raise ValueError(f"{path}: {error.strerror}") from None
    except ValueError as error:
      raise ValueError(f"{path}: not JSON ({error})") from None
    try:
      return cls.from_json(data)
    except ValueError as error:
      raise ValueError(f"{path}: {error}") from None

  @classmethod
  def from_json(cls, data: Any) -> CostTable:
    """The calibration that a decoded file holds."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if not isinstance(data, dict):
      raise ValueError(f"a calibration must be an object, got {type(data).__name__}")
    if data.get("schema") != SCHEMA:
      raise ValueError(f"schema = {data.get('schema')!r}; this version reads {SCHEMA}")
    for name in data:
      if name not in fields:
        raise ValueError(f"{name}: unknown field; a calibration has {', '.join(fields)}")
    for name in fields:
      if name not in data and name != "acceptance":
        raise ValueError(f"{name} is missing")
    return cls(**data)

  def to_json(self) -> dict[str, Any]:
    """What `write` writes, without numpy types."""
    order = ("schema", *(f.name for f in dataclasses.fields(self) if f.name != "schema"))
    return {name: _plain(getattr(self, name)) for name in order}

  def write(self, path: str) -> None:
    """Writes the file, whole or not at all; makes its folder."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    part = f"{path}.part"
    with open(part, "w", encoding="utf-8") as file:
      json.dump(self.to_json(), file, indent=1, ensure_ascii=False, allow_nan=False)
      file.write("\n")
      file.flush()
      os.fsync(file.fileno())
    os.replace(part, path)

  def round_ms_at(self, nodes: float, *, batch: float = 1, live: Any) -> Any:
    """Milliseconds of a round that verifies ``nodes`` nodes (the root included), the draft free.

    Linear between grid points in batch, live length and nodes; beyond the last point of an axis linear
    from its last two, before the first the first point's. Never below 0. A float; for an array of live
    lengths an array of them.
    """
    at_least("nodes", nodes, 1)
    by_nodes = np.moveaxis(self._at(self.round_ms, batch), 1, 0)  # [N, L]
    return _at_lives(self.lives, _linear(self.nodes, by_nodes, nodes), live)

  def draft_ms_at(self, drafter: str, *, batch: float = 1, live: Any) -> Any:
    """Milliseconds of one draft (all its nodes), interpolated as in `round_ms_at`.

    Raises:
      ValueError: the file has no such drafter.
    """
    return _at_lives(self.lives, self._at(self._draft(drafter)["draft_ms"], batch), live)

  def draft_cost(self, drafter: str, *, batch: float = 1, live: float) -> float:
    """c of Leviathan et al. 2023: one step of the draft over one plain step of the target."""
    draft_ms = self.draft_ms_at(drafter, batch=batch, live=live)
    return draft_ms / self._draft(drafter)["depth"] / self.round_ms_at(1, batch=batch, live=live)

  def relative(self, nodes: float, *, batch: float = 1, live: float) -> float:
    """A round of ``nodes`` nodes over a plain one, the draft free."""
    return self.round_ms_at(nodes, batch=batch, live=live) / self.round_ms_at(1, batch=batch, live=live)

  def prefill_ms_of(self, widths: Sequence[int]) -> float:
    """Milliseconds of prefill chunks of these widths, linear between the measured ones."""
    measured = np.array(sorted(self.prefill_ms))
    times = np.array([self.prefill_ms[width] for width in measured])
    for width in widths:
      at_least("prefill width", width, 1)
    return math.fsum(max(float(_linear(measured, times, width)), 0.0) for width in widths)

  def _draft(self, drafter: str) -> Mapping[str, Any]:
    if drafter not in self.drafts:
      known = ", ".join(self.drafts) or "no drafter"
      raise ValueError(f"drafter {drafter!r} is not in the calibration, which has {known}")
    return self.drafts[drafter]

  def _at(self, values: np.ndarray, batch: float) -> np.ndarray:
    """``values [B, L, …]`` at a batch: ``[L, …]``."""
    at_least("batch", batch, 1)
    return _linear(self.batches, values, batch)


def _linear(grid: np.ndarray, values: np.ndarray, x: Any) -> np.ndarray:
  """``values [G, …]`` at ``x``: linear, beyond the end from the last two, before the start constant.

  ``x`` is a number, or ``[…]`` of them, which become the first axes.
  """
  x = np.asarray(x, np.float64)
  if len(grid) == 1:
    return np.broadcast_to(values[0], (*x.shape, *values.shape[1:]))
  right = np.clip(np.searchsorted(grid, x), 1, len(grid) - 1)
  part = np.maximum((x - grid[right - 1]) / (grid[right] - grid[right - 1]), 0.0)
  part = part.reshape(x.shape + (1,) * (values.ndim - 1))
  return values[right - 1] + part * (values[right] - values[right - 1])


def _at_lives(grid: np.ndarray, values: np.ndarray, live: Any) -> float | np.ndarray:
  """``values [L]`` at a live length, or at each of an array of them; never below 0."""
  lives = np.asarray(live)
  at_least("live", lives.min() if lives.size else 0, 0)
  found = np.maximum(_linear(grid, values, lives), 0.0)
  return found if lives.ndim else float(found)


def _axis(name: str, value: Any) -> np.ndarray:
  array = numbers(name, value)
  if array.ndim != 1 or not len(array):
    raise ValueError(f"{name} = {short(value)}; it must be a list with an entry")
  wrong = array[~((array >= 1) & (array == np.floor(array)) & np.isfinite(array))]
  if len(wrong):
    raise ValueError(f"{name} has {wrong[0]:g}; it must hold whole numbers of at least 1")
  if (np.diff(array) <= 0).any():
    raise ValueError(f"{name} = {short(value)}; it must ascend")
  return array.astype(np.int64)


def _times(name: str, value: Any, shape: tuple[int, ...], *, positive: bool = False) -> np.ndarray:
  """Milliseconds of the given shape. Differences of times may be 0, times of work may not."""
  array = numbers(name, value)
  if array.shape != shape:
    raise ValueError(f"{name} has the shape {array.shape}; it must be {shape}")
  wrong = array[~(np.isfinite(array) & ((array > 0) if positive else (array >= 0)))]
  if wrong.size:
    raise ValueError(
      f"{name} has {wrong[0]:g}; it must be finite and {'above' if positive else 'at least'} 0"
    )
  return array


def _named(name: str, value: Any):
  if not isinstance(value, Mapping):
    raise ValueError(f"{name} = {short(value)}; it must be an object")
  return value.items()


def _fields_of(name: str, value: Any, fields: Sequence[str]) -> dict[str, Any]:
  items = dict(_named(name, value))
  for field in fields:
    if field not in items:
      raise ValueError(f"{name} has no {field!r}; it must have {', '.join(fields)}")
  return items


def _prefill(value: Any) -> dict[int, float]:
  items = dict(_named("prefill_ms", value))
  try:
    widths = _axis("prefill_ms", sorted(map(int, items)))
  except (TypeError, ValueError):
    raise ValueError(f"prefill_ms has widths {short(list(items))}; they must be whole numbers") from None
  times = {
    int(width): float(_times(f"prefill_ms[{width}]", t, (), positive=True)) for width, t in items.items()
  }
  return {int(width): times[int(width)] for width in widths}


def _draft(name: str, value: Any, shape: tuple[int, int]) -> dict[str, Any]:
  where = f"drafts[{name!r}]"
  cost = _fields_of(where, value, _DRAFT_FIELDS)
  nodes, depth = (whole(f"{where}.{field}", cost[field], 1) for field in ("nodes", "depth"))
  if depth >= nodes:
    raise ValueError(f"{where}.depth = {depth}; it must be below its nodes, {nodes}")
  return cost | {
    "nodes": nodes,
    "depth": depth,
    "draft_ms": _times(f"{where}.draft_ms", cost["draft_ms"], shape),
    "catch_up_ms": float(_times(f"{where}.catch_up_ms", cost["catch_up_ms"], ())),
  }


def _acceptance(name: str, value: Any) -> dict[str, Any]:
  where = f"acceptance[{name!r}]"
  found = _fields_of(where, value, _ACCEPTANCE_FIELDS)
  return found | {
    "temperature": float(_times(f"{where}.temperature", found["temperature"], ())),
    "proposing": float(shares(f"{where}.proposing", found["proposing"], axes=(0,))),
    "rates": shares(f"{where}.rates", found["rates"]),
    "rounds": whole(f"{where}.rounds", found["rounds"], 0),
  }


def _plain(value: Any) -> Any:
  """Arrays as lists, keys as text."""
  if isinstance(value, np.ndarray | np.generic):
    return value.tolist()
  if isinstance(value, Mapping):
    return {str(name): _plain(item) for name, item in value.items()}
  return value
