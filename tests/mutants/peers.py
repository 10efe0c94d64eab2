"""Faults around comparisons with others: what is timed, which file was read, who answers which question."""

from tests.mutants import Mutant

COMPARE, SIDE, QUESTIONS, PROCESSES, BENCH = (
  "experiments/compare_hf.py",
  "experiments/transformers_side.py",
  "experiments/questions.py",
  "experiments/processes.py",
  "experiments/spec_bench.py",
)
COMPARE_TESTS, QUESTION_TESTS, PROCESS_TESTS, ANSWER_TESTS = (
  f"tests/experiments/test_{name}.py" for name in ("compare_hf", "questions", "processes", "answers")
)

MUTANTS = (
  Mutant(
    "tokens of the prompt's forward count as decoding",
    "transformers decodes faster than it does",
    COMPARE,
    'row["new_tokens"] - row["first_tokens"]',
    'row["new_tokens"]',
    (f"{COMPARE_TESTS}::test_rates_leave_out_what_came_with_the_prompt",),
  ),
  Mutant(
    "the best peer is its plain one",
    "what specjax gains over assisted generation is overstated",
    COMPARE,
    "if name.startswith(PEER + kind)]",
    "if name == PEER_PLAIN]",
    (f"{COMPARE_TESTS}::test_the_best_of_each_side_is_compared",),
  ),
  Mutant(
    "one side always goes first",
    "who is behind the other is always the same",
    COMPARE,
    "first = (number + repeat) % len(names)",
    "first = 0",
    (f"{COMPARE_TESTS}::test_methods_take_turns_and_a_kill_costs_one_question",),
  ),
  Mutant(
    "a mode's range is not checked",
    "transformers fails after everything was loaded and compiled",
    SIDE,
    "    _check(text, option, value)\n",
    "",
    (f"{COMPARE_TESTS}::test_a_bad_value_is_one_line",),
  ),
  Mutant(
    "a line of another layout is taken in",
    "a run asks questions of two benchmarks under the name of one",
    QUESTIONS,
    "if len(layouts) > 1:",
    "if len(layouts) > 2:",
    (f"{QUESTION_TESTS}::test_a_damaged_file_names_the_line",),
  ),
  Mutant(
    "the checksum of what was unpacked",
    "it is not that of the file that lies there",
    QUESTIONS,
    "hashlib.sha256(data).hexdigest()",
    "hashlib.sha256(_text(path, data).encode()).hexdigest()",
    (f"{QUESTION_TESTS}::test_layouts_are_told_by_their_fields",),
  ),
  Mutant(
    "every process takes the first questions",
    "some are answered by nobody, others twice",
    PROCESSES,
    "items[self.index :: self.count]",
    "items[:: self.count]",
    (f"{PROCESS_TESTS}::test_every_question_goes_to_one_process",),
  ),
  Mutant(
    "merging doubles rows",
    "a resumed run counts its questions twice",
    PROCESSES,
    'for row in part["rows"] if key(row) not in stored]',
    'for row in part["rows"]]',
    (f"{PROCESS_TESTS}::test_rows_merge_in_the_order_of_the_questions",),
  ),
  Mutant(
    "answer files without the prefill",
    "Spec-Bench's speeds are not of wall time",
    BENCH,
    '"wall_time": [row["prefill_s"] + row["decode_s"] for row in turns]',
    '"wall_time": [row["decode_s"] for row in turns]',
    (f"{ANSWER_TESTS}::test_spec_bench_computes_the_speeds_from_them",),
  ),
  Mutant(
    "turns in the order in which they were answered",
    "a resumed question has its second turn first",
    BENCH,
    'sorted(answered.values(), key=lambda row: row["turn"])',
    "answered.values()",
    (f"{ANSWER_TESTS}::test_lines_are_as_it_writes_them",),
  ),
)
