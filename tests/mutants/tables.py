"""Faults in tables of papers: figures of another kind, head or part of a tree beside the printed ones."""

from tests.mutants import Mutant

INPUTS, EAGLE, MEDUSA, SPEC_BENCH, BATCH = (
  "experiments/tables/inputs.py",
  "experiments/tables/eagle.py",
  "experiments/tables/medusa.py",
  "experiments/tables/spec_bench.py",
  "experiments/tables/batch.py",
)
TESTS = "tests/experiments/test_tables.py"

MUTANTS = (
  Mutant(
    "costs of another head",
    "a draft is priced as one that another head was measured with",
    INPUTS,
    'known[name].get("head") != head["digest"]',
    'known[name].get("head") is None',
    (f"{TESTS}::test_costs_of_another_head_are_not_used",),
  ),
  Mutant(
    "heads that speak one by one",
    "Medusa's one pass is priced once a level",
    INPUTS,
    '(self.costs.drafts[name]["depth"] if at_once else depth)',
    "depth",
    (f"{TESTS}::test_sizes_of_medusas_tree",),
  ),
  Mutant(
    "another part of EAGLE-2",
    "the tree without re-ranking stands in the row of the full one",
    EAGLE,
    'return "full" if reranked else "no re-rank"',
    'return "no re-rank" if reranked else "full"',
    (f"{TESTS}::test_parts_of_eagle2",),
  ),
  Mutant(
    "conditional accuracy of heads",
    "a head's accuracy is that of rounds that reached it, not of all",
    MEDUSA,
    'head.figures.get("agreement", [])',
    'head.figures.get("acceptance", [])',
    (f"{TESTS}::test_accuracy_by_head_and_rank",),
  ),
  Mutant(
    "Spec-Bench without prefill",
    "speed beside Spec-Bench's is of decoding alone",
    SPEC_BENCH,
    ' + row["prefill_s"]',
    "",
    (f"{TESTS}::test_methods_and_categories",),
  ),
  Mutant(
    "batches in the order of runs",
    "the gain does not stand by batch size",
    BATCH,
    "found.method, found.batch, found.run.number",
    "found.method, found.run.number, found.batch",
    (f"{TESTS}::test_gain_by_batch",),
  ),
)
