"""A drafter from outside the package: goes on repeating the text's last period.

  python -m experiments.generate --drafter=experiments.my_drafter:make --window=6

A drafter is a frozen, hashable object, since it becomes part of the compiled program. What changes while
decoding lives in a state that only the drafter understands, a pytree whose leaves have the row as axis 0.
Four methods, all pure and traced:

- ``init`` makes an empty state; this drafter needs none.
- ``prefill`` is shown the prompt, chunk by chunk, without its last token.
- ``propose`` returns the draft. Node 0 is the root, the last committed token; ``valid`` marks the nodes
  that are really proposed. The loop drops what does not fit the row's budget.
- ``extend`` is shown what was committed: root and accepted drafts.

Without state, weights and hidden states (``taps``), `StatelessDrafter` has all of them but ``propose``.
``kind`` says how the tokens came about. Here they are a function of the committed text, so every rule keeps
the output exact whatever is proposed, and a bad guess costs time only.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from specjax.base import DraftContext, Proposal, StatelessDrafter
from specjax.tree import TokenTree


@dataclasses.dataclass(frozen=True)
class RepeatLast(StatelessDrafter):
  """Proposes that the tokens since the root's previous occurrence come again."""

  window: int

  name = "repeat_last"
  kind = "deterministic"

  @property
  def tree(self) -> TokenTree:
    return TokenTree.chain(self.window)

  def propose(self, weights, state, context: DraftContext, target_cache):
    last = context.length[:, None] - 1  # the root's position
    position = jnp.arange(context.tokens.shape[1])
    same = (context.tokens == context.root[:, None]) & (position < last)
    before = jnp.max(jnp.where(same, position, -1), axis=1, keepdims=True)
    period = jnp.maximum(last - before, 1)
    source = before + 1 + jnp.arange(self.window) % period
    drafts = jnp.take_along_axis(context.tokens, source, axis=1)
    tokens = jnp.concatenate([context.root[:, None], drafts], axis=1)
    valid = jnp.broadcast_to(before >= 0, tokens.shape).at[:, 0].set(True)
    return Proposal(tokens, valid, q=None, tree=self.tree, kind=self.kind), state, target_cache


def make(window: int = 4) -> RepeatLast:
  """What ``--drafter=experiments.my_drafter:make`` calls; ``window`` comes from --window."""
  return RepeatLast(window)
