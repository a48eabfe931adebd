"""Finds the cause of a lost generation among its signs: which worker, where, and whose fault. Pure."""

import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum

from spmd_tx.coordinator.agent.worker_process import WorkerExit
from spmd_tx.protocol.reports import Failure

FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM)  # sent by an operator or a job scheduler

EXCEPTION = 1  # exit code of a worker that has sent a Failure

# JAX says this when it ends a process whose peer is gone.
PEER_IS_GONE = "the JAX distributed service detected fatal errors"

OUT_OF_MEMORY = (
    "A device has no memory left: lower --train-tokens if it was training, else --decode-rows or "
    "--kv-cache-tokens; --max-lora-adapters, --max-lora-rank and --sampler-slots make room, too"
)

OUT_OF_HOST_MEMORY = (
    "its host or container has no memory left, and the kernel killed it: give it more, or leave less to "
    "others; fewer --max-lora-adapters and a smaller --max-lora-rank take less, and so does --warm-up off"
)


class Suspicion(IntEnum):
    """Ranks signs. When workers end together, the sign with the lowest rank is the cause of the others."""

    FAULT = 0  # of the coordinator itself, while it worked on known requests
    KILLED = 1
    HOST_GONE = 2
    FAILED = 3
    SILENT = 4
    LATE = 5
    EXITED = 6
    FOLLOWED = 7


@dataclass(frozen=True)
class LossSign:
    """Holds one sign that a generation is lost."""

    suspicion: Suspicion
    worker: int
    text: str
    by_command: bool  # whether the command may be the cause
    sequence: int | None = None  # of that command, where it is known more exactly than from the replies
    last_lines: tuple[str, ...] = ()
    is_final: bool = False  # it would happen again, whatever the requests
    orders: Collection[int] | None = ()  # compile orders, one of which may be the cause; None: any may be
    was_announced: bool = False  # by the agent, which had to leave
    is_explained: bool = False  # by the worker itself, in a Failure that may still be on its way


@dataclass(frozen=True)
class GenerationLoss:
    """Says why a generation ended."""

    cause: LossSign
    message: str  # "worker 1 on node-b was killed by signal 9 (SIGKILL), during command 17 (optim_step)"

    @property
    def story(self) -> str:
        """The message with the worker's last lines."""
        words = " | ".join(self.cause.last_lines)
        return f"{self.message}; its last words: {words}" if words else self.message


def of_exit(exit: WorkerExit, host: str) -> LossSign:
    number = -exit.code
    follows = any(PEER_IS_GONE in line for line in exit.last_lines)
    if follows:
        suspicion = Suspicion.FOLLOWED
    elif number > 0 and number != signal.SIGABRT:  # libraries may abort because their peer is gone
        suspicion = Suspicion.KILLED
    else:
        suspicion = Suspicion.EXITED
    is_starved = number == signal.SIGKILL and exit.is_out_of_memory
    text = str(exit).replace(f"worker {exit.worker} ", f"worker {exit.worker} on {host} ", 1)
    if is_starved:
        text += f": {OUT_OF_HOST_MEMORY}"
    return LossSign(
        suspicion,
        exit.worker,
        text,
        by_command=exit.code != 0 and (is_starved or number not in FROM_OUTSIDE) and not follows,
        last_lines=exit.last_lines,
        orders=None,
        is_explained=exit.code == EXCEPTION,
    )


def of_failure(failure: Failure, host: str) -> LossSign:
    remedy = f". {OUT_OF_MEMORY}" if "RESOURCE_EXHAUSTED" in failure.message else ""
    return LossSign(
        Suspicion.FOLLOWED if failure.is_consequence else Suspicion.FAILED,
        failure.process,
        f"worker {failure.process} on {host} failed: {failure.message}{remedy}",
        by_command=not failure.is_consequence,
        sequence=failure.sequence,
        is_final=failure.is_final,
    )


def of_agent(worker: int, host: str, what: str) -> LossSign:
    return LossSign(
        Suspicion.HOST_GONE, worker, f"the agent of worker {worker} on {host} {what}", by_command=False
    )


def cause(signs: Sequence[LossSign]) -> LossSign:
    """The sign that explains the others: the first of the lowest rank."""
    return min(signs, key=lambda sign: sign.suspicion)
