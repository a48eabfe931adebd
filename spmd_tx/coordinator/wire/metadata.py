"""Bounds the metadata of sessions, models and checkpoints, since it is stored and listed."""

from typing import Any

import msgspec

MAX_BYTES = 64 << 10  # as JSON
MAX_DEPTH = 20


class WithMetadata(msgspec.Struct, frozen=True):
    """Checks the field ``user_metadata`` of a body, if there is one."""

    def __post_init__(self) -> None:
        metadata = getattr(self, "user_metadata", None)
        if metadata is not None:
            check(metadata)


def check(metadata: dict[str, Any]) -> None:
    """Raise ValueError, which msgspec reports as an error of the body, for metadata out of bounds."""
    level: list[Any] = [metadata]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
    if level:
        raise ValueError(f"user_metadata is nested more than {MAX_DEPTH} levels deep")
    size = len(msgspec.json.encode(metadata))
    if size > MAX_BYTES:
        raise ValueError(f"user_metadata takes {size} bytes as JSON; at most {MAX_BYTES} are kept")


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [each for each in value.values() if isinstance(each, dict | list)]
    return [each for each in value if isinstance(each, dict | list)]
