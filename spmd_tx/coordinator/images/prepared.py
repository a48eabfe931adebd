"""Decodes images into patches in child processes, and keeps them for a while in memory."""

import asyncio
import logging
from hashlib import blake2b
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

import msgspec
import numpy as np

from spmd_tx.bounds import Bounds
from spmd_tx.byte_sizes import show_size
from spmd_tx.coordinator.runtime import metrics
from spmd_tx.coordinator.runtime.byte_budget import ByteBudget
from spmd_tx.coordinator.runtime.byte_lru import ByteLru
from spmd_tx.coordinator.runtime.owner_turns import OWNER
from spmd_tx.coordinator.runtime.shared_children import OutsideCall, SharedChildren
from spmd_tx.errors import ForeignCodeFailed, InvalidRequest
from spmd_tx.images.processor import ImageProcessor
from spmd_tx.processes.child import Allowance

logger = logging.getLogger(__name__)

PREPARED_BYTES = 256 << 20  # of patches that are kept, and as much again of those that are being decoded
CHILDREN = 2  # at a time
CHILDREN_OF_ONE = 1  # owner, so that others need not wait until its images are done

_FUNCTION = "spmd_tx.images.patches:prepare_outside"
_READY = OutsideCall("spmd_tx.images.patches:be_ready", {})


class ImageKey(NamedTuple):
    """Names an image. Owners share none: who sent it first would show in how long it takes."""

    owner: str
    digest: str  # of the file


class StoredImage(NamedTuple):
    """Holds what the log has of an image."""

    content: bytes  # the file, as it was sent
    patches: str | None  # digest of what it was decoded to first; None: it was not decoded yet


class ImageLog(Protocol):
    """Is where images are stored; requests/logged_images.py says what each method does."""

    async def key(self, session_id: str, digest: str) -> ImageKey: ...

    async def read(self, key: ImageKey) -> StoredImage: ...

    async def note_patches(self, key: ImageKey, patches: str) -> None: ...


class PreparedImage(NamedTuple):
    """Holds an image as the model sees it."""

    patches: np.ndarray  # uint8 [N, P], in blocks that become one token
    rows: int  # of patches, turned as the image's orientation says
    columns: int
    digest: str  # of patches and grid


class PreparedImages:
    """Prepares the images of one model."""

    def __init__(self, log: ImageLog, processor: ImageProcessor, bounds: Bounds) -> None:
        self._log = log
        self._processor = processor
        self._bounds = bounds
        allowance = Allowance(bounds.image_seconds, bounds.image_memory_bytes)
        self._children = SharedChildren(allowance, CHILDREN, CHILDREN_OF_ONE)
        self._room = ByteBudget(PREPARED_BYTES)
        self._kept: ByteLru[PreparedImage] = ByteLru(PREPARED_BYTES)
        self._locks: WeakValueDictionary[ImageKey, asyncio.Lock] = WeakValueDictionary()  # of wanted ones

    async def close(self) -> None:
        """End the child processes. No call may be at work."""
        await self._children.close()

    async def get(self, key: ImageKey, tokens: int) -> PreparedImage:
        """Return an image of so many tokens, which the log has. Raises InvalidRequest and DamagedBody."""
        async with self._locks.setdefault(key, asyncio.Lock()):  # several requests may want it at a time
            kept = self._kept.get("/".join(key))
            return kept or await self._prepare(key, tokens)

    async def _prepare(self, key: ImageKey, tokens: int) -> PreparedImage:
        size = tokens * self._processor.merge**2 * self._processor.patch_bytes
        taken = await self._room.take(size)
        try:
            content, earlier = await self._log.read(key)
            patches, rows, columns = await self._outside(key.owner, content)
        finally:
            self._room.give_back(taken)
        metrics.DECODED_IMAGES.inc()
        if len(patches) != size:
            raise InvalidRequest("the image has another size than its header says; save it again")
        digest = blake2b(patches, digest_size=16, key=f"{rows} x {columns}".encode()).hexdigest()
        if earlier is None:
            await self._log.note_patches(key, digest)
        elif earlier != digest:
            metrics.CHANGED_IMAGES.inc()
            logger.error(
                "image %s is decoded to other patches than before (%s, not %s): the libraries for images "
                "have changed, and requests with it may give other numbers when they are run again",
                *(key.digest, digest, earlier),
            )
        patches_NP = np.frombuffer(patches, np.uint8).reshape(rows * columns, self._processor.patch_bytes)
        prepared = PreparedImage(patches_NP, rows, columns, digest)
        self._kept.put("/".join(key), prepared, size)
        return prepared

    async def _outside(self, owner: str, content: bytes) -> tuple[bytes, int, int]:
        processor = msgspec.structs.asdict(self._processor)
        for_owner = OWNER.set(owner)
        try:
            call = OutsideCall(_FUNCTION, {"content": content, "processor": processor})
            return await self._children.call(call, _READY)
        except ForeignCodeFailed as error:
            raise InvalidRequest(
                f"the image could not be decoded within {self._bounds.image_seconds:g} s and "
                f"{show_size(self._bounds.image_memory_bytes)}; send a smaller one, or save it again"
            ) from error
        finally:
            OWNER.reset(for_owner)
