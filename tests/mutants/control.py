"""Faults in controllers, in rounds of several widths, and in what is predicted of them."""

from tests.mutants import Mutant

CONTROL, DECODE, TWO_MODEL, GROWING = (
  f"specjax/{name}.py" for name in ("control", "decode", "drafters/two_model", "drafters/growing")
)

SCRIPTED = "tests/test_control.py"
IN_LOOP = "tests/decode/test_control.py"
EVIDENCE = f"{IN_LOOP}::test_evidence_is_what_the_log_says"
NARROWEST = f"{IN_LOOP}::test_a_chain_is_verified_at_the_narrowest_width_that_holds_it"
WIDTHS = "tests/decode/test_contract.py::test_pair[two_model_widths-greedy]"
AFTER_A_REST = f"{SCRIPTED}::test_what_was_just_seen_to_be_bad_is_tried_again_after_a_rest"
BOUND = f"{SCRIPTED}::test_the_account_bounds_what_is_lost"
SITS_OUT = f"{SCRIPTED}::test_rows_that_do_not_gain_propose_nothing"

MUTANTS = (
  Mutant(
    "widths run unpaid",
    "a width runs whatever the account holds",
    CONTROL,
    "verify[0] - 1 <= held).at[0]",
    "verify[0] - 1 <= held + 9).at[0]",
    (BOUND,),
  ),
  Mutant(
    "rounds are free",
    "a round is not paid for",
    CONTROL,
    "earned = (1 + self.refill) * outcome.emitted - cost / verify[0]",
    "earned = (1 + self.refill) * outcome.emitted - 1",
    (BOUND, EVIDENCE),
  ),
  Mutant(
    "narrower ends are not covered",
    "a chain that ends early is verified at a dearer width than the account covered",
    CONTROL,
    "dearest = jnp.max(jnp.where(_may_run(trees), verify, 0), axis=1)",
    "dearest = verify",
    (BOUND,),
  ),
  Mutant(
    "catching up with all rows",
    "what rows that sit out have not seen is charged",
    CONTROL,
    "jnp.where(joins, seen.unseen[:, None], 0)",
    "seen.unseen[:, None] + 0 * joins",
    (f"{SCRIPTED}::test_what_the_drafter_missed_is_paid_for",),
  ),
  Mutant(
    "no ceiling",
    "what was gained once may be lost later",
    CONTROL,
    "jnp.minimum(seen.account + earned, self.ceiling)",
    "seen.account + earned",
    (BOUND,),
  ),
  Mutant(
    "hope ignores acceptance",
    "exploration takes every draft for accepted",
    CONTROL,
    "weigh(mean + self.curiosity * error, 0.0)",
    "weigh(mean + 1, 0.0)",
    (AFTER_A_REST,),
  ),
  Mutant(
    "evidence never ages at rest",
    "what was bad once is never tried again",
    CONTROL,
    "(memory ** seen.rested.astype(jnp.float32))[:, None, None]",
    "1.0",
    (AFTER_A_REST,),
  ),
  Mutant(
    "never looks around",
    "a better width than the one in use is not found",
    CONTROL,
    "((best == 0) | turn)",
    "(best == 0)",
    (f"{SCRIPTED}::test_a_tree_that_is_better_than_believed_is_found",),
  ),
  Mutant(
    "budget not seen",
    "a row at its last token is counted on for drafts",
    CONTROL,
    "jnp.minimum(depths, (rows.limit - rows.length - 1)[:, None])",
    "jnp.minimum(depths, (rows.limit - rows.length + 99)[:, None])",
    (SITS_OUT,),
  ),
  Mutant(
    "every row joins",
    "rows that gain nothing propose",
    CONTROL,
    "joins = active[:, None] & (gain > least) & (depths > 0)",
    "joins = active[:, None] & (depths > 0)",
    (SITS_OUT,),
  ),
  Mutant(
    "costs of an empty text",
    "costs do not follow the live length",
    CONTROL,
    "live = jnp.max(jnp.where(rows.active, rows.length, 0)).astype(jnp.float32)",
    "live = jnp.float32(0)",
    (f"{SCRIPTED}::test_costs_at_the_live_length_decide",),
  ),
  Mutant(
    "catching up is free",
    "what the drafter missed costs nothing",
    CONTROL,
    "beliefs.catch_up * block",
    "0 * beliefs.catch_up * block",
    (f"{SCRIPTED}::test_what_the_drafter_missed_is_paid_for",),
  ),
  Mutant(
    "silent rounds cost the width",
    "a round in which nothing is proposed counts as a wide one",
    CONTROL,
    "(1 - silent) * verify + silent * verify[0]",
    "verify",
    (f"{SCRIPTED}::test_a_drafter_that_rarely_speaks_costs_little",),
  ),
  Mutant(
    "surprise is not shared",
    "what chains show says nothing about trees",
    CONTROL,
    "beliefs.acceptance + shift[:, None, None]",
    "beliefs.acceptance + 0 * shift[:, None, None]",
    (f"{SCRIPTED}::test_estimates_by_hand",),
  ),
  Mutant(
    "deeper drafts count as judged",
    "drafts behind a rejected one count as rejected, too",
    CONTROL,
    "(depth <= outcome.accepted[:, None] + 1)",
    "(depth <= outcome.accepted[:, None] + 2)",
    (EVIDENCE,),
  ),
  Mutant(
    "groups in one",
    "trees count as chains",
    CONTROL,
    "numbers[1 + np.array(group)] = number",
    "numbers[1 + np.array(group)] = 0",
    (EVIDENCE, f"{SCRIPTED}::test_estimates_by_hand"),
  ),
  Mutant(
    "window grows by one",
    "after a round that accepted all of it",
    CONTROL,
    "jnp.where(all_kept, window + 2, window - 1)",
    "jnp.where(all_kept, window + 1, window - 1)",
    (f"{SCRIPTED}::test_plus_two_minus_one",),
  ),
  Mutant(
    "drafts are cut to a narrower width",
    "a draft is verified at a width that does not hold it",
    DECODE,
    "fits = (deepest > least) & (deepest <= most)",
    "fits = (deepest > 0) & (least == 0)",
    (NARROWEST,),
  ),
  Mutant(
    "plain rounds besides others",
    "a round that was verified is followed by a plain one",
    DECODE,
    "state = _run_if(verified == _NOT_YET, plain, state)",
    "state = _run_if(verified >= _NOT_YET, plain, state)",
    (EVIDENCE, WIDTHS),
  ),
  Mutant(
    "depths are not followed",
    "a row drafts deeper than planned",
    DECODE,
    "valid &= context.active[:, None] & (tree.depths <= depth[:, None])",
    "valid &= state.active[:, None]",
    ("tests/decode/test_law.py::test_f1_joint_law_of_six_tokens[table-adaptive]",),
  ),
  Mutant(
    "rows that sit out keep drafted rows",
    "rows of the draft's cache that were not fed count as there",
    TWO_MODEL,
    "fed = jnp.where(context.active, num_rows, 0)",
    "fed = jnp.where(context.active, num_rows, num_rows)",
    (WIDTHS,),
  ),
  Mutant(
    "confidence of what was drawn",
    "drafting stops where the token drawn is unlikely, not where the draft is unsure",
    GROWING,
    "found.append(usable & (left.sum(axis=-1) > 0))",
    "found.append(left.sum(axis=-1) > 0)",
    ("tests/drafters/test_two_model.py::test_drafting_stops_where_the_draft_is_unsure",),
  ),
  Mutant(
    "missed tokens are never caught up",
    "rounds without a draft count although no later one followed",
    "experiments/results.py",
    "missed, waiting = missed + waiting, 0",
    "missed, waiting = missed, 0",
    ("tests/experiments/test_methods.py::test_missed_tokens_are_those_before_a_later_draft",),
  ),
)
