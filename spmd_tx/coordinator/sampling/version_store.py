"""The folders of a base model's sampler versions, which several groups of workers may read.

One group trains and writes them; groups that only sample load them. A folder outlives its last reader. It is
complete if it exists, and is deleted when no group knows it any more and all commands sent so far have been
executed. There is no table: rows of samplers and folders suffice.
"""

import asyncio
import glob
import shutil
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from spmd_tx.coordinator.catalog.catalog import sampler_id
from spmd_tx.coordinator.checkpoints.writes import Writing
from spmd_tx.coordinator.runtime import metrics
from spmd_tx.coordinator.runtime.containment import contained
from spmd_tx.coordinator.runtime.folder_names import readable
from spmd_tx.coordinator.sampling.bank import VersionKey
from spmd_tx.coordinator.storage.tables import SamplerRow
from spmd_tx.errors import MeshError
from spmd_tx.protocol.reports import Reply

FROM_DISK = -1  # in place of the seq_id of a save that precedes all replayed requests
NOTHING_WRITTEN = FROM_DISK - 1


class Reader(Protocol):
    """Is one generation of workers of one group."""

    @property
    def last_reply(self) -> asyncio.Future[Reply] | None:
        """Done when all that was sent so far has been executed; None: it has been."""
        ...

    def reads(self, folder: Path) -> bool:
        """Whether it may load a folder, or is writing it."""
        ...

    def supersede(self, version: VersionKey) -> None:
        """Forget a version as soon as no request samples from it."""
        ...


class Publisher(Protocol):
    """Is the present generation of workers that train."""

    def has_restored(self, sampler: SamplerRow) -> bool:
        """Whether a sampler's model is what it was."""
        ...

    async def restored(self, sampler: SamplerRow) -> None:
        """Return when a sampler's model is what it was. Raises MeshError when the workers are lost."""
        ...

    async def publish(self, sampler: SamplerRow) -> None:
        """Return when what a sampler draws from has a folder. Raises MeshError when the workers are lost."""
        ...


@dataclass
class _News:
    """Holds what is known of a model's inflight versions.

    After a restart of this process saves are run again one after the other: until the last one has, an older
    version looks like the newest.
    """

    session_id: str
    is_whole: bool = False  # the model has been what it was since this process began
    saved: int = FROM_DISK  # seq_id of the last save that was executed
    written: dict[int, VersionKey] = field(default_factory=dict)  # those with a folder, by seq_id

    @property
    def newest(self) -> VersionKey | None:
        """The newest version with a folder; None: clients may know of a newer one."""
        last = max(self.written, default=NOTHING_WRITTEN)
        return self.written[last] if self.is_whole and last >= self.saved else None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was saved since the snapshot with which the model began."""
        return self.saved == FROM_DISK and not self.written


class VersionStore:
    """Knows which folders there are, who reads them, and who writes them. It outlives all workers."""

    def __init__(self, directory: Path, *, is_shared: bool = False) -> None:
        """``is_shared``: whether other groups sample what one group trains. Blocks: the directory is made."""
        assert directory.is_absolute(), f"{directory} means another place to workers elsewhere"
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.is_shared = is_shared
        self.opening = asyncio.Lock()  # one sampler after the other
        self.lock = asyncio.Lock()  # a folder is not deleted while somebody finds it
        self._readers: list[Reader] = []
        self._publisher: Publisher | None = None
        self._news: dict[str, _News] = {}  # by model
        self._kept: set[Path] = set()  # to delete when their last reader has forgotten them
        self._deleting: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def join(self, reader: Reader, publisher: Publisher | None) -> None:
        """Take a generation of workers in; ``publisher`` if they train."""
        self._readers.append(reader)
        if publisher is not None:
            self._publisher = publisher
            self._wake()

    def leave(self, reader: Reader) -> None:
        """Let a generation go, whose workers are lost."""
        self._readers.remove(reader)
        if self._publisher is reader:
            self._publisher = None
        self.discard(())

    async def close(self) -> None:
        """Wait until what nobody reads is deleted."""
        await asyncio.gather(*self._deleting)

    # --- what is there --------------------------------------------------------------------------------

    def note_saved(self, model_id: str, session_id: str, seq_id: int) -> None:
        """Note that an inflight save was executed, before its client hears of it."""
        news = self._news.setdefault(model_id, _News(session_id))
        news.saved = max(news.saved, seq_id)

    def note_written(self, model_id: str, session_id: str, version: VersionKey, seq_id: int | None) -> None:
        """Note that a version has a folder; ``seq_id`` is that of an inflight save."""
        if seq_id is not None:
            self._news.setdefault(model_id, _News(session_id)).written[seq_id] = version
        self._wake()

    def timed(self, writing: Writing) -> Writing:
        """Measure how long it takes from now until a folder is complete that other groups will load."""
        loop, label = asyncio.get_running_loop(), metrics.group()
        begun = loop.time()

        def observe(writing: Writing) -> None:
            if not writing.cancelled() and writing.exception() is None and writing.result() is None:
                metrics.PUBLISH_SECONDS.labels(label).observe(loop.time() - begun)

        if self.is_shared:
            writing.add_done_callback(observe)
        return writing

    def newest(self, model_id: str) -> VersionKey | None:
        """Return a model's newest inflight version with a folder; None: it is not known to be the newest."""
        news = self._news.get(model_id)
        return None if news is None else news.newest

    def is_written(self, model_id: str, version: VersionKey) -> bool:
        """Whether an inflight version has a folder, and was not given up."""
        news = self._news.get(model_id)
        return news is not None and version in news.written.values()

    def supersede(self, version: VersionKey) -> None:
        """Let all groups forget an inflight version, as a newer one is durable."""
        for news in self._news.values():
            news.written = {seq_id: each for seq_id, each in news.written.items() if each != version}
        for reader in list(self._readers):
            reader.supersede(version)

    def end_session(self, session_id: str) -> None:
        """Delete what is left of a session, also of versions that no workers have used since a restart."""
        self._news = {id: news for id, news in self._news.items() if news.session_id != session_id}
        self._spawn(self._delete_of(session_id))

    async def supply(self, sampler: SamplerRow, is_on_disk: Callable[[SamplerRow], Awaitable[bool]]) -> None:
        """Return when what a sampler of saved weights draws from has a folder.

        Raises InvalidRequest when the group that trains does not have it. While that has no workers, this
        waits. ``is_on_disk`` looks for the folder.
        """
        if sampler.inflight:
            news = self._news.setdefault(sampler.model_id or "", _News(sampler.session_id))
            if self._publisher is not None and self._publisher.has_restored(sampler):
                news.is_whole = True
            if not news.is_whole and await is_on_disk(sampler):
                return
            while not news.is_whole:
                news.is_whole = await self._has_done(lambda publisher: publisher.restored(sampler))
            if not news.is_empty:
                while self._news.get(sampler.model_id or "") is news and news.newest is None:
                    await self._changed.wait()
                return
        while not await is_on_disk(sampler):
            if await self._has_done(lambda publisher: publisher.publish(sampler)):
                return

    async def _has_done(self, work: Callable[[Publisher], Awaitable[None]]) -> bool:
        """Have the workers that train do something; False: they were lost, and there may be others now."""
        publisher = self._publisher
        if publisher is not None:
            with suppress(MeshError):
                await work(publisher)
                return True
        if self._publisher is publisher or self._publisher is None:
            await self._changed.wait()
        return False

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # --- what is deleted ------------------------------------------------------------------------------

    def discard(self, folders: Iterable[Path]) -> None:
        """Delete folders, and those of before, as soon as nobody reads them."""
        doomed, self._kept = self._kept | set(folders), set[Path]()
        if doomed:
            self._spawn(self._delete(doomed))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        deleting = asyncio.create_task(work)
        self._deleting.add(deleting)
        deleting.add_done_callback(self._deleting.discard)

    async def _delete_of(self, session_id: str) -> None:
        """Delete the folders of unnamed versions of a session, whose samplers they are named by."""
        named = f"{glob.escape(readable(sampler_id(session_id, '')))}*"
        await self._delete(set(await asyncio.to_thread(list, self.directory.glob(named))))

    async def _delete(self, folders: set[Path]) -> None:
        """Delete what commands that are in flight may still read."""
        with contained("deleting versions of weights"):
            replies = [reply for each in self._readers if (reply := each.last_reply) is not None]
            if replies:
                await asyncio.wait(replies)
            for folder in folders:
                async with self.lock:
                    if any(each.reads(folder) for each in self._readers):
                        self._kept.add(folder)
                    else:
                        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
