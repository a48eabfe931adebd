"""Takes the images of requests for commands: decoded, and as many at a time as memory has room for."""

import weakref
from collections.abc import Iterable
from typing import NamedTuple

from spmd_tx.coordinator.images.prepared import ImageKey, ImageLog, PreparedImage, PreparedImages
from spmd_tx.coordinator.runtime.byte_budget import ByteBudget
from spmd_tx.images.placed import PlacedImage
from spmd_tx.images.places import ImageSpan
from spmd_tx.protocol.commands import padded_patches
from spmd_tx.protocol.programs import ProgramShape

SEEN_BYTES = 1 << 30  # of the patches of training requests that are under way, and as much of samples
MERGE = 2  # patches of a side of a token
TOKEN_BYTES = MERGE**2 * 3 * 16**2  # of the patches of a token


class SeenImage(NamedTuple):
    """Holds an image that commands read."""

    key: ImageKey
    prepared: PreparedImage

    @property
    def tokens(self) -> int:
        return len(self.prepared.patches) // MERGE**2

    @property
    def program(self) -> ProgramShape:
        """The program that encodes it."""
        return ProgramShape(step="encode_images", patches=padded_patches(len(self.prepared.patches)))

    def span(self, first: int) -> ImageSpan:
        """Return where its tokens stand in a sequence, from this index on."""
        return ImageSpan(first, self.prepared.rows // MERGE, self.prepared.columns // MERGE)


class SeenImages(dict[str, SeenImage]):
    """Holds the images of a request by their digests. Their memory is given back when nobody holds them."""


class RequestImages:
    """Takes the images of requests to one model."""

    def __init__(self, log: ImageLog, prepared: PreparedImages) -> None:
        self._log, self._prepared = log, prepared
        # Samples hold theirs while they wait for models to be trained, which must not wait for them.
        self._of_training, self._of_samples = ByteBudget(SEEN_BYTES), ByteBudget(SEEN_BYTES)

    async def take(self, session_id: str, placed: Iterable[PlacedImage], *, for_training: bool) -> SeenImages:
        """Return the images of a request. Raises InvalidRequest and DamagedBody."""
        tokens = {image.digest: image.tokens for image in placed}
        room = self._of_training if for_training else self._of_samples
        taken = await room.take(TOKEN_BYTES * sum(tokens.values()))
        seen = SeenImages()
        weakref.finalize(seen, room.give_back, taken)
        for digest, count in tokens.items():
            key = await self._log.key(session_id, digest)
            seen[digest] = SeenImage(key, await self._prepared.get(key, count))
        return seen
