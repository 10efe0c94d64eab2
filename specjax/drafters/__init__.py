"""Drafters, by name or by ``package.module:factory``."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
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


def parse_drafter(text: str) -> tuple[str, dict[str, Any]]:
  """``"prompt_lookup[matches=8,nodes=9]"`` → its name and its options.

  Values are Python literals, ``branching=(3,2)`` for one, or bare words.

  Raises:
    ValueError: brackets or an option that cannot be read.
  """
  name, bracket, inside = text.partition("[")
  if not bracket:
    return name, {}
  if not inside.endswith("]"):
    raise ValueError(f"drafter = {text!r}; its options must stand in brackets: name[option=value,…]")
  options = {}
  for part in re.split(r",(?![^(]*\))", inside[:-1]):
    option, _, value = (word.strip() for word in part.partition("="))
    if not option.isidentifier() or not value or option in options:
      raise ValueError(f"drafter = {text!r}: {part!r} is not option=value, or is given twice")
    try:
      options[option] = ast.literal_eval(value)
    except (ValueError, SyntaxError):
      options[option] = value
  return name, options


def make_drafter(text: str, **options: Any) -> Drafter:
  """A drafter by its name, or from outside the package as ``package.module:factory``.

  Args:
    text: a key of `DRAFTERS`, or an importable factory that takes the options and returns a `Drafter`; with
      options in brackets, see `parse_drafter`, which go before the others.
    **options: passed on; ``window`` is the draft length G.

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
  options = {**options, **own}
  try:
    inspect.signature(make).bind(**options)
    return make(**options)
  except TypeError as error:
    raise ValueError(f"drafter = {text!r} with options {', '.join(options) or 'none'}: {error}") from error


__all__ = ["DRAFTERS", "NoDrafter", "PromptLookup", "TwoModel", "make_drafter", "parse_drafter", "two_model"]
