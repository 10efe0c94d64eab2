"""Acceptance rules, by name."""

from __future__ import annotations

from specjax.base import Rule
from specjax.verify.follow import DrawAndFollow, Greedy
from specjax.verify.speculative import SpeculativeSampling
from specjax.verify.synthetic import Synthetic

RULES = {
  "greedy": Greedy,
  "draw_and_follow": DrawAndFollow,
  "speculative_sampling": SpeculativeSampling,
  "synthetic": Synthetic,
}


def make_rule(name: str, **options) -> Rule:
  """A rule by its name; ``synthetic`` takes ``rates``.

  Raises:
    ValueError: unknown name.
  """
  if name not in RULES:
    raise ValueError(f"rule = {name!r}; it must be one of {', '.join(RULES)}")
  return RULES[name](**options)


__all__ = ["RULES", "DrawAndFollow", "Greedy", "SpeculativeSampling", "Synthetic", "make_rule"]
