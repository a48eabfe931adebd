"""Counts what commands carry, and how long moving adapters takes."""

import numpy as np

from spmd_tx.coordinator.runtime import metrics
from spmd_tx.coordinator.training.micro_batch import MicroBatch
from spmd_tx.protocol.commands import Forward, ForwardBackward, PageIn, PageOut, SwapIn, SwapOut
from spmd_tx.protocol.reports import Reply

Swap = SwapOut | SwapIn | PageOut | PageIn
SWAPS = (SwapOut, SwapIn, PageOut, PageIn)


def count_micro_batch(batch: MicroBatch, command: Forward | ForwardBackward) -> None:
    metrics.MICRO_BATCHES.labels("yes" if len(batch.chunks) > 1 else "no").inc()
    rows, tokens = command.rows.slots.size, command.rows.tokens.size
    used = int(np.count_nonzero(command.rows.segments))
    metrics.TRAINING_ROWS.labels("used").inc(batch.used)
    metrics.TRAINING_ROWS.labels("free").inc(rows - batch.used)
    metrics.TRAINING_TOKENS.labels("used").inc(used)
    metrics.TRAINING_TOKENS.labels("padding").inc(tokens - used)


def measure_swap(command: Swap, reply: Reply, seconds: float) -> None:
    if isinstance(command, SwapIn | PageIn):
        tier = "disk" if reply.metrics["from_disk"] else "host"
        metrics.SWAP_SECONDS.labels("in", tier).observe(seconds)
        return
    metrics.SWAP_SECONDS.labels("out", "host").observe(seconds)
    for tier in ("host", "disk"):
        metrics.IDLE_ADAPTER_BYTES.labels(tier).set(reply.metrics[f"{tier}_bytes"])
