"""Loops that repeat one part of decoding inside a compiled program, for `decode_bench` and `calibrate`.

Each turn's input depends on all of the output of the turn before, through a comparison that is never
true: else the compiler would do the same work once, outside of the loop, or leave out what nobody reads.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from experiments.runtime import Method
from specjax import decode, sampling
from specjax.base import Proposal, StatelessDrafter
from specjax.decode import DecodeConfig, DecodeState, Finish, Verification, Weights
from specjax.models import Decoder
from specjax.models.layers import Linear, matmul
from specjax.sampling import Purpose, Settings
from specjax.tree import DynamicTree, TokenTree, TreeBudget

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class FixedDrafter(StatelessDrafter):
  """Proposes nodes that are hardly ever right: rounds of a topology's full cost and one token each.

  Attributes:
    shape: the topology.
    dynamic: give it as an array a row.
  """

  shape: TokenTree
  dynamic: bool = False

  name: ClassVar[str] = "fixed"
  kind: ClassVar[str] = "deterministic"

  @property
  def tree(self) -> TokenTree | TreeBudget:
    return TreeBudget(self.shape.num_nodes, self.shape.max_depth) if self.dynamic else self.shape

  def propose(self, weights, state, context, target_cache):
    tokens = (context.root[:, None] + 7 * jnp.arange(self.shape.num_nodes)) % 256
    tokens = tokens.at[:, 0].set(context.root)
    tree = self.shape
    if self.dynamic:
      # Parents that the compiler cannot know.
      parents = jnp.asarray(tree.parents, jnp.int32) + _never(context.length)
      tree = DynamicTree.from_parents(jnp.broadcast_to(parents, tokens.shape), tree.max_depth)
    proposal = Proposal(tokens, jnp.ones_like(tokens, bool), q=None, tree=tree, kind=self.kind)
    return proposal, state, target_cache


def _never(*outputs: Array) -> Array:
  """A False that the compiler cannot foresee, and that needs every element of the outputs."""
  return functools.reduce(jnp.logical_or, [jnp.max(output) > 1e9 for output in outputs])


def parameter_bytes(model: Decoder) -> int:
  return sum(leaf.nbytes for leaf in jax.tree.leaves(model))


@jax.jit
def read_all(leaves: list[Array]) -> list[Array]:
  """Reads every parameter once, in order: sums over the last axis."""
  return [jnp.sum(leaf, axis=-1, dtype=jnp.float32) for leaf in leaves]


@functools.partial(jax.jit, donate_argnums=0)
def rewind(state: DecodeState, length: Array | int) -> DecodeState:
  """All rows back at ``length`` tokens, nothing else touched: rollback is a number."""
  lengths = jnp.full_like(state.length, length)
  drafter = state.drafter
  if hasattr(drafter, "cache"):  # a draft model's own cache
    drafter = drafter.replace(cache=drafter.cache.replace(length=lengths - 1))
  if hasattr(drafter, "seen"):  # and how many of the target's features a head has
    drafter = drafter.replace(seen=lengths - 1)
  return state.replace(
    length=lengths,
    finish=jnp.full_like(state.finish, Finish.NONE),
    cache=state.cache.replace(length=lengths - 1),
    drafter=drafter,
    log=jax.tree.map(jnp.zeros_like, state.log),
  )


def _linears(model: Decoder) -> list[Array]:
  """Weights ``[O, I]`` of all linear layers and of the output head, in order."""
  is_linear = lambda node: isinstance(node, Linear)
  layers = [node for node in jax.tree.leaves(model.layers, is_leaf=is_linear) if is_linear(node)]
  head = model.embed if model.head is None else model.head.weight
  return [layer.weight[...] for layer in layers] + [head[...]]


def matmul_inputs(model: Decoder, rows: int) -> dict[int, Array]:
  """Inputs ``[rows, I]`` for each width I of the model's linear layers."""
  widths = {weight.shape[1] for weight in _linears(model)}
  return {width: jnp.full((rows, width), 1e-3, model.dtype) for width in widths}


@functools.partial(jax.jit, donate_argnums=0)
def matmuls(inputs: dict[int, Array], target: Weights, rounds: Array | int) -> dict[int, Array]:
  """The model's matrix products and nothing else, one after the other."""
  weights = _linears(target.target)

  def turn(_, inputs):
    inputs = dict(inputs)
    for weight in weights:
      x = inputs[weight.shape[1]]
      inputs[weight.shape[1]] = x + _never(matmul(x, weight)).astype(x.dtype)
    return inputs

  return jax.lax.fori_loop(0, rounds, turn, inputs)


def verify_carry(state: DecodeState, nodes: int) -> tuple[Any, Array]:
  """Cache and tokens ``[B, N]`` for `verify`."""
  return state.cache, jnp.broadcast_to(state.tokens[:, :1], (state.tokens.shape[0], nodes)) + 0


@functools.partial(jax.jit, static_argnames=("implementation", "first"), donate_argnums=0)
def verify(
  carry: tuple[Any, Array],
  target: Weights,
  tree: TokenTree | DynamicTree,
  implementation: str,
  first: int,
  rounds: Array | int,
) -> tuple[Any, Array]:
  """The target's layers from ``first`` on over a tree, with logits; each turn writes scratch rows anew."""
  ancestors = None if tree.is_chain else tree.ancestors

  def turn(_, loop):
    cache, tokens = loop
    # Stands for what the layers before would give.
    hidden = jnp.take(target.target.embed[...], tokens, axis=0, mode="clip") if first else None
    output = target.target(
      tokens,
      cache,
      depths=tree.depths,
      ancestors=ancestors,
      implementation=implementation,
      layer_range=(first, None),
      hidden=hidden,
    )
    return output.cache, tokens + _never(output.logits)

  return jax.lax.fori_loop(0, rounds, turn, carry)


def one_round(method: Method, state: DecodeState) -> tuple[Proposal, Verification, DecodeState]:
  """A real proposal, what the target says about it, and the state before they are accepted."""
  proposal, state = decode.draft_step(method.weights, state, method.config)
  verification, state = decode.verify_step(method.weights, state, proposal, method.config)
  return proposal, verification, state


@jax.jit
def sampled_proposal(proposal: Proposal, verification: Verification) -> Proposal:
  """The same nodes as if drawn from the target's distribution at temperature 1.3."""
  batch = proposal.tokens.shape[0]
  settings = Settings.create(batch, temperature=1.3)
  q = sampling.processed_probs(verification.logits, sampling.peak(verification.logits)[0], settings)
  u = sampling.uniform(settings.seed, Purpose.DRAFT, jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2]))
  # Each node's token is drawn from its parent's row with the node's own noise.
  rows = jnp.take(q, jnp.maximum(jnp.asarray(proposal.tree.parents), 0), axis=1)
  tokens = sampling.draw(rows, u).at[:, 0].set(proposal.tokens[:, 0])
  return proposal.replace(tokens=tokens, q=q, kind="sampled")


def _with_caches_of(after: Any, before: Any) -> Any:
  """A drafter's state as it was, but for its caches: going back to old ones would copy them."""
  return jax.tree.map(lambda new, old: new if new.ndim == 4 else old, after, before)


@functools.partial(jax.jit, static_argnames="config", donate_argnums=0)
def draft(state: DecodeState, weights: Weights, config: DecodeConfig, rounds: Array | int) -> DecodeState:
  """The draft alone, from the same text each turn."""

  def turn(_, state):
    proposal, after = decode.draft_step(weights, state, config)
    read = [proposal.tokens, proposal.valid] + ([] if proposal.q is None else [proposal.q])
    drafter = _with_caches_of(after.drafter, state.drafter)
    return after.replace(length=after.length + _never(*read), drafter=drafter)

  return jax.lax.fori_loop(0, rounds, turn, state)


@functools.partial(jax.jit, static_argnames="config", donate_argnums=0)
def accept(
  state: DecodeState,
  weights: Weights,
  proposal: Proposal,
  verification: Verification,
  config: DecodeConfig,
  rounds: Array | int,
) -> DecodeState:
  """Rule, stops and commit alone, of the same round each turn."""

  def turn(_, carry):
    state, logits = carry
    # One entry, in place: a sum over all of them would be a pass that decoding does not make.
    logits = logits.at[:, :1, :1].add(_never(state.length))
    after = decode.accept_step(weights, state, proposal, verification.replace(logits=logits), config)
    after = after.replace(
      length=state.length + _never(after.length, after.finish, after.tokens),
      finish=state.finish,
      cache=after.cache.replace(length=state.cache.length),
      drafter=_with_caches_of(after.drafter, state.drafter),
      log=after.log.replace(rounds=jnp.zeros_like(state.log.rounds)),
    )
    return after, logits

  return jax.lax.fori_loop(0, rounds, turn, (state, verification.logits))[0]
