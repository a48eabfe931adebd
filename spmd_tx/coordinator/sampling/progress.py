"""Lets somebody watch samples while they are drawn. The stored result stays the truth, and tells the rest."""

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from spmd_tx.coordinator.sampling.job import Sample


class Watch:
    """What is known so far of the samples of some requests."""

    def __init__(self) -> None:
        self.samples: dict[tuple[str, int], Sample] = {}  # by request and index
        self.changed = asyncio.Event()

    def take(self, sample: Sample) -> None:
        self.samples[sample.job.request_id, sample.index] = sample
        self.changed.set()


class Progress:
    """Who watches which request.

    A watcher is shown whole samples, not news: after a loss of the workers a sample may begin once more,
    with the same seeds and therefore the same tokens. So a watcher counts what it has seen.
    """

    def __init__(self) -> None:
        self._watches: dict[str, Watch] = {}

    def hear(self, sample: Sample) -> None:
        """A sample has got tokens."""
        watch = self._watches.get(sample.job.request_id)
        if watch is not None:
            watch.take(sample)

    @contextmanager
    def watching(self, request_ids: Collection[str]) -> Iterator[Watch]:
        """Only one watch of a request counts."""
        watch = Watch()
        self._watches |= dict.fromkeys(request_ids, watch)
        try:
            yield watch
        finally:
            for request_id in request_ids:
                self._watches.pop(request_id, None)
