"""What a worker and its processes for custom losses say to each other, each over a pipe of its own."""

from typing import Any

import msgspec
import numpy as np

from spmd_tx.protocol.commands import CustomLoss, encode, unpack_array


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag=True):
    """One message; ``job`` is the number of the command that it is about."""

    job: int


class Open(Message, frozen=True, tag="open"):
    """Read and check a loss with its datums; answered by Opened."""

    command: CustomLoss


class Take(Message, frozen=True, tag="take"):
    """Run one piece of an open loss; answered by Taken."""

    piece: int


class Close(Message, frozen=True, tag="close"):
    """Forget it. There is no answer."""


class Up(msgspec.Struct, frozen=True, tag_field="op", tag="up"):
    """The process is there."""


class Opened(Message, frozen=True, tag="opened"):
    """It can be run, in so many pieces."""

    pieces: int


class Compiling(Message, frozen=True, tag="compiling"):
    """It is being compiled, before the answer to Take."""


class Compiled(Message, frozen=True, tag="compiled"):
    """It is being run from now on."""


class Taken(Message, frozen=True, tag="taken"):
    """What a piece gave; gradients of its datums end to end."""

    datums: np.ndarray  # int64
    losses: np.ndarray  # float64 [D]
    metrics: np.ndarray  # float64 [D, M]
    gradients: np.ndarray  # float32


class Refused(Message, frozen=True, tag="refused"):
    """It cannot be run on these datums: why, for its author."""

    problem: str


class Failed(Message, frozen=True, tag="failed"):
    """An exception that nobody has foreseen."""

    traceback: str


Order = Open | Take | Close
Answer = Up | Opened | Compiling | Compiled | Taken | Refused | Failed

_order = msgspec.msgpack.Decoder(Order, dec_hook=unpack_array)
_answer = msgspec.msgpack.Decoder(Answer, dec_hook=unpack_array)


def read_order(message: bytes) -> Order:
    return _order.decode(message)


def read_answer(message: bytes) -> Answer:
    return _answer.decode(message)


def written(message: Any) -> bytes:
    return encode(message)
