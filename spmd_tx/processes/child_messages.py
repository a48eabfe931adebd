"""The messages between a process and the child that it starts for one call: one each way."""

import msgspec


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """Tells the child what to call, within which limits."""

    function: str  # "package.module:function"
    arguments: dict[str, object]
    seconds: float
    memory: int  # bytes of address space


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of the child's answers."""


class Returned(Answer, frozen=True):
    """Carries the function's return value."""

    value: object


class RequestRefused(Answer, frozen=True):
    """Carries a RequestError, by the name of its class."""

    error: str
    message: str


class StorageFailed(Answer, frozen=True):
    """Carries an OSError with its number, such as that of a full disk."""

    number: int
    message: str
    path: str | None


class Broke(Answer, frozen=True):
    """Carries any other exception."""

    message: str
    traceback: str


AnyAnswer = Returned | RequestRefused | StorageFailed | Broke
decode_answer = msgspec.msgpack.Decoder(AnyAnswer).decode
