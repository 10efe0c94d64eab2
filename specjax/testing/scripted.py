"""Drafters whose drafts are known beforehand, which record what the loop feeds them; and a controller."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax import processors, sampling
from specjax.base import ANY_DEPTH, Committed, DraftContext, Proposal, RoundPlan
from specjax.sampling import Purpose, Settings
from specjax.tree import TokenTree

Array = jax.Array

NOTHING = -1


def draft_context(
  texts: Sequence[Sequence[int]], capacity: int, *, settings: Settings | None = None, rubbish: int = 0
) -> DraftContext:
  """What `Drafter.propose` is given behind ``texts``, all of them prompts, in buffers of ``capacity``.

  The buffer holds ``rubbish`` behind a text; an empty text is a row that is not active.
  """
  length = np.array([len(text) for text in texts], np.int32)
  tokens = np.full((len(texts), capacity), rubbish, np.int32)
  for row, text in enumerate(texts):
    tokens[row, : len(text)] = text
  return DraftContext(
    tokens=jnp.asarray(tokens),
    length=jnp.asarray(length),
    prompt_length=jnp.asarray(length),
    stop_ids=jnp.full((len(texts), 1), -1),
    settings=Settings.create(len(texts)) if settings is None else settings,
    root=jnp.asarray(tokens[np.arange(len(texts)), np.maximum(length - 1, 0)]),
    active=jnp.asarray(length > 0),
  )


@flax.struct.dataclass
class Record:
  """What `prefill` and `extend` were given, in order: must equal the committed tokens but the last.

  ``tokens [B, C]``, their first tap's first component ``taps [B, C]`` (0 without taps), how many
  ``length [B]``, and proposals made ``rounds [B]``.
  """

  tokens: Array
  taps: Array
  length: Array
  rounds: Array

  @classmethod
  def create(cls, batch: int, slots: int) -> Record:
    zeros = lambda *shape, dtype=jnp.int32: jnp.zeros((batch, *shape), dtype)
    return cls(zeros(slots), zeros(slots, dtype=jnp.float32), zeros(), zeros())

  def append(self, new: Committed) -> Record:
    tokens, valid, taps = new.tokens, new.valid, new.taps
    batch, slots = self.tokens.shape
    at = jnp.where(valid, self.length[:, None] + jnp.cumsum(valid, axis=1) - 1, slots)
    put = lambda buffer, new: buffer.at[jnp.arange(batch)[:, None], at].set(new, mode="drop")
    first = jnp.zeros(tokens.shape) if taps is None else taps[:, :, 0, 0].astype(jnp.float32)
    return self.replace(
      tokens=put(self.tokens, tokens),
      taps=put(self.taps, first),
      length=self.length + valid.sum(axis=1, dtype=jnp.int32),
    )


class _Recording:
  """The parts that scripted drafters share."""

  taps: tuple[int, ...] = ()

  @property
  def window(self) -> int:
    return self.tree.max_depth

  def init(self, weights, batch, slots):
    return Record.create(batch, slots)

  def prefill(self, weights, state, chunk):
    return state.append(chunk)

  def extend(self, weights, state, committed):
    return state.append(committed)


@dataclasses.dataclass(frozen=True)
class ScriptedDrafter(_Recording):
  """Proposes given tokens.

  Attributes:
    script: a draft for each round, in a circle; all of one length. `NOTHING` is an invalid node, and
      any other number is proposed as it stands, ids out of range included.
    taps: layers it asks for.
  """

  script: tuple[tuple[int, ...], ...]
  taps: tuple[int, ...] = ()

  name: ClassVar[str] = "scripted"
  kind: ClassVar[str] = "deterministic"

  @property
  def tree(self) -> TokenTree:
    return TokenTree.chain(len(self.script[0]))

  def propose(self, weights, state, context: DraftContext, target_cache):
    drafts = jnp.asarray(self.script, jnp.int32)[state.rounds % len(self.script)]
    tokens = jnp.concatenate([context.root[:, None], drafts], axis=1)
    proposal = Proposal(tokens, (tokens != NOTHING).at[:, 0].set(True), None, tree=self.tree, kind=self.kind)
    return proposal, state.replace(rounds=state.rounds + context.active), target_cache


@dataclasses.dataclass(frozen=True)
class TruthDrafter(_Recording):
  """Knows the target's greedy text and is right down to a planned node, wrong everywhere else.

  Which rows accept how many drafts is therefore known before the run. A row's seed says which text is
  its own (greedy output does not depend on it). Weights are made by `plan`; another plan of the same
  length compiles nothing.

  Attributes:
    parents: topology, as in `TokenTree`.
    vocab: wrong tokens are taken from ``[0, vocab)``.
    taps: layers it asks for.
  """

  parents: tuple[int, ...]
  vocab: int
  taps: tuple[int, ...] = ()

  name: ClassVar[str] = "truth"
  kind: ClassVar[str] = "deterministic"

  @property
  def tree(self) -> TokenTree:
    return TokenTree(self.parents)

  @staticmethod
  def plan(texts, nodes) -> dict[str, Array]:
    """Weights.

    Args:
      texts: int32 ``[R, C]``, prompts included.
      nodes: the deepest right node of each round, in a circle that row r enters at r; 0 is all wrong.
    """
    return {"texts": jnp.asarray(texts, jnp.int32), "nodes": jnp.asarray(nodes, jnp.int32)}

  def propose(self, weights, state, context: DraftContext, target_cache):
    tree, texts, nodes = self.tree, weights["texts"], weights["nodes"]
    line = context.settings.seed.astype(jnp.int32)
    at = context.length[:, None] - 1 + tree.depths
    truth = jnp.take_along_axis(texts[line], jnp.minimum(at, texts.shape[1] - 1), axis=1)
    right = jnp.asarray(tree.ancestor_mask)[nodes[(state.rounds + line) % nodes.shape[0]]]
    wrong = (truth + 1 + jnp.arange(tree.num_nodes) % (self.vocab - 1)) % self.vocab
    tokens = jnp.where(right, truth, wrong).at[:, 0].set(context.root)
    proposal = Proposal(tokens, jnp.ones_like(tokens, bool), None, tree=tree, kind=self.kind)
    return proposal, state.replace(rounds=state.rounds + context.active), target_cache


@dataclasses.dataclass(frozen=True)
class SampledDrafter(_Recording):
  """Draws a chain from a Markov table, weights: logits ``[V, V]`` by the token before.

  q is processed with the row's own settings and processor.

  Attributes:
    depth: drafts a round.
  """

  depth: int
  taps: tuple[int, ...] = ()

  name: ClassVar[str] = "sampled"
  kind: ClassVar[str] = "sampled"

  @property
  def tree(self) -> TokenTree:
    return TokenTree.chain(self.depth)

  def propose(self, weights, state, context: DraftContext, target_cache):
    tokens, q = [context.root], []
    path = jnp.full((*context.root.shape, 1, self.depth), -1, jnp.int32)
    for node in range(1, self.depth + 1):
      logits = weights[tokens[-1]][:, None]
      q.append(processors.process(logits, context, path).probs(context.settings)[:, 0])
      u = sampling.uniform(context.settings.seed, Purpose.DRAFT, context.length, node)
      tokens.append(sampling.draw(q[-1], u))
      path = path.at[:, 0, node - 1].set(tokens[-1])
    tokens = jnp.stack(tokens, axis=1)
    proposal = Proposal(
      tokens, jnp.ones_like(tokens, bool), jnp.stack(q, axis=1), tree=self.tree, kind=self.kind
    )
    return proposal, state.replace(rounds=state.rounds + context.active), target_cache


@dataclasses.dataclass(frozen=True)
class ScriptedControl:
  """Widths in a circle, whatever happens; every third round a row proposes nothing, and one less deep.

  A width that is deeper than it may be becomes plain decoding.

  Attributes:
    script: widths round by round, 0 is plain decoding.
  """

  script: tuple[int, ...]

  name: ClassVar[str] = "scripted"

  def init(self, beliefs, trees, batch):
    return jnp.zeros((batch,), jnp.int32)

  def plan(self, beliefs, trees, rows, deepest=ANY_DEPTH):
    width = jnp.asarray(self.script, jnp.int32)[jnp.max(rows.control) % len(self.script)]
    whole = jnp.asarray([0, *(tree.max_depth for tree in trees)], jnp.int32)[width]
    width = jnp.where(whole <= deepest, width, 0)
    turn = (rows.control + rows.prompt_length) % 3
    depth = jnp.where(turn == 0, 0, jnp.where(turn == 1, jnp.maximum(whole - 1, 1), whole))
    return RoundPlan(width, jnp.where(rows.active & (width > 0), depth, 0))

  def learn(self, beliefs, trees, rows, plan, outcome):
    return rows.control + rows.active
