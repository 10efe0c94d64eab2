"""Drafters, by name or by ``package.module:factory``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from specjax.base import Drafter
from specjax.drafters.none import NoDrafter
from specjax.drafters.prompt_lookup import PromptLookup
from specjax.drafters.two_model import TwoModel, two_model

DRAFTERS: dict[str, Callable[..., Drafter]] = {
  "none": NoDrafter,
  "prompt_lookup": PromptLookup,
  "two_model": two_model,
}


def make_drafter(name: str, **options: Any) -> Drafter:
  """A drafter by its name, or from outside the package as ``package.module:factory``.

  Args:
    name: a key of `DRAFTERS`, or an importable factory that takes the options and returns a `Drafter`.
    **options: passed on; ``window`` is the draft length G.

  Raises:
    ValueError: unknown name, or a factory that cannot be imported.
  """
  if name in DRAFTERS:
    return DRAFTERS[name](**options)
  module, _, factory = name.partition(":")
  if not factory:
    raise ValueError(f"drafter = {name!r}; it must be one of {', '.join(DRAFTERS)} or package.module:factory")
  try:
    make = getattr(importlib.import_module(module), factory)
  except (ImportError, AttributeError) as error:
    raise ValueError(f"drafter = {name!r} cannot be imported: {error}") from error
  return make(**options)


__all__ = ["DRAFTERS", "NoDrafter", "PromptLookup", "TwoModel", "make_drafter", "two_model"]
