"""Faults in drafters."""

from tests.mutants import Mutant
from tests.mutants.core import CONTRACT, LIMITS

LOOKUP, TWO_MODEL, GROWING, TREE_DRAFTER = (
  f"specjax/drafters/{name}.py" for name in ("prompt_lookup", "two_model", "growing", "tree_drafter")
)

LOOKUP_TESTS = "tests/drafters/test_prompt_lookup.py"
TWO_MODEL_TESTS = "tests/drafters/test_two_model.py"
LONG_LAW = "tests/decode/test_law.py"
DRAFT_TREE = f"{CONTRACT}[two_model_tree_top_k-greedy]"
SELF_DRAFT = f"{CONTRACT}[self_draft-speculative_sampling]"

MUTANTS = (
  # --- prompt lookup
  Mutant(
    "suffix matches itself",
    "the end of the text counts as an earlier occurrence",
    LOOKUP,
    "matching = position < length - 1",
    "matching = position < length",
    (f"{LOOKUP_TESTS}::test_k3_the_latest_of_the_longest_matches",),
  ),
  Mutant(
    "copy starts one token early",
    "the last token of the match is copied and not what followed",
    LOOKUP,
    "source = end[:, :, None] + 1 + ",
    "source = end[:, :, None] + ",
    (f"{LOOKUP_TESTS}::test_k3_the_latest_of_the_longest_matches",),
  ),
  Mutant(
    "copy runs over the end",
    "a short period is not continued but read from beyond the text",
    LOOKUP,
    "jnp.arange(self.window) % period",
    "jnp.arange(self.window) + 0 * period",
    (f"{LOOKUP_TESTS}::test_k3_the_latest_of_the_longest_matches",),
  ),
  Mutant(
    "match runs over the beginning",
    "the padding before the text counts as token 0",
    LOOKUP,
    "(shifted == last) & (position >= back)",
    "(shifted == last)",
    (f"{LOOKUP_TESTS}::test_nothing_stands_before_the_text",),
  ),
  Mutant(
    "short matches count",
    "matches of one token fewer than asked are copied",
    LOOKUP,
    "longest >= self.min_ngram",
    "longest >= self.min_ngram - 1",
    (f"{LOOKUP_TESTS}::test_k3_the_latest_of_the_longest_matches",),
  ),
  Mutant(
    "merge by token alone",
    "branches that began differently are merged where a token is the same",
    LOOKUP,
    "alike[..., depth] & alike[..., depth - 1]",
    "alike[..., depth]",
    (f"{LOOKUP_TESTS}::test_merged_chains_are_a_trie",),
  ),
  Mutant(
    "merge into what was not found",
    "a node belongs to a chain that is left out",
    LOOKUP,
    "jnp.argmax(alike & found[:, None, :, None], axis=2)",
    "jnp.argmax(alike, axis=2)",
    (f"{LOOKUP_TESTS}::test_merged_chains_are_a_trie",),
  ),
  Mutant(
    "merge loses the last branch",
    "one node too few is marked as there",
    LOOKUP,
    "jnp.arange(nodes) <= new.sum(axis=(1, 2))[:, None]",
    "jnp.arange(nodes) < jnp.maximum(new.sum(axis=(1, 2))[:, None], 1)",
    (f"{LOOKUP_TESTS}::test_merged_chains_are_a_trie",),
  ),
  Mutant(
    "branches hang at the root",
    "parents of merged nodes are lost",
    LOOKUP,
    "put(zeros, parent).at",
    "put(zeros, 0 * parent).at",
    (f"{LOOKUP_TESTS}::test_merged_chains_are_a_trie",),
  ),
  # --- a draft model
  Mutant(
    "leaf rows are kept",
    "the draft counts a row for an accepted leaf, which it never fed",
    TWO_MODEL,
    "jnp.sum(committed.valid & (row >= 0), axis=1, dtype=jnp.int32)",
    "jnp.sum(committed.valid, axis=1, dtype=jnp.int32)",
    (DRAFT_TREE,),
  ),
  Mutant(
    "draft tree not compacted",
    "the draft keeps the first rows and not those of the path",
    TWO_MODEL,
    "path = None if self.tree.is_chain else jnp.maximum(row, 0)",
    "path = None",
    (DRAFT_TREE,),
  ),
  Mutant(
    "catch-up leaves one row out",
    "a draft that sat out rounds starts with a row missing",
    TWO_MODEL,
    "jnp.any(behind(cache) > _CATCH_UP)",
    "jnp.any(behind(cache) > _CATCH_UP + 1)",
    ("tests/decode/test_rollback.py::test_plain_rounds_leave_nothing_missing",),
  ),
  Mutant(
    "pending row not read",
    "after a fully accepted round the draft reads its logits one row early",
    TWO_MODEL,
    "last = jnp.clip(missing - 1, 0, _CATCH_UP - 1)",
    "last = jnp.clip(missing - 2, 0, _CATCH_UP - 1)",
    (SELF_DRAFT,),
  ),
  Mutant(
    "level one position too far",
    "drafted nodes sit one position behind their place",
    GROWING,
    "level.depth - 2)",
    "level.depth - 1)",
    (f"{TWO_MODEL_TESTS}::test_top_k_children_are_the_likeliest",),
  ),
  Mutant(
    "level one row too far",
    "drafted nodes are written one scratch row late",
    GROWING,
    "first_row=np.int32(max(rows[0], 0))",
    "first_row=np.int32(max(rows[0], 0) + 1)",
    (f"{TWO_MODEL_TESTS}::test_top_k_children_are_the_likeliest",),
  ),
  Mutant(
    "q of another temperature",
    "drafts are drawn at temperature 1 whatever the row says",
    GROWING,
    "processed.probs(context.settings)",
    "processed.probs(context.settings.replace(temperature=jnp.ones(logits.shape[0])))",
    (f"{TWO_MODEL_TESTS}::test_q_is_kept_by_parent",),
  ),
  Mutant(
    "draft noise by position",
    "a rejected position is drafted again with the noise that was rejected",
    GROWING,
    "Purpose.DRAFT, at, level.nodes[:, rank])",
    "Purpose.DRAFT, at + level.depth, 0 * level.nodes[:, rank])",
    (f"{LONG_LAW}::test_f7_no_random_number_is_used_twice[sample-speculative_sampling]",),
  ),
  Mutant(
    "siblings share their noise",
    "all children of a node are the same draw",
    GROWING,
    "Purpose.DRAFT, at, level.nodes[:, rank])",
    "Purpose.DRAFT, at, level.nodes[:, 0])",
    (f"{TWO_MODEL_TESTS}::test_siblings_have_the_stated_law",),
  ),
  Mutant(
    "elder sibling drawn again",
    "drawing without replacement keeps what was drawn",
    GROWING,
    "== tokens[-1][..., None], 0.0, left)",
    "== tokens[-1][..., None], left, left)",
    (f"{TWO_MODEL_TESTS}::test_siblings_have_the_stated_law",),
  ),
  Mutant(
    "nothing left is proposed",
    "a sibling is proposed although no token is left for it",
    GROWING,
    "left.sum(axis=-1) > 0",
    "left.sum(axis=-1) >= 0",
    (f"{TWO_MODEL_TESTS}::test_a_sibling_that_finds_nothing_left_is_not_proposed",),
  ),
  Mutant(
    "draft proposes padding",
    "the draft's padding ids are not masked",
    TREE_DRAFTER,
    "sampling.mask_padding(over_target(logits, ids, self.vocab_size), self.num_real_tokens)",
    "over_target(logits, ids, self.vocab_size)",
    (f"{LIMITS}::test_l1_padded_vocabularies",),
  ),
  Mutant(
    "draft one position over its limit",
    "the draft model is fed a position it was not made for",
    GROWING,
    "- 2 + self.tree.depths < self.max_length",
    "- 2 + self.tree.depths <= self.max_length",
    (f"{TWO_MODEL_TESTS}::test_deep_nodes_end_with_the_drafts_own_limit",),
  ),
)
