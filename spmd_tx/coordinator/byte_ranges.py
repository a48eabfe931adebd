"""Which bytes a download wants (RFC 9110, section 14): one range, or all. Pure functions."""

import re
from collections.abc import Mapping
from typing import NamedTuple

RANGE = re.compile(r"bytes=\s*(\d{0,19})-(\d{0,19})\s*", re.IGNORECASE)


class Span(NamedTuple):
    """Bytes from ``start`` up to, but not with, ``end``."""

    start: int
    end: int


def is_known(headers: Mapping[str, str], etag: str) -> bool:
    """Whether the client has it already."""
    known = [each.strip().removeprefix("W/") for each in headers.get("if-none-match", "").split(",")]
    return etag in known or "*" in known


def wanted(headers: Mapping[str, str], etag: str, size: int) -> Span | None:
    """The one range that a client asks for; None for all. An empty one if there are no such bytes.

    All is also for those who have a part of another version (If-Range), and for several ranges: a server
    may ignore them.
    """
    found = RANGE.fullmatch(headers.get("range", ""))
    if found is None or headers.get("if-range", etag) != etag:
        return None
    first, last = found.groups()
    if not first and not last:
        return None
    if not first:
        return Span(max(0, size - int(last)), size)
    if last and int(last) < int(first):
        return None  # not a range at all
    start = int(first)
    return Span(start, max(start, min(int(last) + 1, size) if last else size))
