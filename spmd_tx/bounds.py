"""Bounds on what clients may ask for: one table, which docs/limits.md shows and operators can change.

Each field has its default here, its meaning in its ``Meta``, its unit in either. A bound protects
the server and other tenants; what a request means never depends on it.
"""

from typing import Annotated

import msgspec
from msgspec import Meta


class Bounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Set by ``--limit NAME=VALUE``, or in the table ``[limits]`` of the file of ``--config``."""

    stop_strings: Annotated[int, Meta(ge=0, description="Stop strings of a sample request.")] = 64
    stop_string_bytes: Annotated[int, Meta(ge=1, description="Bytes of one stop string, in UTF-8.")] = 1024
