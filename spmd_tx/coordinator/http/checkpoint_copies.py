"""Copies checkpoints, each into a training run of its own, which cannot be trained."""

import asyncio
import uuid
from contextlib import suppress
from hashlib import blake2b
from weakref import WeakValueDictionary

import msgspec

from spmd_tx.coordinator.bases.bases import Bases
from spmd_tx.coordinator.bases.served_base import ServedBase
from spmd_tx.coordinator.catalog.catalog import cannot_be_trained, model_id
from spmd_tx.coordinator.checkpoints.catalog import CheckpointCatalog, SaveOptions
from spmd_tx.coordinator.checkpoints.files import Manifest
from spmd_tx.coordinator.checkpoints.lifetimes import check_ttl
from spmd_tx.coordinator.http.closed_runs import new_model, new_session
from spmd_tx.coordinator.http.security.access import Access
from spmd_tx.coordinator.requests.queue import RequestQueue
from spmd_tx.coordinator.requests.records import Failed
from spmd_tx.coordinator.wire import checkpoint_paths
from spmd_tx.coordinator.wire.checkpoint_paths import CheckpointPath
from spmd_tx.coordinator.wire.checkpoints import CopyWeightsRequest
from spmd_tx.errors import InvalidRequest, NotFound


class CheckpointCopies:
    """Makes copies. A repeated request, with the same idempotency key or number, returns the same copy."""

    def __init__(self, checkpoints: CheckpointCatalog, queue: RequestQueue, bases: Bases) -> None:
        self._checkpoints = checkpoints
        self._bases = bases
        self._queue = queue
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by training run

    async def make(
        self, request: CopyWeightsRequest, key: str | None, writer: Access, reader: Access
    ) -> CheckpointPath:
        """Copy a checkpoint that ``reader`` can read to a run of the caller's; ``key`` is an idempotency key.

        Raises NotFound and InvalidRequest.
        """
        check_ttl(request.ttl_seconds)
        source = checkpoint_paths.parse(request.source_path)
        session_id, number = await _place(request, key, writer)
        run_id = model_id(session_id, number)
        target = CheckpointPath(run_id, source.kind, source.name)
        async with self._locks.setdefault(run_id, asyncio.Lock()):
            with suppress(NotFound):
                if (await self._checkpoints.describe(target)).copied_from == str(source):
                    return target
            base, opened = await reader.open_checkpoint(source, self._bases, may_be_encrypted=True)
            await self._make_run(run_id, source, (base, opened.manifest), request, writer)
            await self._checkpoints.copy(source, target, SaveOptions(ttl_seconds=request.ttl_seconds))
        return target

    async def _make_run(
        self,
        run_id: str,
        source: CheckpointPath,
        trained: tuple[ServedBase, Manifest],
        request: CopyWeightsRequest,
        writer: Access,
    ) -> None:
        """Create the run. Its request takes number 0 of the line, so it is created only once."""
        session_id, _, number = run_id.rpartition(":train:")
        with suppress(NotFound):
            copied_from = (await writer.model(run_id)).copied_from
            if copied_from != str(source):
                raise InvalidRequest(
                    f"model_seq_id {number} of session {session_id!r} is already in use; send the next one"
                )
            return
        base, manifest = trained
        rows = [new_model(run_id, str(source), manifest.base_model, manifest.adapter)]
        if request.session_id is None:
            rows.insert(0, new_session(session_id, request.destination_project_id, writer.caller.owner))
        payload = msgspec.json.encode(msgspec.structs.replace(request, weights_access_token=None))
        refused = Failed(cannot_be_trained(run_id, str(source)), "user")
        await self._queue.submit(
            "copy_weights", run_id, 0, session_id, payload, base=base.key, also=rows, refused=refused
        )


async def _place(request: CopyWeightsRequest, key: str | None, writer: Access) -> tuple[str, int]:
    """Return the session and the number of the training run for the copy."""
    is_numbered = request.session_id is not None and request.model_seq_id is not None
    if is_numbered == (request.destination_project_id is not None):
        raise InvalidRequest("send destination_project_id, or session_id and model_seq_id")
    if request.session_id is not None and request.model_seq_id is not None:
        await writer.open_session(request.session_id)
        return request.session_id, request.model_seq_id
    if key is None:
        return str(uuid.uuid4()), 0
    named = [
        writer.caller.owner,
        key,
        request.source_path,
        request.destination_project_id,
        request.ttl_seconds,
    ]
    return str(uuid.UUID(bytes=blake2b(msgspec.json.encode(named), digest_size=16).digest(), version=4)), 0
