"""Carries out the commands of protocol/commands.py: host arrays in, device steps, arrays out."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, assert_never

import jax
import msgspec
import numpy as np
from jax.sharding import Mesh

from spmd_tx.models.config import model_of
from spmd_tx.protocol.commands import (
    AnyCommand,
    Compile,
    CustomLoss,
    Decode,
    DimuonStep,
    Drop,
    EncodeImages,
    Forward,
    ForwardBackward,
    Move,
    OptimStep,
    Prefill,
    Shutdown,
)
from spmd_tx.protocol.memory_plan import MemoryPlan
from spmd_tx.protocol.reports import Written
from spmd_tx.protocol.setup import Setup
from spmd_tx.sharding.mesh import make_mesh, platform
from spmd_tx.worker.accelerator import keep_float32
from spmd_tx.worker.blocks import Joined, joined
from spmd_tx.worker.custom_loss.lanes import ChildProcess, LossLanes
from spmd_tx.worker.kernel_choices import agreed, identity_of_choices
from spmd_tx.worker.memory.decide import plan_memory
from spmd_tx.worker.memory.plan import Plan, report
from spmd_tx.worker.numerics import numerics
from spmd_tx.worker.programs.adapters import AdapterPrograms
from spmd_tx.worker.programs.agreement import Agreement, everybodys, must_agree
from spmd_tx.worker.programs.aside import ahead_of_need
from spmd_tx.worker.programs.call import Call
from spmd_tx.worker.programs.calls import Calls
from spmd_tx.worker.programs.compiled import CompileOrder, Programs, compile_threads
from spmd_tx.worker.programs.examples import Menu
from spmd_tx.worker.programs.measurements import KeptMeasurements, measure
from spmd_tx.worker.state import WorkerState, allocate
from spmd_tx.worker.stores.adapters import AdapterStore
from spmd_tx.worker.stores.whole_models import ModelStore

# Of a reply, which the device may still be computing.
Arrays = Mapping[str, jax.Array | np.ndarray | Joined]
Result = tuple[Arrays, Mapping[str, Any]]  # with metrics
ReportAside = Callable[..., None]  # kind of report, and its fields; any thread may call it

NOTHING: Result = ({}, {})


class Engine:
    """Carries out commands on this worker's devices. All workers get the same ones, in the same order."""

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        declared: WorkerState,
        state: WorkerState,
        programs: Programs,
        report_aside: ReportAside,
    ) -> None:
        self.setup = setup = plan.sizes.setup
        self.model, self.mesh, self.state, self.programs = plan.sizes.model, mesh, state, programs
        self._plan, self.declared = plan, declared
        self._report_aside = report_aside
        self._calls = Calls(plan, mesh, declared)
        self._menu = Menu(self._calls)
        trained = self._calls.trained
        if isinstance(trained, AdapterPrograms):
            self.store = AdapterStore(trained, state, self._run, self._written)
        else:
            self.store = ModelStore(trained, state, self._run, self._written)
        start = partial(ChildProcess, setup.loss_memory_bytes, setup.compilation_cache)
        self._custom_losses = LossLanes(start, setup.loss_processes, report_aside)

    @classmethod
    def start(
        cls,
        setup: Setup,
        programs: Programs,
        progress: Callable[[str], None],
        report_aside: ReportAside = lambda kind, **fields: None,
    ) -> "Engine":
        """Load the base model and allocate everything else."""
        model = model_of(setup)
        mesh = make_mesh(setup.fsdp, setup.ep, setup.tp)
        keep_float32(setup.dtype, platform(mesh))
        if must_agree(mesh):
            # JAX's cache would give a program to some processes and let others compile it.
            jax.config.update("jax_enable_compilation_cache", False)
        setup = msgspec.structs.replace(setup, kernels=agreed(setup.kernels, platform(mesh)))
        if platform(mesh) == "gpu" and setup.kernel_choices:
            # Each process tries some of the kernels, and XLA gives the results to all.
            identity = identity_of_choices(Path(setup.kernel_choices))
            programs.kernels = "+".join(dict.fromkeys(everybodys("kernels", identity)))
        agreement, measures = None, measure
        if must_agree(mesh):
            agreement = Agreement()
            measures = KeptMeasurements(Path(setup.compilation_cache), mesh, agreement).measure
        plan = plan_memory(setup, model, mesh, progress, measures)
        programs.use(*ahead_of_need(plan, mesh), agreement)
        programs.compile_threads = compile_threads(platform(mesh), os.cpu_count() or 1)
        return cls(plan, mesh, *allocate(plan, progress), programs, report_aside)

    @property
    def plan(self) -> MemoryPlan:
        """The memory plan, for the coordinator."""
        return report(self._plan)

    @property
    def numerics(self) -> dict[str, str]:
        """What decides the bits of results, by name."""
        return numerics(self._plan, self.mesh, self.programs.kernels)

    @property
    def device(self) -> str:
        """The mesh's devices, and what attends on them if it is not the reference, as text."""
        kernels = self.setup.kernels
        tasks = [("attention", kernels.rows), ("paged attention", kernels.pages)]
        tasks += [("attention of images", kernels.images)]
        names = [f", {task} {name}" for task, name in tasks if name not in ("reference", "row_by_row")]
        return f"{self.mesh.size} x {self.mesh.devices.flat[0].device_kind}{''.join(names)}"

    def execute(self, command: AnyCommand) -> Result:
        """Carry out one command; Shutdown is the caller's to act on."""
        match command:
            case ForwardBackward():
                return self._forward_backward(command), {}
            case Forward():
                return self._forward(command), {}
            case OptimStep() | DimuonStep():
                self.state.train, metrics = self._run(self._calls.trained.optim_step(self.state, command))
                return {}, metrics
            case EncodeImages():
                images = self._run(self._calls.encode_images(self.state, command))
                self.state.base = self.state.base.replace(images=images)
                return NOTHING
            case Prefill():
                return self._prefill(self.store.for_programs(command)), {}
            case Decode():
                return self._decode(self.store.for_programs(command)), {}
            case CustomLoss():
                if jax.process_index() == 0:  # it runs there, beside the commands
                    self._custom_losses.submit(command)
                return NOTHING
            case Compile(program=program):
                calls = partial(self._menu.calls, program)
                order = CompileOrder(command.number, program, calls, is_hurried=command.is_hurried)
                self.programs.order(order, self.mesh, lane=command.lane, is_last=command.is_last)
                return NOTHING
            case Move():
                return {}, self.store.move(command)
            case Drop(places=places):
                self.store.drop(places)
                return NOTHING
            case Shutdown():
                return NOTHING
            case _:
                assert_never(command)

    def _forward_backward(self, command: ForwardBackward) -> Arrays:
        replies = []
        for call in self._calls.forward_backward(self.state, command):
            grad_sum, logprobs, losses = self._run(call)
            self.state.train = self.state.train.replace(grad_sum=grad_sum)
            replies.append({"logprobs": logprobs, "losses": losses})
        return joined(replies, self._plan.sizes.data_shards)

    def _forward(self, command: Forward) -> Arrays:
        outputs = map(self._run, self._calls.forward(self.state, command))
        replies = [{"logprobs": logprobs, "losses": losses} for logprobs, losses in outputs]
        return joined(replies, self._plan.sizes.data_shards)

    def _prefill(self, command: Prefill) -> Arrays:
        moves, replies = command.states, list[dict[str, Any] | None]()
        if moves is not None:
            self._copy(self._calls.copy_pages, moves.page_copies)
            self._copy(self._calls.copy_states, moves.copies_before)
        for call in self._calls.prefill(self.state, command):
            if call is None:
                replies.append(None)
                continue
            self.state.cache, scores, experts = self._run(call)
            replies.append(_present(**scores, experts=experts))
        self._copy(self._calls.copy_pages, command.copies)
        if moves is not None:
            self._copy(self._calls.copy_states, moves.copies_after)
        pieces = command.rows.tokens.shape[1] // command.piece if command.piece else 1
        return joined(replies, self._plan.sizes.data_shards, pieces=pieces)

    def _decode(self, command: Decode) -> Arrays:
        state, replies = self.state, list[dict[str, Any]]()
        for call in self._calls.place_tables(state, command):
            state.tables = self._run(call)
        for call in self._calls.decode(state, command):
            state.cache, state.next_rows, drawn = self._run(call)
            replies.append(_present(**vars(drawn)))
        state.rows, state.next_rows = state.next_rows, state.rows
        return joined(replies, self._plan.sizes.data_shards, axis=1)

    def _copy(self, call: Callable[[WorkerState, np.ndarray], Call], copies: np.ndarray) -> None:
        """Copy pages, or states, if there are any."""
        if copies.any():
            self.state.cache = self._run(call(self.state, copies))

    def _run(self, call: Call) -> Any:
        return self.programs.run(call, self.mesh)

    def _written(self, path: str, problem: str | None) -> None:
        if jax.process_index() == 0:
            self._report_aside(Written, path=path, error=problem)


def _present(**arrays: Any) -> dict[str, Any]:
    return {name: array for name, array in arrays.items() if array is not None}
