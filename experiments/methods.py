"""How a way to decode is written in flags and results: ``prompt_lookup``, or ``adaptive[of=prompt_lookup]``.

A drafter alone runs at one width. With a controller it runs at several, chosen round by round: the
controller's options stand in its brackets, and ``of`` names the drafter, at its usual widths, or lists
widths with bars between them: ``adaptive[of=two_model[window=2]|two_model[window=6],allowance=1]``.
``self_speculation[layers=4]`` drafts with the target's own first layers, ``self_speculation[skips=FILE]``
without the sublayers that a file names; neither needs weights of its own.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from specjax import options
from specjax.control import CONTROLS
from specjax.drafters import DRAFTERS, parse_drafter

# What --drafter is without the flag, and what it stands for where speed counts.
AUTO, CHOICE = "auto", "adaptive[of=prompt_lookup]"
# Widths that a controller chooses from where a drafter is named alone: short, long, tree; of EAGLE and of
# Medusa, whose long chains seldom hold, two trees. 4 and 8 nodes: on a CPU products of a few rows are fastest
# for multiples of 4 (lab book: 6 nodes cost more than 8).
WIDTHS = {
  "prompt_lookup": (
    "prompt_lookup[window=3]",
    "prompt_lookup[window=7]",
    "prompt_lookup[matches=4,nodes=8,window=5]",
  ),
  "two_model": ("two_model[window=3]", "two_model[window=7]", "two_model[branching=(2,),window=3]"),
  "eagle": ("eagle[window=3]", "eagle[nodes=4,beam=2,window=2]", "eagle[nodes=8,beam=3,window=4]"),
  "eagle3": ("eagle3[window=3]", "eagle3[nodes=4,beam=2,window=2]", "eagle3[nodes=8,beam=3,window=4]"),
  "medusa": ("medusa[tree=((0,),(1,),(0,0))]", "medusa[tree=((0,),(1,),(2,),(0,0),(0,1),(1,0),(0,0,0))]"),
  "block": ("block[window=3]", "block[nodes=8,beam=3,window=3]"),
  "self_speculation": ("self_speculation[window=3]", "self_speculation[window=7]"),
  "early_exit": ("early_exit[window=3]", "early_exit[window=7]"),
}
# The kind of trained head that a drafter runs with, see `checkpoints.load_head`.
HEADS = {
  "eagle": "eagle",
  "eagle3": "eagle3",
  "medusa": "medusa",
  "two_model": "draft",
  "block": "block",
  "early_exit": "early_exit",
}
# Options of `self_speculation`: which of the target's layers draft. One of them is given.
_OWN = ("layers", "skips")
# Options that say what shape a draft has.
_SHAPE = frozenset({"window", "branching", "matches", "nodes", "beam", "expand", "rerank", "tree"})


@dataclasses.dataclass(frozen=True)
class MethodText:
  """A method taken apart.

  Attributes:
    control: name of the controller, None without.
    options: of the controller.
    widths: drafters of all widths, each as a method of its own: what a calibration calls them.
    own: which of the target's layers draft: ``{"layers": n}``, or ``{"skips": path}``; else empty.
  """

  control: str | None
  options: dict[str, Any]
  widths: tuple[str, ...]
  own: dict[str, Any]

  @property
  def drafter(self) -> str:
    """The drafter's name without options, the same for all widths."""
    return parse_drafter(self.widths[0])[0]

  @property
  def takes_window(self) -> bool:
    """Whether --window says anything about it: where all widths name their own it does not."""
    return any(not parse_drafter(width)[1].keys() & {"window", "tree"} for width in self.widths)

  @property
  def drafters(self) -> tuple[str, ...]:
    """Of all widths, as `drafters.make_drafter` reads them."""
    return tuple(_own_layers(width)[0] for width in self.widths)

  @property
  def is_known(self) -> bool:
    """Whether the drafter is one of the package, or could be one from outside."""
    return self.drafter in DRAFTERS or re.fullmatch(r"[\w.]+:\w+", self.drafter) is not None

  @property
  def uses_draft_model(self) -> bool:
    """Whether weights come from --draft_model: `two_model` must have one, one from outside may."""
    return self.needs_draft_model or self.drafter not in DRAFTERS

  @property
  def needs_draft_model(self) -> bool:
    """Whether it drafts with another model: that of --draft_model, or a head made for the target."""
    return self.drafter == "two_model"

  @property
  def head(self) -> str | None:
    """The kind of trained head that it takes, None if none."""
    return HEADS.get(self.drafter)

  @property
  def needs_head(self) -> bool:
    """Whether it runs with nothing else."""
    return self.head is not None and not self.needs_draft_model


def parse_method(text: str) -> MethodText:
  """Takes a method apart.

  Raises:
    ValueError: brackets that cannot be read, a controller without ``of``, or widths of different drafters.
  """
  name, own = options.parse("drafter", CHOICE if text == AUTO else text)
  if name not in CONTROLS:
    return MethodText(None, {}, (text,), _own_layers(text)[1])
  of = own.pop("of", None)
  if not isinstance(of, str):
    raise ValueError(f"drafter = {text!r}; it must say of what: {name}[of=prompt_lookup]")
  drafters = tuple(options.split(of, "|"))
  names = {parse_drafter(drafter)[0] for drafter in drafters}
  if len(names) > 1 or names & set(CONTROLS):
    raise ValueError(
      f"drafter = {text!r}; its widths must be those of one drafter, got {', '.join(sorted(names))}"
    )
  if len(drafters) == 1:
    drafters = _usual_widths(drafters[0], chains_only=name == "plus2_minus1")
  if name == "plus2_minus1" and any(map(_is_tree, drafters)):
    raise ValueError(f"drafter = {text!r}; {name} takes chains, one of its widths is a tree")
  parts = [_own_layers(drafter)[1] for drafter in drafters]
  if any(part != parts[0] for part in parts):
    raise ValueError(f"drafter = {text!r}; all widths must draft with the same layers")
  make_control(text, name, own)
  return MethodText(name, own, drafters, parts[0])


def make_control(text: str, name: str, own: dict[str, Any]):
  """The controller of a method."""
  return options.make("drafter", text, CONTROLS[name], own)


def _usual_widths(drafter: str, *, chains_only: bool) -> tuple[str, ...]:
  """The drafter at its usual widths, with the options it has; one that names its shape is taken as it is."""
  name, own = parse_drafter(drafter)
  if name not in WIDTHS or own.keys() & _SHAPE:
    return (drafter,)
  usual = [width for width in WIDTHS[name] if not (chains_only and _is_tree(width))]
  widths = (parse_drafter(width)[1] for width in usual)
  return tuple(options.write(name, {**own, **width}) for width in widths)


def _is_tree(drafter: str) -> bool:
  own = parse_drafter(drafter)[1]
  return own.get("matches", 1) != 1 or any(own.get(name) for name in ("branching", "nodes", "tree"))


def _own_layers(text: str) -> tuple[str, dict[str, Any]]:
  """``self_speculation[layers=4,window=3]`` → ``self_speculation[window=3]`` and ``{"layers": 4}``.

  Of other drafters themselves and nothing.
  """
  name, given = parse_drafter(text)
  if name != "self_speculation":
    return text, {}
  own = {option: given.pop(option) for option in _OWN if option in given}
  if len(own) != 1:
    raise ValueError(f"drafter = {text!r}; it needs layers=N or skips=FILE, one of them")
  if type(own.get("layers", 1)) is not int or own.get("layers", 1) < 1:
    raise ValueError(f"drafter = {text!r}: layers = {own['layers']!r}; it must be an integer of at least 1")
  if not isinstance(own.get("skips", ""), str):
    raise ValueError(f"drafter = {text!r}: skips = {own['skips']!r}; it must be a file")
  return options.write(name, given), own
