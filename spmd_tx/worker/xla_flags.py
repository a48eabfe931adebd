"""XLA's flags for workers on GPUs, and the share of a device's memory that is JAX's."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from spmd_tx.protocol.setup import Setup

MEMORY_FRACTION = "0.92"  # of a device, for JAX's pool; the rest is for CUDA, cuDNN and NCCL
UNKNOWN_FLAG = re.compile(r"Unknown flags? in XLA_FLAGS:(.*)")

# A request that is executed again must give the same bits.
REPRODUCIBLE = ("--xla_gpu_exclude_nondeterministic_ops=true",)
# XLA computes values twice, to save memory, as soon as a program's arguments need 80 % of a device's, which
# those with the key-value cache do by plan. The plan has room for what a program needs beside its arguments.
COMPUTED_ONCE = ("--xla_disable_hlo_passes=rematerialization",)
# Overlap gathers of the next layer's weights and sums of gradients with this layer's arithmetic.
OVERLAPPED = (
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    "--xla_gpu_enable_while_loop_double_buffering=true",
)
AUTOTUNED = "--xla_gpu_per_fusion_autotune_cache_dir"


def wanted_flags(setup: Setup) -> list[str]:
    """List our flags for XLA, except those that the user sets."""
    has_collectives = setup.fsdp * setup.ep * setup.tp > 1
    flags = [*REPRODUCIBLE, *COMPUTED_ONCE, *(OVERLAPPED if has_collectives else ())]
    if setup.kernel_choices and not any(map(str.isspace, setup.kernel_choices)):  # spaces separate flags
        # The fastest kernel can be another one next time, and then a request that is executed again would
        # have other bits. So the choices are kept, and not in the cache, which is limited and may be emptied.
        flags.append(f"{AUTOTUNED}={Path(setup.kernel_choices) / 'autotuned'}")
    users = os.environ.get("XLA_FLAGS", "")
    return [flag for flag in flags if flag.split("=")[0] not in users]


def joined_flags(flags: Sequence[str]) -> str:
    """Join our flags and the user's, which come last and so win."""
    return " ".join([*flags, *os.environ.get("XLA_FLAGS", "").split()])


def unknown_flags(errors: str) -> set[str]:
    """Return the flags that XLA rejected when it ended the process."""
    return {flag.split("=")[0] for text in UNKNOWN_FLAG.findall(errors) for flag in text.split()}
