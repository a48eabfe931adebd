import asyncio
import struct
import zlib

import numpy as np
import pytest

from spmd_tx.bounds import Bounds
from spmd_tx.coordinator.images.prepared import ImageKey, PreparedImages, StoredImage
from spmd_tx.coordinator.runtime.metrics import REGISTRY
from spmd_tx.errors import InvalidRequest
from spmd_tx.images.patches import prepare
from spmd_tx.images.processor import ImageProcessor
from tests.support.pictures import encoded, jpeg, noise, png

QWEN = ImageProcessor()
KEY = ImageKey("alice", "1")


class Log:
    """Has images in memory."""

    def __init__(self, **files):
        self.files = {key: StoredImage(content, None) for key, content in files.items()}
        self.reads = 0

    async def read(self, key):
        self.reads += 1
        return self.files[key.digest]

    async def note_patches(self, key, patches):
        self.files[key.digest] = StoredImage(self.files[key.digest].content, patches)


@pytest.fixture
async def images():
    """Return a function that prepares the images of a log."""
    opened = []

    def open(log, bounds=None):
        opened.append(PreparedImages(log, QWEN, bounds or Bounds()))
        return opened[-1]

    yield open
    for each in opened:
        await each.close()


async def test_an_image_is_prepared_once_in_a_child_process(images):
    log = Log(**{"1": jpeg(256, 320)})
    prepared = images(log)
    first, *others = await asyncio.gather(*(prepared.get(KEY, 80) for _ in range(4)))
    patches, rows, columns = prepare(jpeg(256, 320), QWEN)
    assert (first.rows, first.columns) == (rows, columns) == (16, 20)
    assert np.array_equal(first.patches, patches)
    assert all(other is first for other in others)
    assert log.reads == 1


async def test_owners_share_no_image(images):
    log = Log(**{"1": png(256, 256)})
    prepared = images(log)
    mine = await prepared.get(KEY, 64)
    others = await prepared.get(KEY._replace(owner="mallory"), 64)
    assert mine.digest == others.digest
    assert log.reads == 2


def count(metric):
    return REGISTRY.get_sample_value(metric)


async def test_an_image_that_is_decoded_to_other_patches_is_reported(images, caplog):
    log = Log(**{"1": png(256, 256)})
    first = await images(log).get(KEY, 64)
    assert log.files["1"].patches == first.digest
    await images(log).get(KEY, 64)
    assert "other patches" not in caplog.text
    await log.note_patches(KEY, "0" * 32)
    changed = count("spmd_tx_images_changed_total")
    await images(log).get(KEY, 64)
    assert count("spmd_tx_images_changed_total") == changed + 1
    assert f"decoded to other patches than before ({first.digest}, not {'0' * 32})" in caplog.text


def huge(side, colour=2):
    """Return a small PNG of many pixels, all black."""

    def part(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", side, side, 8, colour, 0, 0, 0)
    rows = bytes(side * (1 + side * {2: 3, 6: 4}[colour]))
    parts = part(b"IHDR", header) + part(b"IDAT", zlib.compress(rows, 1)) + part(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


async def test_hostile_files_fail_by_themselves(images):
    text = b"x\0\0" + zlib.compress(bytes(80 << 20))
    chunk = struct.pack(">I", len(text)) + b"zTXt" + text + struct.pack(">I", zlib.crc32(b"zTXt" + text))
    small = png(256, 256)
    bomb = small[:33] + chunk + small[33:]
    files = {
        "1": huge(6144, 6),
        "2": bomb,
        "3": small[:-100],
        "4": encoded(noise(256, 256), "gif"),
        "5": small,
    }
    prepared = images(Log(**files), Bounds(image_memory_bytes=512 << 20))
    with pytest.raises(InvalidRequest, match=r"more memory|within 20 s"):
        await prepared.get(ImageKey("mallory", "1"), 16_384)
    for name in "2", "3", "4":
        with pytest.raises(InvalidRequest, match=r"damaged|a GIF"):
            await prepared.get(ImageKey("mallory", name), 64)
    assert (await prepared.get(ImageKey("alice", "5"), 64)).rows == 16


@pytest.mark.slow
async def test_the_largest_images_are_decoded_within_the_memory(images):
    sizes = {"1": (7000, 7000), "2": (7000, 7000), "3": (4000, 12_000)}
    wide = encoded(noise(*sizes["3"]), "jpeg", progressive=True)
    prepared = images(Log(**{"1": huge(7000), "2": huge(7000, 6), "3": wide}))
    for name, size in sizes.items():
        tokens = QWEN.resized(*size).tokens
        assert (await prepared.get(ImageKey("mallory", name), tokens)).patches.shape == (4 * tokens, 768)


async def test_an_image_that_takes_too_long_is_given_up(images):
    with pytest.raises(InvalidRequest, match=r"could not be decoded within 0.001 s"):
        await images(Log(**{"1": png(256, 256)}), Bounds(image_seconds=0.001)).get(KEY, 64)


async def test_patches_of_another_number_than_announced_are_refused(images):
    with pytest.raises(InvalidRequest, match="another size than its header says"):
        await images(Log(**{"1": png(256, 256)})).get(KEY, 65)
