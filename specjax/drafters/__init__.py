"""Drafters, by name or by ``package.module:factory``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from specjax import options
from specjax.base import Drafter
from specjax.drafters.block import Block, BlockWeights, block
from specjax.drafters.eagle import Eagle3Drafter, EagleDrafter, EagleWeights, eagle, eagle3
from specjax.drafters.early_exit import EarlyExitDrafter, EarlyExitWeights, early_exit
from specjax.drafters.medusa import Medusa, MedusaWeights, medusa
from specjax.drafters.none import NoDrafter
from specjax.drafters.prompt_lookup import PromptLookup
from specjax.drafters.self_speculation import SelfSpeculation, self_speculation
from specjax.drafters.two_model import TwoModel, two_model

DRAFTERS: dict[str, Callable[..., Drafter]] = {
  "none": NoDrafter,
  "prompt_lookup": PromptLookup,
  "two_model": two_model,
  "eagle": eagle,
  "eagle3": eagle3,
  "medusa": medusa,
  "block": block,
  "early_exit": early_exit,
  "self_speculation": self_speculation,
}


def parse_drafter(text: str) -> tuple[str, dict[str, Any]]:
  """``"prompt_lookup[matches=8,nodes=9]"`` → its name and its options, see `options.parse`."""
  return options.parse("drafter", text)


def make_drafter(text: str, **others: Any) -> Drafter:
  """A drafter by its name, or from outside the package as ``package.module:factory``.

  Args:
    text: a key of `DRAFTERS`, or an importable factory that takes the options and returns a `Drafter`; with
      options in brackets, see `parse_drafter`, which go before the others.
    **others: passed on; ``window`` is the draft length G.

  Raises:
    ValueError: an unknown name, a factory that cannot be imported, or options it does not take.
  """
  name, own = parse_drafter(text)
  make = DRAFTERS.get(name)
  if make is None:
    module, _, factory = name.partition(":")
    if not factory:
      raise ValueError(
        f"drafter = {text!r}; it must be one of {', '.join(DRAFTERS)} or package.module:factory"
      )
    try:
      make = getattr(importlib.import_module(module), factory)
    except (ImportError, AttributeError) as error:
      raise ValueError(f"drafter = {text!r} cannot be imported: {error}") from error
  return options.make("drafter", text, make, {**others, **own})


__all__ = [
  "DRAFTERS",
  "Block",
  "BlockWeights",
  "Eagle3Drafter",
  "EagleDrafter",
  "EagleWeights",
  "EarlyExitDrafter",
  "EarlyExitWeights",
  "Medusa",
  "MedusaWeights",
  "NoDrafter",
  "PromptLookup",
  "SelfSpeculation",
  "TwoModel",
  "block",
  "eagle",
  "eagle3",
  "early_exit",
  "make_drafter",
  "medusa",
  "parse_drafter",
  "self_speculation",
  "two_model",
]
