"""Reads format and size of a PNG or JPEG from its first bytes, without foreign code. Pure."""

import struct
from typing import Literal, NamedTuple

from spmd_tx.errors import InvalidRequest

ImageFormat = Literal["png", "jpeg"]

MEDIA_TYPES: dict[ImageFormat, str] = {"png": "image/png", "jpeg": "image/jpeg"}

_PNG, _JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8"
_PNG_HEADER = struct.Struct(">II")  # width, height
_OTHERS = (  # what people send most, so that the refusal can name it
    (b"GIF8", "a GIF"),
    (b"BM", "a BMP"),
    (b"II*\0", "a TIFF"),
    (b"MM\0*", "a TIFF"),
    (b"%PDF", "a PDF"),
    (b"<svg", "an SVG"),
)
_ALONE = {0x01, *range(0xD0, 0xD9)}  # markers without a length
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # markers of a frame's header


class Header(NamedTuple):
    """Holds what the first bytes of an image say. An orientation may exchange the sides."""

    format: ImageFormat
    height: int  # pixels
    width: int


def read_header(content: bytes) -> Header:
    """Read the header of an image. Raises InvalidRequest for neither PNG nor JPEG, or a part of one."""
    if content.startswith(_PNG):
        header = _png(content)
    elif content.startswith(_JPEG):
        header = _jpeg(content)
    else:
        raise InvalidRequest(f"{_kind(content)}; send a PNG or JPEG")
    if not header.height or not header.width:
        raise InvalidRequest(f"a {header.format} of {header.width} x {header.height} pixels, which is empty")
    return header


def _png(content: bytes) -> Header:
    if content[12:16] != b"IHDR" or len(content) < 24:
        raise InvalidRequest("a PNG without a header; it is damaged or cut short")
    width, height = _PNG_HEADER.unpack_from(content, 16)
    return Header("png", height, width)


def _jpeg(content: bytes) -> Header:
    at = len(_JPEG)
    while at + 4 <= len(content) and content[at] == 0xFF:
        marker = content[at + 1]
        if marker == 0xFF:  # filling
            at += 1
        elif marker in _ALONE:
            at += 2
        elif marker in _FRAMES and at + 9 <= len(content):
            height, width = struct.unpack_from(">HH", content, at + 5)
            return Header("jpeg", height, width)
        else:
            at += 2 + max(2, int.from_bytes(content[at + 2 : at + 4]))
    raise InvalidRequest("a JPEG without a header of a frame; it is damaged or cut short")


def _kind(content: bytes) -> str:
    if not content:
        return "no bytes at all"
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "a WebP"
    if content[4:8] == b"ftyp":
        return "a HEIC, AVIF or video"
    known = next((name for beginning, name in _OTHERS if content.startswith(beginning)), None)
    return known or f"neither PNG nor JPEG, it begins with {content[:8]!r}"
