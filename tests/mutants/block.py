"""Faults in the one-pass block drafter: its head, what it keeps, how it is trained."""

from tests.mutants import Mutant
from tests.mutants.core import CONTRACT
from tests.mutants.training import LOOPS

MODEL, DRAFTER, RECIPE = (f"specjax/{path}/block.py" for path in ("models", "drafters", "training/recipes"))
PASS = ("tests/models/test_block.py::test_a_pass_is_that_of_numpy",)
DRAFTS = ("tests/drafters/test_block.py::test_drafts_are_the_heads_own",)
OWN_LOOPS = (f"{LOOPS}[block]",)

MUTANTS = (
  Mutant(
    "a causal block",
    "a position of the block does not see those behind it",
    MODEL,
    "np.ones((width, width), bool)",
    "np.tri(width, dtype=bool)",
    PASS,
  ),
  Mutant(
    "features as they are",
    "keys and values are made of features that no norm went over",
    MODEL,
    "layer.attention.qkv(layer.attention_norm(features))",
    "layer.attention.qkv(features)",
    PASS,
  ),
  Mutant(
    "the block one place on",
    "a block stands a position behind its root's",
    MODEL,
    "depths = np.arange(width, dtype=np.int32)",
    "depths = np.arange(width, dtype=np.int32) + (bits is not None)",
    PASS,
  ),
  Mutant(
    "no room for a block",
    "the head's cache ends where the loop's slots do",
    MODEL,
    "slots += self.config.block_size",
    "slots += 0 * self.config.block_size",
    ("tests/drafters/test_block.py::test_a_block_fits_behind_the_last_slot",),
  ),
  Mutant(
    "the block a depth early",
    "a node's children are its own depth's and not the next",
    DRAFTER,
    "depths[0] + 1, axis=1)",
    "depths[0], axis=1)",
    DRAFTS,
  ),
  Mutant(
    "the Markov head behind the root",
    "the token before a draft does not reach the Markov head",
    DRAFTER,
    "self._said(head, behind, tokens)",
    "self._said(head, behind, 0 * tokens)",
    DRAFTS,
  ),
  Mutant(
    "the block's numbers for the target's",
    "drafts are numbers of the head's own draft vocabulary",
    DRAFTER,
    "head.conditioned(logits, tokens), head.ids)",
    "head.conditioned(logits, tokens), None)",
    DRAFTS,
  ),
  Mutant(
    "blocks behind no feature",
    "a row of one token is drafted for",
    DRAFTER,
    "context.active & (state.cache.length > 0)",
    "context.active & (state.cache.length >= 0)",
    DRAFTS,
  ),
  Mutant(
    "a block's rows kept",
    "the root's row counts as if it were made of the target's features",
    DRAFTER,
    "grown.proposal, BlockState(output.cache), target_cache",
    "grown.proposal, BlockState(output.cache.replace(length=state.cache.length + ready)), target_cache",
    (f"{CONTRACT}[block_chain_sample-block_verification]",),
  ),
  Mutant(
    "the root's feature seen",
    "blocks are trained on a feature that decoding does not have yet",
    RECIPE,
    "(batch.positions[:, None] < position[..., None])",
    "(batch.positions[:, None] <= position[..., None])",
    OWN_LOOPS,
  ),
  Mutant(
    "blocks see other samples",
    "a block sees features of all samples of its row",
    RECIPE,
    "seen = (batch.segments[:, None] == segment[..., None]) &",
    "seen = (batch.segments[:, None] >= 0 * segment[..., None]) &",
    OWN_LOOPS,
  ),
  Mutant(
    "forced a token late",
    "the Markov head is trained on the token that is to be said",
    RECIPE,
    "first + d - 1)",
    "first + d)",
    OWN_LOOPS,
  ),
  Mutant(
    "a block in one place",
    "all positions of a block are trained at the root's rotary position",
    RECIPE,
    "position[..., None] + jnp.arange(size)",
    "position[..., None] + 0 * jnp.arange(size)",
    OWN_LOOPS,
  ),
)
