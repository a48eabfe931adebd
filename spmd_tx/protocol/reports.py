"""The part of the contract that workers say: how far they are, and what a command has brought."""

import msgspec
import numpy as np

from spmd_tx.protocol.memory_plan import MemoryPlan
from spmd_tx.protocol.programs import CompileReport

PROTOCOL_VERSION = 11  # of commands and reports

FRAME_BYTES = 256 << 10  # of a report; longer ones come in several frames
BEAT_SECONDS = 2.0  # between the signs of life of workers and of agents


class Report(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag=True):
    """What a worker says."""

    generation: int
    process: int


class Hello(Report, frozen=True, tag="hello"):
    """First message of a worker; answered by Setup, once process 0 has said where jax.distributed will be."""

    version: int = PROTOCOL_VERSION
    jax_port: int = 0  # free on the host of process 0, which is the one that says it


class Beat(Report, frozen=True, tag="beat"):
    """The worker's process is alive; sent every BEAT_SECONDS over a connection of its own."""

    sequence: int | None  # of the command that it is carrying out
    programs: CompileReport | None = None  # from process 0 only


class Progress(Report, frozen=True, tag="progress"):
    """What the worker is busy with; empty when it is back to running commands."""

    message: str  # "loading weights 45 %", "compiling forward_backward 8x256"


class Ready(Report, frozen=True, tag="ready"):
    """The worker has its weights and runs commands from now on."""

    device: str  # "8 x cpu"
    plan: MemoryPlan


class Reply(Report, frozen=True, tag="reply"):
    """A command was executed. Arrays and metrics come from process 0 only."""

    sequence: int
    arrays: dict[str, np.ndarray] = {}
    metrics: dict[str, float] = {}


class Written(Report, frozen=True, tag="written"):
    """The files of a Snapshot are complete, or could not be written. From process 0 only."""

    path: str
    error: str | None = None


class Compiled(Report, frozen=True, tag="compiled"):
    """A program that was ordered with Compile is ready, or could not be compiled."""

    number: int  # of the order
    seconds: float = 0.0
    error: str | None = None


class CustomLossNews(Report, frozen=True, tag="custom_loss_news"):
    """What becomes of a CustomLoss: "compiling custom loss 'mine', piece 2 of 5". From process 0 only."""

    number: int
    doing: str


class CustomLossEnd(Report, frozen=True, tag="custom_loss_end"):
    """A CustomLoss has been run, or why not. From process 0 only. D datums, M metrics.

    ``arrays`` are losses float64 [D], metrics float64 [D, M], and gradients float32: those of the losses with
    respect to the logprobs, laid out like them.
    """

    number: int
    arrays: dict[str, np.ndarray] = {}
    problem: str | None = None
    is_given_up: bool = False  # it should not be tried again
    is_ours: bool = False  # the problem is no fault of the loss


class Failure(Report, frozen=True, tag="failure"):
    """The worker ends itself because of an exception."""

    message: str
    traceback: str
    sequence: int | None = None  # of the command that was being carried out
    is_consequence: bool = False  # it only follows from the loss of another worker
    is_final: bool = False  # it will not go away until the operator changes something


def in_frames(report: bytes) -> list[memoryview]:
    """An encoded report as the frames of one message.

    The coordinator takes no longer frame from anybody: whoever reaches its port can make it take one, before
    it is known who they are.
    """
    whole = memoryview(report)
    return [whole[at : at + FRAME_BYTES] for at in range(0, len(report), FRAME_BYTES)] or [whole]


AnyReport = (
    Hello | Beat | Progress | Ready | Reply | Written | Compiled | CustomLossNews | CustomLossEnd | Failure
)
