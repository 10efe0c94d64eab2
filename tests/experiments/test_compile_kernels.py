"""Compiling without devices, as far as that goes without compilers: reports, arithmetic, flags, resuming."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest

from experiments import compile_kernels
from experiments.kernels import (
  attention_cases,
  compile_pool,
  compile_tables,
  compile_tiles,
  devices,
  kernel_modules,
  whole_round,
)
from experiments.kernels import compile_reports as reports
from experiments.kernels.attention_cases import Case
from specjax.kernels.tree_attention import choose, tiles
from tests.experiments.tiny import run_script

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'loop_add_fusion' for 'sm_90a'
ptxas info    : Function properties for loop_add_fusion
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 16 registers, used 0 barriers
ptxas info    : Compiling entry function 'tree_attention' for 'sm_90a'
ptxas info    : Function properties for tree_attention
    24 bytes stack frame, 20 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 24 bytes cumulative stack size, 64 bytes smem
"""
THUNKS = """\
001: kCustomKernel [source       | next=002 (1)] loop_add_fusion grid: [1, 1, 1] threads: [8, 1, 1]  \
shared_memory: 0 bytes
002: kCustomKernel [prev=001 (1) | sink ] tree_attention grid: [2, 4, 8] threads: [128, 1, 1]  \
shared_memory: 71680 bytes
"""
GPU_HLO = """\
  %custom-call.1 = bf16[1,8]{1,0} custom-call(%q), custom_call_target="__gpu$xla.gpu.triton", \
backend_config={grid_x = 1 : i32, name = "tree_attention", num_stages = 3 : i32}
  %custom-call.2 = bf16[1,8]{1,0} custom-call(%q), custom_call_target="other", metadata={op_name="q"}
"""
UTILIZATION = """\
== CAPACTIY:
MXU, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU
    4     3     4     2     1     3     3     1     1     2
== UTILIZATION:
0 0 0 0 0 1 0 0 0 0
2 0 1 0 0 1 1 0 0 0
4 0 1 0 0 1 2 0 1 0
"""
ALLOCATIONS = """\
  #allocation0 [shape = 'u32[]', space=smem, size = 0x4, offset = 0x4, fixed_abs, tag = 'core']
  #allocation1 [shape = 'u32[72,128]{1,0:T(1,128)}', space=vmem, size = 0x9000, scoped, tag = 'scratch']
    #allocation3 [shape = 'u8[1048576]{0}', space=vmem, size = 0x100000, scoped, tag = 'input window']
    #allocation4 [shape = 's32[2]{0}', space=sflag, size = 0x8, scoped, tag = 'scoped memory']
"""
TPU_HLO = """\
%body (p: (bf16[1,2,128,64])) -> (bf16[1,2,128,64]) {
  %tree_attention.3 = bf16[1,2,8,64]{3,2,1,0} custom-call(%a, %b), custom_call_target="tpu_custom_call"
  %copy.1 = bf16[1,2,128,64]{3,2,1,0:T(8,128)(2,1)} copy(%x)
  %copy-start.1 = (bf16[1,2,128,64]{3,2,1,0:S(1)}, bf16[1,2,128,64]{3,2,1,0}, u32[]) copy-start(%x)
  %copy.2 = bf16[1,2,64]{2,1,0} copy(%y)
  %all-reduce.1 = f32[8]{0} all-reduce(%z), to_apply=%add
}
ENTRY %main (p: bf16[1,2,128,64]) -> bf16[1,2,128,64] {
  %copy.3 = bf16[1,2,128,64]{2,3,1,0} copy(%p)
  %while.1 = (bf16[1,2,128,64]{3,2,1,0}) while(%t), condition=%condition, body=%body
  %ag = (f32[8]{0}, f32[16]{0}) all-gather-start(%w)
}
"""


# --- reports -------------------------------------------------------------------------------------------


def test_ptxas_and_launches():
  entries = reports.parse_ptxas(PTXAS)
  assert entries["tree_attention"] == reports.PtxasEntry(255, 24, 20, 12, 64)
  assert entries["loop_add_fusion"] == reports.PtxasEntry(16, 0, 0, 0, 0)
  launches = {launch.name: launch for launch in reports.parse_launches(THUNKS)}
  assert launches["tree_attention"] == reports.Launch("tree_attention", (2, 4, 8), (128, 1, 1), 71680)
  assert launches["tree_attention"].programs == 64
  assert reports.gpu_kernels(GPU_HLO) == ["tree_attention"]


def test_tpu_schedule_and_vmem():
  schedule = reports.parse_utilization(UTILIZATION)
  assert schedule == reports.Schedule(bundles=3, mxu=6 / 12, fills=3, spills=1)
  assert reports.parse_vmem(ALLOCATIONS) == 0x9000 + 0x100000
  assert reports.tpu_kernels(TPU_HLO) == ["tree_attention.3"]
  with pytest.raises(ValueError, match="another form"):
    reports.parse_utilization("nothing of the kind")


def test_copies_are_counted_where_they_are_paid():
  assert reports.copies_of(TPU_HLO, "bf16[1,2,128,64]") == reports.Copies(in_loops=1, staged=1, outside=1)
  assert reports.collectives(TPU_HLO)["all-gather"] == 1
  assert reports.collectives(TPU_HLO)["all-reduce"] == 1


@pytest.mark.parametrize(
  ("registers", "shared", "threads", "expected"),
  [
    # 199 registers: 6368 a warp, 6400 allocated, 10 warps, 8 in whole quarters: 2 programs of 4.
    (199, 77824, 128, (2, 8, "registers")),
    # 32 registers: 1024 a warp, 64 warps: the limit of 64 warps is met exactly.
    (32, 0, 128, (16, 64, "registers")),
    # 100 KiB and 1 KiB of CUDA's: 228 // 101 = 2.
    (64, 100 * 1024, 128, (2, 8, "shared memory")),
    (16, 0, 32, (32, 32, "blocks")),
    (16, 230 * 1024, 128, (0, 0, "shared memory")),
  ],
)
def test_occupancy(registers, shared, threads, expected):
  """By hand, for compute capability 9.0: 65536 registers, 64 warps, 32 blocks, 228 KiB."""
  assert reports.occupancy(devices.TARGETS["h100"].gpu, registers, shared, threads) == expected


def test_errors_are_one_line():
  assert reports.one_line("Traceback (most recent call last):\n  File x\nRan out of VMEM: 20M\nmore") == (
    "Ran out of VMEM: 20M"
  )
  message = reports.last_words("I0 start\nLLVM ERROR: Cannot select\n", -6)
  assert message == "the compiler ended the process (signal 6): LLVM ERROR: Cannot select"


# --- bytes, targets, tables ----------------------------------------------------------------------------


def test_least_bytes_and_floor():
  case = Case("llama-3.1-8b", 8, 8192)
  keys = 2 * 8 * (8192 + 8) * 128 * 2
  assert case.kv_bytes == keys
  assert case.least_bytes == keys + 2 * 8 * 32 * 128 * 2 + 4 * 8
  assert Case("gemma-2-9b", 8, 8192, window=4096).live == 4095 + 8
  assert case.slots == 8320 and case.rows == 32 and case.tile_key == "bfloat16/128/32"
  v5e, tpu7x = devices.TARGETS["v5e"], devices.TARGETS["tpu7x"]
  assert compile_tables.floor_us(v5e, 819_000_000) == pytest.approx(1000)
  assert compile_tables.floor_us(tpu7x, 7_380_000_000) == pytest.approx(2000)  # two devices share a chip


def test_target_config_names_what_xla_asks_for():
  text = devices.target_config(devices.TARGETS["h200"])
  assert "core_count: 132" in text and "ACCELERATED_FEATURES" in text and '"NVIDIA H200"' in text
  assert "shared_memory_per_block_optin: 166912" in devices.target_config(devices.TARGETS["a100"])


def test_whole_rounds_are_asked_for_where_promised_and_allocate_nothing():
  v5e, v4 = devices.TARGETS["v5e"], devices.TARGETS["v4"]
  labels = [request.label for request in whole_round.default_rounds(v5e, list(whole_round.CONFIGS))]
  assert len(labels) == 6 and "llama-3.1-8b pallas_tpu model:4" in labels
  assert whole_round.default_rounds(v5e, ["phi-3-mini"]) == whole_round.default_rounds(v4, labels) == []
  model = whole_round.abstract_model(whole_round.CONFIGS["llama-3.1-8b"].replace(num_layers=1))
  leaves = jax.tree.leaves(model)
  assert leaves and all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
  assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.bfloat16)}


ROUND = {"target": "v5e", "round": {"model": "llama-3.1-8b", "implementation": "reference", "model_axis": 1}}
KERNEL = {
  "kernel": "pallas_gpu",
  "target": "h100",
  "case": Case("llama-3.1-8b", 8, 8192).json(),
  "tile": None,
}
GOOD = {
  **dict(status="ok", seconds=1.0, registers=40, spill_stores=0, spill_loads=0, shared=1024, grid=[1, 4, 8]),
  **dict(threads=128, programs=32, resident_programs=3, resident_warps=12, limited_by="registers"),
  **dict(moved=2**25, least=2**24, padding=1.0),
}


def test_what_fails_a_run():
  complaint = compile_tables.complaint
  assert complaint(KERNEL, GOOD) is None
  assert "spills" in complaint(KERNEL, GOOD | {"spill_loads": 4})
  assert "cannot hold" in complaint(KERNEL, GOOD | {"resident_programs": 0})
  assert complaint(KERNEL, {"status": "crash", "error": "LLVM ERROR"}) == "LLVM ERROR"
  assert complaint(KERNEL, {"status": "refused", "error": "takes other heads"}) is None
  full = {"status": "error", "error": "RESOURCE_EXHAUSTED: Ran out of memory on HBM"}
  assert complaint(ROUND, full) is None and complaint(KERNEL, full) is not None


def test_tables_have_a_line_a_compile():
  found = compile_tables.tables([KERNEL, KERNEL], [GOOD, {"status": "error", "error": "no"}])
  (_, header, lines), (_, _, left) = found
  assert len(lines) == len(left) == 1 and len(lines[0]) == len(header)
  assert "2.000" in lines[0] and "10.0" in lines[0]  # x least; 33.6 MB at 3350 GB/s
  assert "| 2.000 |" in compile_tables.markdown(*found[0])


# --- flags and packages --------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("flag", "word"),
  [
    ("--targets=v5e,b300", "b300"),
    ("--kernels=triton", "triton"),
    ("--models=gpt-5", "gpt-5"),
    ("--targets=", "--targets"),
    ("--quick --write_tiles", "--write_tiles"),
  ],
)
def test_wrong_flags_end_with_one_line(flag, word, capsys):
  assert run_script(compile_kernels, *flag.split()) == 2
  error = capsys.readouterr().err.strip()
  assert error.startswith("error: ") and word in error and "\n" not in error


def test_kernels_that_fit_no_target(capsys):
  assert run_script(compile_kernels, "--targets=v5e", "--kernels=pallas_gpu") == 2
  assert "none of --targets" in capsys.readouterr().err


def test_missing_compilers_name_the_extra(monkeypatch, capsys):
  monkeypatch.setattr(devices, "_find", lambda module: None)
  monkeypatch.setattr(devices, "ptxas", lambda: None)
  assert run_script(compile_kernels, "--quick") == 2
  error = capsys.readouterr().err
  assert "libtpu" in error and "jax-cuda13-plugin" in error and "specjax[kernels]" in error
  monkeypatch.setattr(devices, "ptxas", lambda: "/bin/ptxas")
  monkeypatch.setattr(devices, "_find", lambda module: None if module == "libtpu" else object())
  devices.check_compilers([devices.TARGETS["h100"]])  # TPUs were not asked for
  with pytest.raises(ValueError, match="needs libtpu:"):
    devices.check_compilers([devices.TARGETS["v5e"]])


# --- processes and what is kept ------------------------------------------------------------------------

FAKE = """
import json, os, sys, time
for line in sys.stdin:
  nodes = json.loads(line)["case"]["nodes"]
  if nodes == 13:
    print("LLVM ERROR: unlucky", file=sys.stderr, flush=True)
    os.abort()
  if nodes == 14:
    time.sleep(60)
  print(json.dumps({"status": "ok", "pid": os.getpid()}), flush=True)
"""


def requests(*nodes):
  return [KERNEL | {"case": Case("llama-3.1-8b", n, 8192).json()} for n in nodes]


def answers(asked, store, timeout=20.0):
  fake = lambda dumps: compile_pool.Worker(dumps=dumps, command=[sys.executable, "-c", FAKE])
  found = {}
  note = lambda request, answer: found.update({request["case"]["nodes"]: answer})
  compile_pool.run(asked, store, jobs=1, timeout=timeout, done=note, make_worker=fake)
  return found


def test_a_crash_costs_one_entry_and_resuming_skips_what_is_finished(tmp_path):
  path = str(tmp_path / "entries.jsonl")
  found = answers(requests(1, 13, 2), compile_pool.Store(path))
  assert found[1]["status"] == found[2]["status"] == "ok" and found[1]["pid"] != found[2]["pid"]
  assert found[13]["status"] == "crash" and "LLVM ERROR: unlucky" in found[13]["error"]
  with open(path, "a") as file:
    file.write('{"key": "torn')  # as a kill leaves it
  again = answers(requests(1, 13, 2), compile_pool.Store(path))
  assert again[1] == found[1] and again[2] == found[2]  # the same process ids: not asked again
  assert again[13]["status"] == "crash"
  assert len([line for line in open(path) if '"status": "ok"' in line]) == 2


def test_a_timeout_is_named(tmp_path):
  found = answers(requests(14), compile_pool.Store(None), timeout=0.5)
  assert found[14]["status"] == "timeout" and "--timeout" in found[14]["error"]


def test_the_key_holds_source_and_version(monkeypatch):
  (request,) = requests(1)
  before = compile_pool.key(request)
  assert before == compile_pool.key(json.loads(json.dumps(request)))
  monkeypatch.setattr(compile_pool.kernel_modules, "source_hash", lambda kernel: "changed")
  assert compile_pool.key(request) != before
  monkeypatch.undo()
  monkeypatch.setattr(jax, "__version__", "99.0")
  assert compile_pool.key(request) != before


# --- tiles ---------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """An empty tiles folder in place of the package's."""
  monkeypatch.setattr(tiles, "FOLDER", tmp_path)
  tiles.files.cache_clear()
  yield tmp_path
  tiles.files.cache_clear()


def test_tiles_round_trip_and_auto_needs_a_record(folder):
  target = devices.TARGETS["h100"]
  picks = {"bfloat16/128/32": {"rows": 32, "slots": 64}, "bfloat16/64/32": {"rows": 16, "slots": 64}}
  compile_tiles.write(target, picks)
  (kind,) = target.device_kinds
  assert tiles.tile("pallas_gpu", kind, "bfloat16", 128, 20) == picks["bfloat16/128/32"]
  assert tiles.tile("pallas_gpu", kind, "float32", 128, 20) is None
  assert tiles.tile("pallas_gpu", "cpu", "bfloat16", 128, 20) is None
  q = jax.ShapeDtypeStruct((1, 8, 32, 128), jnp.bfloat16)
  k = jax.ShapeDtypeStruct((1, 8, 1024, 128), jnp.bfloat16)
  assert choose("auto", q, k, kind).implementation == "reference"
  verified = {"date": "2026-01-02", "jax": "0.10.2", "command": "x"}
  tiles.write(tiles.read("h100") | {"verified": verified})
  assert choose("auto", q, k, kind).implementation == "pallas_gpu"
  assert choose("auto", q, k, "NVIDIA H100 PCIe").implementation == "reference"
  compile_tiles.write(target, {"bfloat16/128/4": {"rows": 16, "slots": 64}})  # new tiles: nobody has run them
  assert choose("auto", q, k, kind).implementation == "reference"
  assert set(tiles.read("h100")["tiles"]) == {*picks, "bfloat16/128/4"}
  assert not list(folder.glob("*.part"))


def test_the_shipped_tiles_are_of_their_kernels():
  """A field that a kernel has given up, or a size it does not take, must not wait for a device."""
  for entry in tiles.files():
    target = devices.TARGETS.get(entry["device"])
    assert target is None or (entry["kernel"], entry["device_kinds"]) == (
      target.kernel,
      list(target.device_kinds),
    )
    for tile in entry["tiles"].values():
      assert kernel_modules.load(entry["kernel"]).Tile(**tile)._asdict() == tile


@pytest.mark.parametrize(
  "change",
  [{"source": "guessed"}, {"verified": {"date": "today"}}, {"tiles": {"128": {"rows": 1}}}, {"more": 1}],
)
def test_tiles_that_make_no_sense_are_not_written(folder, change):
  compile_tiles.write(devices.TARGETS["v5e"], {})
  with pytest.raises(ValueError):
    tiles.write(tiles.read("v5e") | change)
  assert tiles.read("v5e")["verified"] is None


def test_the_first_tile_that_no_case_spills_with_is_taken():
  """Candidates in the kernel's order, each for every case of the class; else the one that spills least."""
  cases = (Case("llama-3.1-8b", 8, 8192), Case("llama-70b-tp8", 4, 8192))
  tiles_ = tuple({"rows": rows} for rows in (128, 64, 32))
  group = compile_tiles.Group(devices.TARGETS["v5e"], cases[0].tile_key, cases, tiles_)
  assert [request["tile"] for request in group.requests()] == [tiles_[0]] * 2
  spilled = lambda count: GOOD | {"spill_stores": count}
  group.take([GOOD, spilled(8)])
  assert not group.done and group.best == tiles_[0] and group.requests()[0]["tile"] == tiles_[1]
  group.take([GOOD, {"status": "error", "error": "x"}])
  group.take([GOOD, GOOD])
  assert group.done and group.best == tiles_[2] and group.spills == [8, None, 0]
  assert group.describe()[-2:] == [3, 0]
  worse = compile_tiles.Group(group.target, group.key, cases, tiles_, [8, None, 3])
  assert worse.done and worse.best == tiles_[2]
  assert compile_tiles.Group(group.target, group.key, cases, tiles_, [None] * 3).best is None


def test_tiles_to_try_go_over_the_keys_no_more_often_than_the_default(monkeypatch):
  case = Case("llama-3.1-8b", 16, 8192)  # 64 rows
  tile = lambda rows, slots, stages: {"rows": rows, "slots": slots, "stages": stages}
  found = [tile(64, 32, 2), tile(16, 128, 4), tile(64, 64, 2), tile(128, 64, 3), tile(64, 128, 4)]
  monkeypatch.setattr(kernel_modules, "candidates", lambda kernel, case: found)
  assert kernel_modules.shortlist("pallas_gpu", case, 2) == [found[0], found[3]]  # the others are neighbours
  assert found[1] not in kernel_modules.shortlist("pallas_gpu", case, 9)


def test_default_cases_are_what_is_promised():
  cases = attention_cases.default_cases(list(attention_cases.MODELS))
  assert len(set(cases)) == len(cases)
  assert {case.nodes for case in cases if not case.causal} == {1, 8, 16, 64}
  assert {case.prefix for case in cases} == {2048, 8192, 32768} and {case.batch for case in cases} == {1, 16}
  assert any(case.window for case in cases) and any(case.softcap for case in cases)
  assert {case.heads.size for case in cases} == {64, 96, 128, 256}
