"""Fills a micro-batch with chunks of several models, and gives each its part of the reply. Pure.

A micro-batch carries one chunk, and chunks of other models in further blocks and in free rows.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from spmd_tx.coordinator.images.prepared import ImageKey
from spmd_tx.coordinator.images.seen import SeenImage
from spmd_tx.coordinator.sampling.routing_notes import ROUTER_CHOOSES
from spmd_tx.coordinator.training.batching import Chunk, ChunkOutput, RowArrays
from spmd_tx.coordinator.training.packing import TrainingShapes
from spmd_tx.protocol.commands import LossInputs, PackedRows


class _Places(NamedTuple):
    """Says where the rows of a chunk lie in a micro-batch."""

    first: int  # of its whole blocks
    whole: int  # blocks
    rest: int  # rows that do not fill a block
    shared: int  # which of the shared blocks has them
    shards: tuple[int, ...]  # its data shards that have them, each but the last one wholly
    start: int  # the place of their first row in the last of these data shards


class MicroBatch:
    """Collects chunks of different models for one command: the first one determines its program.

    A block adds what its rows contribute to a model's gradient, in the order of the rows within a data shard
    and then over the data shards; the sums of a command's blocks are added in turn. To keep the bits that a
    chunk gives alone, its rows are cut into blocks as if it were alone. Whole blocks are its own and come
    first. The rest of its rows shares a block with the rests of other models, which add exact zeros to its
    sums. A rest that fits one data shard may lie on any of them, because the others add zeros too. One that
    takes two may lie on any pair: the sum of two numbers has no order. A larger one begins at the first data
    shard, because another order of the sums would round differently.
    """

    def __init__(self, first: Chunk, shapes: TrainingShapes) -> None:
        self.chunks: list[Chunk] = []
        self.size = first.size  # rows of a block
        self._program = first.program
        self._shards = shapes.data_shards
        self._most = max(first.blocks, shapes.most_blocks(first.size, first.row_length))
        self._choices = shapes.choices
        self._whole = 0  # blocks that one chunk fills
        self._shared: list[list[int]] = []  # of each further block: rows in use per data shard
        self._places: list[_Places] = []  # of the chunks
        joined = self.join(first)
        assert joined, "a chunk fits a micro-batch of its own"

    @property
    def blocks(self) -> int:
        return self._whole + len(self._shared)

    @property
    def used(self) -> int:
        """The rows in use."""
        return sum(chunk.used for chunk in self.chunks)

    @property
    def images(self) -> list[SeenImage]:
        """The images that its chunks read."""
        return [image for chunk in self.chunks for image in chunk.seen]

    def see(self, ids: Mapping[ImageKey, np.ndarray]) -> None:
        """Put the ids of image tokens into the chunks."""
        self.chunks = [chunk.seeing(ids) for chunk in self.chunks]

    @property
    def is_full(self) -> bool:
        """Whether no row is free and no block can be added."""
        return self.blocks >= self._most and self.used == self.size * self.blocks

    def fits(self, chunk: Chunk) -> bool:
        """Return whether a chunk needs this program and its rows find room."""
        return chunk.program == self._program and self._places_for(chunk) is not None

    def join(self, chunk: Chunk) -> bool:
        """Add a chunk if it fits and is of another model; return whether it was added."""
        if chunk.program != self._program or chunk.slot in {other.slot for other in self.chunks}:
            return False
        places = self._places_for(chunk)
        if places is None:
            return False
        self._whole += places.whole
        if places.rest:
            if places.shared == len(self._shared):
                self._shared.append([0] * self._shards)
            used = self._shared[places.shared]
            for number, shard in enumerate(places.shards):
                used[shard] += min(places.rest - number * self.rows_of_shard, self.rows_of_shard)
        self._places.append(places)
        self.chunks.append(chunk)
        return True

    @property
    def rows_of_shard(self) -> int:
        """The rows of a block that each data shard has."""
        return self.size // self._shards

    def _places_for(self, chunk: Chunk) -> "_Places | None":
        """Return where a chunk's rows would go, or None. Plain integers: this is called often."""
        whole, rest = divmod(chunk.used, self.size)
        places = _Places(self._whole, whole, rest, len(self._shared), (), 0)
        if rest:
            places = self._place_of_rest(places)
        blocks = self.blocks + whole + (rest > 0 and places.shared == len(self._shared))
        return places if blocks <= self._most else None

    def _place_of_rest(self, places: "_Places") -> "_Places":
        rest, room = places.rest, self.rows_of_shard
        choices = self._choices[-(-rest // room)]
        last = (rest - 1) % room + 1  # its rows in the last of its data shards
        for shared, used in enumerate(self._shared):
            for shards in choices:
                start = used[shards[-1]]
                if start + last <= room and not any(used[shard] for shard in shards[:-1]):
                    return places._replace(shared=shared, shards=shards, start=start)
        return places._replace(shards=choices[0])

    def _destinations(self, places: "_Places") -> np.ndarray:
        """Return which rows of the command hold a chunk's. Each data shard has its part of all blocks."""
        room = self.rows_of_shard
        block, order = divmod(np.arange(places.whole * self.size + places.rest), self.size)
        shard, order = divmod(order, room)
        if places.rest:
            is_rest = block == places.whole
            order[is_rest & (shard == len(places.shards) - 1)] += places.start
            shard[is_rest] = np.array(places.shards)[shard[is_rest]]
            block[is_rest] = self._whole + places.shared - places.first
        return (shard * self.blocks + places.first + block) * room + order

    def rows(self) -> PackedRows:
        return self._scatter([chunk.rows for chunk in self.chunks])

    def loss(self) -> LossInputs:
        return self._scatter([chunk.loss for chunk in self.chunks])

    def cut(self, logprobs_BT: np.ndarray, losses_BT: np.ndarray) -> list[ChunkOutput]:
        """Give every chunk its rows of the reply."""
        destinations = map(self._destinations, self._places)
        return [ChunkOutput(logprobs_BT[rows], losses_BT[rows]) for rows in destinations]

    def _scatter(self, parts: list[RowArrays]) -> RowArrays:
        """Lay the chunks' rows out over the command's rows; free rows are zeros.

        Rows of chunks without a field that others have get its neutral value.
        """
        scattered, destinations = {}, [self._destinations(places) for places in self._places]
        for field in parts[0].__struct_fields__:
            given = [getattr(part, field) for part in parts]
            like = next((values for values in given if values is not None), None)
            if like is None:
                continue
            scattered[field] = array = np.zeros((self.size * self.blocks, *like.shape[1:]), like.dtype)
            if field == "experts":
                array[:] = ROUTER_CHOOSES
            for values, destination in zip(given, destinations, strict=True):
                if values is not None:
                    array[destination] = values
        return type(parts[0])(**scattered)
