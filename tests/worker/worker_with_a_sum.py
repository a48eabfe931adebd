"""A worker process whose engine adds numbers over all devices of the mesh, and fails when told to.

Decode's ``steps`` is the number that every device brings. Moves to and from state folders keep a slot with
Orbax. A fresh adapter fails: with seed 1 by an exception, with seed 2 by an error of ours, with seed 3 like a
collective whose peer is gone.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_tx.errors import StartError
from spmd_tx.models.adapters.lora import Adapters, Lora
from spmd_tx.protocol.memory_plan import MemoryPlan
from spmd_tx.protocol.reports import Written
from spmd_tx.sharding.mesh import AXES, make_mesh
from spmd_tx.worker.main import main
from spmd_tx.worker.programs.compiled import Call
from spmd_tx.worker.storage.checkpoints import SlotState, restore_state, save_state, write_in_background

PLAN = MemoryPlan(pages=5, train_tokens=64, decode_rows=2)


class SumEngine:
    plan = PLAN

    def __init__(self, setup, programs, report_aside):
        self.report_aside = report_aside
        self.numerics = {"dtype": "float32"}
        self.mesh = make_mesh(setup.fsdp, setup.ep, setup.tp)
        self.device = f"{self.mesh.size} x {jax.devices()[0].platform}"
        self.programs = programs
        self.sum = jax.jit(jnp.sum, out_shardings=NamedSharding(self.mesh, P()))
        self.slot = None

    @classmethod
    def start(cls, setup, programs, progress, report_aside):
        progress("loading weights 50 %")
        return cls(setup, programs, report_aside)

    def execute(self, command):
        return getattr(self, command.name)(command)

    def one_per_device(self, value):
        sharding = NamedSharding(self.mesh, P(AXES))
        return jax.make_array_from_callback(
            (self.mesh.size,), sharding, lambda _: np.array([value], np.int32)
        )

    def decode(self, command):
        call = Call("sum", (self.mesh.size,), self.sum, (self.one_per_device(command.steps),))
        return {"sum": self.programs.run(call, self.mesh)}, {}

    def create_adapter(self, command):
        if command.source.seed == 1:
            raise ZeroDivisionError("on purpose")
        if command.source.seed == 3:
            gone = "UNKNOWN: [gloo/transport/tcp/pair.cc:534] Connection closed by peer"
            raise jax.errors.JaxRuntimeError(gone)
        raise StartError("the weights are not there")

    def save_state(self, command):
        sharding = NamedSharding(self.mesh, P(None, AXES))
        value = jax.make_array_from_callback(
            (4, 16), sharding, lambda index: np.arange(64, dtype=np.float32).reshape(4, 16)[index]
        )
        self.slot = SlotState(*[Adapters({}, Lora(value, value))] * 3, self.sum(self.one_per_device(1)))
        save_state(Path(command.target.path), self.slot, rank=3)
        return {}, {}

    def load_state(self, command):
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.slot)
        slot = restore_state(Path(command.source.path), like, command.with_optimizer)
        fresh = restore_state(Path(command.source.path), like, False)
        total = self.sum(slot.w.head.a) + self.sum(slot.nu.head.b) + self.sum(fresh.mu.head.a)
        return {}, {"sum": total, "step": slot.step, "fresh_step": fresh.step}

    def snapshot(self, command):
        write_in_background(Path(command.target.path), self.slot, 3, self.written)
        return {}, {}

    def written(self, path, problem):
        if jax.process_index() == 0:
            self.report_aside(Written, path=path, error=problem)

    def shutdown(self, command):
        return {}, {}


def run(*arguments):
    """Run a worker. An exception has the hook and the exit code that it has in a main program."""
    try:
        sys.exit(main(list(arguments), SumEngine.start))
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
