"""A child process for custom losses, so that their memory, their time and their failures spare the worker.

It carries out one order at a time. The worker kills it when it takes too long; it exits with the worker.
"""

import gc
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import jax
import numpy as np

from spmd_tx.processes.modest import be_modest
from spmd_tx.processes.orders import orders_from
from spmd_tx.processes.parent import end_with
from spmd_tx.protocol.encoding import encode
from spmd_tx.worker.custom_loss.interpret import inputs_of
from spmd_tx.worker.custom_loss.messages import (
    Close,
    LossAnswer,
    LossCompiled,
    LossCompiling,
    LossFailed,
    LossOrder,
    LossRefused,
    Open,
    Opened,
    Take,
    Taken,
    Up,
    read_order,
)
from spmd_tx.worker.custom_loss.run import CustomLosses, OpenLoss
from spmd_tx.worker.custom_loss.values import LossProblem

NO_MEMORY = (
    "loss {name} needs more memory on these datums than a custom loss may take (the limit "
    "custom_loss_memory_bytes). Send shorter datums, or keep its values smaller"
)


class LossProcess:
    """Carries out orders on the open losses of this process."""

    def __init__(self, tell: Callable[[LossAnswer], None]) -> None:
        self._tell = tell
        self._losses = CustomLosses()
        self._open: dict[int, OpenLoss] = {}

    def follow(self, order: LossOrder) -> None:
        match order:
            case Open(job=job, command=command):
                opened = self._losses.open(command.definition, inputs_of(command), command.limits)
                self._open[job] = opened
                self._tell(Opened(job=job, pieces=len(opened.pieces)))
            case Take(job=job, piece=piece):
                self._tell(self._taken(job, piece))
            case Close(job=job):
                self._open.pop(job, None)

    def name_of(self, order: LossOrder) -> str:
        return repr(self._open[order.job].loss.name) if order.job in self._open else "this"

    def _taken(self, job: int, number: int) -> Taken:
        opened = self._open[job]
        piece = opened.pieces[number]
        if not piece.is_compiled:
            self._tell(LossCompiling(job=job))
            opened.compile(piece)
            self._tell(LossCompiled(job=job))
        results = opened.run(piece)
        return Taken(
            job=job,
            datums=np.array(piece.datums, np.int64),
            losses=results.losses_D,
            metrics=results.metrics_DM,
            gradients=np.concatenate([gradient.ravel() for gradient in results.gradients]),
        )


def main(descriptor: int, memory_bytes: int, compilation_cache: str, parent: int) -> None:
    """Follow orders until there are no more, or the process ``parent`` is gone."""
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the coordinator
    be_modest()
    _configure_jax(compilation_cache)
    pipe = Connection(descriptor)
    orders = orders_from(pipe)

    def tell(answer: LossAnswer) -> None:
        with suppress(BrokenPipeError):  # the worker is gone, and the reading thread ends this process
            pipe.send_bytes(encode(answer))

    process = LossProcess(tell)
    jax.devices()
    _limit_memory(memory_bytes)
    tell(Up())
    while True:
        order = read_order(orders.get())
        try:
            process.follow(order)
        except LossProblem as problem:
            tell(LossRefused(job=order.job, problem=str(problem)))
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            is_memory = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
            problem = LossRefused(job=order.job, problem=NO_MEMORY.format(name=process.name_of(order)))
            tell(problem if is_memory else LossFailed(job=order.job, traceback=traceback.format_exc()))
        except Exception:  # whatever it is, it is reported, and other losses go on
            tell(LossFailed(job=order.job, traceback=traceback.format_exc()))
        del order
        gc.collect(0)


def _limit_memory(most: int) -> None:
    """Limit memory to ``most`` bytes beyond what Python and JAX take, which grows with the CPUs."""
    if sys.platform != "linux":
        return
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    most += int(status["VmData"].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _configure_jax(compilation_cache: str) -> None:
    """Configure JAX as worker/main.py does, on the CPU, with a cache of programs for later processes."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_compilation_cache_dir", compilation_cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
