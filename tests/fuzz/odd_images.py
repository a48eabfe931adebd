"""Files of images that a hostile client may send: huge, with bombs inside, cut off, with bytes changed."""

import io
import itertools
import struct
import zlib
from collections.abc import Iterator

import numpy as np
from PIL import Image

from tests.support.pictures import encoded, noise

HEADER = 33  # bytes of a PNG, before its other parts
SIDES = 32, 96, 200  # pixels
CHANGES = 1, 4, 32  # bytes
BOMB = 80 << 20  # bytes of a text in a PNG
FIRST_ODD = 20  # there is one of the files that are odd as they are for so many that are changed


def files() -> Iterator[bytes]:
    """Yield files, always other ones."""
    odd = itertools.cycle(odd_files())
    for number in itertools.count():
        yield next(odd) if number % FIRST_ODD == 0 else changed(number)


def odd_files() -> list[bytes]:
    """Return files that are odd as they are."""
    small = encoded(noise(64, 64))
    return [
        huge(8192),
        huge(8192, alpha=True),
        encoded(Image.new("RGB", (12_000, 3_000)), "jpeg", progressive=True),
        small[:HEADER] + part(b"zTXt", b"x\0\0" + zlib.compress(bytes(BOMB))) + small[HEADER:],
        small[:HEADER] + part(b"iCCP", b"x\0\0" + zlib.compress(bytes(BOMB))) + small[HEADER:],
        encoded(noise(64, 64), "gif"),
        encoded(noise(64, 64), "webp"),
        encoded(Image.new("1", (1, 1))),
        encoded(Image.new("RGB", (16_384, 1))),
        b"",
        small[:HEADER],
        huge(2**31 - 1, rows=1),
    ]


def changed(seed: int) -> bytes:
    """Return a file with other bytes in some places, or cut off."""
    chance = np.random.default_rng(seed)
    kind, channels = ("png", chance.integers(1, 5)) if seed % 2 else ("jpeg", chance.choice([1, 3]))
    height, width = chance.choice(SIDES, 2).tolist()
    whole = io.BytesIO()
    noise(height, width, seed, int(channels)).save(whole, kind)
    content = np.frombuffer(whole.getvalue(), np.uint8).copy()
    places = chance.integers(0, len(content), chance.choice(CHANGES))
    content[places] = chance.integers(0, 256, len(places))
    return content[: chance.integers(1, len(content)) if chance.random() < 0.2 else None].tobytes()


def huge(side: int, *, alpha: bool = False, rows: int | None = None) -> bytes:
    """Return a small PNG of many black pixels, with ``rows`` of them in place of ``side``."""
    header = struct.pack(">IIBBBBB", side, side, 8, 6 if alpha else 2, 0, 0, 0)
    row = 1 + side * (4 if alpha else 3) if rows is None else 64
    content = part(b"IDAT", zlib.compress(bytes((rows or side) * row), 1))
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + content + part(b"IEND", b"")


def part(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
