"""What flows through a round, and the four protocols: `Target`, `Drafter`, `Rule`, `Controller`.

Dimension letters: B row (a sequence of the batch), N node of a draft, G draft depth, T query, S slot,
Q query head, K kv head, H head size, D model width, V vocabulary. n is the number of committed tokens
of a row; before a round the target's cache holds n - 1 rows, and the last committed token is the root.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Protocol, get_args, runtime_checkable

import flax.struct
import jax
import numpy as np

from specjax.cache import KVCache
from specjax.processors import History, TokenProcessor
from specjax.sampling import Settings
from specjax.tree import DynamicTree, TokenTree, TreeBudget

Array = jax.Array
State = Any  # a drafter's own

Trees = tuple[TokenTree | TreeBudget, ...]

ProposalKind = Literal["deterministic", "sampled", "sampled_without_replacement"]
ALL_KINDS = frozenset(get_args(ProposalKind))
# As a limit on the depth of drafts: there is none.
ANY_DEPTH = np.iinfo(np.int32).max


@flax.struct.dataclass
class ModelOutput:
  """Result of one forward over T tokens a row."""

  logits: Array | None  # float32 [B, T, V]
  cache: KVCache  # with the T scratch rows; length unchanged
  taps: Array | None = None  # [B, T, number of taps, D]
  hidden: Array | None = None  # [B, T, D]


@flax.struct.dataclass(kw_only=True)
class DraftContext(History):
  """What a drafter may look at: the rows' `History`, and below. Every leaf has the row as axis 0.

  A drafter that chooses by its own logits puts them through `processors.process` first, as the target's
  are: else it drafts what penalties and masks will turn down.

  Attributes:
    root: int32 ``[B]``, the last committed token.
    active: bool ``[B]``; what is proposed for other rows is ignored.
  """

  root: Array
  active: Array


@flax.struct.dataclass
class Proposal:
  """A drafted tree.

  Attributes:
    tokens: int32 ``[B, N]``, node 0 is the root.
    valid: bool ``[B, N]``; an invalid node was not proposed, and neither is anything below it.
    q: float32 ``[B, N, V]``, row i the distribution the children of node i were drawn from, after all
      processing, over the target's vocabulary; None when the kind is deterministic. A leaf's row is
      never read, and an array that ends behind the last node with children will do.
    tree: the topology, one for all rows or one a row.
    kind: ``deterministic``: the tokens are a function of committed tokens (q is a point mass).
      ``sampled``: each child was drawn from q with its own noise, siblings independently.
      ``sampled_without_replacement``: each child was drawn from q without the tokens of its elder
      siblings, renormalised; q itself is the distribution the first child was drawn from.
    hidden: ``[B, N, D]``, where the drafter has run the target's own first layers over the nodes: what they
      gave, the input of layer ``start_layer``. The rows of these layers then lie in the target's cache, node
      i's at slot ``length + i``; those of roots must be there for every row, drafting or not. Else None.
    start_layer: the layer at which verification begins, 0 without ``hidden``.
  """

  tokens: Array
  valid: Array
  q: Array | None
  tree: TokenTree | DynamicTree
  kind: ProposalKind = flax.struct.field(pytree_node=False)
  hidden: Array | None = None
  start_layer: int = flax.struct.field(pytree_node=False, default=0)


@flax.struct.dataclass
class Committed:
  """Tokens for which the target now has rows: a chunk of a prompt, or what a round kept.

  Attributes:
    tokens: int32 ``[B, T]``, at positions ``length … length + T`` of each row.
    valid: bool ``[B, T]``, what belongs to the row; a prefix of it.
    taps: ``[B, T, taps, D]``, the hidden states the drafter asked for, else None.
    path: int32 ``[B, T]``, the nodes of the round's proposal they were, root first; None for a prompt.
  """

  tokens: Array
  valid: Array
  taps: Array | None = None
  path: Array | None = None


@flax.struct.dataclass
class Verdict:
  """What a rule decided for each row.

  Attributes:
    path: int32 ``[B, G + 1]``, accepted nodes, root first; entries past ``accepted`` are 0.
    accepted: int32 ``[B]``, drafts accepted, 0 … G.
    next_token: int32 ``[B]``, the replacement for the first rejected draft, or the bonus token.
    overlap: float32 ``[B]``, Σ over judged drafts of Σ_x min(p, q), the expected acceptance there, with p
      and q as they are once elder siblings were turned down; 0 where it is not known.
    judged: int32 ``[B]``, drafts in that sum.
  """

  path: Array
  accepted: Array
  next_token: Array
  overlap: Array
  judged: Array


@flax.struct.dataclass
class RoundPlan:
  """What a controller wants of the next round.

  Attributes:
    width: int32 ``[]``: 0 is plain decoding, i the i-th drafter of the config.
    depth: int32 ``[B]``, deepest draft a row may propose; with 0 it proposes nothing.
  """

  width: Array
  depth: Array


@flax.struct.dataclass
class RoundOutcome:
  """What became of it.

  Attributes:
    verified: int32 ``[]``, the width that the target ran at: 0 if nothing was proposed, and a narrower one
      than planned if that held the draft.
    depth: int32 ``[B]``, of the deepest draft proposed.
    accepted: int32 ``[B]``, drafts accepted.
    emitted: int32 ``[B]``, tokens emitted; of rows that took no part, this and the others mean nothing.
  """

  verified: Array
  depth: Array
  accepted: Array
  emitted: Array


@runtime_checkable
class Target(Protocol):
  """A model as the loop sees it: a pytree of weights that is called. See `models.Decoder.__call__`."""

  def init_cache(self, batch: int, slots: int) -> KVCache: ...

  def __call__(self, tokens: Array, cache: KVCache, **kwargs: Any) -> ModelOutput: ...


class _Structure:
  """A pytree's structure with its hash kept, equal to itself without a comparison."""

  def __init__(self, treedef):
    self.treedef = treedef
    self._hash = hash(treedef)

  def __hash__(self):
    return self._hash

  def __eq__(self, other):
    return self is other or (isinstance(other, _Structure) and self.treedef == other.treedef)


@jax.tree_util.register_pytree_node_class
class Weights:
  """What is never donated: the target, a pytree that is called, the drafter's weights, the processor, and
  what the controller believes beforehand.

  Flattened once, when made: flattening a module of 270 leaves costs a compiled call 8 ms, which a host
  loop over rounds would pay each time. With the leaves kept it is 0.2 ms.
  """

  def __init__(
    self, target: Target, drafter: Any = None, processor: TokenProcessor | None = None, beliefs: Any = None
  ):
    leaves, treedef = jax.tree.flatten((target, drafter, processor, beliefs))
    self._leaves, self._structure = leaves, _Structure(treedef)

  @property
  def target(self) -> Target:
    return jax.tree.unflatten(self._structure.treedef, self._leaves)[0]

  @property
  def drafter(self) -> Any:
    return jax.tree.unflatten(self._structure.treedef, self._leaves)[1]

  @property
  def processor(self) -> TokenProcessor | None:
    return jax.tree.unflatten(self._structure.treedef, self._leaves)[2]

  @property
  def beliefs(self) -> Any:
    return jax.tree.unflatten(self._structure.treedef, self._leaves)[3]

  def tree_flatten(self):
    return self._leaves, self._structure

  @classmethod
  def tree_unflatten(cls, structure, leaves):
    weights = object.__new__(cls)
    weights._leaves, weights._structure = list(leaves), structure
    return weights


class Drafter(Protocol):
  """A way to propose. Static and hashable; weights and state are pytrees it alone understands.

  Attributes:
    name: as in messages and results.
    tree: the topology it proposes, or the budget of its dynamic ones.
    kind: of its proposals.
    taps: layers of the target whose input it wants to see in `prefill` and `extend`.
  """

  name: str
  tree: TokenTree | TreeBudget
  kind: ProposalKind
  taps: tuple[int, ...]

  def init(self, weights: Any, batch: int, slots: int) -> State:
    """An empty state for ``batch`` rows and sequences that fit ``slots``; row is axis 0 of every leaf."""

  def prefill(self, weights: Any, state: State, chunk: Committed) -> State:
    """A chunk of the prompts. The last prompt token, the first root, never comes through here."""

  def propose(
    self, weights: Any, state: State, context: DraftContext, target_cache: KVCache
  ) -> tuple[Proposal, State, KVCache]:
    """Drafts behind ``context.root``.

    May use scratch rows of the target's cache and hands it back, its length as it was. One that has run the
    target's own layers over its nodes says so in `Proposal.hidden`, and they are not run again.
    """

  def extend(self, weights: Any, state: State, committed: Committed) -> State:
    """What a round kept: root and accepted drafts. T is the depth of the round's proposal and 1.

    Under a controller drafters that differ in width only share one state: a round may be plain (nothing
    was drafted, T = 1), and a chain that ended early is kept by the drafter of a narrower one.
    """


class StatelessDrafter:
  """The part of a `Drafter` that one without weights, state and taps need not write."""

  taps: ClassVar[tuple[int, ...]] = ()

  def init(self, weights: Any, batch: int, slots: int) -> State:
    return ()

  def prefill(self, weights: Any, state: State, chunk: Committed) -> State:
    return state

  def extend(self, weights: Any, state: State, committed: Committed) -> State:
    return state


class Rule(Protocol):
  """An acceptance rule: static, hashable, a pure function of arrays.

  Attributes:
    name: as in flags and results.
    lossless: the output keeps the target's law.
    kinds: proposal kinds it takes.
    chains_only: it takes no trees with branches.
    needs: ``argmax``: it is given the most likely token of each node, int32 ``[B, N]``, and every
      row must be greedy. ``probs``: the processed distribution, float32 ``[B, N, V]``.
  """

  name: str
  lossless: bool
  kinds: frozenset[str]
  chains_only: bool
  needs: Literal["argmax", "probs"]

  def __call__(self, target: Array, proposal: Proposal, settings: Settings, length: Array) -> Verdict: ...


class Controller(Protocol):
  """Chooses each round's width: static, hashable, pure functions of arrays.

  A choice may use committed text and what earlier rounds did, never this round's noise: then every rule
  keeps the law whatever is chosen, since each width keeps it given the text so far.

  Attributes:
    name: as in flags and results.
  """

  name: str

  def init(self, beliefs: Any, trees: Trees, batch: int) -> State:
    """State of fresh rows; row is axis 0 of every leaf. ``trees[i - 1]`` is the topology of width i.

    Raises:
      ValueError: beliefs that do not fit the widths, or topologies it cannot choose between.
    """

  def plan(self, beliefs: Any, trees: Trees, rows: Any, deepest: Array | int = ANY_DEPTH) -> RoundPlan:
    """The next round, from ``rows`` (a `DecodeState`) before it; ``rows.control`` is its own state.

    Args:
      deepest: int32 ``[]``: widths whose trees are deeper are not to be had, as a server says that is busy
        with many rows. Plain decoding always is.
    """

  def learn(self, beliefs: Any, trees: Trees, rows: Any, plan: RoundPlan, outcome: RoundOutcome) -> State:
    """Its state behind the round; ``rows`` are those before it, as `plan` saw them."""
