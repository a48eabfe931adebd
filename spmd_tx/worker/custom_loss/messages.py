"""The messages between a worker and its processes for custom losses, each with its own pipe."""

import msgspec
import numpy as np

from spmd_tx.protocol.commands import CustomLoss
from spmd_tx.protocol.encoding import unpack_array


class LossMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag=True):
    """Holds one message; ``job`` is the number of its command."""

    job: int


class Open(LossMessage, frozen=True, tag="open"):
    """Asks to read and check a loss with its datums; answered by Opened."""

    command: CustomLoss


class Take(LossMessage, frozen=True, tag="take"):
    """Asks to run one piece of an open loss; answered by Taken."""

    piece: int


class Close(LossMessage, frozen=True, tag="close"):
    """Asks to forget a loss. There is no answer."""


class Up(msgspec.Struct, frozen=True, tag_field="op", tag="up"):
    """Says that the process has started."""


class Opened(LossMessage, frozen=True, tag="opened"):
    """Says that the loss can be run, in so many pieces."""

    pieces: int


class LossCompiling(LossMessage, frozen=True, tag="compiling"):
    """Says that the loss is being compiled, before the answer to Take."""


class LossCompiled(LossMessage, frozen=True, tag="compiled"):
    """Says that the loss is compiled and runs now."""


class Taken(LossMessage, frozen=True, tag="taken"):
    """Holds the results of a piece; gradients of its datums are concatenated."""

    datums: np.ndarray  # int64
    losses: np.ndarray  # float64 [D]
    metrics: np.ndarray  # float64 [D, M]
    gradients: np.ndarray  # float32


class LossRefused(LossMessage, frozen=True, tag="refused"):
    """Tells the loss's author why it cannot be run on these datums."""

    problem: str


class LossFailed(LossMessage, frozen=True, tag="failed"):
    """Reports an unexpected exception."""

    traceback: str


LossOrder = Open | Take | Close
LossAnswer = Up | Opened | LossCompiling | LossCompiled | Taken | LossRefused | LossFailed

read_order = msgspec.msgpack.Decoder(LossOrder, dec_hook=unpack_array).decode
read_answer = msgspec.msgpack.Decoder(LossAnswer, dec_hook=unpack_array).decode
