"""What a process and the child that works for it tell each other: a call, an answer, and so on."""

import msgspec

LENGTH_BYTES = 8  # before each message: its length, the most significant byte first


class ChildCall(msgspec.Struct, frozen=True, kw_only=True):
    """Tells the child what to call, within which limits."""

    function: str  # "package.module:function"
    arguments: dict[str, object]
    seconds: float
    memory: int  # bytes of address space
    is_only: bool = True  # whether the child ends after it


class ChildAnswer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of the child's answers."""


class Returned(ChildAnswer, frozen=True):
    """Carries the function's return value."""

    value: object


class RequestRefused(ChildAnswer, frozen=True):
    """Carries a RequestError, by the name of its class."""

    error: str
    message: str


class StorageFailed(ChildAnswer, frozen=True):
    """Carries an OSError with its number, such as that of a full disk."""

    number: int
    message: str
    path: str | None


class Broke(ChildAnswer, frozen=True):
    """Carries any other exception."""

    message: str
    traceback: str


AnyAnswer = Returned | RequestRefused | StorageFailed | Broke
decode_answer = msgspec.msgpack.Decoder(AnyAnswer).decode


def encode(message: ChildCall | AnyAnswer) -> bytes:
    """The message, with its length before it."""
    content = msgspec.msgpack.encode(message)
    return len(content).to_bytes(LENGTH_BYTES) + content
