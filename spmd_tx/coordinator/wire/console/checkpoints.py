"""Checkpoints beside what was known of their runs when they were saved, as the console reads them."""

import msgspec

from spmd_tx.coordinator.wire.checkpoints import Checkpoint, Cursor


class SavedCheckpoint(msgspec.Struct, frozen=True):
    checkpoint: Checkpoint
    step: int | None  # optimizer steps of its run before it; null: not known, or of no run
    metric: str | None  # name of the value
    value: float | None  # the newest at the save; null: there was none, or not finite
    loss: float | None  # per token, as value


class SavedCheckpointsResponse(msgspec.Struct, frozen=True):
    checkpoints: list[SavedCheckpoint]  # newest first
    metrics: list[str]  # that any of them has
    cursor: Cursor
