"""The tables of the contract suites. A new drafter or rule is one row here.

`tests/decode/test_contract.py` then holds it to: token-identical to plain in a ragged batch, cache rows
equal to a fresh prefill, nothing else read, statistics that add up, one trace for streaming and the whole.
(Order, padding, insertion and copies are tested on a row of each kind: `test_rows.py`, `test_compile.py`.)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from specjax import decode
from specjax.base import Proposal
from specjax.control import Fixed
from specjax.drafters import make_drafter
from specjax.models import SkipSet, skipping, truncated
from specjax.sampling import Settings
from specjax.testing import ScriptedControl, TruthDrafter, perturbed, tiny_model
from specjax.tree import TokenTree
from specjax.verify import make_rule
from tests import heads

VOCAB = 61
WINDOW = 4
LENGTH_LIMIT = 96
PREFILL_WIDTHS = (16, 32)
# Ragged prompts, the second repetitive so that prompt lookup has something to find.
PROMPTS = ((3, 14, 15, 9, 26, 5), (1, 2, 3, 1, 2, 3, 1, 2), (7,), tuple(range(20, 39)))
BUDGETS = (30, 41, 36, 23)
BATCH = len(PROMPTS)
# Settings that differ from row to row, one of them greedy; seeds that are no row numbers.
SAMPLING = dict(
  temperature=(0.9, 1.2, 0.0, 0.8),
  top_k=(0, 8, 0, 20),
  top_p=(1.0, 0.95, 1.0, 0.9),
  seed=(7, 1, 4, 4_000_000_000),
)
TREE = (-1, 0, 0, 1, 1, 2, 5, 6)  # the root; two branches, one of depth 4


@functools.cache
def target():
  return tiny_model(0)


@functools.cache
def draft():
  """Often right, often wrong."""
  return perturbed(target(), 0.07)


@functools.cache
def other_draft():
  """Other heads, head size, depth, padding and length limit than the target (case L5)."""
  return tiny_model(
    5,
    num_layers=1,
    d_model=24,
    d_ff=32,
    num_heads=3,
    num_kv_heads=1,
    head_dim=6,
    vocab_size=64,
    max_length=40,
  )


ANY_CHAIN = ("greedy", "draw_and_follow", "speculative_sampling")
TREE_RULES = ("recursive_rejection", "traversal_verification")


@dataclasses.dataclass(frozen=True)
class DrafterCase:
  """How to make a drafter, and what is known about it beforehand.

  Attributes:
    make: ``() → (drafter, its weights)``.
    rules: names of the rules it runs with.
    ragged: rows of a greedy batch are known to accept different numbers of drafts.
    accepts: drafts accepted in every round that the end does not cut, where known.
    deep: rounds that accept two drafts and more are known to be many.
    changes: fields of `DecodeConfig`.
    caches: ``state.drafter → {name: (model, KVCache)}``, caches whose rows must equal a fresh prefill.
  """

  make: Callable[[], tuple[Any, Any]]
  rules: tuple[str, ...] = ANY_CHAIN
  ragged: bool = True
  accepts: int | None = None
  deep: bool = False
  caches: Callable[[Any], dict] = lambda state: {}
  changes: dict = dataclasses.field(default_factory=dict)


def two_model(model, policy, branching=(), **options):
  return two_model_drafter(model, policy, branching, **options), model


def two_model_drafter(model, policy, branching=(), window=WINDOW, **options):
  return make_drafter(
    "two_model",
    window=window,
    branching=branching,
    **options,
    vocab_size=VOCAB,
    num_real_tokens=VOCAB,
    max_length=model.config.max_length,
    policy=policy,
  )


@functools.cache
def eagle3_weights():
  """Often right on the plain texts, which its output layer is fitted to."""
  return heads.eagle3(target(), plain_texts(), plain_lengths())


def eagle3_drafter(window=WINDOW, **options):
  sizes = dict(vocab_size=VOCAB, num_real_tokens=VOCAB, max_length=512, taps=heads.TAPS)
  return make_drafter("eagle3", window=window, **sizes, **options)


def eagle3(**options):
  return eagle3_drafter(**options), eagle3_weights()


def eagle3_caches(state):
  return {"head": (heads.EagleRows(target(), eagle3_weights()), state.cache)}


@functools.cache
def eagle1_weights():
  """Often right on the plain texts, which its feed-forward is fitted to."""
  return heads.eagle1(target(), plain_texts(), plain_lengths())


def eagle1(window=WINDOW, **options):
  sizes = dict(vocab_size=VOCAB, num_real_tokens=VOCAB, max_length=512, taps=(2,))
  return make_drafter("eagle", window=window, **sizes, **options), eagle1_weights()


def eagle1_caches(state):
  return {"head": (heads.EagleRows(target(), eagle1_weights()), state.cache)}


def medusa(**shape):
  sizes = dict(vocab_size=VOCAB, num_real_tokens=VOCAB, num_heads=3, taps=(2,))
  weights = heads.medusa(target(), plain_texts(), plain_lengths())
  return make_drafter("medusa", **shape, **sizes), weights


@functools.cache
def block_weights():
  """Often right on the plain texts, which its output layer and Markov head are fitted to."""
  return heads.block(target(), plain_texts(), plain_lengths())


def block_drafter(window=WINDOW, **options):
  sizes = dict(vocab_size=VOCAB, num_real_tokens=VOCAB, max_length=512, taps=heads.TAPS, block_size=5)
  return make_drafter("block", window=window, **sizes, **options)


def block(**options):
  return block_drafter(**options), block_weights()


def block_caches(state):
  return {"head": (heads.BlockRows(target(), block_weights()), state.cache)}


def self_speculation_drafter(exit, **options):
  sizes = dict(vocab_size=VOCAB, num_real_tokens=VOCAB, max_length=512)
  return make_drafter("self_speculation", **{"window": WINDOW, "exit": exit, **sizes, **options})


def prefix(**options):
  """The target's first layer drafts."""
  return self_speculation_drafter(1, **options), truncated(target(), 1)


# Without its last feed-forward, or without the first attention: a draft that is often right.
LAST_FF, FIRST_ATTENTION = SkipSet(2, ff=(1,)), SkipSet(2, attention=(0,))


def skips(skipped: SkipSet, **options):
  return self_speculation_drafter(skipped.prefix, **options), skipping(target(), skipped)


@functools.cache
def early_exit_weights():
  return heads.early_exit(target(), plain_texts(), plain_lengths())


def early_exit_drafter(**options):
  sizes = dict(vocab_size=VOCAB, num_real_tokens=VOCAB, max_length=512, exit=1)
  return make_drafter("early_exit", **{"window": WINDOW, **sizes, **options})


def early_exit(**options):
  return early_exit_drafter(**options), early_exit_weights()


def early_exit_caches(state):
  return {"adapter": (heads.EarlyExitRows(target(), early_exit_weights()), state.cache)}


# Two thirds of the tokens, and a draft that says no others.
IDS = tuple(i for i in range(VOCAB) if i % 3)


@functools.cache
def reduced_draft():
  return heads.draft_decoder(target(), draft(), IDS)


def last_token(window: int = WINDOW):
  """A drafter from outside, made by its path: says the last token again and again."""
  return RepeatDrafter(window)


@dataclasses.dataclass(frozen=True)
class RepeatDrafter:
  """Shows what a class from elsewhere needs; nothing in the package knows it."""

  window: int

  name: ClassVar[str] = "repeat"
  kind: ClassVar[str] = "deterministic"
  taps: ClassVar[tuple[int, ...]] = ()

  @property
  def tree(self):
    return TokenTree.chain(self.window)

  def init(self, weights, batch, slots):
    return ()

  def prefill(self, weights, state, chunk):
    return state

  def propose(self, weights, state, context, target_cache):
    tokens = jnp.repeat(context.root[:, None], self.window + 1, axis=1)
    proposal = Proposal(tokens, jnp.ones_like(tokens, bool), None, tree=self.tree, kind=self.kind)
    return proposal, state, target_cache

  def extend(self, weights, state, committed):
    return state


def truth(parents, plan):
  return TruthDrafter(parents, VOCAB), TruthDrafter.plan(plain_texts(), plan)


CHAIN = tuple(range(-1, WINDOW))
RAGGED = (0, 4, 1, 3, 2)
RAGGED_TREE = (0, 7, 2, 3, 5, 6, 1, 4)
DRAFTERS: dict[str, DrafterCase] = {
  "none": DrafterCase(lambda: (make_drafter("none"), None), ragged=False, accepts=0),
  "prompt_lookup": DrafterCase(
    lambda: (make_drafter("prompt_lookup", window=WINDOW, min_ngram=1, max_ngram=2), None)
  ),
  "prompt_lookup_plain_rounds": DrafterCase(
    lambda: (make_drafter("prompt_lookup", window=WINDOW, max_ngram=2, min_ngram=2), None),
    rules=("greedy", "speculative_sampling"),
    changes=dict(control=Fixed()),
  ),
  "two_model_top_k": DrafterCase(
    lambda: two_model(draft(), "top_k"),
    rules=(*ANY_CHAIN, "block_verification"),
    caches=lambda state: {"draft": (draft(), state.cache)},
  ),
  "two_model_sample": DrafterCase(
    lambda: two_model(draft(), "sample"),
    rules=(*ANY_CHAIN, "block_verification"),
    caches=lambda state: {"draft": (draft(), state.cache)},
  ),
  "prompt_lookup_tree": DrafterCase(
    lambda: (
      make_drafter("prompt_lookup", window=WINDOW, min_ngram=1, max_ngram=2, matches=5, nodes=9),
      None,
    ),
    rules=("greedy", "draw_and_follow", *TREE_RULES),
    changes=dict(control=Fixed()),
  ),
  "two_model_tree_top_k": DrafterCase(
    lambda: two_model(draft(), "top_k", (2, 1, 2)),
    rules=("greedy", "draw_and_follow", "recursive_rejection"),
    caches=lambda state: {"draft": (draft(), state.cache)},
  ),
  "two_model_tree_sample": DrafterCase(
    lambda: two_model(draft(), "sample", (3,)),
    rules=("draw_and_follow", *TREE_RULES),
    caches=lambda state: {"draft": (draft(), state.cache)},
  ),
  "two_model_tree_distinct": DrafterCase(
    lambda: two_model(draft(), "sample_without_replacement", (2, 2)),
    rules=("draw_and_follow", *TREE_RULES),
    caches=lambda state: {"draft": (draft(), state.cache)},
  ),
  "two_model_unlike": DrafterCase(
    lambda: two_model(other_draft(), "sample"),
    rules=("speculative_sampling",),
    ragged=False,
    changes=dict(control=Fixed()),  # behind its length limit it has nothing to say
    caches=lambda state: {"draft": (other_draft(), state.cache)},
  ),
  "self_draft": DrafterCase(
    lambda: two_model(target(), "sample"),
    ragged=False,
    accepts=WINDOW,
    caches=lambda state: {"draft": (target(), state.cache)},
  ),
  "always_wrong": DrafterCase(lambda: truth(CHAIN, (0,) * len(RAGGED)), ragged=False, accepts=0),
  "scripted_ragged": DrafterCase(lambda: truth(CHAIN, RAGGED), rules=("greedy", "speculative_sampling")),
  "scripted_tree": DrafterCase(
    lambda: truth(TREE, RAGGED_TREE), rules=("greedy", "draw_and_follow", *TREE_RULES)
  ),
  # Under a controller: plain, short, long, tree in turn, rows that propose nothing or less among them.
  "prompt_lookup_widths": DrafterCase(
    lambda: (make_drafter("prompt_lookup", window=WINDOW, min_ngram=1, max_ngram=2), None),
    rules=("greedy", "draw_and_follow"),
    changes=dict(
      control=ScriptedControl((1, 2, 0, 3)),
      alternatives=(
        make_drafter("prompt_lookup", window=2, min_ngram=1, max_ngram=2),
        make_drafter("prompt_lookup", window=3, min_ngram=1, max_ngram=2, matches=5, nodes=7),
      ),
    ),
  ),
  "two_model_widths": DrafterCase(
    lambda: two_model(draft(), "sample"),
    rules=("traversal_verification", "greedy"),
    caches=lambda state: {"draft": (draft(), state.cache)},
    changes=dict(
      control=ScriptedControl((3, 0, 1, 2, 0, 0, 0, 0, 0)),
      alternatives=(
        two_model_drafter(target(), "sample", window=2),
        two_model_drafter(target(), "sample", (2, 2), window=3),
      ),
    ),
  ),
  "two_model_dynamic": DrafterCase(
    lambda: two_model(draft(), "top_k", nodes=7, beam=3),
    rules=("greedy", "draw_and_follow"),
    caches=lambda state: {"draft": (draft(), state.cache)},
  ),
  "two_model_draft_vocabulary": DrafterCase(
    lambda: two_model(reduced_draft(), "sample"),
    rules=("speculative_sampling", "greedy"),
    caches=lambda state: {"draft": (reduced_draft(), state.cache)},
  ),
  "eagle_chain_sample": DrafterCase(
    lambda: eagle1(policy="sample"), rules=(*ANY_CHAIN, "block_verification"), deep=True, caches=eagle1_caches
  ),
  "eagle_tree_distinct": DrafterCase(
    lambda: eagle1(branching=(2, 2), policy="sample_without_replacement"),
    rules=("draw_and_follow", *TREE_RULES),
    caches=eagle1_caches,
  ),
  # EAGLE-2, and its ablations.
  "eagle_dynamic": DrafterCase(
    lambda: eagle1(nodes=7, beam=3), rules=("greedy", "draw_and_follow"), deep=True, caches=eagle1_caches
  ),
  "eagle_dynamic_ablated": DrafterCase(
    lambda: eagle1(nodes=7, beam=2, expand="confidence", rerank=False),
    rules=("greedy", "draw_and_follow"),
    caches=eagle1_caches,
  ),
  "eagle3_chain_sample": DrafterCase(
    lambda: eagle3(policy="sample"), rules=(*ANY_CHAIN, "block_verification"), deep=True, caches=eagle3_caches
  ),
  "eagle3_tree_top_k": DrafterCase(
    lambda: eagle3(branching=(2, 2), policy="top_k"),
    rules=("greedy", "draw_and_follow", "recursive_rejection"),
    deep=True,
    caches=eagle3_caches,
  ),
  "eagle3_dynamic": DrafterCase(
    lambda: eagle3(nodes=7, beam=3), rules=("greedy", "draw_and_follow"), deep=True, caches=eagle3_caches
  ),
  "medusa_tree": DrafterCase(
    lambda: medusa(tree=((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0))),
    rules=("greedy", "draw_and_follow", "traversal_verification"),
    deep=True,
  ),
  # A ring that holds hardly more than a round, and more plain rounds than fit it.
  "eagle3_widths": DrafterCase(
    lambda: eagle3(policy="sample", ring=5),
    rules=("traversal_verification", "greedy"),
    caches=eagle3_caches,
    changes=dict(
      control=ScriptedControl((3, 0, 1, 2, 4, 0, 0, 0, 0, 0)),
      alternatives=(
        eagle3_drafter(2, policy="sample", ring=5),
        eagle3_drafter(3, branching=(2, 2), policy="sample", ring=5),
        eagle3_drafter(3, nodes=6, beam=2, ring=5),
      ),
    ),
  ),
  "block_chain_sample": DrafterCase(
    lambda: block(policy="sample"), rules=(*ANY_CHAIN, "block_verification"), deep=True, caches=block_caches
  ),
  "block_tree_distinct": DrafterCase(
    lambda: block(branching=(2, 2), policy="sample_without_replacement"),
    rules=("draw_and_follow", *TREE_RULES),
    deep=True,
    caches=block_caches,
  ),
  "block_dynamic": DrafterCase(
    lambda: block(nodes=7, beam=3), rules=("greedy", "draw_and_follow"), deep=True, caches=block_caches
  ),
  # Blocks are longer than most of these drafts, and plain rounds come between.
  "block_widths": DrafterCase(
    lambda: block(policy="sample"),
    rules=("traversal_verification", "greedy"),
    caches=block_caches,
    changes=dict(
      control=ScriptedControl((3, 0, 1, 2, 4, 0, 0)),
      alternatives=(
        block_drafter(1, policy="sample"),
        block_drafter(3, branching=(2, 2), policy="sample"),
        block_drafter(3, nodes=6, beam=2),
      ),
    ),
  ),
  "self_speculation_prefix": DrafterCase(lambda: prefix(), rules=("speculative_sampling", "greedy")),
  "self_speculation_skips": DrafterCase(
    lambda: skips(LAST_FF), rules=("draw_and_follow", "block_verification", "greedy")
  ),
  "self_speculation_tree": DrafterCase(
    lambda: skips(LAST_FF, branching=(2, 2), policy="top_k"), rules=("greedy", "traversal_verification")
  ),
  "self_speculation_dynamic": DrafterCase(
    lambda: skips(FIRST_ATTENTION, nodes=7, beam=3, policy="top_k"), rules=("greedy",)
  ),
  "early_exit": DrafterCase(
    lambda: early_exit(),
    rules=(*ANY_CHAIN, "block_verification"),
    deep=True,
    caches=early_exit_caches,
  ),
  # Plain rounds, rows that draft nothing or less, and rounds in which an unsure draft proposes nothing.
  "early_exit_widths": DrafterCase(
    lambda: early_exit(confidence=0.3),
    rules=("greedy", "traversal_verification"),
    caches=early_exit_caches,
    changes=dict(
      control=ScriptedControl((2, 0, 1, 2, 0)),
      alternatives=(early_exit_drafter(window=2, confidence=0.3),),
    ),
  ),
  "from_outside": DrafterCase(
    lambda: (make_drafter("tests.contract:last_token", window=WINDOW), None), rules=("greedy",), ragged=False
  ),
}
PAIRS = [(name, rule) for name, case in DRAFTERS.items() for rule in case.rules]


def config(drafter, rule: str = "greedy", **changes) -> decode.DecodeConfig:
  fields = dict(num_real_tokens=VOCAB, length_limit=LENGTH_LIMIT, prefill_widths=PREFILL_WIDTHS)
  return decode.DecodeConfig(drafter=drafter, rule=make_rule(rule), **{**fields, **changes})


@functools.cache
def built(name: str):
  """``(drafter, weights of both)``."""
  drafter, weights = DRAFTERS[name].make()
  return drafter, decode.Weights(target(), weights)


def static(name: str, rule: str, **changes) -> decode.DecodeConfig:
  """The config of a row of the table."""
  return config(built(name)[0], rule, **{**DRAFTERS[name].changes, **changes})


def start(name: str, *, rows=tuple(range(BATCH)), budgets=BUDGETS, stop_ids=(), sampling=None, **changes):
  """A prefilled state of the given rows, in that order; row i keeps seed i wherever it stands.

  The prefill does not depend on the rule, so one compiled program serves all of them.

  Args:
    name: key of `DRAFTERS`.
    rows: indices into `PROMPTS`.
    budgets: of all rows.
    stop_ids: as in `prefill`.
    sampling: settings, each a value a row (of all rows); None is greedy.
    **changes: fields of `DecodeConfig`.
  """
  weights = built(name)[1]
  # The prefill does not depend on the rule, so one that takes everything will do.
  rule = "draw_and_follow"
  picked = {field: [values[i] for i in rows] for field, values in (sampling or {}).items()}
  return decode.prefill(
    weights,
    static(name, rule, **changes),
    [PROMPTS[i] for i in rows],
    settings=Settings.create(len(rows), **{"seed": list(rows), **picked}),
    max_new_tokens=[budgets[i] for i in rows],
    stop_ids=stop_ids,
  )


def finish(name: str, rule: str, state, **changes) -> list[decode.RowResult]:
  """Decodes to the end."""
  config = static(name, rule, **changes)
  return decode.results(decode.generate(built(name)[1], state, config))


def run(name: str, rule: str, **kwargs) -> list[decode.RowResult]:
  """Prefill and decode to the end."""
  changes = {k: v for k, v in kwargs.items() if k in ("length_limit", "prefill_widths")}
  return finish(name, rule, start(name, **kwargs), **changes)


def comparable(rows):
  """Rows without what depends on a batch: float32 sums, which round differently, and the width of rounds."""
  return [dataclasses.replace(row, overlap=None, logprobs=None, nodes=[], width=[]) for row in rows]


@functools.cache
def plain() -> tuple[decode.RowResult, ...]:
  """The same rows without drafts, greedy: what every lossless pair must say."""
  return tuple(run("none", "greedy"))


@functools.cache
def plain_sampled() -> tuple[decode.RowResult, ...]:
  """The same with `SAMPLING`."""
  return tuple(run("none", "draw_and_follow", sampling=SAMPLING))


@functools.cache
def plain_texts() -> np.ndarray:
  """Prompts and greedy continuations, int32 ``[rows, LENGTH_LIMIT]``: the weights of `TruthDrafter`."""
  texts = np.zeros((BATCH, LENGTH_LIMIT), np.int32)
  for row, (prompt, result) in enumerate(zip(PROMPTS, plain())):
    texts[row, : len(prompt) + len(result.tokens)] = (*prompt, *result.tokens)
  return texts


def plain_lengths() -> list[int]:
  """How many tokens each of them has."""
  return [len(prompt) + len(result.tokens) for prompt, result in zip(PROMPTS, plain())]
