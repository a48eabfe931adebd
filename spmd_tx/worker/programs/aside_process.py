"""The child process that compiles ahead of need (aside.py); it ends with its worker."""

import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import jax

from spmd_tx.models.config import model_of
from spmd_tx.processes.orders import orders_from
from spmd_tx.protocol.programs import ProgramShape
from spmd_tx.sharding.mesh import make_mesh
from spmd_tx.worker.memory.decide import compute_dtype
from spmd_tx.worker.memory.refusal import make_plan
from spmd_tx.worker.memory.sizes import Sizes
from spmd_tx.worker.programs.aside_messages import Answer, Begin, Made, encode, read_begin, read_order
from spmd_tx.worker.programs.examples import menu_of
from spmd_tx.worker.programs.store import ProgramStore
from spmd_tx.worker.programs.surroundings import surroundings

BEGUN = b""  # the first message; the process ends with its parent from now on


class Compiler:
    """Compiles programs from abstract arguments, as the worker would, and writes them into its store.

    Raises ValueError if anything that programs depend on differs from the worker's.
    """

    def __init__(self, begin: Begin) -> None:
        for name, value in begin.settings.items():
            if jax.config.values[name] != value:
                jax.config.update(name, value)
        # A program from JAX's cache could not be stored.
        jax.config.update("jax_enable_compilation_cache", False)
        setup = begin.setup
        model = model_of(setup)
        self._mesh = mesh = make_mesh(setup.fsdp, setup.ep, setup.tp)
        plan = make_plan(Sizes(setup, model, mesh, compute_dtype(setup)), begin.memory)
        here = surroundings(plan, mesh)
        if here != begin.surroundings:
            raise ValueError(f"the worker differs: {_difference(here, begin.surroundings)}")
        self._menu = menu_of(plan, mesh)
        self._store = ProgramStore(Path(setup.compilation_cache), here, mesh)

    def compile(self, program: ProgramShape) -> Iterator[Made]:
        """Compile what a command of this shape calls, unless it is in the store."""
        for call in self._menu.calls(program):
            if self._store.has(call):
                continue
            began = time.monotonic()
            self._store.save(call, call.step.lower(*call.abstract(self._mesh)).compile())
            yield Made(name=call.name, seconds=time.monotonic() - began)


def main(descriptor: int) -> None:
    """Compile what is ordered until the worker is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the coordinator
    pipe = Connection(descriptor)
    pipe.send_bytes(BEGUN)
    orders = orders_from(pipe)
    begin = read_begin(orders.get())
    compiler: Compiler | None = None
    while True:
        program = read_order(orders.get())
        try:
            compiler = compiler or Compiler(begin)
            answer = Answer(made=tuple(compiler.compile(program)))
        except Exception as problem:  # whatever it is, the worker compiles the program itself
            answer = Answer(problem=f"{type(problem).__name__}: {problem}")
        with suppress(BrokenPipeError):  # the worker is gone, and the reading thread ends this process
            pipe.send_bytes(encode(answer))


def _difference(here: str, there: str) -> str:
    pairs = zip(here.splitlines(), there.splitlines(), strict=False)
    return next((f"{one!r} instead of {other!r}" for one, other in pairs if one != other), "more of them")
