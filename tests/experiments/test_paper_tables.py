"""Tables of papers: published rows recomputed, files that read back, ours by hand, one-line errors."""

import csv
import json
import re

import pytest

from experiments import paper_tables, published, render, results, run_files
from specjax import analysis
from specjax.analysis.costs import KEY_FIELDS
from tests.experiments.tiny import run_script

DRAFTER = "two_model[window=2]"
PLACE = {"platform": "gpu", "device_kind": "H200", "cpu": "X", "model": "target", "dtype": "float32"}
INFO = PLACE | {"schema": results.SCHEMA, "cpu_count": 2, "device_count": 1, "commit": "0123456789abcdef"}


def save_run(path, rows, script="spec_bench", flags="", **info):
  path.mkdir(parents=True)
  (path / "run.json").write_text(json.dumps(INFO | {"script": script, "finished": "now"} | info))
  (path / "flags.txt").write_text(f"--model=target\n--temperature=0.0\n{flags}")
  (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  return str(path)


def bench_row(question, drafter, decode_s, rounds, **more):
  plain = drafter == "none"
  window = more.pop("window", 2) if not plain else 0
  settings = {"window": window, "nodes": window + 1, "temperature": 1.0, "batch_size": 1}
  return {
    "question_id": question,
    "turn": 0,
    "category": "qa" if question < 3 else "writing",
    "drafter": drafter,
    "rule": "block_verification",
    "settings": settings | {"widths": [] if plain else [drafter]},
    "prompt_tokens": 100,
    "new_tokens": 60,
    "rounds": rounds,
    "accepted": 60 - rounds,
    "accept_counts": [],
    "reach_counts": [],
    "node_counts": {str(window + 1): rounds},
    "width_counts": {"0" if plain else "1": rounds},
    "missed": 0,
    "overlap": None,
    "prefill_s": 1.0,
    "decode_s": decode_s,
  } | more


def chain_rows(drafter=DRAFTER, **more):
  """Two questions of one category, one of another; 30 rounds judge 50 drafts, 40 rounds 60.

  Plain decoding answers a question more, and takes longer for the third.
  """
  judged = dict(reach_counts=[30, 20], overlap=0.8), dict(reach_counts=[40, 20], overlap=0.5)
  return [
    *(bench_row(question, "none", seconds, 60) for question, seconds in enumerate((3.0, 3.0, 4.5, 9.0), 1)),
    bench_row(1, drafter, 2.0, 30, **judged[0] | more),
    bench_row(2, drafter, 2.5, 40, **judged[1] | more),
    bench_row(3, drafter, 3.0, 30, **judged[0] | more),
  ]


def calibration(path, **key):
  """One live length: 4 ms plain, 5 ms for three nodes; a draft of two steps in 1.6 ms, so c = 0.2."""
  data = {
    "schema": 1,
    "made": "now",
    "key": dict.fromkeys(KEY_FIELDS, "x") | PLACE | key,
    "batches": [1],
    "lives": [128],
    "nodes": [1, 3],
    "round_ms": [[[4.0, 5.0]]],
    "accept_ms": [0.1, 0.1],
    "prefill_ms": {"64": 9.0},
    "call_ms": 0.1,
    "drafts": {DRAFTER: {"nodes": 3, "depth": 2, "draft_ms": [[1.6]], "catch_up_ms": 0.0}},
  }
  path.write_text(json.dumps(data))
  return str(path)


def ours(table):
  """Our rows as dictionaries of the cells that are not dashes."""
  rows = [dict(zip(table.header, row, strict=True)) for row in table.rows]
  return [{k: v for k, v in row.items() if v is not None} for row in rows if row["source"] != "published"]


# --- published rows --------------------------------------------------------------------------------


@pytest.mark.parametrize("row", published.LEVIATHAN, ids=str)
def test_every_published_prediction_is_recomputed(row):
  """Within 0.1 of what is printed, from the rounded α and c. Fails for a wrong digit or formula."""
  got = analysis.leviathan_speedup(row.alpha, row.window, published.LEVIATHAN_C[row.draft])
  assert abs(got - row.predicted) < 0.1


def test_published_rows_stand_without_a_run():
  """Every line; dashes for ours. Fails when a row is lost or a cell is made up."""
  inputs = paper_tables.Inputs([])
  tables = {name: make(inputs) for name, make in paper_tables.TABLES.items()}
  assert {name: len(table.rows) for name, table in tables.items()} == {
    "leviathan": 12,
    "leviathan_lenience": 4,
    "chen": 3,
    "eagle1": 6,
    "eagle1_inputs": 3,
    "eagle2": 9,
    "eagle3": 8,
    "medusa": 4,
    "medusa_heads": 5,
    "medusa_trees": 1,
    "early_exit": 3,
    "spec_bench": 9,
    "batch": 18,
  }
  for table in tables.values():
    columns = [i for i, name in enumerate(table.header) if name.startswith("ours")]
    assert columns and all(row[i] is None for row in table.rows for i in columns)
    assert "published" in " ".join(table.header) and "predicted" in " ".join(table.header)


def test_published_cells_by_hand():
  """First lines, figures worked out from the printed ones. Fails when a column holds another figure."""
  inputs = paper_tables.Inputs([])
  first = lambda table: dict(zip(table.header, table.rows[0], strict=True))
  row = first(paper_tables.leviathan(inputs))
  tokens = (1 - 0.75**8) / 0.25
  assert row["predicted ×"] == f"{tokens / 1.14:.2f}" == "3.16"
  assert row["predicted operations ×"] == f"{(7 * 77 / 11000 + 8) / tokens:.2f}"
  assert (row["published predicted ×"], row["published measured ×"]) == ("3.2", "3.4")
  row = first(paper_tables.leviathan_lenience(inputs))
  assert (row["predicted tokens"], row["predicted ×"]) == ("2.57", f"{(1 - 0.62**8) / 0.38 / 1.14:.2f}")
  best = max(range(1, 30), key=lambda g: (1 - 0.62 ** (g + 1)) / (0.02 * g + 1))
  assert row["best γ"] == str(best)
  chen = paper_tables.chen(inputs)
  row = first(chen)
  assert row["recomputed ×"] == f"{14.1 / 7.52:.2f}" and row["implied tokens a round"] == f"{21.3 / 7.52:.2f}"
  assert row["predicted upper bound ×"] == f"{5 / (7.2 / 14.1 + 1):.2f}"
  alpha = float(row["implied α"])
  assert sum(alpha**k for k in range(5)) == pytest.approx(21.3 / 7.52, abs=0.05)
  assert [note for note in chen.notes if "is not" in note] == [
    "XSum, nucleus: the printed 1.92 is not 14.1 / 7.52 = 1.875."
  ]


# --- our rows --------------------------------------------------------------------------------------


def test_our_chains_by_hand(tmp_path):
  """α over 50 and 60 judged drafts, τ, speeds and both predictions of the category and of all.

  Fails when means are not over judged drafts, prompts of plain decoding are others, or c is a draft's and
  not a step's.
  """
  run = run_files.Run.read(save_run(tmp_path / "run", chain_rows()))
  costs = analysis.CostTable.read(calibration(tmp_path / "costs.json"))
  qa, writing, overall = ours(paper_tables.leviathan(paper_tables.Inputs([run], costs)))
  alpha = (50 * 0.8 + 60 * 0.5) / 110
  tokens = 1 + alpha + alpha**2
  assert qa == {
    "source": "ours [1]",
    "device": "H200",
    "task": "qa",
    "draft": DRAFTER,
    "T": "1",
    "γ": "2",
    "α": f"{alpha:.2f}",
    "c": "0.20",
    "predicted ×": f"{tokens / 1.4:.2f}",
    "predicted × with own verify cost": f"{tokens / (5 / 4 + 0.4):.2f}",
    "ours ×": f"{6.0 / 4.5:.2f}",
    "ours τ": f"{120 / 70:.2f}",
  }
  assert (writing["task"], writing["α"], writing["ours ×"]) == ("writing", "0.80", "1.50")
  assert (overall["task"], overall["ours ×"], overall["ours τ"]) == ("overall", "1.40", "1.80")


def test_greedy_chains_take_their_accepted_share(tmp_path):
  """Where Σ min(p, q) is not known: 30 of 50 and 20 of 60 drafts. Fails when it counts as 0."""
  rows = chain_rows(overlap=None, rule="greedy")
  qa, *_ = ours(
    paper_tables.leviathan(paper_tables.Inputs([run_files.Run.read(save_run(tmp_path / "run", rows))]))
  )
  assert qa["α"] == f"{50 / 110:.2f}" and "c" not in qa and "predicted ×" not in qa


def test_only_lossless_chains_are_ours(tmp_path):
  """Trees, other drafters and rules that change the law are left out. Fails when one of them comes in."""
  tree = {"settings": {"window": 2, "nodes": 7, "temperature": 1.0, "batch_size": 1}}
  for number, rows in enumerate(
    (
      chain_rows(**tree),
      chain_rows(drafter="prompt_lookup"),
      chain_rows(rule="synthetic[rates=(0.7,)]"),
      chain_rows(rule="lenient_speculative_sampling[lenience=0.5]"),
    )
  ):
    run = run_files.Run.read(save_run(tmp_path / str(number), rows))
    assert ours(paper_tables.leviathan(paper_tables.Inputs([run]))) == []


def test_chen_takes_chains_of_four(tmp_path):
  """ms a token, τ and its α; a chain of two is left out. Fails when the window is not looked at."""
  of_four = {"settings": {"window": 4, "nodes": 5, "temperature": 0.5, "batch_size": 3}}
  rows = chain_rows() + chain_rows(drafter="two_model", **of_four)[3:]
  qa, *rest = ours(
    paper_tables.chen(paper_tables.Inputs([run_files.Run.read(save_run(tmp_path / "run", rows))]))
  )
  assert len(rest) == 2 and qa["device"] == "H200, batch 3" and qa["T"] == "0.5"
  assert (qa["plain ms a token"], qa["ms a token"], qa["ours ×"]) == ("50.00", "37.50", "1.33")
  assert qa["ours τ"] == "1.71" and "predicted upper bound ×" not in qa
  assert sum(float(qa["implied α"]) ** k for k in range(5)) == pytest.approx(120 / 70, abs=0.03)


def lenient_row(question, lenience, tokens, **more):
  rule = f"lenient_speculative_sampling[lenience={lenience}]"
  return {
    "question_id": question,
    "position": 16,
    "temperature": 1.0,
    "proposal": "two_model[policy=sample]",
    "rule": rule,
    "tokens": tokens,
    "divergence": 0.1,
  } | more


def test_our_lenience_by_hand(tmp_path):
  """Mean and error over contexts, α at the run's window, the paper's c. Fails when rules are mixed."""
  rows = [lenient_row(q, 0.5, tokens) for q, tokens in ((1, 1.5), (2, 2.0))]
  rows += [lenient_row(1, 1.0, 1.2), lenient_row(1, 1.0, 9.0, rule="block_verification")]
  run = run_files.Run.read(save_run(tmp_path / "run", rows, script="rule_bench", flags="--window=2\n"))
  half, whole = ours(paper_tables.leviathan_lenience(paper_tables.Inputs([run])))
  alpha = (-1 + (1 + 4 * 0.75) ** 0.5) / 2  # 1 + α + α² = 1.75
  assert (half["l"], half["γ"], half["α"]) == ("0.5", "2", f"{alpha:.2f}")
  assert half["ours tokens"] == "1.75 ± 0.25" and half["predicted ×"] == f"{1.75 / 1.04:.2f}"
  assert half["ours KL, nats"] == "0.100"
  assert (whole["l"], whole["ours tokens"]) == ("1", "1.20")


@pytest.mark.parametrize(
  ("proposal", "flags", "window"),
  [
    ("two_model", "", 4),
    ("two_model", "--window=6\n", 6),
    ("two_model[window=3]", "--window=6\n", 3),
  ],
)
def test_the_window_of_a_judged_chain(tmp_path, proposal, flags, window):
  """Its own option, then the flag, then the drafter's default. Fails for another order."""
  rows = [lenient_row(1, 1.0, 1.2, proposal=proposal)]
  run = run_files.Run.read(save_run(tmp_path / "run", rows, script="rule_bench", flags=flags))
  (row,) = ours(paper_tables.leviathan_lenience(paper_tables.Inputs([run])))
  assert row["γ"] == str(window)


def test_a_calibration_of_something_else_is_not_used(tmp_path):
  """Another model: no c, and a note that says so. Fails when its costs are taken all the same."""
  run = run_files.Run.read(save_run(tmp_path / "run", chain_rows()))
  costs = analysis.CostTable.read(calibration(tmp_path / "costs.json", model="other"))
  table = paper_tables.leviathan(paper_tables.Inputs([run], costs))
  assert all("c" not in row for row in ours(table))
  assert "[1]: the calibration has another model and was not used." in table.notes


def test_a_note_names_command_and_device(tmp_path):
  """Flags at their defaults are left out, an unfinished run says so. Fails when the command is lost."""
  path = save_run(tmp_path / "run", chain_rows(), flags="--rule=auto\n--window=2\n", finished=None)
  run = run_files.Run.read(path)
  command = "`python -m experiments.spec_bench --model=target --window=2`"
  assert run.note == f"[1] `{path}`: {command} on H200, commit 0123456789ab"
  data = json.loads((tmp_path / "run" / "run.json").read_text())
  del data["finished"]
  (tmp_path / "run" / "run.json").write_text(json.dumps(data))
  assert run_files.Run.read(path).note.endswith("; not finished")


# --- files and the script --------------------------------------------------------------------------


def read_markdown(text):
  lines = [line for line in text.splitlines() if line.startswith("| ")]
  assert len({len(line) for line in lines}) == 1, "not aligned"
  split = lambda line: [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
  return [[re.sub(r"\\(.)", r"\1", cell) for cell in split(line)] for line in (lines[0], *lines[2:])]


def test_files_read_back(tmp_path, capsys):
  """CSV and Markdown give the same cells, LaTeX as many rows and columns; Markdown is printed.

  Fails when a cell is lost or escaped for another format.
  """
  run = save_run(tmp_path / "run", chain_rows())
  output = tmp_path / "new" / "tables"
  costs = calibration(tmp_path / "costs.json")
  assert run_script(paper_tables, f"--runs={run}", f"--calibration={costs}", f"--output={output}") == 0
  printed = capsys.readouterr().out
  assert {path.name for path in output.iterdir()} == {
    f"{name}.{ending}" for name in paper_tables.TABLES for ending in ("md", "csv", "tex")
  }
  inputs = paper_tables.Inputs([run_files.Run.read(run)], analysis.CostTable.read(costs))
  for name, make in paper_tables.TABLES.items():
    cells = make(inputs).cells
    with open(output / f"{name}.csv", newline="", encoding="utf-8") as file:
      assert list(csv.reader(file)) == cells
    markdown = (output / f"{name}.md").read_text()
    assert read_markdown(markdown) == cells and markdown in printed
    lines = [line for line in (output / f"{name}.tex").read_text().splitlines() if line.endswith(r"\\")]
    assert len(lines) == len(cells)
    assert {len(re.findall(r"(?<!\\)&", line)) for line in lines} == {len(cells[0]) - 1}


def test_what_formats_read_as_commands_is_written_out():
  """Cells of special characters, negative numbers, code in notes. Fails when one is left as it is."""
  table = render.Table("t", "50 % of a_b", ("a", "b|c"), [("x & y", None), ("[#}", "-0.5")], ["see `a_b` #1"])
  tex = render.latex(table)
  assert r"\caption{50 \% of a\_b}" in tex and r"a & b\textbar{}c \\" in tex
  assert r"x \& y & -- \\" in tex and r"{[}\#\} & $-0.5$ \\" in tex and r"see \texttt{a\_b} \#1" in tex
  assert r"b\|c" in render.markdown(table) and "- see `a_b` #1" in render.markdown(table)
  with pytest.raises(ValueError, match="table t: a row of 1 cells; the header has 2"):
    render.Table("t", "", ("a", "b"), [("x",)])


def test_chosen_tables_alone(tmp_path):
  """Fails when --tables is passed over."""
  assert run_script(paper_tables, "--tables=chen", f"--output={tmp_path / 'out'}") == 0
  assert {path.name for path in (tmp_path / "out").iterdir()} == {"chen.md", "chen.csv", "chen.tex"}


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    (["--runs={tmp}/absent"], "absent: no run.json; this is not a run directory"),
    (["--runs={tmp}/old"], "schema = 1; this version reads"),
    (["--runs={tmp}/other"], "a run of generate; tables read spec_bench and rule_bench"),
    (["--runs={tmp}/empty"], "empty: no rows"),
    (["--tables=chen,medusa_9"], "--tables has 'medusa_9'; it must be of leviathan"),
    (["--ablations={tmp}/absent"], "absent: no training run there, nor TABLE/ROW"),
    (["--ablations={tmp}/torn"], "config.json: not valid JSON"),
    (["--ablations={tmp}/headless"], "config.json: field --head is missing"),
    (["--ablations={tmp}/nowhere"], "config.json: field platform is missing"),
    (["--calibration={tmp}/absent.json"], "absent.json: No such file"),
    (["--output="], "--output is empty"),
  ],
)
def test_bad_input_is_one_line(tmp_path, capsys, arguments, words):
  """And nothing is written. Fails when a traceback comes, or a table of the rest."""
  save_run(tmp_path / "old", chain_rows(), schema=1)
  save_run(tmp_path / "other", chain_rows(), script="generate")
  save_run(tmp_path / "empty", [])
  for name, text in (
    ("torn", "{"),
    ("headless", '{"settings": {}}'),
    ("nowhere", '{"settings": {"--head": "medusa"}}'),
  ):
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(text)
  output = tmp_path / "out"
  given = [argument.format(tmp=tmp_path) for argument in arguments]
  assert run_script(paper_tables, f"--output={output}", *given) == 2
  (line,) = [line for line in capsys.readouterr().err.splitlines() if line]
  assert line.startswith("error: ") and words in line and not output.exists()
