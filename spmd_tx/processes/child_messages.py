"""What a process and a child that it has started for one call tell each other: one message each way."""

import msgspec


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """What the child is to do, and what it may take for that."""

    function: str  # "package.module:function"
    arguments: dict[str, object]
    seconds: float
    memory: int  # bytes of address space


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How it went."""


class Returned(Answer, frozen=True):
    """What the function has returned."""

    value: object


class RequestRefused(Answer, frozen=True):
    """A RequestError, by the name of its class."""

    error: str
    message: str


class StorageFailed(Answer, frozen=True):
    """An OSError that says what is wrong with the disk, as a full one."""

    number: int
    message: str
    path: str | None


class Broke(Answer, frozen=True):
    """Any other exception."""

    message: str
    traceback: str


AnyAnswer = Returned | RequestRefused | StorageFailed | Broke
decode_answer = msgspec.msgpack.Decoder(AnyAnswer).decode
