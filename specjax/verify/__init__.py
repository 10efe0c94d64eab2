"""Acceptance rules, by name."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax import options
from specjax.base import Rule
from specjax.verify.block import BlockVerification
from specjax.verify.follow import DrawAndFollow, Greedy
from specjax.verify.recursive import RecursiveRejection
from specjax.verify.speculative import LenientSpeculativeSampling, SpeculativeSampling
from specjax.verify.synthetic import Synthetic
from specjax.verify.traversal import TraversalVerification
from specjax.verify.typical import TypicalAcceptance

RULES = {
  rule.name: rule
  for rule in (
    Greedy,
    DrawAndFollow,
    SpeculativeSampling,
    BlockVerification,
    RecursiveRejection,
    TraversalVerification,
    LenientSpeculativeSampling,
    TypicalAcceptance,
    Synthetic,
  )
}


def make_rule(text: str, **others: Any) -> Rule:
  """A rule by its name, with options in brackets or as arguments: ``synthetic[rates=(0.8,0.6)]``.

  Raises:
    ValueError: an unknown name, or options that it does not take or that are out of range.
  """
  name, own = options.parse("rule", text)
  if name not in RULES:
    raise ValueError(f"rule = {text!r}; it must be one of {', '.join(RULES)}")
  return options.make("rule", text, RULES[name], {**others, **own})


def describe(rule: Rule) -> str:
  """The rule as `make_rule` reads it, its options included: what results call it."""
  return options.write(rule.name, dataclasses.asdict(rule))


__all__ = [
  "RULES",
  "BlockVerification",
  "DrawAndFollow",
  "Greedy",
  "LenientSpeculativeSampling",
  "RecursiveRejection",
  "SpeculativeSampling",
  "Synthetic",
  "TraversalVerification",
  "TypicalAcceptance",
  "describe",
  "make_rule",
]
