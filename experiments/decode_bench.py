"""What decoding costs, part by part, relative to plain decoding of one row.

  python -m experiments.decode_bench [--quick] [--output=runs/cost]

Everything runs in loops inside compiled programs, ``--rounds`` turns a call, so that no host work is
timed. The cases of a part alternate pass by pass; figures are medians over the passes, ratios are taken
within a pass, and the spread is their interquartile range. The parts:

- floor: reading every parameter once (row sums of each array), against plain decoding;
- nodes: the bare matrix products (all linear layers and the output head, nothing else) and the verify of
  N nodes;
- phases: draft, verify, accept with commit, and the whole round of the drafter;
- rules: from logits to the committed tokens, N = 16: processing, rule, commit, by rule and settings;
- trees: a round of the same N nodes as a chain, as a static and as a dynamic tree;
- memory: what the loop needs beside its state, by N and buffer;
- slots: a round against the size of the buffer, same live tokens;
- batch: a round against the number of rows;
- compile: seconds to trace and compile the loop of a tiny model of many layers (no compilation cache).
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Sequence

import jax
import numpy as np
from absl import flags
from flax import nnx

from experiments import flags as shared
from experiments import loops, results, runtime
from experiments.bench import Bench, blocked, fixed, tree_of
from experiments.methods import parse_method
from specjax import decode
from specjax.models import Decoder
from specjax.sampling import Settings
from specjax.tree import TokenTree
from specjax.verify import make_rule

PARTS = ("floor", "nodes", "phases", "rules", "trees", "memory", "slots", "batch", "compile")
SELECTED = flags.DEFINE_list("parts", list(PARTS), "What to measure.")
QUICK = flags.DEFINE_bool("quick", False, "Fewer passes, nodes, buffers and batches.")
ROUNDS = flags.DEFINE_integer("rounds", 16, "Turns of the loop in each timed call.", 1)
PASSES = flags.DEFINE_integer("passes", None, "Passes over the cases of a part. Default: 9, quick 3.", 1)
LIVE = flags.DEFINE_integer("live", 100, "Tokens in each row before the first round.", 2)
NODES = flags.DEFINE_list("nodes", None, "Widths to verify. Default: 1,2,4,8,16,32,64, quick 1,8.")
TREES = flags.DEFINE_list("trees", None, "Nodes of the parts trees and memory. Default: 8,16,64, quick 16.")
SLOTS = flags.DEFINE_list("buffer_slots", None, "Buffer sizes. Default: 512,2048,8192, quick 512,8192.")
BATCHES = flags.DEFINE_list("batches", None, "Numbers of rows. Default: 1,2,4,8, quick 1,4.")
LAYERS = flags.DEFINE_list("layers", None, "Layers of the part compile. Default: 32,80, quick 8.")


def _numbers(flag, full: Sequence[int], quick: Sequence[int]) -> list[int]:
  if flag.value is None:
    return list(quick if QUICK.value else full)
  if not flag.value or not all(value.isdigit() and int(value) for value in flag.value):
    raise ValueError(f"--{flag.name} = {','.join(flag.value)!r}; positive numbers are needed, e.g. 1,8")
  return [int(value) for value in flag.value]


def measure_floor(bench: Bench) -> None:
  model = bench.job.target.model
  read = functools.partial(loops.read_all, jax.tree.leaves(model))
  plain = bench.rounds_case(bench.method("none"))
  name = f"read {loops.parameter_bytes(model) / 1e6:.0f} MB"
  bench.measure("floor", {name: blocked(read), "plain round": plain}, {name: 1})


def measure_nodes(bench: Bench, widths: Sequence[int]) -> None:
  model, plain = bench.job.target.model, bench.method("none")
  cases = {"plain round": bench.rounds_case(plain)}
  for nodes in widths:
    inputs = loops.matmul_inputs(model, nodes)
    cases[f"matrix products {nodes}"] = bench.loop_case(loops.matmuls, inputs, plain.weights)
    verify = loops.verify_carry(bench.state(plain), nodes)
    chain, implementation = TokenTree.chain(nodes - 1), plain.config.implementation
    cases[f"verify {nodes}"] = bench.loop_case(loops.verify, verify, plain.weights, chain, implementation, 0)
  bench.measure("nodes", cases)


def measure_phases(bench: Bench) -> None:
  method = bench.method(_drafter())
  nodes = method.config.drafter.tree.num_nodes
  proposal, verification, state = loops.one_round(method, bench.state(method))
  bench.measure(
    f"phases, N = {nodes}",
    {
      "whole round": bench.rounds_case(method),
      "draft": bench.loop_case(loops.draft, bench.state(method), method.weights, method.config),
      "verify": bench.loop_case(
        loops.verify,
        loops.verify_carry(bench.state(method), nodes),
        method.weights,
        proposal.tree,
        method.config.implementation,
        proposal.start_layer,
      ),
      "accept and commit": bench.loop_case(
        loops.accept, state, method.weights, proposal, verification, method.config
      ),
    },
  )


# Settings of a row: what the words of a table stand for.
_SETTINGS = {
  "T = 0": {},
  "T = 0, penalties": dict(repetition_penalty=1.1, frequency_penalty=0.2),
  "T = 0.8": dict(temperature=0.8),
  "T = 0.8, penalties": dict(temperature=0.8, repetition_penalty=1.1, frequency_penalty=0.2),
  "T = 0.8, top-k 50, top-p .95": dict(temperature=0.8, top_k=50, top_p=0.95),
  "T = 0.8, top-p .95": dict(temperature=0.8, top_p=0.95),
  "T = 1.2, top-p .99": dict(temperature=1.2, top_p=0.99),
}
_RULE_NODES = 16
_RULE_CASES = (
  ("greedy", "chain", ("T = 0", "T = 0, penalties")),
  ("draw_and_follow", "chain", ("T = 0.8", "T = 0.8, top-k 50, top-p .95")),
  ("speculative_sampling", "chain", tuple(_SETTINGS)[2:]),
  ("block_verification", "chain", ("T = 0.8", "T = 0.8, top-k 50, top-p .95")),
  ("recursive_rejection", "tree", ("T = 0.8", "T = 0.8, top-k 50, top-p .95")),
  ("traversal_verification", "tree", ("T = 0.8", "T = 0.8, top-k 50, top-p .95")),
)


def measure_rules(bench: Bench) -> None:
  """Drafts drawn from the target's own distribution at another temperature: accepted often, not always."""
  plain = bench.method("none")
  cases = {"plain round": bench.rounds_case(plain)}
  shapes = {"chain": TokenTree.chain(_RULE_NODES - 1), "tree": tree_of(_RULE_NODES)}
  for rule, shape, names in _RULE_CASES[:: 4 if QUICK.value else 1]:
    greedy = fixed(plain, shapes[shape])
    method = dataclasses.replace(greedy, config=dataclasses.replace(greedy.config, rule=make_rule(rule)))
    for name in names[: 1 if QUICK.value else None]:
      state = bench.state(method).replace(settings=Settings.create(1, **_SETTINGS[name]))
      proposal, verification, state = loops.one_round(method, state)
      if rule != "greedy":
        proposal = loops.sampled_proposal(proposal, verification)
      cases[f"{rule}, {shape}, {name}"] = bench.loop_case(
        loops.accept, state, method.weights, proposal, verification, method.config
      )
  bench.measure(f"rules, N = {_RULE_NODES}", cases)


def measure_trees(bench: Bench, widths: Sequence[int]) -> None:
  plain = bench.method("none")
  for nodes in widths:
    methods = {
      f"chain, N = {nodes}": fixed(plain, TokenTree.chain(nodes - 1)),
      "static tree": fixed(plain, tree_of(nodes)),
      "dynamic tree": fixed(plain, tree_of(nodes), dynamic=True),
    }
    bench.measure("trees", {name: bench.rounds_case(method) for name, method in methods.items()})


def measure_memory(bench: Bench, widths: Sequence[int]) -> None:
  """What the compiler sets aside for the loop beside its state; nothing runs."""
  plain, lines = bench.method("none"), []
  for slots in (512, 8192):
    for nodes in widths:
      method = fixed(plain, tree_of(nodes), slots=slots)
      init = functools.partial(decode.init_state, config=method.config, batch=1)
      state = jax.eval_shape(init, method.weights)
      loop = decode.run_rounds.lower(method.weights, state, method.config, np.int32(1)).compile()
      caches = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.cache))
      row = {
        "part": "memory",
        "case": f"{slots} slots, N = {nodes}",
        "cache": caches,
        "temporary": loop.memory_analysis().temp_size_in_bytes,
      }
      lines.append([row["case"], *(f"{row[name] / 2**20:.2f}" for name in ("cache", "temporary"))])
      if bench.directory is not None:
        bench.directory.append(row)
  results.table(("memory of the loop, static tree", "cache, MiB", "temporary, MiB"), lines)
  print(flush=True)


def measure_slots(bench: Bench, sizes: Sequence[int]) -> None:
  for name in ("none", _drafter()):
    cases = {f"{name}, {slots} slots": bench.rounds_case(bench.method(name, slots)) for slots in sizes}
    bench.measure(f"slots, {LIVE.value} live", cases)


def measure_batch(bench: Bench, batches: Sequence[int]) -> None:
  methods = [bench.method(name) for name in ("none", _drafter())]
  cases = {
    f"{method.name}, batch {batch}": bench.rounds_case(method, batch)
    for method in methods
    for batch in batches
  }
  bench.measure("batch", cases)


def measure_compile(bench: Bench, depths: Sequence[int]) -> None:
  """Compiles the loop of narrow models with many layers; nothing runs."""
  config = bench.job.target.config.replace(vocab_size=256, real_vocab_size=None, d_model=64, d_ff=128)
  config = config.replace(num_heads=4, num_kv_heads=2, head_dim=16)
  cached = jax.config.jax_enable_compilation_cache
  jax.config.update("jax_enable_compilation_cache", False)
  lines = []
  try:
    for layers in depths:
      model = Decoder(config.replace(num_layers=layers), rngs=nnx.Rngs(0))
      for name in ("none", _drafter()):
        seconds = _compile_seconds(model, runtime.make_method(bench.job, name, 512))
        lines.append([f"{layers} layers, {name}", *(f"{value:.1f}" for value in seconds.values())])
        if bench.directory is not None:
          bench.directory.append({"part": "compile", "case": lines[-1][0], **seconds})
  finally:
    jax.config.update("jax_enable_compilation_cache", cached)
  results.table(("compile", "trace, s", "compile, s"), lines)
  print(flush=True)


def _compile_seconds(model: Decoder, method: runtime.Method) -> dict[str, float]:
  """Seconds to trace and to compile the loop of ``method`` with ``model`` as the target."""
  config = dataclasses.replace(method.config, num_real_tokens=model.config.vocab_size)
  weights = decode.Weights(model, method.weights.drafter)
  state = jax.eval_shape(lambda weights: decode.init_state(weights, config, 1), weights)
  start = time.perf_counter()
  lowered = decode.run_rounds.lower(weights, state, config, np.int32(1))
  traced = time.perf_counter()
  lowered.compile()
  return {"trace_s": traced - start, "compile_s": time.perf_counter() - traced}


def _drafter() -> str:
  return runtime.drafter_name("prompt_lookup")


def main(_: list[str]) -> None:
  widths = _numbers(NODES, (1, 2, 4, 8, 16, 32, 64), (1, 8))
  sizes = _numbers(SLOTS, (512, 2048, 8192), (512, 8192))
  batches = _numbers(BATCHES, (1, 2, 4, 8), (1, 4))
  trees = _numbers(TREES, (8, 16, 64), (16,))
  depths = _numbers(LAYERS, (32, 80), (8,))
  unknown = [part for part in SELECTED.value if part not in PARTS]
  if unknown or not SELECTED.value:
    raise ValueError(f"--parts = {','.join(SELECTED.value)!r}; possible: {','.join(PARTS)}")
  if parse_method(_drafter()).control is not None:
    raise ValueError(f"--drafter = {_drafter()!r}: parts are measured of one width; name a drafter")
  if _drafter() == "none":
    raise ValueError("--drafter = 'none': plain rounds are always measured; name a drafter")
  directory = None
  if shared.OUTPUT.value:
    directory = results.RunDirectory(shared.OUTPUT.value, "decode_bench", [shared, sys.modules[__name__]])
    if directory.rows:
      raise ValueError(f"--output = {shared.OUTPUT.value!r} holds rows already; name a new directory")
  bench = Bench(
    runtime.load_job([_drafter()]),
    directory,
    passes=PASSES.value or (3 if QUICK.value else 9),
    rounds=ROUNDS.value,
    live=LIVE.value,
  )
  window, slots = bench.method(_drafter()).window, min(512, *sizes)
  room = LIVE.value + ROUNDS.value * (window + 1)
  if slots < room:
    raise ValueError(f"--live, --rounds and a window of {window} may need {room} slots; a buffer has {slots}")
  measures = {
    "floor": lambda: measure_floor(bench),
    "nodes": lambda: measure_nodes(bench, widths),
    "phases": lambda: measure_phases(bench),
    "rules": lambda: measure_rules(bench),
    "trees": lambda: measure_trees(bench, trees),
    "memory": lambda: measure_memory(bench, trees),
    "slots": lambda: measure_slots(bench, sizes),
    "batch": lambda: measure_batch(bench, batches),
    "compile": lambda: measure_compile(bench, depths),
  }
  for part in PARTS:
    if part in SELECTED.value:
      measures[part]()
  print(
    f"ms a round (a read for the floor), medians of {bench.passes} passes; relative to the first case of "
    f"the part; {bench.compiles} programs compiled while timing"
  )
  if directory is not None:
    directory.finish(
      model=bench.job.target.source, times=bench.job.times, compiles_while_timing=bench.compiles
    )


if __name__ == "__main__":
  shared.run(main)
