"""The options of drafters that grow a tree with a draft of their own, and their checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, get_args

import jax

from specjax import sampling
from specjax.base import DraftContext
from specjax.drafters.dynamic import DynamicGrowth, Expand
from specjax.drafters.growing import KINDS, Growth, Policy
from specjax.drafters.step import Grown, Start, Step
from specjax.models import over_target
from specjax.tree import MAX_NODES, TokenTree, TreeBudget

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class TreeDrafter:
  """What to grow, and how.

  Attributes:
    tree: a chain or a tree with branches; or the budget of a tree whose shape follows the draft's own
      probabilities, see `DynamicGrowth`.
    vocab_size: width of the target's logits; q is given over it.
    num_real_tokens: ids below are real.
    max_length: positions the draft was made for; where its limit ends it proposes nothing, and decoding goes
      on plainly.
    policy: see `Growth`; a dynamic tree takes ``top_k`` alone.
    confidence: see `Growth`.
    beam: nodes fed a level of a dynamic tree, and children that each of them offers; None for others.
    expand, rerank: of a dynamic tree, see `DynamicGrowth`: EAGLE-2's ablations.
    implementation: of `tree_attention` in the draft.
  """

  tree: TokenTree | TreeBudget
  vocab_size: int
  num_real_tokens: int
  max_length: int
  policy: Policy = "sample"
  confidence: float = 0.0
  beam: int | None = None
  expand: Expand = "value"
  rerank: bool = True
  implementation: str = "auto"

  name: ClassVar[str]

  def __post_init__(self):
    if self.tree.num_nodes < 2:
      raise ValueError(f"{self.name}: the tree has {self.tree.num_nodes} node; a draft needs at least 2")
    if self.policy not in get_args(Policy):
      raise ValueError(f"policy = {self.policy!r}; it must be one of {', '.join(get_args(Policy))}")
    if not 0 <= self.confidence <= 1:
      raise ValueError(f"confidence = {self.confidence}; it must be in [0, 1]")
    if self.expand not in get_args(Expand):
      raise ValueError(f"expand = {self.expand!r}; it must be one of {', '.join(get_args(Expand))}")
    if type(self.rerank) is not bool:
      raise ValueError(f"rerank = {self.rerank!r}; it must be True or False")
    if self.is_dynamic:
      self._check_dynamic()
      # The draft feeds other nodes than it proposes.
      drafted = DynamicGrowth.num_rows(self.tree.max_depth, self.beam)
      object.__setattr__(self, "tree", dataclasses.replace(self.tree, drafted=drafted))
      return
    if self.beam is not None:
      raise ValueError(f"beam = {self.beam} shapes a dynamic tree; {self.name} needs nodes, too")
    if self.expand != "value" or not self.rerank:
      raise ValueError(
        f"expand = {self.expand!r}, rerank = {self.rerank} shape a dynamic tree; {self.name} needs nodes, too"
      )
    most = max(map(len, self.tree.children))
    if most > self.num_real_tokens:
      raise ValueError(
        f"{self.name}: a node has {most} children; there are {self.num_real_tokens} real tokens"
      )

  def _check_dynamic(self) -> None:
    window, nodes, beam = self.tree.max_depth, self.tree.num_nodes, self.beam
    if self.policy != "top_k":
      raise ValueError(f"policy = {self.policy!r}; a dynamic tree (nodes = {nodes}) takes top_k")
    if type(beam) is not int or not 1 <= beam <= self.num_real_tokens:
      raise ValueError(f"beam = {beam!r}; with nodes it must be an integer in [1, {self.num_real_tokens}]")
    rows, most = DynamicGrowth.num_rows(window, beam), DynamicGrowth.num_candidates(window, beam)
    if rows > MAX_NODES:
      raise ValueError(f"beam = {beam}, window = {window}: {rows} nodes are fed; the limit is {MAX_NODES}")
    if nodes > most:
      raise ValueError(f"nodes = {nodes}; with beam = {beam} and window = {window} it must be at most {most}")
    if not self.rerank and nodes > 1 + beam * window:
      raise ValueError(
        f"nodes = {nodes}; with rerank = False, beam = {beam} and window = {window} it must be at most "
        f"{1 + beam * window}"
      )

  @property
  def is_dynamic(self) -> bool:
    """Whether the tree's shape follows the draft's probabilities."""
    return isinstance(self.tree, TreeBudget)

  @property
  def kind(self) -> str:
    return KINDS[self.policy]

  def grow(self, step: Step, start: Start, context: DraftContext) -> Grown:
    """One round's tree behind ``context.root``."""
    common = dict(confidence=self.confidence, max_length=self.max_length)
    if self.is_dynamic:
      dynamic = dict(expand=self.expand, rerank=self.rerank, **common)
      return DynamicGrowth(self.tree, self.beam, **dynamic)(step, start, context)
    return Growth(self.tree, self.policy, **common)(step, start, context)

  def over_target_vocabulary(self, logits: Array, ids: Array | None) -> Array:
    """Logits of the draft ``[..., Vd]`` over the target's real tokens ``[..., V]``, -inf elsewhere.

    Args:
      ids: int32 ``[Vd]``, the target's id of each of the draft's tokens; None: they are the same.
    """
    return sampling.mask_padding(over_target(logits, ids, self.vocab_size), self.num_real_tokens)


def cascade(name: str, window: int, branching: Sequence[int] = ()) -> TokenTree:
  """A tree ``window`` deep whose nodes at depth 0, 1, … have ``branching`` children, deeper ones one.

  Raises:
    ValueError: naming the field, the value and the limit; ``name`` is the drafter's.
  """
  if type(window) is not int or window < 1:
    raise ValueError(f"window = {window!r}; {name} needs an integer of at least 1")
  if not isinstance(branching, Sequence):
    raise ValueError(f"branching = {branching!r}; it must be numbers of children by depth, e.g. (3,2)")
  if len(branching) > window:
    raise ValueError(f"branching = {tuple(branching)} names {len(branching)} depths; window = {window}")
  return TokenTree.cartesian((*branching, *[1] * (window - len(branching))))


def shaped(
  name: str,
  *,
  window: int,
  branching: Sequence[int] = (),
  nodes: int | None = None,
  beam: int | None = None,
  **options: Any,
) -> dict[str, Any]:
  """Fields of a `TreeDrafter` from how its tree is written.

  Args:
    name: of the drafter, for messages.
    window: G, drafts along a path.
    branching: children of a node at depth 0, 1, …; deeper nodes have one.
    nodes: of a dynamic tree, the root included; None: the tree is static.
    beam: of a dynamic tree.
    **options: further fields.

  Raises:
    ValueError: naming the field, the value and the limit.
  """
  tree = cascade(name, window, branching)
  if nodes is None:
    return dict(tree=tree, beam=beam, **options)
  if branching:
    raise ValueError(
      f"branching = {tuple(branching)}, nodes = {nodes}: a tree is static or dynamic, not both"
    )
  if type(nodes) is not int or not window < nodes <= MAX_NODES:
    raise ValueError(f"nodes = {nodes!r}; it must be in [window + 1 = {window + 1}, {MAX_NODES}]")
  return dict(tree=TreeBudget(nodes, window), beam=beam, **{"policy": "top_k", **options})
