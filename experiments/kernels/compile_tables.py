"""What `experiments.compile_kernels` prints: tables, and what counts as a failure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from experiments.kernels import devices
from experiments.kernels.attention_cases import Case
from experiments.kernels.compile_pool import Answer, Request
from experiments.kernels.whole_round import Round

Table = tuple[str, tuple[str, ...], list[list[Any]]]

MIB, GIB = 2**20, 2**30
NOTES = (
  "Compiled only, run nowhere. moved: MiB to and from device memory by the kernel's grid and index maps; "
  "x least: over live keys and values, queries and outputs, once each; padding: bytes of memory for a byte "
  "of the caches. floor: moved and padded bytes at the published bandwidth (GB/s: "
  + ", ".join(
    f"{t.name} {t.gbps:g}" + (f" for {t.devices_per_chip} devices" if t.devices_per_chip > 1 else "")
    for t in devices.TARGETS.values()
  )
  + "). bundles and MXU are static: a loop's body counts once. "
  "busy SMs: multiprocessors that get a program at all, of the chip's; per SM: programs and warps that "
  "registers, shared memory and threads let one hold."
)
_BYTES = ("moved MiB", "x least", "padding", "floor us", "s")
_TPU = ("target", "case", "VMEM MiB", "bundles", "MXU", "spills", *_BYTES)
_GPU = (
  *("target", "case", "regs", "spills", "shared KiB", "grid", "busy SMs", "threads"),
  *("programs per SM", "warps per SM", "limited by", *_BYTES),
)
_ROUND = (
  *("target", "round", "arguments GiB", "temporaries MiB", "aliased GiB", "needs GiB", "of GiB", "fits"),
  *("copies a round", "via VMEM", "copies a call", "all-gathers", "all-reduces", "s"),
)


def label(request: Request) -> str:
  """``v5e llama-3.1-8b bf16 N8 S8k B1``."""
  if "round" in request:
    return f"{request['target']} {Round(**request['round']).label}"
  return f"{request['target']} {Case(**request['case']).label}"


def out_of_memory(answer: Answer) -> bool:
  """The compiler says that a program does not fit the device: for a whole model that is a finding."""
  text = answer.get("error") or ""
  return answer["status"] == "error" and ("RESOURCE_EXHAUSTED" in text or "Ran out of memory" in text)


def complaint(request: Request, answer: Answer) -> str | None:
  """Why an answer fails the run, None if it does not. A refused shape is served by the reference."""
  if answer["status"] == "refused":
    return None
  if answer["status"] != "ok":
    return None if "round" in request and out_of_memory(answer) else answer["error"]
  if "round" in request:
    copies = answer["copies_in_loop"]
    return f"copies a whole cache {copies} times a round" if copies else None
  stores, loads = answer["spill_stores"], answer["spill_loads"]
  if stores or loads:
    return f"spills registers ({stores} stores, {loads} loads)"
  if answer.get("resident_programs", 1) < 1:
    return "a multiprocessor cannot hold one program"
  return None


def floor_us(target: devices.Target, moved: float) -> float:
  """Microseconds that the bytes take at the published bandwidth."""
  return moved / target.bytes_per_second * 1e6


def _common(target: devices.Target, answer: Answer) -> list[str]:
  return [
    f"{answer['moved'] / MIB:.2f}",
    f"{answer['moved'] / answer['least']:.3f}",
    f"{answer['padding']:.2f}",
    f"{floor_us(target, answer['moved'] * answer['padding']):.1f}",
    f"{answer['seconds']:.1f}",
  ]


def _spills(answer: Answer) -> str:
  return f"{answer['spill_stores']}/{answer['spill_loads']}"


def _tpu_line(target: devices.Target, answer: Answer) -> list[str]:
  return [
    f"{answer['vmem'] / MIB:.2f}",
    str(answer["bundles"]),
    f"{100 * answer['mxu']:.1f} %",
    _spills(answer),
    *_common(target, answer),
  ]


def _gpu_line(target: devices.Target, answer: Answer) -> list[str]:
  return [
    str(answer["registers"]),
    _spills(answer),
    f"{answer['shared'] / 1024:.1f}",
    "x".join(map(str, answer["grid"])),
    f"{min(answer['programs'], target.gpu.processors)}/{target.gpu.processors}",
    str(answer["threads"]),
    str(answer["resident_programs"]),
    str(answer["resident_warps"]),
    answer["limited_by"],
    *_common(target, answer),
  ]


def tables(requests: Sequence[Request], answers: Sequence[Answer]) -> list[Table]:
  """A table a kind of device, and one of what has no line there."""
  pairs = list(zip(requests, answers, strict=True))
  found: list[Table] = []
  for title, platform, header, line in (
    ("TPU", "tpu", _TPU, _tpu_line),
    ("GPU", "cuda", _GPU, _gpu_line),
  ):
    lines = []
    for request, answer in pairs:
      target = devices.TARGETS[request["target"]]
      if target.platform == platform and answer["status"] == "ok":
        lines.append([target.name, Case(**request["case"]).label, *line(target, answer)])
    if lines:
      found.append((f"{title}: {len(lines)} compiled", header, lines))
  return found + _left(pairs)


def _left(pairs: Iterable[tuple[Request, Answer]]) -> list[Table]:
  lines = [
    [r["target"], label(r).split(" ", 1)[1], a["status"], a["error"]] for r, a in pairs if a["status"] != "ok"
  ]
  header = ("target", "what", "result", "the compiler's or the kernel's words")
  return [("Not compiled", header, lines)] if lines else []


def round_tables(requests: Sequence[Request], answers: Sequence[Answer]) -> list[Table]:
  """Memory and copies of whole decoding loops."""
  pairs = list(zip(requests, answers, strict=True))
  lines = []
  for request, answer in pairs:
    if answer["status"] == "ok":
      lines.append(
        [
          request["target"],
          Round(**request["round"]).label,
          f"{answer['arguments'] / GIB:.2f}",
          f"{answer['temporaries'] / MIB:.1f}",
          f"{answer['aliased'] / GIB:.2f}",
          f"{answer['needed'] / GIB:.2f}",
          f"{answer['memory'] / GIB:.1f}",
          "yes" if answer["fits"] else "no",
          str(answer["copies_in_loop"]),
          str(answer["copies_staged"]),
          str(answer["copies_outside"]),
          str(answer["collectives"]["all-gather"]),
          str(answer["collectives"]["all-reduce"]),
          f"{answer['seconds']:.0f}",
        ]
      )
  title = "Whole decoding loops, a device each (batch 1, bf16, 8192 slots, prompt_lookup of 7)"
  return ([(title, _ROUND, lines)] if lines else []) + _left(pairs)


def markdown(title: str, header: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
  """A table for a file."""
  row = lambda cells: "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
  rule = "|" + "|".join(["---"] * len(header)) + "|"
  return "\n".join([f"## {title}", "", row(header), rule, *map(row, lines), ""])
