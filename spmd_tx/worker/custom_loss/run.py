"""Runs custom losses on datums: datums are grouped by shape, each shape is compiled once, and run in pieces.

Losses run on the host's CPU, where they take none of the memory that was planned for the model.
Dimension key: D datum, T token, M metric.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from spmd_tx.custom_loss.arguments import quoted
from spmd_tx.custom_loss.definition import CheckedLoss, decode, read
from spmd_tx.custom_loss.limits import LossLimits
from spmd_tx.worker.custom_loss.interpret import LossProgram, place_of, power_of_four
from spmd_tx.worker.custom_loss.values import LossProblem, Need

SHORTEST_BUCKET = 32  # tokens
MOST_PROGRAMS = 64  # kept, the most recently used

DatumInputs = Sequence[np.ndarray]  # its inputs, logprobs first: each [], [T] or [T, K]


@dataclass(frozen=True)
class LossResults:
    """Holds the results of a loss for each datum."""

    losses_D: np.ndarray  # float64
    metrics_DM: np.ndarray  # float64
    gradients: list[np.ndarray]  # of the loss with respect to logprobs, float32, in their shape


@dataclass(frozen=True)
class Piece:
    """Holds the datums of one call of a program, filled up to ``count`` with copies of the first."""

    program: LossProgram
    bucket: int  # tokens
    count: int
    datums: list[int]

    @property
    def is_compiled(self) -> bool:
        return self.program.is_compiled(self.count)


@dataclass(frozen=True)
class OpenLoss:
    """Runs a loss on the datums of one request, in pieces that do not depend on each other."""

    loss: CheckedLoss
    inputs: Sequence[DatumInputs]
    pieces: list[Piece]

    def compile(self, piece: Piece) -> None:
        with _as_torch():
            piece.program.compile(piece.count)

    def run(self, piece: Piece) -> LossResults:
        """Return the results of the piece's datums."""
        inputs = self.inputs
        chosen = [*piece.datums, *[piece.datums[0]] * (piece.count - len(piece.datums))]
        tokens_D = np.array([inputs[datum][0].shape[0] for datum in chosen], np.int64)
        stacked = [
            np.stack([_padded(inputs[datum][place], piece.bucket) for datum in chosen])
            for place in range(len(self.loss.inputs))
        ]
        with _as_torch():
            (losses, metrics), gradients = piece.program.run(tokens_D, stacked[0], stacked[1:])
            losses, metrics, gradients = (np.asarray(each) for each in (losses, metrics, gradients))
        real = len(piece.datums)
        return LossResults(
            losses_D=losses[:real].astype(np.float64),
            metrics_DM=metrics[:real].astype(np.float64),
            gradients=[gradients[place, : tokens_D[place]].astype(np.float32) for place in range(real)],
        )


class CustomLosses:
    """Runs losses, and keeps the most recently used losses and programs."""

    def __init__(self) -> None:
        self._loss = lru_cache(MOST_PROGRAMS)(lambda definition: read(decode(definition)))
        self._program = lru_cache(MOST_PROGRAMS)(
            lambda definition, *datum: LossProgram(self._loss(definition), *datum)
        )

    def open(
        self, definition: bytes, inputs: Sequence[DatumInputs], limits: LossLimits | None = None
    ) -> OpenLoss:
        """Trace a loss on datums. Raises LossProblem when it cannot be run on them, or takes too much."""
        loss, groups = self._loss(definition), _groups(inputs)
        if limits is not None:
            _check_programs(loss, len(groups), limits)
        pieces: list[Piece] = []
        with _as_torch():
            for key, datums in groups.items():
                program = self._program(definition, *key)
                _check_needs(loss, program.needs, {datum: inputs[datum][0].shape[0] for datum in datums})
                for start in range(0, len(datums), program.datums):
                    chosen = datums[start : start + program.datums]
                    pieces.append(Piece(program, key[0], _count(len(chosen), program.datums), chosen))
        if limits is not None:
            _check_programs(loss, len({(id(piece.program), piece.count) for piece in pieces}), limits)
            _check_operations(loss, pieces, limits)
        return OpenLoss(loss, inputs, pieces)


@contextmanager
def _as_torch() -> Iterator[None]:
    """Run JAX on the host's CPU, with torch's 64-bit types."""
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


def _groups(inputs: Sequence[DatumInputs]) -> dict[tuple[Any, ...], list[int]]:
    """Group datums by program: (bucket, padded shapes, types) to the datums' numbers, in order."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for datum, arrays in enumerate(inputs):
        bucket = max(SHORTEST_BUCKET, 1 << (arrays[0].shape[0] - 1).bit_length())
        shapes = tuple((bucket, *array.shape[1:]) if array.ndim else () for array in arrays)
        groups.setdefault((bucket, shapes, tuple(str(array.dtype) for array in arrays)), []).append(datum)
    return groups


def _count(datums: int, most: int) -> int:
    """Round up to a power of four, so that programs are compiled for few numbers of datums."""
    return min(4 * power_of_four(datums - 1) if datums > 1 else 1, most)


def _padded(array: np.ndarray, bucket: int) -> np.ndarray:
    if not array.ndim:
        return array
    return np.pad(array, [(0, bucket - array.shape[0]), *[(0, 0)] * (array.ndim - 1)])


def _check_needs(loss: CheckedLoss, needs: Sequence[Need], tokens: dict[int, int]) -> None:
    for need in needs:
        for datum, count in tokens.items():
            if count < need.tokens:
                raise LossProblem(
                    f"datum {datum} has {count} tokens; "
                    f"{place_of(loss, need.node)} takes at least {need.tokens}"
                )


def _check_programs(loss: CheckedLoss, programs: int, limits: LossLimits) -> None:
    if programs > limits.programs:
        raise LossProblem(
            f"loss {quoted(loss.name)} would be compiled {programs} times for this request, once for each "
            f"power of two of tokens and each width of an input [T, K]. At most {limits.programs} are "
            "allowed (the limit custom_loss_programs): use fewer different widths"
        )


def _check_operations(loss: CheckedLoss, pieces: Sequence[Piece], limits: LossLimits) -> None:
    for piece in pieces:
        if piece.program.operations > limits.operations_per_datum:
            raise LossProblem(
                f"datum {piece.datums[0]}: loss {quoted(loss.name)} takes {piece.program.operations:,} "
                f"operations for it; at most {limits.operations_per_datum:,.0f} are allowed (the limit "
                "custom_loss_datum_operations). Use shorter datums, or smaller products of matrices"
            )
    total = sum(piece.program.operations * len(piece.datums) for piece in pieces)
    if total > limits.operations:
        raise LossProblem(
            f"loss {quoted(loss.name)} takes {total:,} operations for these datums; at most "
            f"{limits.operations:,.0f} are allowed in one request (the limit custom_loss_operations). Send "
            "fewer datums in one request, or shorter ones"
        )
