"""Heads and how they are trained: one file a head, one entry here."""

from __future__ import annotations

from specjax import options
from specjax.training.recipes.base import RANKS, Recipe, TextStats, acceptance, reference, without_layers
from specjax.training.recipes.block import Block
from specjax.training.recipes.distilled import Distilled
from specjax.training.recipes.eagle1 import EagleOne
from specjax.training.recipes.eagle3 import EagleThree
from specjax.training.recipes.early_exit import EarlyExit
from specjax.training.recipes.medusa import Medusa
from specjax.training.recipes.medusa2 import MedusaTwo

_ALL = (Distilled, Medusa, MedusaTwo, EagleOne, EagleThree, Block, EarlyExit)
RECIPES: dict[str, type[Recipe]] = {recipe.name: recipe for recipe in _ALL}


def make_recipe(text: str) -> Recipe:
  """A recipe by its name, with options in brackets: ``eagle3[steps=4,draft_vocab=8192]``.

  Raises:
    ValueError: an unknown name, or options it does not take.
  """
  name, own = options.parse("head", text)
  if name not in RECIPES:
    raise ValueError(f"head = {text!r}; it must be one of {', '.join(RECIPES)}")
  return options.make("head", text, RECIPES[name], own)


__all__ = [
  "RANKS",
  "RECIPES",
  "Block",
  "Distilled",
  "EagleOne",
  "EagleThree",
  "EarlyExit",
  "Medusa",
  "MedusaTwo",
  "Recipe",
  "TextStats",
  "acceptance",
  "make_recipe",
  "reference",
  "without_layers",
]
