"""Faults in attention, the decoder and the text."""

from tests.mutants import Mutant

MASKS = "specjax/kernels/tree_attention/masks.py"
REFERENCE = "specjax/kernels/tree_attention/reference.py"
LAYERS = "specjax/models/layers.py"
TEXT = "specjax/text.py"

SUITE = "tests/kernels/test_reference.py::TestReference"
LARGE_SUITE = "tests/kernels/test_reference.py::TestLargeReference"
DECODER_TESTS = "tests/models/test_decoder.py"
TEXT_TESTS = "tests/test_text.py"

MUTANTS = (
  Mutant(
    "prefix with the root's row",
    "slot 0 of the scratch rows is seen by nodes whose bit is not set",
    MASKS,
    "seen = inside_window & (column < 0)",
    "seen = inside_window & (column <= 0)",
    (f"{SUITE}::test_c2_a_node_that_sees_nothing_gives_zeros",),
  ),
  Mutant(
    "causal without itself",
    "a token does not see its own row",
    MASKS,
    "inside_window & (column <= node)",
    "inside_window & (column < node)",
    (f"{SUITE}::test_causal_is_the_chain",),
  ),
  Mutant(
    "window one slot short",
    "the oldest visible slot is hidden",
    MASKS,
    "slots[None, None, :] >= mask.first[:, :, None]",
    "slots[None, None, :] > mask.first[:, :, None]",
    (f"{SUITE}::test_d1_trees_and_lengths",),
  ),
  Mutant(
    "window one slot long",
    "a slot outside the window is seen",
    MASKS,
    "jnp.maximum(position - window + 1, 0)",
    "jnp.maximum(position - window, 0)",
    (f"{SUITE}::test_d1_trees_and_lengths",),
  ),
  Mutant(
    "window keeps the oldest bits",
    "of a long path a node sees the beginning and not the end",
    MASKS,
    "jnp.cumsum(flat[..., ::-1], axis=-1)[..., ::-1]",
    "jnp.cumsum(flat, axis=-1)",
    (f"{SUITE}::test_d1_trees_and_lengths",),
  ),
  Mutant(
    "ancestors of the first row",
    "all rows of a batch see by the first row's tree",
    MASKS,
    "mask.words[:, :, word, None]",
    "mask.words[:1, :, word, None]",
    (f"{SUITE}::test_d1_trees_and_lengths",),
  ),
  Mutant(
    "end one column short",
    "the last scratch row that anyone sees is not read",
    MASKS,
    "jnp.where(words == 0, 0, highest + offset)",
    "jnp.where(words == 0, 0, highest + offset - 1)",
    ("tests/kernels/test_masks.py::test_bounds_are_tight",),
  ),
  Mutant(
    "position by number of columns",
    "a node's position counts all rows before it",
    MASKS,
    "position = prefix[:, None] + depth",
    "position = prefix[:, None] + jnp.arange(nodes)",
    (f"{SUITE}::test_d1_trees_and_lengths",),
  ),
  Mutant(
    "masked values not hidden",
    "a probability of 0 times NaN is NaN",
    REFERENCE,
    "jnp.where(finite, v, jnp.zeros((), v.dtype))",
    "jnp.where(finite | True, v, jnp.zeros((), v.dtype))",
    (f"{SUITE}::test_c1_what_nobody_sees_changes_no_bit",),
  ),
  Mutant(
    "NaN hidden from those who see it",
    "a value that is not finite counts as 0 where it is shown, too",
    REFERENCE,
    "spoilt = shown & ~finite.all(axis=-1)[:, :, None, :]",
    "spoilt = shown & False & ~finite.all(axis=-1)[:, :, None, :]",
    (SUITE,),
  ),
  Mutant(
    "careful sum never taken",
    "masked values that are not finite spoil the sum of the block on CPU",
    REFERENCE,
    "jax.lax.cond(jnp.isfinite(plain).all()",
    "jax.lax.cond(jnp.isfinite(plain).any() | True",
    (f"{LARGE_SUITE}::test_c1_what_nobody_sees_changes_no_bit",),
  ),
  Mutant(
    "empty row divides by 0",
    "a node that sees nothing gives NaN",
    REFERENCE,
    "acc / jnp.where(total == 0, 1.0, total)[..., None]",
    "acc / total[..., None]",
    (f"{SUITE}::test_c2_a_node_that_sees_nothing_gives_zeros",),
  ),
  Mutant(
    "last block counted twice",
    "slots of an overlapping block are seen two times",
    REFERENCE,
    "visible_slots(slot, mask) & (slot >= i * block)[None, None, :]",
    "visible_slots(slot, mask) & (slot >= 0)[None, None, :]",
    ("tests/kernels/test_reference.py::test_a_buffer_that_ends_inside_a_block",),
  ),
  Mutant(
    "rotation by node",
    "rotary positions count nodes and not depth",
    LAYERS,
    "rope=rope_table(cache.length[:, None] + depths, config)",
    "rope=rope_table(cache.length[:, None] + jnp.arange(width), config)",
    (f"{DECODER_TESTS}::test_q2_each_branch_of_a_tree_is_a_chain",),
  ),
  Mutant(
    "scratch rows overwritten",
    "a level of a tree is written over the one before",
    LAYERS,
    "start=cache.length + scratch",
    "start=cache.length + 0 * scratch",
    (f"{DECODER_TESTS}::test_a_tree_grown_level_by_level_is_the_tree_at_once",),
  ),
  # --- text
  Mutant(
    "stop strings by token",
    "a stop string that spans two tokens is not found",
    TEXT,
    "held = self._held + piece",
    "held = piece",
    (f"{TEXT_TESTS}::test_stops_do_not_depend_on_how_tokens_arrive",),
  ),
  Mutant(
    "stop string given out",
    "the text is cut behind the stop string and not before it",
    TEXT,
    "held[: min(found)[1]]",
    "held[: min(found)[0]]",
    (f"{TEXT_TESTS}::test_stops_do_not_depend_on_how_tokens_arrive",),
  ),
  Mutant(
    "too little held back",
    "the first character of what may become a stop string is given out",
    TEXT,
    "range(longest, 0, -1)",
    "range(longest, 1, -1)",
    (f"{TEXT_TESTS}::test_stops_do_not_depend_on_how_tokens_arrive",),
  ),
  Mutant(
    "held text lost",
    "what was held back at the end of a run is dropped",
    TEXT,
    'self.text, self._held = self.text + self._held, ""',
    'self._held = ""',
    (f"{TEXT_TESTS}::test_text_that_may_become_a_stop_is_held_back",),
  ),
)
