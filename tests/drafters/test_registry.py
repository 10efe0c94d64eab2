"""Drafters by name or path."""

import pytest

from specjax import decode, options
from specjax.drafters import make_drafter, parse_drafter
from specjax.testing import SampledDrafter
from specjax.verify import describe, make_rule


def test_from_outside():
  drafter = make_drafter("tests.contract:last_token", window=3)
  assert drafter.window == 3 and hash(drafter) == hash(make_drafter("tests.contract:last_token", window=3))


@pytest.mark.parametrize("name", ("no_such_drafter", "no.such.module:make", "tests.contract:no_such_factory"))
def test_unknown_drafters_are_named(name):
  with pytest.raises(ValueError, match=name):
    make_drafter(name)


SIZES = dict(vocab_size=9, num_real_tokens=9, max_length=9)


@pytest.mark.parametrize(
  ("name", "options", "field"),
  [
    ("none", dict(window=2), "window"),
    ("two_model", dict(window=0, **SIZES), "window"),
    ("two_model", dict(window=1, **SIZES, policy="beam"), "policy"),
    (
      "two_model",
      dict(window=1, branching=(2, 2), **SIZES),
      "branching",
    ),
    ("two_model", dict(window=2, branching=(0,), **SIZES), "branching"),
  ],
)
def test_bad_options_name_themselves(name, options, field):
  with pytest.raises(ValueError, match=field):
    make_drafter(name, **options)


def test_a_rule_refuses_kinds_it_does_not_take():
  """Before anything compiles. Fails when a sampled proposal is judged as a deterministic one."""

  class OnlyDeterministic(type(make_rule("greedy"))):
    kinds = frozenset({"deterministic"})

  with pytest.raises(ValueError, match="sampled"):
    decode.DecodeConfig(SampledDrafter(2), OnlyDeterministic(), num_real_tokens=9, length_limit=20)


def test_options_in_brackets():
  """Literals, tuples and bare words; they go before the caller's own options."""
  assert parse_drafter("none") == ("none", {})
  assert parse_drafter("two_model[branching=(3,2),policy=top_k]") == (
    "two_model",
    {"branching": (3, 2), "policy": "top_k"},
  )
  assert make_drafter("prompt_lookup[window=2]", window=7).window == 2
  assert parse_drafter("x[a=[1,2],b=(3,(4,5))]") == ("x", {"a": (1, 2), "b": (3, (4, 5))})
  for bad in ("prompt_lookup[window=2", "prompt_lookup[window]", "prompt_lookup[window=2,window=3]"):
    with pytest.raises(ValueError, match="window"):
      make_drafter(bad)
  with pytest.raises(ValueError, match="widow"):
    make_drafter("prompt_lookup[widow=2]")


def test_rules_with_options():
  """What results call a rule makes the same rule again; commas in brackets part no names."""
  assert describe(make_rule("greedy")) == "greedy"
  for rule in (make_rule("typical_acceptance", epsilon=0.123456), make_rule("synthetic[rates=[0.5,0.25]]")):
    assert make_rule(describe(rule)) == rule and hash(rule)
  assert describe(make_rule("synthetic", rates=(0.5,))) == "synthetic[rates=(0.5,)]"
  assert options.split("none, a[b=(1,2),c=3],none,d") == ["none", "a[b=(1,2),c=3]", "d"]
  for bad in (
    "greedy[speed=2]",
    "synthetic[rates=0.5",
    "synthetic[rates=0.5]",
    "lenient_speculative_sampling[lenience=0]",
  ):
    with pytest.raises(ValueError, match=bad.split("[")[1].split("=")[0].rstrip("]")):
      make_rule(bad)
