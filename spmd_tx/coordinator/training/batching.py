"""Cuts training requests into chunks, and puts their results together. Pure: arrays in, arrays out.

The chunks depend on the request alone. Dimension key: N token, K target of a position.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from spmd_tx.coordinator.images.prepared import ImageKey
from spmd_tx.coordinator.images.seen import SeenImage, SeenImages
from spmd_tx.coordinator.requests.records import LearnedFacts
from spmd_tx.coordinator.sampling.routing_notes import ROUTER_CHOOSES
from spmd_tx.coordinator.training.advantages import advantages_of_samples
from spmd_tx.coordinator.training.losses import LossSettings
from spmd_tx.coordinator.training.packing import RowLayout, TrainingShapes, lay_out
from spmd_tx.coordinator.training.validation import clips_of, joined
from spmd_tx.coordinator.wire.training_protobuf import Datum
from spmd_tx.images.places import places
from spmd_tx.protocol.commands import LossInputs, PackedRows
from spmd_tx.protocol.programs import ProgramShape

RowArrays = TypeVar("RowArrays", PackedRows, LossInputs)
Spread = Callable[[np.ndarray, type], np.ndarray]  # [tokens, ...] into rows [rows, T, ...]
Experts = Sequence[np.ndarray | None]  # of each datum: int16 [N, L, k] to replay; None: unknown


class RowImage(NamedTuple):
    """Says where in a chunk an image's tokens are."""

    row: int
    start: int  # the place of its first token
    image: SeenImage


@dataclass(frozen=True)
class Chunk:
    """Holds the part of a request that one micro-batch carries: only its own rows, in order."""

    rows: PackedRows
    loss: LossInputs
    size: int  # rows of a block
    forward_only: bool
    images: tuple[RowImage, ...] = ()

    @property
    def slot(self) -> int:
        return int(self.rows.slots[0])

    def in_slot(self, slot: int) -> "Chunk":
        """Return a copy for the slot that its model has when it is sent."""
        slots = np.full_like(self.rows.slots, slot)
        return replace(self, rows=msgspec.structs.replace(self.rows, slots=slots))

    def seeing(self, ids: Mapping[ImageKey, np.ndarray]) -> "Chunk":
        """Return a copy with the ids that image tokens have when it is sent."""
        if not self.images:
            return self
        tokens = self.rows.tokens.copy()
        for row, start, image in self.images:
            tokens[row, start : start + image.tokens] = ids[image.key]
        return replace(self, rows=msgspec.structs.replace(self.rows, tokens=tokens))

    @property
    def seen(self) -> list[SeenImage]:
        """The images that it reads."""
        return [each.image for each in self.images]

    @property
    def used(self) -> int:
        return self.rows.tokens.shape[0]

    @property
    def blocks(self) -> int:
        """How many blocks its rows take; the last one may have free rows."""
        return -(-self.used // self.size)

    @property
    def row_length(self) -> int:
        return self.rows.tokens.shape[1]

    @cached_property
    def program(self) -> ProgramShape:
        """The program it runs as. It follows from the request alone, whatever shares the micro-batch."""
        targets = self.rows.targets.shape[2:]
        return ProgramShape(
            step="forward" if self.forward_only else "forward_backward",
            rows=self.size,
            row_length=self.row_length,
            targets=targets[0] if targets else 0,
            sequences=self.loss.ratio_mask is not None,
        )

    @property
    def programs(self) -> list[ProgramShape]:
        """The programs that it needs: its own, and those that encode its images."""
        return list(dict.fromkeys([self.program, *(image.program for image in self.seen)]))

    @property
    def tokens(self) -> int:
        """The chunk's cost: tokens, with the padding of its rows."""
        return self.used * self.row_length


@dataclass(frozen=True)
class ChunkOutput:
    """Holds the results of a chunk's rows."""

    logprobs: np.ndarray  # float32 [rows, T], or [rows, T, K]
    losses: np.ndarray  # float32 [rows, T]


class Results(NamedTuple):
    """Holds what a request's datums get, in their order."""

    logprobs: list[np.ndarray]  # float32 [N], or [N, K]
    losses: list[np.ndarray]  # float32 [N]: of each position, summed over its targets
    loss: float  # summed in float64


@dataclass(frozen=True)
class PackedRequest:
    """Holds a request's chunks, and where its datums lie in their rows."""

    chunks: list[Chunk]
    destination: np.ndarray  # [tokens of all datums, in datum order] index into the rows laid end to end
    shapes: list[tuple[int, ...]]  # of each datum's result
    learned: LearnedFacts | None = None  # None: its loss knows no advantages
    seen: SeenImages | None = None  # the images of all datums, whose memory they take until this is gone

    @property
    def ends(self) -> np.ndarray:
        """Where each datum ends among the tokens of all."""
        return np.cumsum([shape[0] for shape in self.shapes])

    def results(self, outputs: list[ChunkOutput]) -> Results:
        """Put the outputs of the chunks together."""
        width = outputs[0].logprobs.shape[2:]
        logprobs = np.concatenate([output.logprobs.reshape(-1, *width) for output in outputs])
        losses = np.concatenate([output.losses.ravel() for output in outputs])[self.destination]
        ends = self.ends
        with np.errstate(invalid="ignore"):  # ratios that overflow may leave inf - inf
            loss_of_datum = np.add.reduceat(losses.astype(np.float64), [0, *ends[:-1]])
        pieces = np.split(logprobs[self.destination], ends[:-1])
        cut = [_in_shape(piece, shape) for piece, shape in zip(pieces, self.shapes, strict=True)]
        return Results(cut, np.split(losses, ends[:-1]), float(sum(loss_of_datum.tolist())))


def pack(
    datums: list[Datum],
    loss: LossSettings,
    forward_only: bool,
    shapes: TrainingShapes,
    experts: Experts = (),
    seen: SeenImages | None = None,
) -> PackedRequest:
    """Pack the datums of one validated request into chunks; their slot is chosen later.

    ``seen`` are their images; None: the model takes text alone.
    """
    lengths = np.array([len(datum.tokens) for datum in datums])
    layout = lay_out(lengths, shapes)
    within = _counters(lengths)  # place of each token in its datum
    destination = np.repeat(layout.rows * layout.row_length + layout.starts, lengths) + within
    shape = (int(layout.rows.max()) + 1, layout.row_length)

    def spread(values: np.ndarray, dtype: type) -> np.ndarray:
        width = values.shape[1:]
        array = np.zeros((*shape, *width), dtype)
        array.reshape(-1, *width)[destination] = values
        return array

    rows = PackedRows(
        tokens=spread(np.concatenate([datum.tokens for datum in datums]), np.int32),
        targets=spread(_cells(datums, "target_tokens"), np.int32),
        segments=spread(np.repeat(_segment_numbers(layout), lengths), np.int32),
        positions=spread(within, np.int32),
        slots=np.zeros(shape[0], np.int32),
        experts=_spread_experts(experts, lengths, destination, shape),
        places=None
        if seen is None
        else spread(np.concatenate([_places(each, seen) for each in datums]), np.int32),
    )
    images = () if seen is None else _row_images(datums, layout, seen)
    chunks = _with_room(layout.chunks, images, shapes.image_tokens) if shapes.image_tokens else layout.chunks
    losses = _loss_inputs(datums, loss, spread)
    return PackedRequest(
        chunks=_split(Chunk(rows, losses, 0, forward_only, images), chunks),
        destination=destination,
        shapes=[datum.loss_inputs["target_tokens"].shape for datum in datums],
        learned=None if loss.name == "cross_entropy" else advantages_of_samples(datums),
        seen=seen,
    )


def _spread_experts(
    experts: Experts, lengths: np.ndarray, destination: np.ndarray, shape: tuple[int, int]
) -> np.ndarray | None:
    known = next((each for each in experts if each is not None), None)
    if known is None:
        return None
    array = np.full((*shape, *known.shape[1:]), ROUTER_CHOOSES, np.int16)
    flat, ends = array.reshape(-1, *known.shape[1:]), np.cumsum(lengths)
    for each, end, length in zip(experts, ends, lengths, strict=True):
        if each is not None:
            flat[destination[end - length : end]] = each
    return array


def _loss_inputs(datums: list[Datum], loss: LossSettings, spread: Spread) -> LossInputs:
    nothing = spread(np.zeros((), np.float32), np.float32)
    weights = advantages = sampling_logprobs = low = high = nothing
    ratio_mask = None
    if loss.name == "cross_entropy":
        weights = spread(_merged_weights(datums), np.float32)
    else:
        advantage = joined(datums, "advantages")
        counts = advantage != 0
        if loss.name == "gspo":
            mask = joined(datums, "sequence_ratio_mask")
            ratio_mask, counts = spread(mask, np.float32), counts | (mask != 0)
        advantages = spread(advantage, np.float32)
        # The logprob of a position that does not count may be -inf or NaN.
        sampling_logprobs = spread(np.where(counts, joined(datums, "logprobs"), 0), np.float32)
        clips = zip(*(clips_of(datum, loss) for datum in datums), strict=True)  # low ones of all, high ones
        low, high = (spread(np.concatenate(each), np.float32) for each in clips)
    count = nothing.shape[0]
    return LossInputs(
        kinds=np.full(count, loss.kind, np.int32),
        clip_low=low,
        clip_high=high,
        beta=np.full(count, loss.beta, np.float32),
        kl_coeff=np.full(count, loss.kl_coeff, np.float32),
        weights=weights,
        advantages=advantages,
        sampling_logprobs=sampling_logprobs,
        ratio_mask=ratio_mask,
    )


def _merged_weights(datums: list[Datum]) -> np.ndarray:
    """Return weights [N] or [N, K], where a position's repeated target token has a single weight.

    The sum is the same, and no device adds up the gradients of one logit in an order of its own.
    """
    weights = _cells(datums, "weights")
    if weights.ndim == 1:
        return weights
    targets = np.where(weights == 0, -1, _cells(datums, "target_tokens"))
    order = np.argsort(targets, axis=1, kind="stable")
    ordered = np.take_along_axis(targets, order, axis=1)
    repeats = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if not repeats.any():
        return weights
    values = np.take_along_axis(weights, order, axis=1)
    for place in range(values.shape[1] - 1, 0, -1):  # from the last of a run to its first
        moved = np.where(repeats[:, place - 1], values[:, place], 0)
        values[:, place - 1] += moved
        values[:, place] -= moved
    merged = np.empty_like(values)
    np.put_along_axis(merged, order, values, axis=1)
    return merged


def _split(whole: Chunk, sizes: list[tuple[int, int]]) -> list[Chunk]:
    """Split rows into chunks of so many rows, each with the rows of its blocks."""
    chunks, start = [], 0
    for used, size in sizes:
        part, end = slice(start, start + used), start + used
        images = tuple(
            each._replace(row=each.row - start) for each in whole.images if start <= each.row < end
        )
        chunks.append(
            Chunk(_take(whole.rows, part), _take(whole.loss, part), size, whole.forward_only, images)
        )
        start = end
    return chunks


def _with_room(chunks: list[tuple[int, int]], images: Iterable[RowImage], room: int) -> list[tuple[int, int]]:
    """Cut chunks before rows whose images find no room beside those before; one row is never cut."""
    of_rows: dict[int, dict[ImageKey, int]] = defaultdict(dict)
    for row, _, image in images:
        of_rows[row][image.key] = image.tokens
    cut, first = list[tuple[int, int]](), 0
    for used, size in chunks:
        end, held = first + used, dict[ImageKey, int]()
        for row in range(first, end):
            if row > first and sum((held | of_rows[row]).values()) > room:
                cut.append((row - first, size))
                first, held = row, {}
            held |= of_rows[row]
        cut.append((end - first, size))
        first = end
    return cut


def _places(datum: Datum, seen: SeenImages) -> np.ndarray:
    """Return time, row and column of a datum's tokens, int32 [N, 3]."""
    spans = [seen[image.digest].span(image.first) for image in datum.images]
    return places(len(datum.tokens), spans)[0]


def _row_images(datums: list[Datum], layout: RowLayout, seen: SeenImages) -> tuple[RowImage, ...]:
    """Return the images of all datums, and where they are in the rows."""
    return tuple(
        RowImage(int(row), int(start) + image.first, seen[image.digest])
        for datum, row, start in zip(datums, layout.rows, layout.starts, strict=True)
        for image in datum.images
    )


def _take(arrays: RowArrays, part: slice) -> RowArrays:
    given = {field: getattr(arrays, field) for field in arrays.__struct_fields__}
    return type(arrays)(**{name: values[part] for name, values in given.items() if values is not None})


def _in_shape(logprobs: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Reshape a datum's part of the reply to the shape of its targets, [N] or [N, K]."""
    width = shape[1] if len(shape) == 2 else 1
    return logprobs.reshape(len(logprobs), -1)[:, :width].reshape(shape)


def _cells(datums: list[Datum], key: str) -> np.ndarray:
    """Join values to [N] with one target per position, else [N, K], K a power of two, padded with 0."""
    arrays = [datum.loss_inputs[key] for datum in datums]
    widths = [array.shape[1] if array.ndim == 2 else 1 for array in arrays]
    width = 1 << (max(widths) - 1).bit_length()
    if width == 1:
        return joined(datums, key)
    cells = (array.reshape(-1, own) for array, own in zip(arrays, widths, strict=True))
    return np.concatenate([np.pad(each, ((0, 0), (0, width - each.shape[1]))) for each in cells])


def _counters(lengths: np.ndarray) -> np.ndarray:
    """Return 0, 1, ... length - 1 for every length, end to end."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)


def _segment_numbers(layout: RowLayout) -> np.ndarray:
    """Number the segments of each row 1, 2, ... from left to right."""
    order = np.lexsort((layout.starts, layout.rows))
    numbers = np.empty(len(order), np.int64)
    numbers[order] = 1 + _counters(np.bincount(layout.rows))
    return numbers
