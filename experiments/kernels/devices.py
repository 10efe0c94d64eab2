"""The accelerators that kernels are compiled for, described by published facts.

None of them has to be there: `topologies.get_topology_desc` makes a device from a TPU topology's name, or
from the facts XLA's GPU compiler asks for, and programs compile for it on any machine. What a device alone
can tell, values and times, is left to `experiments.kernel_bench`.

Sources. TPU: the system architecture pages of Google Cloud (``cloud.google.com/tpu/docs/v4``, ``…/v5e``,
``…/v5p``, ``…/v6e``, ``…/tpu7x``) for memory and bandwidth.
GPU: NVIDIA's data sheets (A100 80GB SXM, H100 SXM, H200 SXM) and architecture papers for multiprocessors,
clocks, caches, memory and bandwidth; the table of compute capabilities 8.0 and 9.0 in the CUDA C++
programming guide for limits of threads, registers and shared memory.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
from collections.abc import Sequence

GIB = 2**30
EXTRA = "kernels"


@dataclasses.dataclass(frozen=True)
class Gpu:
  """What XLA's GPU compiler and the occupancy arithmetic need to know.

  Attributes:
    capability: compute capability ``(major, minor)``.
    accelerated: architecture-specific instructions (``sm_90a``).
    processors: streaming multiprocessors.
    fp32_lanes: float32 lanes a multiprocessor.
    clock_ghz: boost clock.
    l2_bytes: second-level cache.
    shared_bytes: shared memory a multiprocessor; a block can have 1 KiB less.
    memory_bytes: what a process can allocate, below the data sheet's round figure.
  """

  capability: tuple[int, int]
  accelerated: bool
  processors: int
  fp32_lanes: int
  clock_ghz: float
  l2_bytes: int
  shared_bytes: int
  memory_bytes: int

  # The same for compute capabilities 8.0 and 9.0.
  warp: int = 32
  max_warps: int = 64  # resident a multiprocessor
  max_blocks: int = 32  # resident a multiprocessor
  max_threads: int = 1024  # a block
  registers: int = 65536  # a multiprocessor
  max_registers: int = 255  # a thread
  register_unit: int = 256  # allocated a warp in multiples of this
  shared_unit: int = 128  # bytes
  reserved_shared: int = 1024  # bytes of each resident block that CUDA keeps for itself

  @property
  def arch(self) -> str:
    """``sm_80``, ``sm_90a``."""
    return f"sm_{self.capability[0]}{self.capability[1]}" + ("a" if self.accelerated else "")


@dataclasses.dataclass(frozen=True)
class Target:
  """A device to compile for.

  Attributes:
    name: ``v5e``, ``h100``.
    platform: ``tpu`` or ``cuda``.
    device_kinds: `jax.Device.device_kind` of such devices; the first one is also what the deviceless
      topology reports.
    gbps: published memory bandwidth of a chip, GB/s (10⁹).
    memory: bytes of device memory a JAX device has.
    topology: name of one chip's topology.
    topology4: name of a topology with at least four devices.
    devices_per_chip: JAX devices that share a chip's memory and bandwidth.
    gpu: more facts (GPU).
  """

  name: str
  platform: str
  device_kinds: tuple[str, ...]
  gbps: float
  memory: int
  topology: str
  topology4: str
  devices_per_chip: int = 1
  gpu: Gpu | None = None

  @property
  def kernel(self) -> str:
    return "pallas_tpu" if self.platform == "tpu" else "pallas_gpu"

  @property
  def bytes_per_second(self) -> float:
    """Published bandwidth of one JAX device."""
    return self.gbps * 1e9 / self.devices_per_chip


_A100 = Gpu((8, 0), False, 108, 64, 1.41, 40 * 2**20, 164 * 1024, 85_198_045_184)
_H100 = Gpu((9, 0), True, 132, 128, 1.98, 50 * 2**20, 228 * 1024, 85_520_809_984)
_H200 = dataclasses.replace(_H100, memory_bytes=151_397_597_184)


def _tpu(name: str, kinds: tuple[str, ...], gbps: float, gib: int, one: str, four: str, devices: int = 1):
  return Target(name, "tpu", kinds, gbps, gib * GIB // devices, one, four, devices)


def _gpu(name: str, kind: str, gbps: float, gpu: Gpu):
  return Target(name, "cuda", (kind,), gbps, gpu.memory_bytes, "1x1x1", "1x1x4", gpu=gpu)


TARGETS = {
  target.name: target
  for target in (
    _tpu("v4", ("TPU v4",), 1228, 32, "v4:1x1x1", "v4:2x2x1"),
    _tpu("v5e", ("TPU v5 lite", "TPU v5e"), 819, 16, "v5e:1x1", "v5e:2x2"),
    _tpu("v5p", ("TPU v5", "TPU v5p"), 2765, 95, "v5p:1x1x1", "v5p:2x2x1"),
    _tpu("v6e", ("TPU v6 lite", "TPU v6e"), 1640, 32, "v6e:1x1", "v6e:2x2"),
    _tpu("tpu7x", ("TPU7x",), 7380, 192, "tpu7x:1x1x1", "tpu7x:2x2x1", devices=2),
    _gpu("a100", "NVIDIA A100-SXM4-80GB", 2039, _A100),
    _gpu("h100", "NVIDIA H100 80GB HBM3", 3350, _H100),
    _gpu("h200", "NVIDIA H200", 4800, _H200),
  )
}


def target_of_kind(device_kind: str) -> Target | None:
  """The target that a device of this kind is."""
  return next((t for t in TARGETS.values() if device_kind in t.device_kinds), None)


def parse_targets(names: Sequence[str]) -> list[Target]:
  """
  Raises:
    ValueError: an unknown name, or none.
  """
  unknown = [name for name in names if name not in TARGETS]
  if unknown or not names:
    raise ValueError(f"--targets = {','.join(names)!r}; possible: {','.join(TARGETS)}")
  return [TARGETS[name] for name in dict.fromkeys(names)]


def target_config(target: Target) -> str:
  """The text proto from which XLA makes a GPU that is not there."""
  gpu = target.gpu
  facts = {
    "threads_per_block_limit": gpu.max_threads,
    "threads_per_warp": gpu.warp,
    "shared_memory_per_block": 48 * 1024,
    "shared_memory_per_block_optin": gpu.shared_bytes - gpu.reserved_shared,
    "shared_memory_per_core": gpu.shared_bytes,
    "threads_per_core_limit": gpu.max_warps * gpu.warp,
    "core_count": gpu.processors,
    "fpus_per_core": gpu.fp32_lanes,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 2**16 - 1,
    "block_dim_limit_z": 2**16 - 1,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
    "registers_per_core_limit": gpu.registers,
    "registers_per_block_limit": gpu.registers,
    "memory_bandwidth": int(target.gbps * 1e9),
    "l2_cache_size": gpu.l2_bytes,
    "clock_rate_ghz": gpu.clock_ghz,
    "device_memory_size": gpu.memory_bytes,
  }
  major, minor = gpu.capability
  extension = " feature_extension: ACCELERATED_FEATURES" if gpu.accelerated else ""
  lines = [f"  {name}: {value}" for name, value in facts.items()]
  lines.append(f"  cuda_compute_capability {{ major: {major} minor: {minor}{extension} }}")
  return "\n".join(
    [
      "gpu_device_info {",
      *lines,
      "}",
      'platform_name: "CUDA"',
      "dnn_version_info { major: 9 minor: 10 }",
      f'device_description_str: "{target.device_kinds[0]}"',
    ]
  )


# --- what has to be installed ------------------------------------------------------------------------


def ptxas() -> str | None:
  """Path of the PTX assembler: on PATH, or from NVIDIA's wheel."""
  found = shutil.which("ptxas")
  if found:
    return found
  for package in ("nvidia.cu13", "nvidia.cuda_nvcc"):
    spec = _find(package)
    for folder in spec.submodule_search_locations or () if spec else ():
      path = os.path.join(folder, "bin", "ptxas")
      if os.path.exists(path):
        return path
  return None


def _find(module: str):
  try:
    return importlib.util.find_spec(module)
  except ModuleNotFoundError:  # a parent package is missing
    return None


def check_compilers(targets: Sequence[Target]) -> None:
  """
  Raises:
    ValueError: the compiler of a target is not installed; the message names the extra that has it.
  """
  platforms = {target.platform for target in targets}
  missing = []
  if "tpu" in platforms and _find("libtpu") is None:
    missing.append("libtpu")
  if "cuda" in platforms:
    missing += [name for name, module in _CUDA_MODULES.items() if _find(module) is None]
    if ptxas() is None:
      missing.append("ptxas (a CUDA 13 toolkit on PATH, or nvidia-cuda-nvcc)")
  if missing:
    raise ValueError(
      f"compiling without a device needs {', '.join(missing)}: install the extra {EXTRA!r} "
      f"(pip install 'specjax[{EXTRA}]'), or leave out the targets with --targets"
    )


_CUDA_MODULES = {"jax-cuda13-plugin": "jax_cuda13_plugin", "jax-cuda13-pjrt": "jax_plugins.xla_cuda13"}


def worker_environment(dumps: str | None) -> dict[str, str]:
  """Environment of a process that compiles for devices that are not there.

  ``dumps`` is a folder for libtpu's reports. They are written for every fusion: fine for a kernel, but a
  whole model then compiles for minutes, mostly writing; None writes none.
  """
  environment = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # no metadata server to ask
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several workers at once
    # Only quiets warnings about a host that is not a TPU host.
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TF_CPP_MIN_LOG_LEVEL": "2",
  }
  if dumps is not None:
    environment["LIBTPU_INIT_ARGS"] = (
      f"--xla_jf_dump_to={dumps} --xla_jf_dump_llo_text=true "
      "--xla_jf_dump_llo_pass_label_regex=^(original|final_hlo-static-per-bundle-utilization)$"
    )
  return environment


def topology_devices(target: Target, count: int = 1) -> list:
  """``count`` (1 to 4) devices of a target, none of them there. In a process with `worker_environment`."""
  from jax.experimental import topologies

  name = target.topology if count == 1 else target.topology4
  if target.platform == "tpu":
    bounds = {"chips_per_host_bounds": (1, 1, 1)} if count == 1 else {}
    topology = topologies.get_topology_desc(name, platform="tpu", **bounds)
  else:
    topology = topologies.get_topology_desc(
      "gpu", platform="cuda", target_config=target_config(target), topology=name
    )
  return list(topology.devices[:count])
