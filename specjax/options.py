"""Names with options, ``name[option=value,…]``: how drafters and rules are written in flags and results."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from typing import Any


def parse(what: str, text: str) -> tuple[str, dict[str, Any]]:
  """``"two_model[branching=(3,2),policy=top_k]"`` → the name and its options.

  Values are Python literals, ``branching=(3,2)`` for one, or bare words. `write` is the inverse.

  Args:
    what: for messages, e.g. ``drafter``.
    text: to be read.

  Raises:
    ValueError: brackets or an option that cannot be read.
  """
  name, bracket, inside = text.partition("[")
  if not bracket:
    return name, {}
  if not inside.endswith("]"):
    raise ValueError(f"{what} = {text!r}; its options must stand in brackets: name[option=value,…]")
  options: dict[str, Any] = {}
  for part in _parts(inside[:-1]):
    option, _, value = (word.strip() for word in part.partition("="))
    if not option.isidentifier() or not value or option in options:
      raise ValueError(f"{what} = {text!r}: {part!r} is not option=value, or is given twice")
    try:
      options[option] = ast.literal_eval(value)
    except (ValueError, SyntaxError):
      options[option] = value
    if isinstance(options[option], list):  # what is made of them is hashed
      options[option] = tuple(options[option])
  return name, options


def write(name: str, options: Mapping[str, Any]) -> str:
  """``name[option=value,…]`` as `parse` reads it; the name alone without options."""
  inside = ",".join(f"{option}={value!r}".replace(" ", "") for option, value in options.items())
  return f"{name}[{inside}]" if inside else name


def split(text: str, separator: str = ",") -> list[str]:
  """Names with commas between them, each with its options, none twice."""
  return list(dict.fromkeys(part.strip() for part in _parts(text, separator)))


def _parts(text: str, separator: str = ",") -> list[str]:
  """Cut at separators that stand in no bracket."""
  parts, depth = [""], 0
  for character in text:
    depth += (character in "([") - (character in ")]")
    if character == separator and not depth:
      parts.append("")
    else:
      parts[-1] += character
  return parts


def make(what: str, text: str, factory: Callable[..., Any], options: dict[str, Any]) -> Any:
  """``factory(**options)``; options it does not take are a ValueError that names ``text``."""
  try:
    inspect.signature(factory).bind(**options)
    return factory(**options)
  except TypeError as error:
    raise ValueError(f"{what} = {text!r} with options {', '.join(options) or 'none'}: {error}") from error
