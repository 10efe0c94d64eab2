"""Faults in what changes logits before temperature, and in log-probabilities."""

from tests.mutants import Mutant

PROCESSORS, DECODE = "specjax/processors.py", "specjax/decode.py"

BY_HAND = "tests/test_processors.py"
NODES = f"{BY_HAND}::test_i1_every_node_is_processed_along_its_own_path"
IN_LOOP = "tests/decode/test_processing.py"
ONCE = f"{IN_LOOP}::test_i1_a_drafted_token_is_counted_once"

MUTANTS = (
  Mutant(
    "drafted tokens counted twice",
    "a token on the way to a node is penalized two times",
    PROCESSORS,
    "of(count) + here",
    "of(count) + 2 * here",
    (NODES, ONCE),
  ),
  Mutant(
    "drafted tokens not counted",
    "a token on the way to a node is not penalized",
    PROCESSORS,
    "of(count) + here",
    "of(count) + 0 * here",
    (NODES, ONCE),
  ),
  Mutant(
    "prompt counts as said",
    "presence and frequency penalties count the prompt",
    PROCESSORS,
    "new = said & (at >= history.prompt_length[:, None])",
    "new = said",
    (NODES,),
  ),
  Mutant(
    "repetition rewarded",
    "the repetition penalty raises what it should lower",
    PROCESSORS,
    "logits > 0,",
    "logits < 0,",
    (NODES,),
  ),
  Mutant(
    "bias added twice",
    "a biased token that was drafted gets its bias two times",
    PROCESSORS,
    "of(count) + here, of(bias))",
    "of(count) + here, 2 * of(bias))",
    (NODES,),
  ),
  Mutant(
    "least length one token too long",
    "stop ids are held back for a token too many",
    PROCESSORS,
    "early = done < settings.min_new_tokens[:, None]",
    "early = done <= settings.min_new_tokens[:, None]",
    (NODES, f"{IN_LOOP}::test_h6_least_length_is_counted_by_node"),
  ),
  Mutant(
    "least length by round",
    "the drafts on the way to a node do not count as new tokens",
    PROCESSORS,
    "+ drafted.sum(axis=-1)",
    "+ 0 * drafted.sum(axis=-1)",
    (NODES, f"{IN_LOOP}::test_h6_least_length_is_counted_by_node"),
  ),
  Mutant(
    "mask not applied",
    "tokens that the processor forbids can be chosen",
    PROCESSORS,
    "logits = jnp.where(allowed, logits, -jnp.inf)",
    "logits = jnp.where(allowed | ~allowed, logits, -jnp.inf)",
    (f"{IN_LOOP}::test_i4_a_grammar_holds_through_rejected_drafts",),
  ),
  Mutant(
    "processor state of another node",
    "after a round the processor stands behind the first drafts, not behind the path",
    DECODE,
    "node = jnp.take_along_axis(verdict.path, last, axis=1)[:, 0]",
    "node = last[:, 0] * 0",
    (f"{IN_LOOP}::test_i4_a_grammar_holds_through_rejected_drafts",),
  ),
  Mutant(
    "log-probability of the next row",
    "a token's log-probability is read behind it and not before it",
    DECODE,
    "values = chosen - jax.nn.logsumexp(rows, axis=-1)",
    "values = jnp.roll(chosen - jax.nn.logsumexp(rows, axis=-1), 1, axis=1)",
    (f"{IN_LOOP}::test_log_probabilities_are_those_of_one_forward",),
  ),
)
