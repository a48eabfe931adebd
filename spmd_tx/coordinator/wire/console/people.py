"""What the console shows an admin about owners and their keys. Times are seconds since the epoch."""

from typing import Literal

import msgspec


class Key(msgspec.Struct, frozen=True):
    """Describes an API key; nobody can read the key itself."""

    id: str
    owner: str
    role: Literal["user", "admin", "read-only"]
    created_at: float
    expires_at: float | None  # null: never
    last_used_at: float | None  # up to a minute old; null: never
    limits: dict[str, float]  # those that it has, by name
    problem: str | None  # why it is not valid any more; null: it is valid
    is_own: bool  # whether the caller has signed in with it


class KeysResponse(msgspec.Struct, frozen=True):
    keys: list[Key]  # newest first
    left_out: int  # older ones


class HourOfUse(msgspec.Struct, frozen=True):
    """Counts what one owner has used within an hour, in tokens."""

    hour: int  # its first second
    owner: str
    trained: int
    forwarded: int
    prompt: int
    cached: int  # of the prompts' tokens
    sampled: int


class UseResponse(msgspec.Struct, frozen=True):
    since: int  # first second of the first hour
    until: int  # last second of the present hour
    hours: list[HourOfUse]  # in order of time; an owner who has used nothing is left out
    is_cut: bool
