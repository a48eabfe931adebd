"""Datums, requests made of them, and what stands in for a model."""

from dataclasses import replace

import numpy as np

from spmd_tx.coordinator.training.attention_cost import AttentionCost
from spmd_tx.coordinator.training.batching import ChunkOutput, PackedRequest, pack
from spmd_tx.coordinator.training.losses import LossSettings
from spmd_tx.coordinator.training.micro_batch import MicroBatch
from spmd_tx.coordinator.training.packing import TrainingShapes
from spmd_tx.coordinator.wire.training_protobuf import Datum
from spmd_tx.protocol.commands import LOSS_NAMES, LossInputs, PackedRows

SHARDS = 4
SHAPES = TrainingShapes(SHARDS, 2048, (256, 2048), max_context=512, attention=AttentionCost(5e-4))
SHORT_ROWS = TrainingShapes(SHARDS, 128, (256,), max_context=64, attention=AttentionCost(5e-4))
# of 64 tokens: a micro-batch is one block of 8 rows
IN_BLOCKS = replace(SHORT_ROWS, train_tokens=1024)  # 8 blocks of 8 rows
CROSS_ENTROPY = LossSettings(LOSS_NAMES.index("cross_entropy"))
PPO = LossSettings(LOSS_NAMES.index("ppo"), clip_low=0.8, clip_high=1.2)
GSPO = LossSettings(LOSS_NAMES.index("gspo"), clip_low=0.8, clip_high=1.2)


def supervised(length: int, seed: int = 0, weight: float = 1.0) -> Datum:
    random = np.random.default_rng([length, seed])
    return Datum(
        tokens=random.integers(1, 1000, length, dtype=np.int32),
        loss_inputs={
            "target_tokens": random.integers(1, 1000, length),
            "weights": np.full(length, weight, np.float32),
        },
    )


def reinforced(length: int, seed: int = 0) -> Datum:
    random = np.random.default_rng([length, seed])
    return Datum(
        tokens=random.integers(1, 1000, length, dtype=np.int32),
        loss_inputs={
            "target_tokens": random.integers(1, 1000, length),
            "logprobs": -random.random(length, dtype=np.float32),
            "advantages": random.standard_normal(length, dtype=np.float32),
        },
    )


def distilled(length: int, targets: int, seed: int = 0) -> Datum:
    random = np.random.default_rng([length, targets, seed])
    return Datum(
        tokens=random.integers(1, 1000, length, dtype=np.int32),
        loss_inputs={
            "target_tokens": random.integers(1, 1000, (length, targets)),
            "weights": random.random((length, targets), dtype=np.float32),
        },
    )


def of_sequences(length: int, seed: int = 0) -> Datum:
    datum = reinforced(length, seed)
    return Datum(datum.tokens, datum.loss_inputs | {"sequence_ratio_mask": np.ones(length, np.float32)})


def packed(
    datums: list[Datum],
    slot: int = 0,
    loss: LossSettings = CROSS_ENTROPY,
    forward_only: bool = False,
    shapes: TrainingShapes = SHAPES,
):
    request = pack(datums, loss, forward_only, shapes)
    return replace(request, chunks=[chunk.in_slot(slot) for chunk in request.chunks])


def half_a_batch(slot: int) -> PackedRequest:
    """Four rows of a block of 8."""
    return packed(four(slot), slot, shapes=SHORT_ROWS)


def four(seed: int) -> list[Datum]:
    """Two of them do not fit into one short row."""
    return [supervised(60, 4 * seed + number) for number in range(4)]


def run(rows: PackedRows, loss: LossInputs) -> tuple[np.ndarray, np.ndarray]:
    """Stands in for the model: depends on everything a token may depend on."""
    per_token = rows.tokens * 3 + rows.positions * 11 + rows.slots[:, None]
    several = rows.targets.ndim == 3
    logprobs = -((per_token[..., None] if several else per_token) + rows.targets * 7) / 1000
    losses = -logprobs * loss.weights
    return logprobs.astype(np.float32), (losses.sum(-1) if several else losses).astype(np.float32)


def alone(request: PackedRequest) -> list[ChunkOutput]:
    outputs = []
    for chunk in request.chunks:
        batch = MicroBatch(chunk, SHAPES)
        outputs += batch.cut(*run(batch.rows(), batch.loss()))
    return outputs


def fields_of(arrays: PackedRows | LossInputs) -> dict[str, np.ndarray]:
    """Return the arrays that are not None."""
    fields = {field: getattr(arrays, field) for field in arrays.__struct_fields__}
    return {field: values for field, values in fields.items() if values is not None}
