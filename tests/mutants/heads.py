"""Faults in trained heads as drafters, and in trees that follow a draft's probabilities."""

from tests.mutants import Mutant
from tests.mutants.core import CONTRACT

GROWING, DYNAMIC, EAGLE, MEDUSA, TWO_MODEL, TREE_DRAFTER = (
  f"specjax/drafters/{name}.py"
  for name in ("growing", "dynamic", "eagle", "medusa", "two_model", "tree_drafter")
)
EAGLE1, EAGLE1_FILES = "specjax/models/eagle1.py", "specjax/checkpoints/eagle1_files.py"

DYNAMIC_TESTS = "tests/drafters/test_dynamic.py"
EAGLE_TESTS = "tests/drafters/test_eagle.py"
MEDUSA_TESTS = "tests/drafters/test_medusa.py"
DRAFTS = (f"{EAGLE_TESTS}::test_drafts_are_the_heads_own",)
RING = (f"{EAGLE_TESTS}::test_the_ring_holds_what_is_pending_and_feeds_it_when_full",)
PYTORCH = ("tests/checkpoints/test_heads_eagle1.py::test_m2_features_and_logits_equal_pytorch",)
ABLATED = (f"{DYNAMIC_TESTS}::test_without_value_and_without_reranking",)
BY_LOOPS = (f"{DYNAMIC_TESTS}::test_the_tree_is_what_the_algorithm_says",)

MUTANTS = (
  # --- growth over a step that recurs
  Mutant(
    "children of the first parent's state",
    "all children of a level are given what recurs from one of its nodes",
    GROWING,
    "hidden[:, level.parent], q)",
    "hidden[:, 0 * level.parent], q)",
    ("tests/drafters/test_growing.py::test_children_see_what_recurs_from_their_own_parent",),
  ),
  Mutant(
    "rows that are not ready draft",
    "a row without anything to draft from is drafted for",
    GROWING,
    "ready = start.ready[:, None]",
    "ready = context.active[:, None]",
    ("tests/drafters/test_growing.py::test_rows_that_are_not_ready_draft_nothing",),
  ),
  # --- dynamic trees
  Mutant(
    "expanded by the last step alone",
    "a level is expanded by its own probabilities and not by those of the paths",
    DYNAMIC,
    "fed.values[..., None] + jnp.log(likely)",
    "0 * fed.values[..., None] + jnp.log(likely)",
    BY_LOOPS,
  ),
  Mutant(
    "of equals the last",
    "where values are equal a child goes before its parent",
    DYNAMIC,
    "chosen = jnp.sort(jax.lax.top_k(ranks, nodes)[1], axis=1)",
    "chosen = jnp.sort(ranks.shape[1] - 1 - jax.lax.top_k(ranks[:, ::-1], nodes)[1], axis=1)",
    (f"{DYNAMIC_TESTS}::test_ties_keep_parents",),
  ),
  Mutant(
    "nodes in the order of their rank",
    "re-ranked nodes are not put back in the order of the levels, by which parents are numbered",
    DYNAMIC,
    "chosen = jnp.sort(jax.lax.top_k(ranks, nodes)[1], axis=1)",
    "chosen = jax.lax.top_k(ranks, nodes)[1]",
    BY_LOOPS,
  ),
  Mutant(
    "greedy rows ranked by 0 and 1",
    "of a greedy row only the most likely token has a probability",
    DYNAMIC,
    "processed.probs(_softened(context.settings))",
    "processed.probs(context.settings)",
    BY_LOOPS,
  ),
  Mutant(
    "nodes see their siblings",
    "the bits of a dynamic level are those of the whole beam",
    DYNAMIC,
    "fed = fed._replace(seen=fed.seen | own)",
    "fed = fed._replace(seen=fed.seen | own.any(axis=0))",
    (f"{DYNAMIC_TESTS}::test_a_draft_model_sees_each_nodes_own_path",),
  ),
  Mutant(
    "children of the best alone",
    "what recurs is not picked with the nodes of the beam",
    DYNAMIC,
    "hidden=None if hidden is None else of(hidden)",
    "hidden=None if hidden is None else jnp.broadcast_to(hidden[:, :1], (*which.shape, hidden.shape[-1]))",
    BY_LOOPS,
  ),
  Mutant(
    "parents by candidate",
    "parents are numbered among all candidates and not among the nodes",
    DYNAMIC,
    "parents = jnp.where(valid, parents, 0)",
    "parents = jnp.where(valid, jnp.minimum(at(candidates.parents), nodes - 1), 0)",
    BY_LOOPS,
  ),
  Mutant(
    "expanded by value all the same",
    "without value, a level is still picked by the values of its paths",
    DYNAMIC,
    'values if self.expand == "value" else likely, self.beam)',
    "values, self.beam)",
    ABLATED,
  ),
  Mutant(
    "re-ranked all the same",
    "without re-ranking, the best of all candidates are proposed",
    DYNAMIC,
    "    if self.rerank:\n      return candidates.values",
    "    if True:\n      return candidates.values",
    ABLATED,
  ),
  Mutant(
    "last level left out",
    "without re-ranking, the nodes of the deepest level are not proposed",
    DYNAMIC,
    "order = jnp.concatenate([fed, last.number], axis=1)",
    "order = jnp.concatenate([fed, 0 * last.number - 1], axis=1)",
    (f"{DYNAMIC_TESTS}::test_what_is_not_there_is_not_put_in_its_place",),
  ),
  Mutant(
    "dynamic rows not put in order",
    "the draft keeps the first rows that it fed and not those of the path",
    TWO_MODEL,
    "rows, none = jnp.maximum(grown.rows, 0), jnp.zeros_like(cache.length)",
    "rows, none = jnp.maximum(0 * grown.rows, jnp.arange(self.tree.num_nodes)), jnp.zeros_like(cache.length)",
    (f"{CONTRACT}[two_model_dynamic-greedy]",),
  ),
  Mutant(
    "unfed leaf kept",
    "the last accepted node of a dynamic tree counts, though it may not have been fed",
    TWO_MODEL,
    "jnp.where(count > 1, count - 1, count)",
    "count",
    (f"{CONTRACT}[two_model_dynamic-greedy]",),
  ),
  Mutant(
    "no room for what is fed",
    "a buffer holds the nodes that are proposed, and rows are written over its end",
    TREE_DRAFTER,
    "dataclasses.replace(self.tree, drafted=drafted)",
    "dataclasses.replace(self.tree, drafted=0 * drafted)",
    (f"{DYNAMIC_TESTS}::test_the_last_slots_hold_what_is_fed",),
  ),
  # --- draft vocabularies
  Mutant(
    "draft ids as they are",
    "a draft vocabulary's own numbers are taken for the target's",
    TREE_DRAFTER,
    "over_target(logits, ids, self.vocab_size)",
    "over_target(logits, None, self.vocab_size)",
    ("tests/drafters/test_two_model.py::test_l3_a_draft_vocabulary_maps_to_the_targets_ids",),
  ),
  # --- EAGLE
  Mutant(
    "feature with its own token",
    "a feature is fed with the token of its position and not the next",
    EAGLE,
    "tokens = jnp.take_along_axis(state.tokens, (at + 1) % self.ring, axis=1)",
    "tokens = jnp.take_along_axis(state.tokens, at % self.ring, axis=1)",
    RING,
  ),
  Mutant(
    "root not fed",
    "the last feature goes with whatever token the ring holds",
    EAGLE,
    "jnp.where(at + 1 == seen[:, None], following[:, None], tokens)",
    "jnp.where(at + 1 > seen[:, None], following[:, None], tokens)",
    DRAFTS,
  ),
  Mutant(
    "prompt a token early",
    "a chunk's features go with their own tokens",
    EAGLE,
    "at = jnp.arange(chunk.tokens.shape[1]) + 1 - pending[:, None]",
    "at = jnp.arange(chunk.tokens.shape[1]) - 0 * pending[:, None]",
    DRAFTS,
  ),
  Mutant(
    "ring one slot late",
    "what a round kept is noted a slot behind its place",
    EAGLE,
    "which = (jnp.arange(self.ring) - state.seen[:, None]) % self.ring",
    "which = (jnp.arange(self.ring) - state.seen[:, None] - 1) % self.ring",
    RING,
  ),
  Mutant(
    "ring written over",
    "pending features are not fed before there is no room for more",
    EAGLE,
    "+ count > self.ring)",
    "+ count > self.ring + 2)",
    RING,
  ),
  Mutant(
    "own guesses kept",
    "rows of drafts count as if they were made of the target's features",
    EAGLE,
    "state.replace(cache=grown.cache), target_cache",
    "state.replace(cache=grown.cache.replace(length=jnp.where(ready, grown.cache.length + 1, "
    "grown.cache.length))), target_cache",
    (f"{CONTRACT}[eagle3_chain_sample-block_verification]",),
  ),
  Mutant(
    "nothing behind nothing pending",
    "a draft without pending rows begins from a hidden state of zeros",
    EAGLE,
    "again = jnp.minimum(state.cache.length, jnp.maximum(state.seen - 1, 0))",
    "again = jnp.minimum(state.cache.length, jnp.maximum(state.seen, 0))",
    (f"{EAGLE_TESTS}::test_drafting_again_without_a_round_says_the_same",),
  ),
  Mutant(
    "drafts behind a single token",
    "a row of one token is drafted for from no feature at all",
    EAGLE,
    "ready = context.active & (state.seen > 0)",
    "ready = context.active",
    DRAFTS,
  ),
  Mutant(
    "head's own numbers for the target's",
    "drafts behind the root are the numbers of an EAGLE-3 head's draft vocabulary",
    EAGLE,
    "head.read(hidden), head.ids)",
    "head.read(hidden), None)",
    DRAFTS,
  ),
  Mutant(
    "map one token late",
    "deeper drafts are the map's next token",
    EAGLE,
    "output.logits, weights.head.ids), output.hidden",
    "output.logits, weights.head.ids + 1), output.hidden",
    DRAFTS,
  ),
  Mutant(
    "feature before the norm",
    "an EAGLE-1 head is given the target's hidden state as it is",
    EAGLE1,
    "return self.norm(taps[..., 0, :].astype(self.dtype))",
    "return taps[..., 0, :].astype(self.dtype)",
    PYTORCH,
  ),
  Mutant(
    "feature before the embedding",
    "the two inputs of an EAGLE-1 head's fc are swapped",
    EAGLE1,
    '"both": (embeddings, features)',
    '"both": (features, embeddings)',
    PYTORCH,
  ),
  Mutant(
    "the head's epsilon",
    "the target's final norm is computed with the draft layer's epsilon",
    EAGLE1,
    "eps=target.config.norm_eps",
    "eps=c.decoder.norm_eps",
    PYTORCH,
  ),
  Mutant(
    "biases by the model type alone",
    "a head that says qkv_bias is read without them",
    EAGLE1_FILES,
    'fields.get("qkv_bias", bool, decoder.qkv_bias)',
    "decoder.qkv_bias",
    PYTORCH,
  ),
  # --- Medusa
  Mutant(
    "heads one too early",
    "a node's token is its parent's depth's head's",
    MEDUSA,
    "depth = tree.depths[1:] - 1",
    "depth = np.maximum(tree.depths[1:] - 2, 0)",
    (f"{MEDUSA_TESTS}::test_a_node_is_its_rank_of_its_depths_head",),
  ),
  Mutant(
    "heads a depth late",
    "along paths, a node's children are its own depth's head's",
    MEDUSA,
    "depths[0] + 1, axis=1)",
    "depths[0], axis=1)",
    (f"{MEDUSA_TESTS}::test_paths_do_not_matter_where_nothing_is_processed",),
  ),
  Mutant(
    "hidden state of the root",
    "after a round the heads see the first position that it kept",
    MEDUSA,
    "last = jnp.maximum(count - 1, 0)",
    "last = jnp.maximum(0 * count, 0)",
    (f"{MEDUSA_TESTS}::test_the_hidden_state_is_the_last_rows",),
  ),
)
