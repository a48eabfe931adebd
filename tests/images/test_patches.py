import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from spmd_tx.errors import InvalidRequest
from spmd_tx.images.patches import prepare
from spmd_tx.images.processor import ImageProcessor
from tests.support.pictures import encoded, jpeg, noise, png

QWEN = ImageProcessor()
ORIENTATION = 0x0112


def picture(content):
    """Return the picture of the patches again, uint8 [H, W, 3]."""
    patches, rows, columns = prepare(content, ImageProcessor(least_pixels=32 * 32))
    blocks = patches.reshape(rows // 2, columns // 2, 2, 2, 3, 16, 16)
    return blocks.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * 16, columns * 16, 3)


@pytest.mark.parametrize(
    "content",
    [png(256, 256), jpeg(360, 480), png(300, 100), png(37, 911), jpeg(17, 16), png(336, 400), png(40, 1000)],
)
def test_patches_are_those_of_transformers(content):
    theirs = Qwen2VLImageProcessorPil(
        size={"shortest_edge": QWEN.least_pixels, "longest_edge": QWEN.most_pixels},
        **{"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    )
    expected = theirs(Image.open(io.BytesIO(content)), return_tensors="np")
    patches, rows, columns = prepare(content, QWEN)
    assert expected["image_grid_thw"].tolist() == [[1, rows, columns]]
    both_frames = (patches.astype(np.float32) / 255 - 0.5) / 0.5
    both_frames = np.repeat(both_frames.reshape(len(patches), 3, 1, 256), 2, axis=2)
    assert np.abs(both_frames.reshape(len(patches), -1) - expected["pixel_values"]).max() <= 1.2e-7


def test_the_orientation_is_applied():
    tags = Image.Exif()
    tags[ORIENTATION] = 6  # a quarter turn
    image = noise(64, 96)
    turned = picture(encoded(image, "png", exif=tags))
    assert turned.shape == (96, 64, 3)
    assert (turned == np.rot90(np.asarray(image), -1)).all()


@pytest.mark.parametrize(
    "image, expected",
    [
        (Image.new("RGBA", (64, 64), (0, 0, 0, 0)), 255),
        (Image.new("LA", (64, 64), (0, 0)), 255),
        (Image.new("RGBA", (64, 64), (0, 0, 0, 51)), 204),
        (Image.fromarray(np.full((64, 64), 0x4FFF, np.uint16)), 0x4F),
        (Image.new("L", (64, 64), 77), 77),
        (Image.new("1", (64, 64), 1), 255),
    ],
    ids=["clear", "clear grey", "half clear", "16 bit", "grey", "one bit"],
)
def test_other_colours_become_opaque_rgb(image, expected):
    assert (picture(encoded(image)) == expected).all()


def test_a_palette_with_a_clear_colour_lies_on_white():
    image = Image.new("P", (64, 64), 0)
    image.putpalette([0, 0, 0, 10, 20, 30])
    image.paste(1, (0, 0, 32, 64))
    shown = picture(encoded(image, transparency=0))
    assert (shown[:, :32] == (10, 20, 30)).all()
    assert (shown[:, 32:] == 255).all()


def test_an_animation_shows_its_first_frame():
    first, second = Image.new("RGB", (64, 64), (1, 2, 3)), Image.new("RGB", (64, 64), (9, 9, 9))
    assert (picture(encoded(first, save_all=True, append_images=[second])) == (1, 2, 3)).all()


def damaged_png(height, width, content):
    def part(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", content) + part(b"IEND", b"")


@pytest.mark.parametrize(
    "content, problem",
    [
        (png()[:-200], "damaged"),
        (jpeg()[: len(jpeg()) // 2], "damaged"),
        (damaged_png(64, 64, zlib.compress(b"")), "damaged"),
        (damaged_png(64, 64, b"no zlib"), "damaged"),
        (png()[:40] + encoded(noise(64, 64), "gif"), "damaged"),
        (encoded(noise(40, 50), "gif"), "a GIF"),
    ],
    ids=["half a png", "half a jpeg", "no pixels", "no zlib", "another within", "gif"],
)
def test_a_damaged_file_is_the_requests_own_fault(content, problem):
    with pytest.raises(InvalidRequest, match=problem):
        prepare(content, QWEN)


def test_a_broken_orientation_changes_nothing():
    content = encoded(noise(64, 96), "jpeg", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert picture(content).shape == (64, 96, 3)


@pytest.mark.parametrize("kind", ["png", "png with its checksums", "jpeg"])
def test_hundreds_of_changed_files_are_decoded_or_refused(kind):
    decoded = 0
    for seed in range(350):
        random = np.random.default_rng(seed)
        content = bytearray((jpeg if kind == "jpeg" else png)(48, 40, seed))
        for place in random.integers(0, len(content), random.integers(1, 8)):
            content[place] = random.integers(256)
        if kind == "png with its checksums":
            content = bytearray(with_checksums(bytes(content)))
        if seed % 5 == 0:
            del content[random.integers(len(content)) :]
        try:
            patches, rows, columns = prepare(bytes(content), QWEN)
        except InvalidRequest:
            continue
        assert patches.shape == (rows * columns, 768)
        decoded += 1
    assert 0 < decoded < 350


def with_checksums(content):
    """Make the checksums of a PNG's parts right again."""
    parts, at = [content[:8]], 8
    while at + 12 <= len(content):
        end = at + 8 + int.from_bytes(content[at : at + 4])
        parts += [content[at:end], struct.pack(">I", zlib.crc32(content[at + 4 : end]))]
        at = end + 4
    return b"".join(parts)
