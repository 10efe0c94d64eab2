"""What a test of a drafter or a rule needs: tiny models, scripted parts, oracles of exact laws.

Shipped with the package, so that a drafter from outside can be held to the same contract:

* `tiny_model`, `perturbed`: real decoders of a few thousand weights.
* `TableTarget`: a target whose law is a table, with a cache that shows every mistake in bookkeeping.
* `ScriptedDrafter`, `TruthDrafter`, `SampledDrafter`: drafts that are known beforehand.
* `ScriptedControl`: widths of rounds that are.
* `draft_context`: what a drafter is asked with, without a loop.
* `process`, `joint_law`, `round_law`, `drafts_of`, `fixed_noise`: exact laws by enumeration.
* `poison`, `fresh_cache`, `assert_cache_rows`: are the valid cache rows right, and only they used?
"""

from specjax.testing.checks import (
  accepted_differs,
  assert_cache_rows,
  first_difference,
  fresh_cache,
  poison,
  teacher_forced,
)
from specjax.testing.oracle import RoundLaw, chi_square, drafts_of, fixed_noise, joint_law, process, round_law
from specjax.testing.scripted import (
  NOTHING,
  SampledDrafter,
  ScriptedControl,
  ScriptedDrafter,
  TruthDrafter,
  draft_context,
)
from specjax.testing.targets import TableTarget, perturbed, tiny_config, tiny_model

__all__ = [
  "NOTHING",
  "RoundLaw",
  "SampledDrafter",
  "ScriptedControl",
  "ScriptedDrafter",
  "TableTarget",
  "TruthDrafter",
  "accepted_differs",
  "assert_cache_rows",
  "chi_square",
  "draft_context",
  "drafts_of",
  "first_difference",
  "fixed_noise",
  "fresh_cache",
  "joint_law",
  "perturbed",
  "poison",
  "process",
  "round_law",
  "teacher_forced",
  "tiny_config",
  "tiny_model",
]
