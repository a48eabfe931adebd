"""The commands of protocol/commands.py as methods: host arrays in, device steps, arrays out."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
from jax.sharding import Mesh

from spmd_tx.models.adapter_formats import peft
from spmd_tx.models.adapters.lora import Adapters
from spmd_tx.models.config import read_model_config
from spmd_tx.protocol import commands
from spmd_tx.protocol.commands import AdapterSpec
from spmd_tx.protocol.memory_plan import MemoryPlan
from spmd_tx.protocol.setup import Setup
from spmd_tx.sharding.mesh import make_mesh, platform
from spmd_tx.sharding.transfer import to_devices
from spmd_tx.sharding.weight import abstract, shardings
from spmd_tx.worker.accelerator import keep_float32
from spmd_tx.worker.blocks import joined
from spmd_tx.worker.custom_loss.lanes import ChildProcess, LossLanes
from spmd_tx.worker.idle_adapters import IdleAdapters, place_of
from spmd_tx.worker.kernel_choices import agreed, identity_of_choices
from spmd_tx.worker.memory.decide import plan_memory
from spmd_tx.worker.memory.host import idle_budget
from spmd_tx.worker.memory.plan import Plan, report
from spmd_tx.worker.programs.agreement import Agreement, everybodys, must_agree
from spmd_tx.worker.programs.aside import ahead_of_need
from spmd_tx.worker.programs.call import Call
from spmd_tx.worker.programs.calls import Calls
from spmd_tx.worker.programs.compiled import Order, Programs, compile_threads
from spmd_tx.worker.programs.examples import Menu
from spmd_tx.worker.programs.measurements import KeptMeasurements
from spmd_tx.worker.state import WorkerState, allocate
from spmd_tx.worker.steps.adapters import one_adapter, slot_weights
from spmd_tx.worker.storage.checkpoints import (
    OnEnd,
    fresh_state,
    restore_state,
    save_state,
    write_in_background,
)
from spmd_tx.worker.storage.folder_writer import FolderWriter

Result = tuple[dict[str, Any], dict[str, Any]]  # arrays and metrics; may still be on the device


class Engine:
    """Carries out commands on this worker's devices. All workers call the same methods in the same order."""

    CALLS, MENU = Calls, Menu

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        declared: WorkerState,
        state: WorkerState,
        programs: Programs,
    ) -> None:
        self.setup = setup = plan.sizes.setup
        self.model, self.mesh, self.state, self.programs = plan.sizes.model, mesh, state, programs
        self._plan, self.declared = plan, declared
        self._calls = self.CALLS(plan, setup, mesh, declared)
        self._menu = self.MENU(plan, mesh, declared, self._calls)
        self.on_written: OnEnd = lambda path, problem: None
        self.report_aside: Callable[..., None] = lambda kind, **fields: None
        start = partial(ChildProcess, setup.loss_memory_bytes, setup.compilation_cache)
        self._custom_losses = LossLanes(
            start, setup.loss_processes, lambda kind, **fields: self.report_aside(kind, **fields)
        )
        place = place_of(Path(setup.idle_adapters), setup.generation, jax.process_index())
        budget = idle_budget(setup.num_processes)
        self._idle = IdleAdapters(place, budget)
        self._writer = FolderWriter(
            self._write_folder, budget // 4, lambda path, problem: self.on_written(path, problem)
        )

    @classmethod
    def start(cls, setup: Setup, programs: Programs, progress: Callable[[str], None]) -> "Engine":
        """Load the base model and allocate everything else."""
        model = read_model_config(
            Path(setup.model_dir), setup.expert_lora, setup.expert_weights, setup.base_dtype
        )
        mesh = make_mesh(setup.fsdp, setup.ep, setup.tp)
        keep_float32(setup.dtype, platform(mesh))
        if must_agree(mesh):
            # JAX's cache would give a program to some processes and let others compile it.
            jax.config.update("jax_enable_compilation_cache", False)
        setup = msgspec.structs.replace(setup, kernels=agreed(setup.kernels, platform(mesh)))
        if platform(mesh) == "gpu" and setup.kernel_choices:
            # Each process tries some of the kernels, and XLA gives the results to all.
            mine = identity_of_choices(Path(setup.kernel_choices))
            programs.kernels = "+".join(dict.fromkeys(everybodys("kernels", mine)))
        agreement, ways = None, dict[str, Any]()
        if must_agree(mesh):
            agreement = Agreement()
            ways["measure"] = KeptMeasurements(Path(setup.compilation_cache), mesh, agreement).measure
        plan = plan_memory(setup, model, mesh, progress, **ways)
        programs.use(*ahead_of_need(plan, mesh), agreement)
        programs.compile_threads = compile_threads(platform(mesh), os.cpu_count() or 1)
        return cls(plan, mesh, *allocate(plan, progress), programs)

    @property
    def plan(self) -> MemoryPlan:
        """The memory plan, for the coordinator."""
        return report(self._plan)

    @property
    def device(self) -> str:
        """The mesh's devices, and what attends on them if it is not the reference, as text."""
        kernels = self.setup.kernels
        names = [("attention", kernels.rows), ("paged attention", kernels.pages)]
        told = [f", {what} {name}" for what, name in names if name not in ("reference", "row_by_row")]
        return f"{self.mesh.size} x {self.mesh.devices.flat[0].device_kind}{''.join(told)}"

    def compile(self, command: commands.Compile) -> Result:
        calls = partial(self._menu.calls, command.program)
        order = Order(command.number, command.program, calls, is_hurried=command.is_hurried)
        self.programs.order(order, self.mesh, lane=command.lane, is_last=command.is_last)
        return {}, {}

    def create_adapter(self, command: commands.CreateAdapter) -> Result:
        self.state.train = self._run(self._calls.create_adapter(self.state, command))
        return {}, {}

    def forward_backward(self, command: commands.ForwardBackward) -> Result:
        replies = []
        for call in self._calls.forward_backward(self.state, command):
            grad_sum, logprobs, losses = self._run(call)
            self.state.train = self.state.train.replace(grad_sum=grad_sum)
            replies.append({"logprobs": logprobs, "losses": losses})
        return joined(replies, self._plan.sizes.data_shards), {}

    def forward(self, command: commands.Forward) -> Result:
        outputs = map(self._run, self._calls.forward(self.state, command))
        replies = [{"logprobs": logprobs, "losses": losses} for logprobs, losses in outputs]
        return joined(replies, self._plan.sizes.data_shards), {}

    def custom_loss(self, command: commands.CustomLoss) -> Result:
        """Start it on process 0 only, where it runs beside the commands."""
        if jax.process_index() == 0:
            self._custom_losses.submit(command)
        return {}, {}

    def optim_step(self, command: commands.OptimStep) -> Result:
        self.state.train, metrics = self._run(self._calls.optim_step(self.state, command))
        return {}, metrics

    def save_state(self, command: commands.SaveState) -> Result:
        slot = self._run(self._calls.read_adapter(self.state, command.slot))
        save_state(Path(command.path), slot, command.adapter.rank)
        return {}, {}

    def snapshot(self, command: commands.Snapshot) -> Result:
        slot = self._run(self._calls.read_adapter(self.state, command.slot))
        write_in_background(Path(command.path), slot, command.adapter.rank, self.on_written)
        return {}, {}

    def load_state(self, command: commands.LoadState) -> Result:
        like = abstract(self.mesh, slot_weights(self.declared.train))
        path = Path(command.path)
        if peft.is_folder(path):
            content = fresh_state(self._read_peft(path, command.adapter), like)
        else:
            content = restore_state(path, like, command.optimizer)
        call = self._calls.write_adapter(self.state, command.slot, content, command.adapter)
        self.state.train = self._run(call)
        return {}, {}

    def swap_out(self, command: commands.SwapOut) -> Result:
        vector = self._run(self._calls.swap_out(self.state, command.slot))
        return self._keep(of_model(command.model), vector)

    def swap_in(self, command: commands.SwapIn) -> Result:
        vector, is_from_disk = self._idle.take(of_model(command.model))
        self.state.train = self._run(self._calls.swap_in(self.state, command.slot, vector))
        return {}, {"from_disk": is_from_disk}

    def drop_swapped(self, command: commands.DropSwapped) -> Result:
        self._idle.drop(map(of_model, command.models))
        return {}, {}

    def save_sampler(self, command: commands.SaveSampler) -> Result:
        one = self._run(self._calls.weights_of_slot(self.state, command.slot))
        if command.bank >= 0:
            self._to_bank(one, command.bank, command.adapter)
        if command.path is not None:
            self._write_peft(one, command.path, command.adapter)
        return {}, {}

    def write_sampler(self, command: commands.WriteSampler) -> Result:
        one = self._run(self._calls.weights_of_bank(self.state, command.bank))
        self._write_peft(one, command.path, command.adapter)
        return {}, {}

    def page_out(self, command: commands.PageOut) -> Result:
        vector = self._run(self._calls.page_out(self.state, command.bank))
        return self._keep(of_version(command.version), vector)

    def page_in(self, command: commands.PageIn) -> Result:
        vector, is_from_disk = self._idle.take(of_version(command.version))
        self.state.bank = self._run(self._calls.page_in(self.state, vector, command.bank, command.adapter))
        return {}, {"from_disk": is_from_disk}

    def drop_paged(self, command: commands.DropPaged) -> Result:
        self._idle.drop(map(of_version, command.versions))
        return {}, {}

    def load_sampler(self, command: commands.LoadSampler) -> Result:
        one = self._read_peft(Path(command.path), command.adapter)
        self._to_bank(one, command.bank, command.adapter)
        return {}, {}

    def prefill(self, command: commands.Prefill) -> Result:
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
        return joined(replies, self._plan.sizes.data_shards, pieces=pieces), {}

    def decode(self, command: commands.Decode) -> Result:
        state, replies = self.state, list[dict[str, Any]]()
        for call in self._calls.place_tables(state, command):
            state.tables = self._run(call)
        for call in self._calls.decode(state, command):
            state.cache, state.next_rows, drawn = self._run(call)
            replies.append(_present(**vars(drawn)))
        state.rows, state.next_rows = state.next_rows, state.rows
        return joined(replies, self._plan.sizes.data_shards, axis=1), {}

    def _copy(self, call: Callable[[WorkerState, np.ndarray], Call], copies: np.ndarray) -> None:
        """Copy pages, or states, if there are any."""
        if copies.any():
            self.state.cache = self._run(call(self.state, copies))

    def _run(self, call: Call) -> Any:
        return self.programs.run(call, self.mesh)

    def _to_bank(self, one: Any, bank: int, adapter: AdapterSpec) -> None:
        self.state.bank = self._run(self._calls.to_bank(self.state, one, bank, adapter))

    def _keep(self, name: str, vector: Any) -> Result:
        self._idle.put(name, vector)
        return {}, {"host_bytes": self._idle.host_bytes, "disk_bytes": self._idle.disk_bytes}

    def _read_peft(self, path: Path, adapter: AdapterSpec) -> Adapters[jax.Array]:
        """Read an adapter in fp32 onto the devices, as one training slot is split."""
        host = peft.read(path, adapter, self.model, self.setup.max_rank)
        return jax.tree.map(to_devices, host, shardings(self.mesh, one_adapter(self.declared.train.w)))

    def _write_peft(self, one: Any, path: str, adapter: AdapterSpec) -> None:
        """Begin to write on process 0, which needs a whole copy of what several processes hold."""
        if jax.process_count() > 1:
            one = self._run(self._calls.gather(one))
        if jax.process_index() == 0:
            self._writer.submit(Path(path), one, adapter)

    def _write_folder(self, path: Path, one: Any, adapter: AdapterSpec) -> None:
        peft.write(path, one, adapter, self.model, self.setup.model_name)


def of_model(model: str) -> str:
    """Return the name of a model in idle memory."""
    return f"model {model}"


def of_version(version: str) -> str:
    """Return the name of a version in idle memory."""
    return f"version {version}"


def _present(**arrays: Any) -> dict[str, Any]:
    return {name: array for name, array in arrays.items() if array is not None}
