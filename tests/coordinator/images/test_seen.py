import asyncio

import pytest

from spmd_tx.coordinator.images import seen
from spmd_tx.coordinator.images.prepared import ImageKey
from spmd_tx.coordinator.images.seen import RequestImages
from spmd_tx.errors import InvalidRequest
from spmd_tx.images.placed import PlacedImage
from tests.support import seen_images

TWICE = [PlacedImage(3, 64, "a"), PlacedImage(80, 64, "a")]


class Prepared:
    """Knows images by their digests; "broken" cannot be decoded."""

    async def get(self, key, tokens):
        if key.digest == "broken":
            raise InvalidRequest("it is broken")
        return seen_images.seen(key.digest, 16, tokens // 4).prepared


class Owners:
    async def key(self, session_id, digest):
        return ImageKey(f"owner of {session_id}", digest)


@pytest.fixture
def images():
    return RequestImages(Owners(), Prepared())


async def test_images_of_a_request_are_taken_once_each(images):
    taken = await images.take("s", [*TWICE, PlacedImage(200, 80, "b")], for_training=False)
    assert [(image.key, image.tokens) for image in taken.values()] == [
        (("owner of s", "a"), 64),
        (("owner of s", "b"), 80),
    ]
    assert taken["b"].span(7) == (7, 8, 10)
    assert taken["b"].program.patches == 512


async def test_a_request_waits_until_others_have_let_go_of_theirs(images, monkeypatch):
    monkeypatch.setattr(seen, "SEEN_BYTES", 100 * seen.TOKEN_BYTES)
    images = RequestImages(Owners(), Prepared())
    first = await images.take("s", TWICE, for_training=False)
    waiting = asyncio.create_task(images.take("s", [PlacedImage(0, 64, "b")], for_training=False))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert (await images.take("s", TWICE, for_training=True))["a"].tokens == 64  # it waits for no sample
    del first
    assert (await waiting)["b"].tokens == 64


async def test_what_was_taken_for_a_damaged_image_is_given_back(images, monkeypatch):
    monkeypatch.setattr(seen, "SEEN_BYTES", 64 * seen.TOKEN_BYTES)
    images = RequestImages(Owners(), Prepared())
    with pytest.raises(InvalidRequest, match="broken"):
        await images.take("s", [PlacedImage(0, 64, "broken")], for_training=False)
    assert await asyncio.wait_for(images.take("s", TWICE, for_training=False), 10)
