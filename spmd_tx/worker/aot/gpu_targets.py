"""Describes NVIDIA GPUs to XLA, which would otherwise ask the driver, by NVIDIA's data sheets."""

from dataclasses import dataclass

from spmd_tx.worker.memory.accelerators import ACCELERATORS


@dataclass(frozen=True)
class _Chip:
    name: str
    cores: int  # streaming multiprocessors
    clock: float  # GHz
    cache: int  # bytes, of the second level
    shared_memory: int  # bytes that all blocks of a core have together
    memory: int  # bytes
    features: str = ""  # of instructions that later chips do not have


CHIPS = {
    "a100": _Chip("NVIDIA A100-SXM4-80GB", 108, 1.41, 40 << 20, 167936, 80 << 30),
    "a100-40": _Chip("NVIDIA A100-SXM4-40GB", 108, 1.41, 40 << 20, 167936, 40 << 30),
    "h100": _Chip("NVIDIA H100 80GB HBM3", 132, 1.98, 50 << 20, 233472, 80 << 30, "ACCELERATED_FEATURES"),
    "h200": _Chip("NVIDIA H200", 132, 1.98, 50 << 20, 233472, 141 << 30, "ACCELERATED_FEATURES"),
    "b200": _Chip("NVIDIA B200", 148, 1.97, 126 << 20, 233472, 180 << 30, "ACCELERATED_FEATURES"),
}
KEPT_BY_DRIVER = 1024  # bytes of shared memory of each block
CUDA, CUDNN = "12.8.0", (9, 10, 0)


def target_of(kind: str) -> str:
    """Return XLA's GpuTargetConfigProto of a GPU, as text. Raises KeyError for others."""
    chip, known = CHIPS[kind], ACCELERATORS[kind]
    major, minor = known.capability
    capability = f"major: {major} minor: {minor}" + (
        f" feature_extension: {chip.features}" if chip.features else ""
    )
    version = ".".join(map(str, CUDNN))
    return f"""
gpu_device_info {{
  name: "{chip.name}"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ {capability} }}
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {chip.shared_memory - KEPT_BY_DRIVER}
  shared_memory_per_core: {chip.shared_memory}
  core_count: {chip.cores}
  fpus_per_core: {128 if major > 8 else 64}
  clock_rate_ghz: {chip.clock}
  l2_cache_size: {chip.cache}
  memory_bandwidth: {int(known.bandwidth)}
  device_memory_size: {chip.memory}
  driver_version: "{CUDA}"
  runtime_version: "{CUDA}"
  compile_time_toolkit_version: "{CUDA}"
  dnn_version: "{version}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: {CUDNN[0]} minor: {CUDNN[1]} patch: {CUDNN[2]} }}
device_description_str: "{chip.name}"
"""
