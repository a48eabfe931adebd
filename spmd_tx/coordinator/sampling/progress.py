"""Lets routes watch samples while they are drawn. Only the stored result is final."""

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from spmd_tx.coordinator.sampling.job import Sample


class Watch:
    """Holds the latest state of the samples of some requests."""

    def __init__(self) -> None:
        self.samples: dict[tuple[str, int], Sample] = {}  # by request and index
        self.changed = asyncio.Event()

    def forget(self, request_id: str) -> None:
        """Drop the samples of a request whose result is known."""
        for key in [key for key in self.samples if key[0] == request_id]:
            del self.samples[key]

    def take(self, sample: Sample) -> None:
        self.samples[sample.job.request_id, sample.index] = sample
        self.changed.set()


class SampleProgress:
    """Passes samples to the watches of their requests.

    A watch gets whole samples, not deltas: after a loss of the workers a sample may begin again, with the
    same seeds and so the same tokens. So a watcher counts the tokens that it has seen.
    """

    def __init__(self) -> None:
        self._watches: dict[str, Watch] = {}

    def hear(self, sample: Sample) -> None:
        """Pass on a sample that got tokens."""
        watch = self._watches.get(sample.job.request_id)
        if watch is not None:
            watch.take(sample)

    @contextmanager
    def watching(self, request_ids: Collection[str]) -> Iterator[Watch]:
        """Watch requests inside the block; a later watch of a request replaces an earlier one."""
        watch = Watch()
        self._watches |= dict.fromkeys(request_ids, watch)
        try:
            yield watch
        finally:
            for request_id in request_ids:
                self._watches.pop(request_id, None)
