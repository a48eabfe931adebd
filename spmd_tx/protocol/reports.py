"""The messages from workers: their progress, and the results of commands."""

import msgspec
import numpy as np

from spmd_tx.protocol.memory_plan import MemoryPlan
from spmd_tx.protocol.programs import CompileReport

PROTOCOL_VERSION = 27  # of commands and reports

FRAME_BYTES = 256 << 10  # of a report; longer ones come in several frames
BEAT_SECONDS = 2.0  # between the heartbeats of workers and of agents


class Report(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag=True):
    """Base of what a worker reports."""

    generation: int
    process: int


class Hello(Report, frozen=True, tag="hello"):
    """Opens a connection. Setup answers it, once process 0 has said where jax.distributed will be."""

    version: int = PROTOCOL_VERSION
    jax_port: int = 0  # a free port on the host of process 0; other processes leave it 0


class Beat(Report, frozen=True, tag="beat"):
    """Says that the worker's process is alive, every BEAT_SECONDS over a connection of its own."""

    sequence: int | None  # of the command that it is carrying out
    programs: CompileReport | None = None  # from process 0 only


class Progress(Report, frozen=True, tag="progress"):
    """Says what the worker is busy with; the message is empty when it runs commands again."""

    message: str  # "loading weights 45 %", "compiling forward_backward 8x256"


class Ready(Report, frozen=True, tag="ready"):
    """Says that the worker has its weights and runs commands from now on."""

    device: str  # "8 x cpu"
    plan: MemoryPlan
    kernels: str = ""  # which choices of kernels, made by trying them, programs are compiled with; "": none
    compiles_aside: bool = False  # whether programs that nobody waits for are compiled at nobody's expense
    compile_threads: int = 1  # that may compile what nobody waits for at the same time, if not so
    numerics: dict[str, str] = {}  # what decides the bits of results, by name (worker/numerics.py)


class Reply(Report, frozen=True, tag="reply"):
    """Says that a command was executed. Arrays and metrics come from process 0 only."""

    sequence: int
    arrays: dict[str, np.ndarray] = {}
    metrics: dict[str, float] = {}
    # Why a Move was not carried out, for which nothing was changed: its folder has other weights than this
    # base model's, or is damaged. The same from all processes.
    refusal: str | None = None
    is_damage: bool = False  # of that folder


class Written(Report, frozen=True, tag="written"):
    """Says that the files of a Move are complete, or could not be written.

    From process 0 only.
    """

    path: str
    error: str | None = None


class Compiled(Report, frozen=True, tag="compiled"):
    """Says that a program ordered with Compile is ready, or could not be compiled."""

    number: int  # of the order
    seconds: float = 0.0
    error: str | None = None


class CustomLossNews(Report, frozen=True, tag="custom_loss_news"):
    """Says how far a CustomLoss is: "compiling custom loss 'mine', piece 2 of 5". From process 0 only."""

    number: int
    doing: str


class CustomLossEnd(Report, frozen=True, tag="custom_loss_end"):
    """Ends a CustomLoss with its results or a problem. From process 0 only. D datums, M metrics.

    ``arrays`` holds losses float64 [D], metrics float64 [D, M], and gradients float32, which are those of the
    losses with respect to the logprobs and have their layout.
    """

    number: int
    arrays: dict[str, np.ndarray] = {}
    problem: str | None = None
    is_given_up: bool = False  # whether it should not be tried again
    is_ours: bool = False  # whether the problem is the server's fault, not the loss's


class Failure(Report, frozen=True, tag="failure"):
    """Says that the worker ends because of an exception."""

    message: str
    traceback: str
    sequence: int | None = None  # of the command that was being carried out
    is_consequence: bool = False  # whether it only follows from the loss of another worker
    is_final: bool = False  # whether it will happen again until the operator changes something


def in_frames(report: bytes) -> list[memoryview]:
    """Split an encoded report into the frames of one message.

    The coordinator refuses longer frames: anyone who reaches its port can make it read one frame before they
    are authenticated.
    """
    whole = memoryview(report)
    return [whole[at : at + FRAME_BYTES] for at in range(0, len(report), FRAME_BYTES)] or [whole]


AnyReport = (
    Hello | Beat | Progress | Ready | Reply | Written | Compiled | CustomLossNews | CustomLossEnd | Failure
)
