"""Reads the images that the log has, and notes what they were decoded to."""

import asyncio
from pathlib import Path

from sqlalchemy import Select, select, update

from spmd_tx.coordinator.images.prepared import ImageKey, StoredImage
from spmd_tx.coordinator.requests import image_rows
from spmd_tx.coordinator.requests.payload_files import read_body
from spmd_tx.coordinator.runtime.byte_lru import ByteLru
from spmd_tx.coordinator.storage.database import Database
from spmd_tx.coordinator.storage.tables import ImageRow, SessionRow
from spmd_tx.errors import DamagedBody

OWNERS_BYTES = 4 << 20


class LoggedImages:
    """Finds images in the database, and their files in the folder of payloads."""

    def __init__(self, database: Database, payloads: Path) -> None:
        self._database = database
        self._payloads = payloads
        self._owners: ByteLru[str] = ByteLru(OWNERS_BYTES)  # by session

    async def key(self, session_id: str, digest: str) -> ImageKey:
        """Return the key of an image to which a request of a session refers."""
        owner = self._owners.get(session_id)
        if owner is None:
            async with self._database.reading() as db:
                owner = await db.scalar(select(SessionRow.owner).where(SessionRow.id == session_id)) or ""
            self._owners.put(session_id, owner, len(session_id) + len(owner))
        return ImageKey(owner, digest)

    async def read(self, key: ImageKey) -> StoredImage:
        """Read an image. Raises DamagedBody when it is missing or damaged."""
        async with self._database.reading() as db:
            row = await db.scalar(_of(key))
        if row is None:
            raise DamagedBody(f"the server has lost the image {key.digest}: it is not in its database")
        content = await asyncio.to_thread(read_body, self._payloads, image_rows.place_of(row))
        return StoredImage(content, row.patches)

    async def note_patches(self, key: ImageKey, patches: str) -> None:
        """Store what an image was decoded to first."""
        is_it = ImageRow.owner == key.owner, ImageRow.digest == key.digest, ImageRow.patches.is_(None)
        async with self._database.transaction() as db:
            await db.execute(update(ImageRow).where(*is_it).values(patches=patches))


def _of(key: ImageKey) -> "Select[ImageRow]":
    return select(ImageRow).where(ImageRow.owner == key.owner, ImageRow.digest == key.digest)
