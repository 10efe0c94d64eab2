"""Several processes, on one machine or on many hosts: each takes its share of the questions, results merge.

On every host of a TPU slice, or under Slurm or Open MPI, the same command runs with ``--coordinator=auto``.
Elsewhere each process is told who is who:

  python -m experiments.spec_bench … --output=RUN --coordinator=HOST:PORT --num_processes=2 --process_id=0

(the other with ``--process_id=1``; HOST is that of process 0). A process decodes on its own devices and keeps
a run directory of its own beside RUN, on its own disk, so that each resumes after a kill. When all are done,
the rows go to process 0, which writes RUN.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from absl import flags
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost

from experiments import results
from experiments.summary import Row

AUTO = "auto"
COORDINATOR = flags.DEFINE_string(
  "coordinator",
  "",
  f"Where process 0 listens, HOST:PORT, if several processes share the questions; {AUTO}: as the cluster "
  "says (TPU VMs, Slurm, Open MPI). Default: this process is alone.",
)
NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "How many processes, with --coordinator.", 1)
PROCESS_ID = flags.DEFINE_integer("process_id", None, "Which of them this is, from 0.", 0)

# How long the first to finish waits for the others.
_PATIENCE_MS = 7 * 24 * 3600 * 1000
Item = TypeVar("Item")


def _consistent(values: dict[str, Any]) -> bool:
  address, count, index = (values[name] for name in ("coordinator", "num_processes", "process_id"))
  if address in ("", AUTO):
    given = [f"--{name}" for name in ("num_processes", "process_id") if values[name] is not None]
    if given:
      raise flags.ValidationError(f"{given[0]} needs --coordinator=HOST:PORT, got {address!r}")
    return True
  host, _, port = address.rpartition(":")
  if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
    raise flags.ValidationError(f"--coordinator = {address!r}; it must be HOST:PORT or {AUTO}")
  if count is None or index is None:
    raise flags.ValidationError(f"--coordinator={address} needs --num_processes and --process_id")
  if index >= count:
    raise flags.ValidationError(f"--process_id = {index}; it must be below --num_processes = {count}")
  return True


flags.register_multi_flags_validator(["coordinator", "num_processes", "process_id"], _consistent)


@dataclasses.dataclass(frozen=True)
class Processes:
  """All processes of a run, seen from one of them.

  Attributes:
    index: which this is, from 0.
    count: how many there are.
  """

  index: int = 0
  count: int = 1

  @property
  def is_first(self) -> bool:
    return self.index == 0

  def share(self, items: Sequence[Item]) -> list[Item]:
    """Every ``count``-th item: neighbours, often of one category, go to different processes.

    Raises:
      ValueError: a process would get nothing.
    """
    if len(items) < self.count:
      raise ValueError(f"{self.count} processes share {len(items)} questions; some would have none")
    return list(items[self.index :: self.count])

  def directory(self, path: str) -> str:
    """The run directory of this process for the run ``path``."""
    return path if self.count == 1 else f"{path}.process{self.index}of{self.count}"

  def gather(self, value: Any) -> list[Any]:
    """What JSON can hold, of every process, in order; waits until all have come here."""
    if self.count == 1:
      return [value]
    # Collectives give up after minutes, and one process may be done hours before another.
    multihost.get_barrier_sync_fn()(key="specjax_gather", timeout_ms=_PATIENCE_MS)
    data = np.frombuffer(json.dumps(value, ensure_ascii=False).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(data)))
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: len(data)] = data
    gathered = multihost_utils.process_allgather(padded)
    return [json.loads(row[:size].tobytes()) for row, size in zip(gathered, sizes, strict=True)]


def join() -> Processes:
  """Joins the other processes, as the flags say; call it before anything else of JAX.

  Raises:
    ValueError: they cannot be found.
  """
  address = COORDINATOR.value
  if not address:
    return Processes()
  try:
    if address == AUTO:
      jax.distributed.initialize()
    else:
      jax.distributed.initialize(
        address, NUM_PROCESSES.value, PROCESS_ID.value, cluster_detection_method="deactivate"
      )
  except (ValueError, RuntimeError) as error:
    hint = "; name it: HOST:PORT, --num_processes, --process_id" if address == AUTO else ""
    raise ValueError(f"--coordinator = {address!r}: {error}{hint}") from error
  return Processes(jax.process_index(), jax.process_count())


def part(directory: results.RunDirectory) -> dict[str, Any]:
  """What a process has to give to `merge`."""
  return {"info": directory.info, "rows": directory.rows}


def merge(whole: results.RunDirectory, parts: Sequence[dict[str, Any]], order: Sequence[Any]) -> None:
  """Puts the runs of all processes together; rows that are there already stay as they are.

  Args:
    whole: the run directory of all.
    parts: of each process, see `part`.
    order: ids of all questions, in which rows come.
  """
  place = {question_id: number for number, question_id in enumerate(order)}
  key = lambda row: (row["question_id"], row["turn"], row["drafter"])
  stored = {key(row) for row in whole.rows}
  rows: list[Row] = [row for part in parts for row in part["rows"] if key(row) not in stored]
  for row in sorted(rows, key=lambda row: (place[row["question_id"]], row["turn"])):
    whole.append(row)
  infos = [part["info"] for part in parts]
  summed = lambda name: sum(info[name] for info in infos)
  own = ("platform", "device_kind", "device_count", "cpu", "cpu_count")
  first = {name: value for name, value in infos[0].items() if name not in ("schema", "script", "started")}
  whole.update(
    **first
    | {
      "finished": max(info["finished"] for info in infos),
      "compile_count": summed("compile_count"),
      "compiles_while_timing": summed("compiles_while_timing"),
      "peak_memory_bytes": max(info["peak_memory_bytes"] for info in infos),
      "differences": [found for info in infos for found in info["differences"]],
      "processes": [{name: info[name] for name in own} for info in infos],
    }
  )
