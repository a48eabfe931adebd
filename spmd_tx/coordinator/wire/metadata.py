"""Bounds what clients may attach to sessions, models and checkpoints: it is kept, and listed again."""

from typing import Any

import msgspec

MOST_BYTES = 64 << 10  # as JSON
MOST_DEPTH = 20


class WithMetadata(msgspec.Struct, frozen=True):
    """A body that may have the field ``user_metadata``."""

    def __post_init__(self) -> None:
        metadata = getattr(self, "user_metadata", None)
        if metadata is not None:
            check(metadata)


def check(metadata: dict[str, Any]) -> None:
    """Raises ValueError, which msgspec tells as an error of the body."""
    level: list[Any] = [metadata]
    for _ in range(MOST_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
    if level:
        raise ValueError(f"user_metadata is nested more than {MOST_DEPTH} levels deep")
    size = len(msgspec.json.encode(metadata))
    if size > MOST_BYTES:
        raise ValueError(f"user_metadata takes {size} bytes as JSON; at most {MOST_BYTES} are kept")


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [each for each in value.values() if isinstance(each, dict | list)]
    return [each for each in value if isinstance(each, dict | list)]
