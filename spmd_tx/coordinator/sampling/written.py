"""Chunks of prompts that a command writes, and what its reply says of them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spmd_tx.coordinator.requests.records import Failed
from spmd_tx.coordinator.runtime.at_work import AtWork
from spmd_tx.coordinator.runtime.containment import let_pass
from spmd_tx.coordinator.sampling.dispatch import failed
from spmd_tx.coordinator.sampling.job import ChunkedPrefill, SampleJob
from spmd_tx.coordinator.sampling.prefill import PrefillChunk, PromptSegment
from spmd_tx.coordinator.sampling.shard import Shard


@dataclass(frozen=True)
class WrittenChunk:
    """Holds a chunk with its row in the reply."""

    prefill: ChunkedPrefill
    segment: PromptSegment
    row: int
    is_scored: bool = False  # whether the request wants scores of it besides keys and values

    @classmethod
    def beside(cls, prefill: ChunkedPrefill, chunk: PrefillChunk) -> "WrittenChunk":
        """Return a chunk that a Decode reads, in a reply of riders.reply_of_chunks."""
        return cls(prefill, PromptSegment(chunk, chunk.shard, 0), chunk.shard)


def absorb(
    written: Iterable[WrittenChunk],
    arrays: Mapping[str, np.ndarray],
    shards: Sequence[Shard],
    at_work: AtWork,
) -> Iterator[tuple[SampleJob, Failed]]:
    """Give the prompts what the reply says of them; yield the requests that this has failed."""
    for each in written:
        job = each.prefill.job
        try:
            with at_work.on(job.request_id):
                each.prefill.absorb(each.segment, each.row, arrays, each.is_scored)
                shards[each.segment.chunk.shard].remember_routing(each.prefill.owner)
        except BaseException as error:
            let_pass(error)
            if not job.is_over:
                yield job, failed(job.request_id, error)
