"""Takes in weights that clients upload, each as a checkpoint in a training run of its own.

The run follows from the upload's id, so that finishing again gives the same checkpoint.
"""

import asyncio
import base64
import hashlib
import shutil
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import NamedTuple
from weakref import WeakValueDictionary

import msgspec

from spmd_tx.coordinator.bases.bases import Bases
from spmd_tx.coordinator.bases.served_base import ServedBase
from spmd_tx.coordinator.catalog.catalog import cannot_be_trained, model_id
from spmd_tx.coordinator.checkpoints import foreign_adapter
from spmd_tx.coordinator.checkpoints.catalog import CheckpointCatalog, SaveOptions
from spmd_tx.coordinator.checkpoints.uploads import Upload, UploadedPart, Uploads, check_size
from spmd_tx.coordinator.http.closed_runs import new_model, new_session
from spmd_tx.coordinator.http.security.access import Access
from spmd_tx.coordinator.requests.queue import RequestQueue
from spmd_tx.coordinator.requests.records import Failed
from spmd_tx.coordinator.storage.disk import DiskGuard
from spmd_tx.coordinator.wire.checkpoint_paths import EXTERNAL_WEIGHTS, CheckpointPath
from spmd_tx.errors import BodyTooLarge, InvalidRequest, NotFound, RequestError, Unavailable
from spmd_tx.protocol.commands import AdapterSpec

NAME = "upload"  # of the checkpoint
SOURCE = "an upload"
PIECE_BYTES = 1 << 20  # written at once
AT_ONCE = 2  # uploads that are checked; each takes the memory of a tensor, and the disk's time


class Sent(NamedTuple):
    """Says which bytes of a file a request sends, as far as its headers tell."""

    start: int = 0
    end: int | None = None  # where they end in the file
    total: int | None = None  # bytes of the whole file; None: what comes is all
    md5: str | None = None  # of the bytes that it sends, in Base64


class CheckpointUploads:
    """Begins uploads, receives their files and finishes them."""

    def __init__(
        self,
        uploads: Uploads,
        checkpoints: CheckpointCatalog,
        queue: RequestQueue,
        storage: DiskGuard,
        bases: Bases,
    ) -> None:
        self._uploads = uploads
        self._checkpoints = checkpoints
        self._queue = queue
        self._storage = storage
        self._bases = bases
        self._sending: set[tuple[str, str]] = set()  # upload and file
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by upload
        self._at_once = asyncio.Semaphore(AT_ONCE)

    async def begin(
        self, owner: str, base_model: str, adapter: AdapterSpec, project_id: str | None
    ) -> Upload:
        """Raises InvalidRequest when the owner has too many open uploads."""

        def begin() -> Upload:
            base = self._bases.need(base_model).base
            most_bytes = foreign_adapter.most_bytes(adapter, base.model.config)
            return self._uploads.begin(owner, base_model, adapter, project_id, most_bytes)

        return await asyncio.to_thread(begin)

    async def part(self, id: str, name: str, total: int) -> UploadedPart:
        """Say how much of a file of ``total`` bytes has arrived. Raises NotFound and BodyTooLarge."""
        upload = await asyncio.to_thread(self._uploads.find, id)
        part = await asyncio.to_thread(self._uploads.part, upload, name)
        await self._check_size(upload, name, total)
        return part

    async def receive(self, id: str, name: str, sent: Sent, pieces: AsyncIterator[bytes]) -> UploadedPart:
        """Write what a request sends of a file, as far as it comes; return how much has arrived by then.

        Raises NotFound, BodyTooLarge, InvalidRequest for a wrong digest, and Unavailable while another
        request sends the same file; OSError while the disk is too full.
        """
        upload = await asyncio.to_thread(self._uploads.find, id)
        if (id, name) in self._sending:
            raise Unavailable(f"another request is sending {name} of upload {id}; send this one again later")
        self._sending.add((id, name))
        try:
            part = await asyncio.to_thread(self._uploads.part, upload, name)
            await self._check_size(upload, name, sent.total or 0)
            if sent.start > part.size or (part.is_whole and sent.start):
                return part
            return await self._write(upload, name, sent, pieces)
        except FileNotFoundError:
            raise NotFound(f"upload {id!r} has expired, or is finished; start a new one") from None
        finally:
            self._sending.discard((id, name))

    async def _check_size(self, upload: Upload, name: str, size: int) -> None:
        try:
            check_size(upload, name, size)
        except BodyTooLarge:
            await asyncio.to_thread(self._uploads.note_refusal, upload)
            raise

    async def _write(
        self, upload: Upload, name: str, sent: Sent, pieces: AsyncIterator[bytes]
    ) -> UploadedPart:
        file = await asyncio.to_thread(self._uploads.open, upload, name, sent.start)
        digest, waiting = hashlib.md5(usedforsecurity=False), bytearray()

        async def flush() -> None:
            piece = bytes(waiting)
            waiting.clear()
            self._storage.require_space()
            await asyncio.to_thread(self._uploads.write, upload, name, file, piece)

        try:
            async for piece in pieces:
                waiting += piece
                digest.update(piece)
                if len(waiting) >= PIECE_BYTES:
                    await flush()
        finally:  # also if the client is gone: it can continue here
            try:
                await flush()
                size = file.tell()
            finally:
                await asyncio.to_thread(file.close)
        problem = None
        if sent.md5 is not None and base64.b64encode(digest.digest()).decode() != sent.md5:
            problem = f"Content-MD5 of {name} is {sent.md5!r}, which its bytes do not have"
        elif sent.end is not None and size > sent.end:
            problem = (
                f"{size - sent.start} bytes of {name} came, and Content-Range says {sent.end - sent.start}"
            )
        if problem is not None:
            (await asyncio.to_thread(self._uploads.open, upload, name, sent.start)).close()
            raise InvalidRequest(f"{problem}; send it again")
        is_whole = sent.total is None or size == sent.total
        if is_whole:
            await asyncio.to_thread(self._uploads.complete, upload, name)
        return UploadedPart(size, is_whole)

    async def finish(self, id: str, access: Access) -> CheckpointPath:
        """Make the checkpoint. Raises NotFound, and InvalidRequest for files that were not announced so."""
        target = CheckpointPath(model_id(id, 0), EXTERNAL_WEIGHTS, NAME)
        async with self._locks.setdefault(id, asyncio.Lock()):
            with suppress(NotFound):
                await access.checkpoint(target)
                with suppress(NotFound):  # else the server ended before it could forget the upload
                    await asyncio.to_thread(lambda: self._uploads.forget(self._uploads.find(id)))
                return target
            upload = await asyncio.to_thread(self._uploads.find, id)
            if not access.caller.sees(upload.owner):
                raise NotFound(f"upload {id!r} does not exist, or has expired; start a new one")
            await asyncio.to_thread(self._uploads.check_whole, upload)
            async with self._at_once:
                await self._take_in(upload, target)
            await asyncio.to_thread(self._uploads.forget, upload)
        return target

    async def _take_in(self, upload: Upload, target: CheckpointPath) -> None:
        options = SaveOptions(owner=upload.owner)
        staged = await self._checkpoints.begin(target, options)
        folder, base = self._uploads.folder(upload.id), self._bases.need(upload.base_model).base
        names = (base.name, upload.base_model)
        try:
            adapter = await asyncio.to_thread(
                foreign_adapter.convert, folder, staged, upload.adapter, base.model.config, names
            )
        except (RequestError, OSError) as problem:
            await asyncio.to_thread(shutil.rmtree, staged, ignore_errors=True)
            if isinstance(problem, RequestError):
                await asyncio.to_thread(self._uploads.note_refusal, upload)
            raise
        await self._make_run(upload, target.run_id, base, adapter)
        await self._checkpoints.complete(target, staged, adapter, options, base.checkpoints)

    async def _make_run(self, upload: Upload, run_id: str, base: ServedBase, adapter: AdapterSpec) -> None:
        """Create the run. Its request takes number 0 of the line, so it is created only once."""
        rows = [
            new_session(upload.id, upload.project_id, upload.owner),
            new_model(run_id, SOURCE, base.name, adapter),
        ]
        payload = msgspec.json.encode({"upload_id": upload.id})
        refused = Failed(cannot_be_trained(run_id, SOURCE), "user")
        await self._queue.submit(
            "upload_weights", run_id, 0, upload.id, payload, base=base.key, also=rows, refused=refused
        )
