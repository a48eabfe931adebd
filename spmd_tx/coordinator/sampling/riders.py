"""Chunks of prompts that a Decode reads beside its rows, where that takes less time than a Prefill. Pure.

A step reads all weights, whether for one row or for many. Up to as many rows as a device computes meanwhile,
further tokens cost next to nothing; a Prefill would read the weights once more. So prompts that are long do
not keep samples from their next tokens. A prompt's last chunk, and chunks with scores or images, have
Prefills all the same: a Decode copies nothing, and replies no scores.
"""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from spmd_tx.coordinator.sampling.cache.pages import TRASH_PAGE, pages_for
from spmd_tx.coordinator.sampling.job import ChunkedPrefill
from spmd_tx.coordinator.sampling.prefill import PrefillChunk
from spmd_tx.coordinator.sampling.shapes import SamplingShapes
from spmd_tx.coordinator.sampling.shard import Shard
from spmd_tx.protocol.commands import CHUNK_STEPS, Decode, PromptChunk

LEAST_GAIN = 1.05  # predicted; what is not predicted costs something, too


def saves_time(shapes: SamplingShapes, rows: int) -> bool:
    """Predict whether a Decode of ``rows`` rows of a data shard and a chunk are faster together.

    The unit is the time that the maps take for a token. Attention takes as long either way.
    """
    chunk, ridge = shapes.chunk_beside, shapes.ridge
    if not chunk:
        return False
    apart = CHUNK_STEPS * max(ridge, rows) + max(ridge, chunk)
    together = CHUNK_STEPS * max(ridge, rows + chunk / CHUNK_STEPS)
    return apart >= LEAST_GAIN * together


class Riding:
    """Says which prompts leave their next chunk to a Decode."""

    def __init__(self, shapes: SamplingShapes, shards: Sequence[Shard]) -> None:
        self._shapes, self._shards = shapes, shards
        self.decodes_read = False  # whether the last Decode could read chunks: so will the next one, perhaps
        self.any_wait = False  # whether any prompt was left to a Decode

    def may_ride(self, prefill: ChunkedPrefill, chunk: PrefillChunk) -> bool:
        """Return whether a Decode can read a chunk: no copies, scores, states or images belong to it."""
        job = prefill.job
        is_plain = not (job.wants_scores(chunk.end) or job.is_lonely or job.sight or chunk.state)
        return bool(self._shapes.chunk_beside) and chunk.end < prefill.end and is_plain

    def waits_for_decode(self, prefill: ChunkedPrefill, chunk: PrefillChunk) -> bool:
        """Return whether a chunk is left to a Decode."""
        waits = self.decodes_read and any(shard.has_rows for shard in self._shards)
        waits = waits and self.may_ride(prefill, chunk)
        self.any_wait |= waits
        return waits


def with_chunks(command: Decode, chunks: Sequence[PrefillChunk], shapes: SamplingShapes) -> Decode:
    """Let a Decode read these chunks, at most one of each data shard; with none it stays as it is."""
    return msgspec.structs.replace(command, chunk=_prompt_chunk(chunks, shapes)) if chunks else command


def _prompt_chunk(chunks: Sequence[PrefillChunk], shapes: SamplingShapes) -> PromptChunk:
    size = shapes.shards, shapes.chunk_beside
    tokens, slots = np.zeros(size, np.int32), np.zeros(shapes.shards, np.int32)
    positions, pages = np.full(size, -1, np.int32), np.full(size, TRASH_PAGE, np.int32)
    tables = np.full((shapes.shards, shapes.table), TRASH_PAGE, np.int32)
    for chunk in chunks:
        shard, order = chunk.shard, np.arange(chunk.first, chunk.end)
        tokens[shard, : chunk.length] = chunk.content[chunk.first : chunk.end]
        positions[shard, : chunk.length] = order
        pages[shard, : chunk.length] = np.asarray(chunk.pages, np.int32)[order // shapes.page_size]
        read = chunk.pages[: pages_for(chunk.end, shapes.page_size)]
        tables[shard, : len(read)] = read
        slots[shard] = chunk.bank
    return PromptChunk(tokens=tokens, positions=positions, pages=pages, slots=slots, tables=tables)


def reply_of_chunks(arrays: Mapping[str, np.ndarray], shards: int) -> dict[str, np.ndarray]:
    """Return what a Decode replies of chunks as a Prefill does: by name, with a row of each data shard."""
    if "chunk_experts" not in arrays:
        return {}
    steps_KCLE = arrays["chunk_experts"][:CHUNK_STEPS]
    steps, tokens, *rest = steps_KCLE.shape
    by_shard = steps_KCLE.reshape(steps, shards, tokens // shards, *rest).swapaxes(0, 1)
    return {"experts": by_shard.reshape(shards, steps * tokens // shards, *rest)}
