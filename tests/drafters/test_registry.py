"""Drafters by name or path."""

import pytest

from specjax import decode
from specjax.drafters import make_drafter
from specjax.testing import SampledDrafter
from specjax.verify import make_rule


def test_from_outside():
  drafter = make_drafter("tests.contract:last_token", window=3)
  assert drafter.window == 3 and hash(drafter) == hash(make_drafter("tests.contract:last_token", window=3))


@pytest.mark.parametrize("name", ("medusa", "no.such.module:make", "tests.contract:no_such_factory"))
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
