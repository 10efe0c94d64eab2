"""Faults in what clients may ask and are told, in who may ask, and in how a server ends."""

from tests.mutants import Mutant

SCHEMA, REPLIES, METRICS, RUNNER, APP, SERVER = (
  f"specjax/serving/http/{name}.py" for name in ("schema", "replies", "metrics", "runner", "app", "server")
)

FIELDS = "tests/serving/test_http_schema.py"
WEB = "tests/serving/test_http_app.py"
THREAD = "tests/serving/test_http_runner.py"
CLIENT = "tests/serving/test_http_openai.py"

MUTANTS = (
  Mutant(
    "unknown fields are ignored",
    "a wish that is not known is not refused",
    SCHEMA,
    "elif name not in _NEUTRAL:",
    "elif False:",
    (FIELDS,),
  ),
  Mutant(
    "true is 1",
    "a value of another type that is equal for Python counts as neutral",
    SCHEMA,
    "type(value) is type(same) and value == same",
    "value == same",
    (f"{FIELDS}::test_what_changes_nothing_is_taken",),
  ),
  Mutant(
    "budgets are cut to fit",
    "more tokens than there is room for are shortened in silence",
    SCHEMA,
    "if budget > room:",
    "budget = min(budget, room)\n    if budget > room:",
    (f"{FIELDS}::test_what_does_not_fit_says_so",),
  ),
  Mutant(
    "one seed for all",
    "requests without a seed all have the same",
    SCHEMA,
    "secrets.randbits(32)",
    "0",
    (f"{FIELDS}::test_what_is_not_said_is_openais_default",),
  ),
  Mutant(
    "the model's ends are forgotten",
    "an answer goes on behind the end",
    SCHEMA,
    "if self.ignores_end else end_ids",
    "if not self.ignores_end else end_ids",
    (f"{FIELDS}::test_every_field_arrives",),
  ),
  Mutant(
    "half a character",
    "text that is no Unicode reaches the tokenizer",
    SCHEMA,
    "    value.encode()\n",
    "    value.encode('utf-8', 'surrogatepass')\n",
    (f"{FIELDS}::test_bodies_that_are_none",),
  ),
  Mutant(
    "usage counts rounds",
    "rounds are told as tokens",
    REPLIES,
    "prompt, new = last.result.prompt_tokens, len(last.result.tokens)",
    "prompt, new = last.result.prompt_tokens, last.result.rounds",
    (f"{CLIENT}::test_many_at_once_say_what_each_says_alone",),
  ),
  Mutant(
    "a role with each piece",
    "a streamed message begins again and again",
    REPLIES,
    "    self._began = True\n",
    "",
    (f"{CLIENT}::test_chat",),
  ),
  Mutant(
    "buckets of their own",
    "a histogram's buckets are not cumulative",
    METRICS,
    "total += count",
    "total = count",
    (f"{WEB}::test_metrics_add_up",),
  ),
  Mutant(
    "any key",
    "a wrong key opens",
    APP,
    "if not hmac.compare_digest(given, self._expected):",
    "if not given.startswith(b'Bearer '):",
    (f"{WEB}::test_a_key_is_needed_for_all_but_health",),
  ),
  Mutant(
    "announced lengths are believed",
    "a chunked body may be of any size",
    APP,
    "if len(body) > limits.body_bytes:",
    "if False:",
    (f"{WEB}::test_a_body_without_a_length_is_counted",),
  ),
  Mutant(
    "places are kept",
    "a request that has ended keeps its place",
    APP,
    "      self._taken -= 1",
    "      pass",
    (f"{WEB}::test_more_than_the_limit_at_once_are_told_so",),
  ),
  Mutant(
    "decoding for nobody",
    "who leaves is decoded for to the end",
    APP,
    "      runner.cancel(request.id)",
    "      pass",
    (f"{WEB}::test_a_client_that_leaves_in_the_middle_frees_its_row",),
  ),
  Mutant(
    "all is cancelled",
    "a request that has ended is cancelled, too",
    APP,
    "  finally:\n    leaving.cancel()\n    if output is None or output.update.reason is None:",
    "  finally:\n    leaving.cancel()\n    if True:",
    (f"{WEB}::test_a_client_that_has_its_answer_cancels_nothing",),
  ),
  Mutant(
    "streams hide refusals",
    "a refusal has status 200 where the answer was to be streamed",
    APP,
    "    if not begun:\n      raise\n",
    "",
    (f"{WEB}::test_a_full_queue_is_a_429",),
  ),
  Mutant(
    "any content type",
    "what is not said to be JSON is read",
    APP,
    'if kind != "application/json":',
    "if not kind:",
    (f"{WEB}::test_hostile_requests_get_an_error_and_the_next_one_an_answer",),
  ),
  Mutant(
    "healthy when broken",
    "health does not know of a broken engine",
    RUNNER,
    "    if self._broken is not None:\n      return",
    "    if False:\n      return",
    (f"{WEB}::test_a_broken_engine_is_told_of",),
  ),
  Mutant(
    "live requests are not finished",
    "the end cancels what was to be finished",
    RUNNER,
    "self.close(finish=seconds > 0)",
    "self.close(finish=False)",
    (f"{WEB}::test_the_end_finishes_or_cancels",),
  ),
  Mutant(
    "listeners break the engine",
    "an error of one client's ends the engine for all",
    RUNNER,
    '      except Exception:\n        _LOG.exception("request',
    '      except KeyError:\n        _LOG.exception("request',
    (f"{THREAD}::test_a_listener_that_fails_costs_nobody_else_anything",),
  ),
  Mutant(
    "requests come too late",
    "a request waits for a thread that has ended",
    RUNNER,
    "      if self._over:\n        raise",
    "      if False:\n        raise",
    (f"{THREAD}::test_who_comes_when_it_has_ended_is_told_so",),
  ),
)
