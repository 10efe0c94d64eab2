"""Faults in acceptance rules."""

from tests.mutants import Mutant
from tests.mutants.core import TREE_PAIR

FOLLOW, SPECULATIVE, RESIDUAL, BLOCK, TRAVERSAL, TYPICAL = (
  f"specjax/verify/{name}.py"
  for name in ("follow", "speculative", "residual", "block", "traversal", "typical")
)

LAWS = "tests/verify/test_laws.py"
ON_CHAINS = f"{LAWS}::test_a_round_over_a_chain_has_the_targets_joint_law"
CHAIN_LAW, BLOCK_LAW = (
  f"{ON_CHAINS}[{rule}-sampled-random]" for rule in ("speculative_sampling", "block_verification")
)
ON_TREES = f"{LAWS}::test_a_round_over_a_static_tree_has_the_targets_joint_law"
TREE_LAW, TRAVERSAL_LAW = (
  f"{ON_TREES}[{rule}-sampled]" for rule in ("recursive_rejection", "traversal_verification")
)
SIBLINGS = f"{LAWS}::test_five_tokens_three_siblings[recursive_rejection-sampled]"
EARLY = f"{LAWS}::test_a_chain_may_end_early"
BONUS = f"{LAWS}::test_the_bonus_is_plains_draw_at_its_position"
CORRECTION = f"{LAWS}::test_e9_the_correction_is_read_at_the_rejected_drafts_parent"
LONG_LAW = "tests/decode/test_law.py"
LENIENT = "tests/verify/test_lossy.py::test_lenience_has_the_law_it_states"
TYPICAL_BY_HAND = "tests/verify/test_lossy.py::test_typical_acceptance_is_its_statement"

MUTANTS = (
  # --- following the target's choice
  Mutant(
    "validity ignored",
    "a node that was not proposed is accepted",
    FOLLOW,
    "accepts = (accepts & proposal.valid).at",
    "accepts = accepts.at",
    ("tests/test_cases.py::test_invalid_drafts_are_never_accepted[greedy]",),
  ),
  Mutant(
    "ancestors need not be accepted",
    "a node is accepted although its parent was rejected",
    FOLLOW,
    "reached = jnp.all(accepts[:, None, :] | ~tree.ancestor_mask, axis=-1)",
    "reached = accepts | tree.ancestor_mask.all()",
    (CORRECTION, TREE_PAIR),
  ),
  Mutant(
    "descendants must be accepted",
    "a node is accepted when all that hangs below it is",
    FOLLOW,
    "accepts[:, None, :] | ~tree.ancestor_mask, axis=-1)",
    "accepts[:, :, None] | ~tree.ancestor_mask, axis=-2)",
    (CORRECTION, TREE_PAIR),
  ),
  Mutant(
    "choice of the node itself",
    "a draft is compared with what its own row says",
    FOLLOW,
    "proposal.tokens == proposal.tree.of_parent(chosen)",
    "proposal.tokens == chosen",
    (CORRECTION,),
  ),
  Mutant(
    "bonus read at the root",
    "the next token is what the root's row says",
    FOLLOW,
    "next_token = jnp.take_along_axis(chosen, node[:, None], axis=1)[:, 0]",
    "next_token = chosen[:, 0]",
    (CORRECTION,),
  ),
  Mutant(
    "target noise by round",
    "all positions of a round share one draw",
    FOLLOW,
    "Purpose.TARGET, length[:, None] + proposal.tree.depths)",
    "Purpose.TARGET, length[:, None] + 0 * proposal.tree.depths)",
    (f"{ON_TREES}[draw_and_follow-deterministic]",),
  ),
  # --- token by token
  Mutant(
    "ratio turned round",
    "drafts are accepted with q / p",
    SPECULATIVE,
    "* (lenience * q) < p",
    "* p < (lenience * q)",
    (CHAIN_LAW,),
  ),
  Mutant(
    "accepts what should be rejected",
    "the sign of the comparison is turned",
    SPECULATIVE,
    "* (lenience * q) < p",
    "* (lenience * q) >= p",
    (CHAIN_LAW,),
  ),
  Mutant(
    "q of another node",
    "a draft is judged by the distribution of the one before it",
    SPECULATIVE,
    "jnp.take_along_axis(proposal.q[:, : p.shape[1]], drafted",
    "jnp.take_along_axis(jnp.roll(proposal.q, 1, axis=1)[:, : p.shape[1]], drafted",
    (CHAIN_LAW,),
  ),
  Mutant(
    "residual turned round",
    "replacements are drawn from (q - p)+",
    SPECULATIVE,
    "jnp.maximum(mass * row - at(proposal.q, jnp.minimum(node, last - 1)), 0.0)",
    "jnp.maximum(at(proposal.q, jnp.minimum(node, last - 1)) - mass * row, 0.0)",
    (f"{LAWS}::test_e2_replacements_come_from_the_residual",),
  ),
  Mutant(
    "residual not clipped",
    "replacements are drawn from |p - q|",
    SPECULATIVE,
    "jnp.maximum(mass * row - at(proposal.q, jnp.minimum(node, last - 1)), 0.0)",
    "jnp.abs(mass * row - at(proposal.q, jnp.minimum(node, last - 1)))",
    (f"{LAWS}::test_e2_replacements_come_from_the_residual",),
  ),
  Mutant(
    "residual of the first node",
    "the q that is subtracted is the first node's",
    SPECULATIVE,
    "jnp.minimum(node, last - 1)",
    "jnp.minimum(node, 0)",
    (CHAIN_LAW,),
  ),
  Mutant(
    "residual forgotten",
    "replacements are drawn from p",
    SPECULATIVE,
    "[:, None], residual, row)",
    "[:, None], row, row)",
    (f"{LAWS}::test_e2_replacements_come_from_the_residual",),
  ),
  Mutant(
    "rejected token comes again",
    "a deterministic draft that was rejected can be its own replacement",
    SPECULATIVE,
    "== token[:, None], 0.0, row)",
    "== token[:, None], row, row)",
    (f"{LAWS}::test_e7_a_deterministic_draft_is_accepted_with_its_probability",),
  ),
  Mutant(
    "correction from the next row",
    "the next token is drawn from the row behind the rejected draft",
    SPECULATIVE,
    "row = at(target, node)",
    "row = at(target, jnp.minimum(node + 1, target.shape[1] - 1))",
    (CORRECTION,),
  ),
  Mutant(
    "bonus from the row before",
    "the next token is drawn from the parent of the last accepted node",
    SPECULATIVE,
    "row = at(target, node)",
    "row = at(target, jnp.maximum(node - 1, 0))",
    (BONUS,),
  ),
  Mutant(
    "nothing proposed counts as rejected",
    "behind the last proposed draft a residual is drawn",
    SPECULATIVE,
    "rejected = (node < nodes - 1) & at(proposal.valid, jnp.minimum(node + 1, nodes - 1))",
    "rejected = node < nodes - 1",
    (BONUS,),
  ),
  Mutant(
    "overlap of unjudged drafts",
    "positions that were never judged are averaged",
    SPECULATIVE,
    "judged = proposal.valid[:, 1:] & (jnp.arange(p.shape[1]) <= node[:, None])",
    "judged = proposal.valid[:, 1:]",
    (f"{LONG_LAW}::test_overlap_is_the_expected_acceptance",),
  ),
  Mutant(
    "overlap of accepted drafts only",
    "the position at which a draft was rejected is not averaged",
    SPECULATIVE,
    "(jnp.arange(p.shape[1]) <= node[:, None])",
    "(jnp.arange(p.shape[1]) < node[:, None])",
    (f"{LONG_LAW}::test_overlap_is_the_expected_acceptance",),
  ),
  Mutant(
    "residual shares the acceptance noise",
    "the number that rejected a draft also picks its replacement",
    RESIDUAL,
    "Purpose.RESIDUAL, length, node)",
    "Purpose.ACCEPT, length, node + 1)",
    (f"{LONG_LAW}::test_f7_no_random_number_is_used_twice[sample-speculative_sampling]",),
  ),
  Mutant(
    "bonus noise by round",
    "the bonus is drawn with the noise of the first position of its round",
    RESIDUAL,
    "Purpose.TARGET, length + depth)",
    "Purpose.TARGET, length + 0 * depth)",
    (BONUS,),
  ),
  Mutant(
    "one acceptance number a round",
    "all drafts of a round are judged by one number",
    RESIDUAL,
    "starts, jnp.arange(nodes))",
    "starts, 0 * jnp.arange(nodes))",
    (f"{LONG_LAW}::test_f7_no_random_number_is_used_twice[sample-speculative_sampling]",),
  ),
  # --- a chain as a block
  Mutant(
    "block forgets its mass",
    "each draft is judged as if all before it were certain",
    BLOCK,
    "ratio(mass * pair[0], pair[1])",
    "ratio(pair[0] + 0 * mass, pair[1])",
    (BLOCK_LAW,),
  ),
  Mutant(
    "last draft as one in between",
    "the test of a whole block is that of a part",
    BLOCK,
    "(node == 0) | (node == drafts)",
    "node == 0",
    (BLOCK_LAW,),
  ),
  Mutant(
    "a part passes with its mass",
    "h of a part of a block is p in place of S / (S + 1 - p)",
    BLOCK,
    "mass_left(left(node), at(masses, node))",
    "at(masses, node)",
    (BLOCK_LAW,),
  ),
  Mutant(
    "block residual of mass 1",
    "behind a part of a block (P - Q)+ is drawn and not (p P - Q)+",
    BLOCK,
    "rejected, at(masses, node))",
    "rejected)",
    (BLOCK_LAW,),
  ),
  Mutant(
    "block as wide as the program",
    "what stands behind an invalid draft counts",
    BLOCK,
    "jnp.cumprod(proposal.valid[:, 1:].astype(jnp.int32), axis=1)",
    "jnp.ones_like(proposal.tokens[:, 1:])",
    (EARLY,),
  ),
  # --- siblings and trees
  Mutant(
    "elder siblings forgotten",
    "only the last sibling is subtracted from the target",
    RESIDUAL,
    "more = taken + _inverse(unseen)",
    "more = 0 * taken + _inverse(unseen)",
    (SIBLINGS,),
  ),
  Mutant(
    "residual not normalised",
    "what is left of the target behind a rejection does not sum to 1",
    RESIDUAL,
    "scale=put(left.scale, scale * grow)",
    "scale=put(left.scale, scale)",
    (TREE_LAW,),
  ),
  Mutant(
    "subtracted part not normalised",
    "what was subtracted is not scaled with what is left",
    RESIDUAL,
    "taken=put(left.taken, taken * grow)",
    "taken=put(left.taken, taken)",
    (SIBLINGS,),
  ),
  Mutant(
    "q not renormalised",
    "without replacement q keeps the tokens of elder siblings",
    RESIDUAL,
    "unseen=put(left.unseen, unseen),",
    "unseen=left.unseen,",
    (f"{ON_TREES}[recursive_rejection-sampled_without_replacement]",),
  ),
  Mutant(
    "tested against the whole target",
    "a later sibling is judged by p and not by what is left of it",
    RESIDUAL,
    "r = jnp.maximum(at(left.scale, node) * p - at(left.taken, node) * q, 0.0)",
    "r = at(left.mass, node) * p",
    (TREE_LAW,),
  ),
  Mutant(
    "a token gets two chances",
    "a deterministic sibling that repeats a rejected token is judged anew",
    RESIDUAL,
    "r = jnp.where(jnp.any(same & self._turned_down(left, node), axis=1), 0.0, r)",
    "r = jnp.where(jnp.any(same & (child < 0)[:, None], axis=1), 0.0, at(left.scale, node) * p)",
    (f"{ON_TREES}[recursive_rejection-deterministic]",),
  ),
  Mutant(
    "residual of the root",
    "the q that is subtracted is the root's at every node",
    RESIDUAL,
    "return at(self.draft, jnp.minimum(node, self.draft.shape[1] - 1))",
    "return at(self.draft, 0 * node)",
    (TREE_LAW,),
  ),
  Mutant(
    "last draw from the whole target",
    "behind rejected siblings the next token is drawn from p",
    RESIDUAL,
    "jnp.where((rejected & (r.sum(axis=-1) > 0))[:, None], r, row)",
    "jnp.where((rejected & (r.sum(axis=-1) > 0))[:, None], row, row)",
    (TREE_LAW,),
  ),
  Mutant(
    "mass after a rejection",
    "S / (S + 1 - p) is S",
    RESIDUAL,
    "left / jnp.where(left > 0, left + (1 - mass), 1.0)",
    "left",
    (TRAVERSAL_LAW,),
  ),
  Mutant(
    "traversal leaves the parent as it was",
    "a rejected subtree is not subtracted from its parent",
    TRAVERSAL,
    "left, _ = residuals.turn_down(left, node, ~done)",
    "left = left.replace(out=residuals.turn_down(left, node, ~done)[0].out)",
    (TRAVERSAL_LAW,),
  ),
  Mutant(
    "traversal masses of children alone",
    "a path is accepted with the ratio of its last node",
    TRAVERSAL,
    "scale=jnp.where(here, mass, left.scale)",
    "scale=left.scale",
    (TRAVERSAL_LAW,),
  ),
  Mutant(
    "traversal shares one number",
    "one random number decides about all nodes",
    TRAVERSAL,
    "at(u, node) < at(left.mass, node)",
    "u[:, 0] < at(left.mass, node)",
    (TRAVERSAL_LAW,),
  ),
  # --- rules with a law of their own
  Mutant(
    "lenience in the residual",
    "a lenient rejection draws from (p / l - q)+",
    SPECULATIVE,
    "weights = remove_draft(target, proposal, node, rejected)",
    "weights = remove_draft(target, proposal, node, rejected, 1 / lenience)",
    (LENIENT,),
  ),
  Mutant(
    "lenience turned round",
    "a lenient rule accepts less",
    SPECULATIVE,
    "* (lenience * q) < p",
    "* q < (lenience * p)",
    (LENIENT,),
  ),
  Mutant(
    "typical with the entropy turned round",
    "the more open the target is, the higher is the threshold",
    TYPICAL,
    "jnp.exp(-entropy)",
    "jnp.exp(entropy)",
    (TYPICAL_BY_HAND,),
  ),
  Mutant(
    "typical threshold of the node itself",
    "a draft is judged by the entropy behind it",
    TYPICAL,
    "(p > threshold[batch, above])",
    "(p > threshold[batch, jnp.minimum(jnp.arange(p.shape[1]), threshold.shape[1] - 1)])",
    (TYPICAL_BY_HAND,),
  ),
  Mutant(
    "typical takes the first path",
    "of equally long paths the likeliest does not win",
    TYPICAL,
    "jnp.where(longest, likely, -jnp.inf)",
    "jnp.where(longest, 0 * likely, -jnp.inf)",
    ("tests/verify/test_lossy.py::test_typical_acceptance_by_hand",),
  ),
  Mutant(
    "typical takes the likeliest path",
    "a short path wins over a longer one",
    TYPICAL,
    "jnp.where(longest, likely, -jnp.inf)",
    "jnp.where(reached, likely, -jnp.inf)",
    ("tests/verify/test_lossy.py::test_typical_acceptance_by_hand",),
  ),
)
