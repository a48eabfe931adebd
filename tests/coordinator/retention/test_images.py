from sqlalchemy import select

from spmd_tx.coordinator.storage.tables import ImageRow, RequestImage
from tests.coordinator.retention.contents import HOUR, add, add_request, add_session


async def add_image(database, number, requests, **place):
    row = {"number": number, "owner": "local", "digest": str(number), "created_at": 0.0, "content_length": 9}
    await add(database, ImageRow, row | (place or {"content_body": b"x"}))
    await add(database, RequestImage, *({"request": request, "image": number} for request in requests))


async def left(database):
    async with database.reading() as db:
        return sorted(await db.scalars(select(ImageRow.number)))


async def test_an_image_goes_with_the_last_request_that_refers_to_it(database, reaper, now):
    await add_session(database)
    old = await add_request(database, 1, kind="sample", line="s:sample:0")
    young = await add_request(database, 2, kind="sample", line="s:sample:0", finished_at=now)
    await add_image(database, 1, [old])
    await add_image(database, 2, [old, young])
    assert "images of requests that are gone" in {each.kind for each in await reaper.reap(now)}
    assert await left(database) == [2]
    await reaper.reap(now + 3 * HOUR)
    assert await left(database) == []


async def test_files_with_images_stay_as_long_as_these(database, reaper, payload_files, now):
    await add_session(database)
    request = await add_request(database, 1, kind="sample", line="s:sample:0", finished_at=now)
    await add_image(database, 1, [request], content_file=3, content_offset=0)
    for _ in range(2):
        await reaper.reap(now)
    assert 3 in payload_files.numbers()
    for _ in range(2):
        await reaper.reap(now + 3 * HOUR)
    assert 3 not in payload_files.numbers()
