"""Faults in drafts of the target's own layers, and in verification that begins behind them."""

from tests.mutants import Mutant

DECODE, SHARED, EARLY, ADAPTER, SKIPPING, AGREEMENT = (
  "specjax/decode.py",
  "specjax/drafters/shared_layers.py",
  "specjax/drafters/early_exit.py",
  "specjax/models/early_exit.py",
  "specjax/models/skipping.py",
  "specjax/training/agreement.py",
)

TESTS = "tests/drafters/test_shared_layers.py"
DRAFTS = (f"{TESTS}::test_a_chain_is_the_drafts_own",)
NOT_AGAIN = (f"{TESTS}::test_what_drafted_is_not_run_again",)
SEARCH = (
  "tests/experiments/test_search_skips.py::test_agreement_is_that_of_the_draft_behind_the_targets_rows",
)

MUTANTS = (
  Mutant(
    "verification from the beginning",
    "layers that drafted are run once more",
    DECODE,
    "begun = proposal.hidden is not None",
    "begun = False",
    NOT_AGAIN,
  ),
  Mutant(
    "silent rounds from the beginning",
    "where nothing was proposed the roots go through all layers, some of them a second time",
    DECODE,
    "& (deepest == 0)",
    "& (deepest < 0)",
    (f"{NOT_AGAIN[0]}[silent]",),
  ),
  Mutant(
    "hidden states one node late",
    "what verification begins with is another node's",
    SHARED,
    "(0, node, 0))",
    "(0, node - 1, 0))",
    DRAFTS,
  ),
  Mutant(
    "the last draft is not run",
    "verification begins with nothing at the last node of a chain",
    SHARED,
    "reached = jnp.any(context.active & proposal.valid[:, -1])",
    "reached = jnp.bool_(False)",
    DRAFTS,
  ),
  Mutant(
    "the root's row is not counted in",
    "what is drafted writes over the root's row, at its position",
    SHARED,
    "rows.behind(length + 1), context.active)",
    "rows.behind(length), context.active)",
    DRAFTS,
  ),
  Mutant(
    "trees hand over what lies in another order",
    "verification of a tree begins behind layers whose rows are in the order of drafting",
    SHARED,
    "return self.tree.is_chain and self.exit > 0",
    "return self.exit > 0 and not self.is_dynamic",
    (f"{TESTS}::test_a_tree_is_verified_whole",),
  ),
  Mutant(
    "the target's length is kept moved",
    "the target's cache comes back with the root's row counted",
    SHARED,
    "rows = rows.behind(length)\n    return proposal",
    "rows = rows.behind(length + 1)\n    return proposal",
    DRAFTS,
  ),
  Mutant(
    "feed-forwards a layer early",
    "a skip set's feed-forwards are left out in the layer before",
    SKIPPING,
    "thin.layers[i].ff = thin.layers[i].ff_norm = None",
    "thin.layers[i - 1].ff = thin.layers[i - 1].ff_norm = None",
    DRAFTS,
  ),
  Mutant(
    "an adapter without its residual",
    "the adapter's attention takes the place of the hidden state",
    ADAPTER,
    "hidden = hidden + y",
    "hidden = y",
    DRAFTS,
  ),
  Mutant(
    "adapter rows without their norm",
    "rows of prompts and of plain rounds are made of the hidden state as it is",
    ADAPTER,
    "_, k, v = self.attention.qkv(self.attention_norm(hidden.astype(self.dtype)))",
    "_, k, v = self.attention.qkv(hidden.astype(self.dtype))",
    DRAFTS,
  ),
  Mutant(
    "the exit's draft vocabulary is the target's",
    "an early exit's own numbers are proposed",
    EARLY,
    "self.over_target_vocabulary(output.logits, adapter.ids)",
    "self.over_target_vocabulary(output.logits, None)",
    DRAFTS,
  ),
  Mutant(
    "plain rounds leave no row",
    "behind a round that did not draft the adapter's row of the root is what lay there",
    EARLY,
    "if committed.tokens.shape[1] == 1:",
    "if committed.tokens.shape[1] == 0:",
    ("tests/decode/test_contract.py::test_pair[early_exit_widths-greedy]",),
  ),
  Mutant(
    "places see the target's row of themselves",
    "agreement of a skip set is measured with the whole target's row at the draft's own place",
    AGREEMENT,
    "< places[:, :, None]",
    "<= places[:, :, None]",
    SEARCH,
  ),
)
