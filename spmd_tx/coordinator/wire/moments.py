"""Times on the wire: RFC 3339, with the offset from UTC."""

from datetime import UTC, datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from spmd_tx.errors import InvalidRequest

# Text until it is read: msgspec's datetime takes numbers too, and those may lie beyond the calendar.
Moment = Annotated[str, Meta(max_length=64, extra_json_schema={"format": "date-time"})]


def read_moment(name: str, text: str) -> datetime:
    """Read the time in field ``name``. Raises InvalidRequest for no time, or one without its offset."""
    try:
        moment = msgspec.convert(text, datetime)
    except msgspec.ValidationError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise InvalidRequest(
            f"{name} is {text!r}; send a time with its offset from UTC, as 2026-01-31T15:00:00Z"
        )
    return moment


def write_moment(seconds: float) -> str:
    """Write a time, given in seconds since the epoch."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()
