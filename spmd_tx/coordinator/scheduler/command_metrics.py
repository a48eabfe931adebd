"""Counts what commands carry, and how long moving adapters takes."""

import numpy as np

from spmd_tx.coordinator.runtime import metrics
from spmd_tx.coordinator.training.micro_batch import MicroBatch
from spmd_tx.protocol.commands import AnyCommand, EncodeImages, Forward, ForwardBackward, Move
from spmd_tx.protocol.places import Idle
from spmd_tx.protocol.reports import Reply


def count_micro_batch(batch: MicroBatch, command: Forward | ForwardBackward) -> None:
    group = metrics.group()
    metrics.MICRO_BATCHES.labels("yes" if len(batch.chunks) > 1 else "no", group).inc()
    rows, tokens = command.rows.slots.size, command.rows.tokens.size
    used = int(np.count_nonzero(command.rows.segments))
    metrics.TRAINING_ROWS.labels("used", group).inc(batch.used)
    metrics.TRAINING_ROWS.labels("free", group).inc(rows - batch.used)
    metrics.TRAINING_TOKENS.labels("used", group).inc(used)
    metrics.TRAINING_TOKENS.labels("padding", group).inc(tokens - used)


def count_images(command: AnyCommand) -> None:
    """Count the images of a command that encodes some."""
    if isinstance(command, EncodeImages):
        metrics.ENCODED_IMAGES.labels(metrics.group()).inc(len(command.grids))


def measure_move(move: Move, reply: Reply, seconds: float) -> None:
    """Note how long it took to bring something to idle memory or back; other moves do not count."""
    if not move.pair.replies:
        return
    group = metrics.group()
    if isinstance(move.source, Idle):
        tier = "disk" if reply.metrics["from_disk"] else "host"
        metrics.SWAP_SECONDS.labels("in", tier, group).observe(seconds)
        return
    metrics.SWAP_SECONDS.labels("out", "host", group).observe(seconds)
    for tier in ("host", "disk"):
        metrics.IDLE_ADAPTER_BYTES.labels(tier, group).set(reply.metrics[f"{tier}_bytes"])
