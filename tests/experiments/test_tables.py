"""Tables of EAGLE, Medusa, early exits, Spec-Bench and batches: printed figures that agree, ours by hand."""

import json

import pytest

from experiments import ablations, footprint, paper_tables, published, run_files, training_files
from specjax import analysis
from specjax.analysis.costs import KEY_FIELDS, CostTable
from tests.experiments.test_paper_tables import INFO, PLACE, bench_row, ours, save_run

CHAIN, TREE, DYNAMIC = (
  "eagle[window=2]",
  "eagle[branching=(2,),window=2]",
  "eagle[nodes=8,beam=3,window=4]",
)
# A round that reaches both depths accepts 20 of 30, then 10 of 20.
COUNTS = {"accept_counts": [10, 10, 10], "reach_counts": [30, 20]}


def settings(method, **more):
  given = {"window": 2, "nodes": 3, "temperature": 0.0, "batch_size": 1, "widths": [method]}
  return {"settings": given | more}


def rows_of(*methods, **more):
  """Two questions of 60 tokens, plain in 4 s; a method in 2 s and 3 s, 30 rounds each: τ 2, × 1.6."""
  plain = settings("none", window=0, nodes=1, widths=[], **more)
  rows = [bench_row(q, "none", 4.0, 60, rule="greedy", **plain) for q in (1, 2)]
  for method, given in methods:
    of_all = COUNTS | {"rule": "greedy"} | settings(method, **more | given)
    nodes = of_all["settings"]["nodes"]
    of_all["node_counts"] = {str(nodes): 30}
    rows += [bench_row(q, method, seconds, 30, **of_all) for q, seconds in ((1, 2.0), (2, 3.0))]
  return rows


def read_run(path, *methods, number=1, flags="", info=None, **more):
  folder = save_run(path, rows_of(*methods, **more), flags=flags, **info or {})
  return run_files.Run.read(folder, number)


def with_recipes(**recipes):
  """``run.json``'s methods of heads with these recipes."""
  head = lambda text: {"head": {"digest": "abc", "recipe": text}}
  return {"methods": {method: head(text) for method, text in recipes.items()}}


def costs(**drafts):
  """4 ms plain, 5 ms for three nodes, 7 ms for five and 11 ms for nine; drafts by name."""
  return CostTable(
    made="now",
    key=dict.fromkeys(KEY_FIELDS, "x") | PLACE,
    batches=[1, 4],
    lives=[128],
    nodes=[1, 3, 5, 9],
    round_ms=[[[4.0, 5.0, 7.0, 11.0]], [[8.0, 14.0, 20.0, 32.0]]],
    accept_ms=[0.1] * 4,
    prefill_ms={"64": 9.0},
    call_ms=0.0,
    drafts=drafts,
  )


def drafted(nodes, depth, ms, **more):
  return {"nodes": nodes, "depth": depth, "draft_ms": [[ms], [ms]], "catch_up_ms": 0.0} | more


HELD_OUT = {
  "acceptance": [0.5, 0.4],
  "agreement": [0.5, 0.3],
  "overlap": [0.5, 0.3],
  "ranks": [[0.5, 0.2, 0.1], [0.4, 0.2, 0.0]],
  "coverage": 0.9,
  "tau": 1.7,
}


def save_trained(folder, head, held_out=HELD_OUT, *, result=True):
  """A training run as train_drafter leaves it."""
  folder.mkdir(parents=True)
  about = {name: INFO[name] for name in ("platform", "device_kind", "cpu", "cpu_count", "device_count")}
  given = {"--head": head, "--model": "target", "--dtype": "float32", "--data": "d" * 64, "steps": 200}
  config = {"settings": given, "about": about | {"commit": "c" * 40}}
  if result:
    config["result"] = {"tokens": 130_000, "seconds": 60.0, "parameters": 7, "peak_memory_bytes": 9}
  (folder / "config.json").write_text(json.dumps(config))
  rows = [{"step": 1, "tokens": 10, "seconds": 6.0, "loss": 2.0}]
  rows += [{"step": 200, "tokens": 130_000, "held_out": held_out, "seconds": 60.0}] if held_out else []
  (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def save_ablation(path, table):
  """Every row of a table of `ablations`, the later ones worse."""
  for place, (row, head) in enumerate(ablations.TABLES[table].heads.items()):
    worse = [share / (1 + place) for share in HELD_OUT["acceptance"]]
    figures = HELD_OUT | {"acceptance": worse, "tau": analysis.chain_tokens(worse)}
    save_trained(path / table / row.replace(" ", "_"), head, figures)
  return training_files.read_trained(str(path), 2)


def inputs(runs=(), table=None, heads=()):
  return paper_tables.Inputs(list(runs), table, list(heads))


# --- what is printed -------------------------------------------------------------------------------


def test_printed_figures_agree_with_each_other():
  """The same figure in two tables, drafts by depth and their sum. Fails for most wrong digits."""
  chain, tree = published.EAGLE1_CHAIN.tau, published.EAGLE1[0].tau
  rates = published.EAGLE1_POSITIONS
  assert analysis.chain_tokens(rates[:-1]) < chain < analysis.chain_tokens(rates) < tree
  assert sum(published.EAGLE1_TREE) == 25 and len(published.EAGLE1_TREE) == len(rates)
  assert sum(published.MEDUSA_TREE) == 63 and len(published.MEDUSA_TREE) <= len(published.MEDUSA_TOP1)
  assert published.EAGLE2[0] == published.EAGLE2_ABLATION[-1]
  full = next(row for row in published.EAGLE3 if row.target == "LLaMA-3.1 8B")
  last = published.EAGLE3_ABLATION[-1]
  assert (full.speedup, full.tau) == (last.speedup, last.tau)
  for gains in published.BATCH_GAINS.values():
    assert len(gains) == len(published.BATCHES)


def test_no_printed_round_is_cheaper_than_a_plain_one():
  """τ over speedup is what a round costs. Fails when the two are swapped, or a digit is wrong by much."""
  rows = published.EAGLE1 + published.EAGLE2_ABLATION + published.EAGLE2 + published.EAGLE3_ABLATION
  rows += published.EAGLE3 + published.MEDUSA + published.SPEC_BENCH
  both = [row for row in rows if row.tau is not None]
  assert len(both) == len(rows) - 1
  assert all(1 < row.tau / row.speedup < 2 for row in both)


def test_parts_of_a_dynamic_tree_change_tokens_and_not_costs():
  """Printed speeds from printed τ at the first row's cost. Fails for a wrong digit in either."""
  table = paper_tables.eagle2(inputs())
  rows = [dict(zip(table.header, row)) for row in table.rows]
  found = [(float(row["predicted ×"]), float(row["published ×"])) for row in rows if row["predicted ×"]]
  assert len(found) == 4 and all(abs(a - b) < 0.07 for a, b in found)


# --- EAGLE -----------------------------------------------------------------------------------------


def test_chains_and_static_trees_of_eagle1(tmp_path):
  """Positions, τ by their product, costs. Fails when dynamic trees, controllers or other heads come in."""
  adaptive = "adaptive[of=eagle]"
  methods = [(CHAIN, {}), (TREE, {"nodes": 5}), (DYNAMIC, {"nodes": 8}), (adaptive, {}), ("eagle3", {})]
  run = read_run(tmp_path / "run", *methods)
  table = costs(**{CHAIN: drafted(3, 2, 1.0), TREE: drafted(9, 2, 1.0)})
  chain, tree = ours(paper_tables.eagle1(inputs([run], table)))
  assert (chain["draft"], tree["draft"]) == (CHAIN, TREE)
  assert chain["acceptance by position"] == ".67 .50" and chain["target"] == "target"
  assert chain["predicted τ"] == "2.00" == chain["ours τ"]
  # 60 tokens are 240 ms plain, and 30 rounds of 5 ms with drafts of 1 ms.
  assert chain["predicted ×"] == f"{240 / 180:.2f}" and chain["ours ×"] == "1.60"
  assert chain["τ / ×"] == f"{2 / 1.6:.2f}"
  assert "predicted ×" not in tree, "the calibration has a tree of other nodes"


def test_inputs_of_eagle1_by_their_names(tmp_path):
  """In the paper's order, with held-out figures; measured ones of the head that a run had.

  Fails when rows are sorted by folder, a chain is priced at other nodes, or a head is taken for another.
  """
  heads = save_ablation(tmp_path / "ablations", "inputs")
  token, both = "eagle[inputs=token,judged=3]", "eagle[judged=3]"
  runs = [
    read_run(tmp_path / str(i), (CHAIN, {}), number=i, info=with_recipes(**{CHAIN: recipe}))
    for i, recipe in ((1, token), (3, both))
  ]
  table = costs(**{CHAIN: drafted(3, 2, 1.0, head="abc")})
  found = ours(paper_tables.eagle1_inputs(inputs(runs, table, heads)))
  assert [row["inputs"] for row in found] == [
    *("token", "feature", "feature + shifted token"),
    *("token", "feature + shifted token"),
  ]
  best = found[2]
  assert best["source"] == "ours [2]" and best["device"] == "H200" and best["tokens trained"] == "0.13 M"
  assert best["acceptance by position"] == ".50 .40" and best["ours τ"] == "1.70"
  # Three nodes cost 1.25 plain rounds and two steps of the draft 0.25.
  assert best["predicted ×"] == f"{1.7 / 1.5:.2f}" and "ours ×" not in best
  assert found[3]["ours ×"] == "1.60" and found[3]["predicted ×"] == "1.33"


def test_parts_of_eagle2(tmp_path):
  """By their options, in the paper's order. Fails when an option is read as another part."""
  parts = {
    "full": DYNAMIC,
    "no re-rank": "eagle[nodes=8,beam=3,window=4,rerank=False]",
    "no value": "eagle[nodes=8,beam=3,window=4,expand=confidence]",
    "neither": "eagle[nodes=8,beam=3,window=4,expand=confidence,rerank=False]",
  }
  methods = [(method, {"nodes": 8, "window": 4}) for method in parts.values()]
  run = read_run(tmp_path / "run", *methods, (CHAIN, {}))
  found = ours(paper_tables.eagle2(inputs([run])))
  assert [(row["tree"], row["draft"]) for row in found] == list(parts.items())[::-1]
  assert {row["nodes"] for row in found} == {"8"}


def test_parts_of_eagle3(tmp_path):
  """Rows of the ablation and of a run by what their heads have. Fails when a row has another's name."""
  heads = save_ablation(tmp_path / "ablations", "features")
  fused = with_recipes(**{"eagle3[window=2]": "eagle3[steps=1,tap_layers=(2,15,27)]"})
  run = read_run(tmp_path / "run", ("eagle3[window=2]", {}), info=fused)
  found = ours(paper_tables.eagle3(inputs([run], None, heads)))
  assert [row["head"] for row in found] == [
    "EAGLE-1's head (EAGLE-2)",
    "neither",
    "fused features, no training-time test",
    "training-time test (no feature loss)",
    "+ fused features (EAGLE-3)",
    "fused features, no training-time test",
  ]
  assert found[4]["acceptance by position"] == ".50 .40", "the first row of the ablation is EAGLE-3"


# --- Medusa ----------------------------------------------------------------------------------------


def test_both_recipes_of_medusa(tmp_path):
  """Medusa-2's runs have their own target, its training a KL. Fails when one is taken for the other."""
  save_trained(tmp_path / "m1", "medusa[heads=2]")
  save_trained(tmp_path / "m2", "medusa2[heads=2,lora=8]", HELD_OUT | {"kl": 0.0123})
  heads = [h for i, name in ((3, "m1"), (4, "m2")) for h in training_files.read_trained(tmp_path / name, i)]
  method = "medusa[window=2]"
  runs = [
    read_run(
      tmp_path / model, (method, {}), number=i, info={"model": model} | with_recipes(**{method: recipe})
    )
    for i, (model, recipe) in enumerate((("target", "medusa[heads=2]"), ("m2/target", "medusa2[lora=8]")), 1)
  ]
  made = paper_tables.medusa(inputs(runs, None, heads))
  found = ours(made)
  assert [row["recipe"] for row in found] == ["Medusa-1", "Medusa-2"] * 2
  assert "ours KL, nats" not in found[0] and found[1]["ours KL, nats"] == "0.0123"
  assert [row["target"] for row in found] == ["target", "target", "target", "m2/target"]
  assert any("another target" in note for note in made.notes)


def test_accuracy_by_head_and_rank(tmp_path):
  """Top-1 whatever came before, ranks, τ and its bound. Fails when conditional rates stand for others."""
  save_trained(tmp_path / "m1", "medusa[heads=2]")
  heads = training_files.read_trained(str(tmp_path / "m1"), 1)
  first, second = ours(paper_tables.medusa_heads(inputs(heads=heads)))
  assert (first["head"], first["ours top-1"], first["ours by rank"]) == ("1", "0.500", ".50 .20 .10")
  assert (second["ours top-1"], second["ours by rank"]) == ("0.300", ".40 .20 .00")
  assert (second["predicted τ at most"], second["ours τ"]) == ("1.80", "1.70")


def test_sizes_of_medusas_tree(tmp_path):
  """The best tree of each size and its price, then trees that were run, the smallest first.

  Fails when a level is priced as a pass of its own, or drafts are counted at another depth.
  """
  save_trained(tmp_path / "m1", "medusa[heads=2]")
  heads = training_files.read_trained(str(tmp_path / "m1"), 2)
  sparse, chain = "medusa[tree=((0,),(1,),(0,0),(0,1))]", "medusa[window=2]"
  run = read_run(tmp_path / "run", (sparse, {"nodes": 5}), (chain, {}))
  table = costs(**{chain: drafted(3, 2, 1.0)})
  found = ours(paper_tables.medusa_trees(inputs([run], table, heads)))
  two, four, eight, whole, *run_rows = found
  assert (two["nodes"], two["drafts by depth"], two["predicted τ"]) == ("2", "1", "1.50")
  # Two nodes cost 4.5 / 4 plain rounds, the heads' one pass 1 / 4, however deep the tree.
  assert two["predicted ×"] == f"{1.5 / 1.375:.2f}"
  assert (four["nodes"], four["drafts by depth"], four["predicted τ"]) == ("4", "2/1", "1.90")
  assert four["predicted ×"] == f"{1.9 / 1.75:.2f}"
  assert (eight["nodes"], eight["drafts by depth"]) == ("8", "3/4")
  assert (whole["nodes"], whole["drafts by depth"]) == ("10", "3/6"), "others are never accepted"
  assert [row["nodes"] for row in run_rows] == ["3", "5"]
  assert [row["drafts by depth"] for row in run_rows] == ["1/1", "2/2"]


# --- early exit, Spec-Bench, batches ---------------------------------------------------------------


def test_early_exits_by_layer(tmp_path):
  """Sorted by layer: trained ones, then runs by the head's record or their own option. Fails by name."""
  heads = save_ablation(tmp_path / "ablations", "early_exit")
  method = "early_exit[window=2]"
  runs = [
    read_run(
      tmp_path / str(i), (method, {}), number=i, info=with_recipes(**{method: f"early_exit[exit={layers}]"})
    )
    for i, layers in ((1, 15), (3, 2))
  ]
  own = [(f"self_speculation[layers={layers},window=2]", {}) for layers in (8, 4)]
  runs.append(read_run(tmp_path / "own", *own, number=4))
  found = ours(paper_tables.early_exit(inputs(runs, None, heads)))
  assert [row["layers"] for row in found] == ["2", "6", "10", "15", "15", "2", "4", "8"]
  assert found[0]["tokens trained"] == "0.13 M" and found[0]["draft"] == "held-out chain of 2"
  assert found[4]["ours ×"] == "1.60"


def test_methods_and_categories(tmp_path):
  """Both speeds and the prediction's error by hand, of each category and of all.

  Fails when Spec-Bench's mean is over rows or leaves the prefill out, or errors take the total in.
  """
  rows = [
    *(bench_row(q, "none", 4.0, 60, prefill_s=1.0) for q in (1, 2, 3)),
    *(bench_row(q, CHAIN, seconds, 30, prefill_s=1.0) for q, seconds in ((1, 2.0), (2, 3.0), (3, 5.0))),
  ]
  run = run_files.Run.read(save_run(tmp_path / "run", rows))
  made = paper_tables.spec_bench(inputs([run], costs(**{CHAIN: drafted(3, 2, 1.0)})))
  qa, writing, overall = ours(made)
  assert [row["category"] for row in (qa, writing, overall)] == ["qa", "writing", "overall"]
  assert qa["ours ×"] == "1.60" and qa["ours × as Spec-Bench"] == f"{(60 / 3 + 60 / 4) / 2 / 12:.2f}"
  assert qa["predicted ×"] == f"{240 / 180:.2f}" and qa["predicted / ours"] == "-17 %"
  assert writing["ours ×"] == "0.80" and writing["predicted / ours"] == "+67 %"
  error = ((1.6 - 4 / 3) / 1.6 + (4 / 3 - 0.8) / 0.8) / 2
  assert f"[1]: predicted × is off by {100 * error:.1f} % on average of method × category." in made.notes


def test_gain_by_batch(tmp_path):
  """Smallest batch first, rates of the whole batch, costs of that batch. Fails when they are a row's."""
  runs = [read_run(tmp_path / str(b), (CHAIN, {}), number=i, batch_size=b) for i, b in ((1, 4), (2, 1))]
  one, four = ours(paper_tables.batch(inputs(runs, costs(**{CHAIN: drafted(3, 2, 1.0)}))))
  assert [row["batch"] for row in (one, four)] == ["1", "4"] and four["source"] == "ours [1]"
  assert (one["ours plain tokens/s"], one["ours tokens/s"]) == ("15.0", "24.0")
  # Of a batch of four: 8 ms plain, 14 ms for three nodes a row.
  assert (one["predicted ×"], four["predicted ×"]) == (f"{240 / 180:.2f}", f"{480 / 450:.2f}")


# --- what is read ----------------------------------------------------------------------------------


def test_costs_of_another_head_are_not_used(tmp_path):
  """And a note says so. Fails when an early exit after one layer is priced as one after another."""
  run = read_run(tmp_path / "run", (CHAIN, {}), info=with_recipes(**{CHAIN: "eagle"}))
  for head, known in (("abc", True), ("other", False)):
    made = paper_tables.eagle1(inputs([run], costs(**{CHAIN: drafted(3, 2, 1.0, head=head)})))
    (row,) = ours(made)
    assert ("predicted ×" in row) == known
    note = f"[1]: the calibration has {CHAIN} with another head: not predicted."
    assert (note in made.notes) != known


def test_heads_of_older_runs_are_known_by_their_records(tmp_path):
  """Of --drafter_path, the one of the drafter's kind. Fails when another kind's recipe is taken."""
  for name, head in (("m", "medusa2[lora=8]"), ("e", "early_exit[exit=6]")):
    save_trained(tmp_path / name, head)
  paths = ",".join(str(tmp_path / name / "head") for name in ("m", "e"))
  methods = [("medusa[window=2]", {}), ("early_exit[window=2]", {}), (CHAIN, {})]
  run = read_run(tmp_path / "run", *methods, flags=f"--drafter_path={paths}\n")
  found = [run.recipe(method) for method, _ in methods]
  assert found == [("medusa2", {"lora": 8}), ("early_exit", {"exit": 6}), ("", {})]


def test_what_a_run_says_of_its_heads(tmp_path):
  """The recipe is the last run's. Fails when ``run.json`` does not tell one head from another."""
  save_trained(tmp_path / "run", "early_exit[exit=6]")
  assert footprint.training_of(str(tmp_path / "run" / "head"))["recipe"] == "early_exit[exit=6]"


def test_training_runs_are_found(tmp_path):
  """A run alone, a shipped head, all rows of all tables; one that did not end has no tokens and a note.

  Fails when a folder is missed, or an unfinished run looks like a finished one.
  """
  save_trained(tmp_path / "all" / "inputs" / "both", "eagle")
  save_trained(tmp_path / "all" / "early_exit" / "exit_2", "early_exit[exit=2]", None, result=False)
  exit_2, both = training_files.read_trained(str(tmp_path / "all"), 5)
  assert (exit_2.table, exit_2.row, both.table, both.row) == ("early_exit", "exit 2", "inputs", "both")
  assert exit_2.tokens is None and exit_2.acceptance == [] and both.acceptance == [0.5, 0.4]
  (note,) = training_files.notes([exit_2, both])
  assert note.startswith(f"[5] `{tmp_path / 'all'}`: training runs on H200, data dddddddddddd, 200 steps")
  assert note.endswith("; not finished: exit 2")
  save_trained(tmp_path / "shipped", "medusa")
  (tmp_path / "shipped" / "config.json").rename(tmp_path / "shipped" / "training.json")
  (head,) = training_files.read_trained(str(tmp_path / "shipped"), 1)
  assert head.table is None and head.recipe == ("medusa", {})


@pytest.mark.parametrize("table", ("inputs", "features", "medusa", "early_exit"))
def test_tables_know_every_row_of_the_ablations(tmp_path, table):
  """Each row comes up once. Fails when a row is added there that no table shows."""
  heads = save_ablation(tmp_path / "ablations", table)
  makes = {"inputs": "eagle1_inputs", "features": "eagle3"}
  found = ours(paper_tables.TABLES[makes.get(table, table)](inputs(heads=heads)))
  assert len(found) == len(ablations.TABLES[table].heads)
  assert len({(row["ours τ"], row["acceptance by position"]) for row in found}) == len(found)
