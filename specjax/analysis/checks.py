"""Checks of arguments: one ValueError with the name, the value and the limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


def short(value: Any) -> str:
  """A value for a message, cut where it is long."""
  text = repr(value.tolist() if isinstance(value, np.ndarray) else value)
  return text if len(text) <= 60 else f"{text[:57]}..."


def at_least(name: str, value: float, least: float) -> None:
  """Raises for anything but a finite number of at least ``least``."""
  if not least <= value < math.inf:
    raise ValueError(f"{name} = {value}; it must be a finite number of at least {least}")


def above(name: str, value: float, limit: float) -> None:
  """Raises for anything but a finite number above ``limit``."""
  if not limit < value < math.inf:
    raise ValueError(f"{name} = {value}; it must be a finite number above {limit}")


def share(name: str, value: float) -> None:
  """Raises for anything outside [0, 1]."""
  if not 0 <= value <= 1:
    raise ValueError(f"{name} = {value}; it must be in [0, 1]")


def whole(name: str, value: Any, least: int) -> int:
  """The value as an int; raises for anything but a whole number of at least ``least``."""
  if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
    raise ValueError(f"{name} = {short(value)}; it must be a whole number of at least {least}")
  return int(value)


def numbers(name: str, value: Any) -> np.ndarray:
  """Numbers as float64; text, booleans and ragged lists are refused."""
  try:
    array = np.asarray(value)
  except ValueError:
    raise ValueError(f"{name} is ragged; its rows must be of equal length") from None
  if array.size and array.dtype.kind not in "iuf":
    raise ValueError(f"{name} = {short(value)}; it must hold numbers alone")
  return array.astype(np.float64)


def shares(name: str, value: Any, *, axes: Sequence[int] = (1,)) -> np.ndarray:
  """An array of numbers in [0, 1] with one of the given numbers of axes; it may be empty."""
  array = numbers(name, value)
  if array.ndim not in axes:
    raise ValueError(f"{name} has {array.ndim} axes; it must have {' or '.join(map(str, axes))}")
  if not ((array >= 0) & (array <= 1)).all():
    raise ValueError(f"{name} = {short(value)}; each must be in [0, 1]")
  return array


def topology(parents: Sequence[int]) -> tuple[int, ...]:
  """Parents of a tree: -1 for the root, then ``0 <= parents[i] < i``."""
  if not len(parents) or parents[0] != -1:
    raise ValueError(f"parents must start with -1 (the root), got {short(tuple(parents[:3]))}")
  for node, parent in enumerate(parents[1:], start=1):
    if not 0 <= parent < node:
      raise ValueError(f"parents[{node}] = {parent}; it must be in [0, {node})")
  return tuple(map(int, parents))
