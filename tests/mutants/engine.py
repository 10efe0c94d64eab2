"""Faults in the engine: rows that are begun, read, copied, placed, moved and emptied."""

from tests.mutants import Mutant

PROGRAMS, KV, EXECUTORS, SAMPLER, ENGINE, CONTROL, DECODE = (
  f"specjax/{name}.py"
  for name in (
    "serving/programs",
    "serving/kv_manager",
    "serving/executors",
    "serving/sampler",
    "serving/engine",
    "control",
    "decode",
  )
)

TESTS = "tests/serving/test_engine.py"
MIXED = f"{TESTS}::test_mixed_requests_say_what_they_say_alone"
DEPTH = f"{TESTS}::test_rounds_draft_no_deeper_than_the_policy_says"
BREAKS = f"{TESTS}::test_an_engine_that_breaks_ends_every_request_once"
COPIED = "tests/serving/test_prefixes.py::test_q4_a_copied_prefix_is_what_was_read"
KEPT = "tests/serving/test_prefixes.py::test_what_is_kept_and_what_is_found"
LIMIT = "tests/test_control.py::test_no_width_is_deeper_than_it_may_be"

MUTANTS = (
  Mutant(
    "a lane keeps what it had read",
    "a row begins with the rows of the lane's last text counted in",
    PROGRAMS,
    "lane = _emptied(weights, lane, config, jnp.ones((1,), bool))",
    "lane = _emptied(weights, lane, config, jnp.zeros((1,), bool))",
    (MIXED,),
  ),
  Mutant(
    "new text begins where the row does",
    "a preempted row takes what it had said for its prompt: penalties and least lengths change",
    SAMPLER,
    "prompt_length=number(len(request.prompt)),",
    "prompt_length=number(len(text)),",
    (MIXED,),
  ),
  Mutant(
    "the drafter's state is not copied",
    "a copied prefix leaves the drafter with nothing but rows",
    PROGRAMS,
    "      return known\n    return _copy_rows",
    "      return into\n    return _copy_rows",
    (COPIED,),
  ),
  Mutant(
    "the last block is not copied",
    "of a prefix that ends inside a block the rows behind the last whole one are missing",
    PROGRAMS,
    "(rows + block - 1) // block, put",
    "rows // block, put",
    (COPIED, MIXED),
  ),
  Mutant(
    "a prefix of other tokens",
    "a prefix is copied that the text does not begin with",
    KV,
    "if count <= shared and self._may_go_on",
    "if self._may_go_on",
    (KEPT, MIXED),
  ),
  Mutant(
    "a prefix between chunks",
    "a text is read on where no chunk begins",
    KV,
    "(count < needed and count % self._config.prefill_widths[0] == 0)",
    "count < needed",
    (KEPT,),
  ),
  Mutant(
    "used prefixes are given up",
    "a lane that a row is going to copy is used for another text",
    KV,
    "for key in [key for key, other in self._kept.items() if not other.users]:",
    "for key in list(self._kept):",
    (KEPT,),
  ),
  Mutant(
    "rows get lost when the batch moves",
    "a batch that shrinks keeps its first rows, whoever is in them",
    KV,
    "self.state, np.int32(at))\n      self._place",
    "self.state, np.int32(to))\n      self._place",
    (MIXED,),
  ),
  Mutant(
    "rows are not emptied",
    "a row whose request has ended goes on, and costs",
    PROGRAMS,
    "  state = _emptied(weights, state, config, gone)\n",
    "",
    (MIXED,),
  ),
  Mutant(
    "depth is not limited",
    "rounds draft as deep as they like",
    EXECUTORS,
    "np.int32(rounds), np.int32(depth)",
    "np.int32(rounds), np.int32(99)",
    (DEPTH,),
  ),
  Mutant(
    "a controller that ignores the limit",
    "a width is taken that is deeper than it may be",
    CONTROL,
    "affordable & (depths <= deepest)",
    "affordable",
    (LIMIT,),
  ),
  Mutant(
    "the fixed width ignores the limit",
    "plain decoding is asked for and the drafter runs",
    CONTROL,
    "jnp.max(jnp.where(depths <= deepest, jnp.arange(len(depths), dtype=jnp.int32), 0))",
    "jnp.max(jnp.where(depths <= 99, jnp.arange(len(depths), dtype=jnp.int32), 0))",
    (LIMIT, DEPTH),
  ),
  Mutant(
    "tokens behind a stop string",
    "the answer goes on to the end of the round",
    SAMPLER,
    "new, reason = new[: answer.row.seen - before], Reason.STOP",
    "reason = Reason.STOP",
    (MIXED,),
  ),
  Mutant(
    "log-probabilities of the round's beginning",
    "each row's log-probabilities are those of its first tokens",
    PROGRAMS,
    "values = behind(state.logprobs, start, tokens.shape[1])",
    "values = state.logprobs[:, : tokens.shape[1]]",
    (MIXED,),
  ),
  Mutant(
    "nobody hears of the end",
    "requests of an engine that broke wait for ever",
    ENGINE,
    "    for id in list(self._answers):\n",
    "    for id in []:\n",
    (BREAKS,),
  ),
)
