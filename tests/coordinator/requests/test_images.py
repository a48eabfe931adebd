import msgspec
import pytest
from sqlalchemy import func, select

from spmd_tx.coordinator.images.arrival import of_training
from spmd_tx.coordinator.images.prepared import ImageKey
from spmd_tx.coordinator.requests.logged_images import LoggedImages
from spmd_tx.coordinator.storage.tables import ImageRow, RequestImage, SessionRow
from spmd_tx.coordinator.wire import tinker_pb2 as pb
from spmd_tx.coordinator.wire.limits import Limits
from spmd_tx.errors import DamagedBody
from spmd_tx.images.processor import ImageProcessor
from tests.coordinator.retention.contents import add
from tests.support.pictures import encoded, noise, png

OWNERS = {"a1": "alice", "a2": "alice", "b1": "bob"}  # of sessions


@pytest.fixture
async def sessions(database):
    rows = [{"id": id, "created_at": 0.0, "tags": [], "owner": owner} for id, owner in OWNERS.items()]
    await add(database, SessionRow, *rows)


@pytest.fixture
def images(sessions, database, tmp_path):
    return LoggedImages(database, tmp_path / "payloads")


async def submit(queue, session, seq_id, files):
    line = f"{session}:sample:0"
    return await queue.submit("sample", line, seq_id, session, b"{}", images=files)


async def counts(database):
    async with database.reading() as db:
        return [await db.scalar(select(func.count()).select_from(row)) for row in (ImageRow, RequestImage)]


async def test_an_image_is_stored_once_for_its_owner(queue, images, database):
    small, large = b"small", png(256, 256)
    await submit(queue, "a1", 1, {"s": small, "l": large})
    await submit(queue, "a2", 1, {"l": b"the file is not looked at again"})
    await submit(queue, "b1", 1, {"l": large})
    assert await counts(database) == [3, 4]
    for session, owner in ("a1", "alice"), ("a2", "alice"), ("b1", "bob"):
        key = await images.key(session, "l")
        assert key == ImageKey(owner, "l")
        assert (await images.read(key)).content == large
    assert (await images.read(ImageKey("alice", "s"))).content == small
    with pytest.raises(DamagedBody, match="has lost the image s"):
        await images.read(ImageKey("bob", "s"))


async def test_the_same_request_again_stores_nothing(queue, images, database):
    for _ in range(2):
        await submit(queue, "a1", 1, {"l": png()})
    assert await counts(database) == [1, 1]


async def test_an_image_is_there_after_a_restart(running_queue, images, database, tmp_path):
    async with running_queue(database, tmp_path) as queue:
        await submit(queue, "a1", 1, {"l": png(256, 256)})
    async with running_queue(database, tmp_path) as queue:
        await submit(queue, "a1", 2, {"l": b""})
    assert (await images.read(ImageKey("alice", "l"))).content == png(256, 256)


async def test_the_first_patches_are_kept(queue, images):
    await submit(queue, "a1", 1, {"l": png()})
    key = ImageKey("alice", "l")
    assert (await images.read(key)).patches is None
    for digest in "first", "second":
        await images.note_patches(key, digest)
    assert (await images.read(key)).patches == "first"


async def test_a_step_of_rl_adds_each_image_to_the_log_once(queue, images, tmp_path):
    """8 prompts, each with 16 samples, as datums of 4 requests."""
    limits = Limits(100, 512, 4, images=ImageProcessor(least_pixels=32 * 32))
    pictures = [encoded(noise(128, 128, seed), "jpeg") for seed in range(8)]
    text = pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=bytes(4 * 20)))
    for number in range(4):
        data = [
            pb.Datum(model_input=[text, pb.Chunk(image=pb.ImageChunk(data=picture)), text])
            for picture in pictures
            for _ in range(4)
        ]
        taken = of_training(pb.ForwardBackwardRequest(data=data).SerializeToString(), limits)
        await queue.submit("forward", "a1:train:0", number + 1, "a1", taken.body, images=taken.files)
    stored = sum(path.stat().st_size for path in (tmp_path / "payloads").glob("*.zst"))
    assert stored <= 1.2 * (sum(map(len, pictures)) + 128 * len(text.SerializeToString()) * 2)


def test_the_reference_in_a_body_is_read_again():
    taken = of_training(
        pb.ForwardBackwardRequest(
            data=[pb.Datum(model_input=[pb.Chunk(image=pb.ImageChunk(data=png(256, 320)))])]
        ).SerializeToString(),
        Limits(100, 512, 4, images=ImageProcessor()),
    )
    (chunk,) = pb.ForwardBackwardRequest.FromString(taken.body).data[0].model_input
    stored = chunk.image.stored
    assert (stored.tokens, stored.width, stored.height, stored.size) == (80, 320, 256, len(png(256, 320)))
    assert list(taken.files) == [stored.digest]
    assert msgspec.json.encode(stored.digest)
