"""The programs of adapters: training them, and moving them between places."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_tx.models.adapters import lora
from spmd_tx.protocol.commands import AdapterSpec, DimuonStep, OptimStep
from spmd_tx.protocol.places import PAIRS, BankSlot, Form, Fresh, MoveStep, Slot, TrainSlot
from spmd_tx.sharding.weight import abstract
from spmd_tx.worker.memory.plan import Plan
from spmd_tx.worker.programs.call import Call, int32
from spmd_tx.worker.state import WorkerState
from spmd_tx.worker.steps.adamw import ADAMW
from spmd_tx.worker.steps.adapters import make_adapter_steps, one_adapter, slot_weights
from spmd_tx.worker.steps.dimuon import DIMUON
from spmd_tx.worker.steps.optimizer import UpdateRule, make_optim_step
from spmd_tx.worker.steps.swap import make_page_in, make_swap_steps, vector
from spmd_tx.worker.steps.train import make_forward, make_forward_backward

# The optimizers that adapters can have, by the command of their steps.
OPTIMIZERS: Mapping[Any, UpdateRule] = {OptimStep: ADAMW, DimuonStep: DIMUON}


class AdapterPrograms:
    """Makes the calls of steps that train and move adapters. ``state`` is the worker's, or abstract."""

    def __init__(self, plan: Plan, mesh: Mesh, declared: WorkerState) -> None:
        self.setup, self.model, self.mesh, self.declared = plan.sizes.setup, plan.sizes.model, mesh, declared
        model, kernels = self.model, self.setup.kernels
        training = (model, mesh, declared.base, declared.train)
        self.forward = make_forward(*training, kernels=kernels)
        self.forward_backward = {
            level: make_forward_backward(*training, level, kernels=kernels) for level in plan.levels
        }
        self._optim_steps = {
            command: make_optim_step(model, mesh, declared.train, optimizer)
            for command, optimizer in OPTIMIZERS.items()
        }
        self._adapters = make_adapter_steps(model, mesh, declared.train, declared.bank)
        self._swap = make_swap_steps(mesh, declared.train)
        self._page_out = make_swap_steps(mesh, declared.bank.w).out
        self._page_in = make_page_in(mesh, declared.bank)
        self._gather = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))

    def evaluated(self, state: WorkerState) -> tuple[Any, ...]:
        """Return the arrays of ``forward``."""
        return state.base, state.train.w, state.train.scale

    def differentiated(self, state: WorkerState) -> tuple[Any, ...]:
        """Return the arrays of ``forward_backward``."""
        train = state.train
        return state.base, train.w, train.grad_sum, train.scale

    def optim_step(self, state: WorkerState, command: OptimStep | DimuonStep) -> Call:
        kind = type(command)
        rest = (int32(command.slot), OPTIMIZERS[kind].inputs(self.model, command))
        return Call(command.name, (), self._optim_steps[kind], (state.train,), rest=rest)

    def create(self, state: WorkerState, slot: int, seed: int, adapter: AdapterSpec) -> Call:
        """Fill a training slot with a fresh adapter."""
        seed_2 = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
        ranks = np.array([adapter.rank, lora.rank_in_experts(self.model, adapter.rank)], np.int32)
        groups = np.array([adapter.train_attn, adapter.train_mlp, adapter.train_unembed])
        rest = (int32(slot), seed_2, ranks, self._scale(adapter), groups)
        return Call("create_adapter", (), self._adapters.create, (state.train,), rest=rest)

    def read(self, state: WorkerState, place: Slot, form: Form) -> Call:
        """Copy what a slot has."""
        call = partial(Call, shape=(), rest=(int32(place.slot),))
        match place, form:
            case TrainSlot(), "state":
                return call("read_adapter", step=self._adapters.read, state=(state.train,))
            case TrainSlot(), "weights":
                return call("weights_of_slot", step=self._adapters.weights_of, state=(state.train.w,))
            case TrainSlot(), "bits":
                return call("swap_out", step=self._swap.out, state=(state.train,))
            case BankSlot(), "weights":
                return call("weights_of_bank", step=self._adapters.weights_of, state=(state.bank.w,))
            case BankSlot(), "bits":
                return call("page_out", step=self._page_out, state=(state.bank.w,))
            case _:
                raise AssertionError(f"{place} has no {form}")

    def write(
        self, state: WorkerState, place: Slot, form: Form, content: Any, adapter: AdapterSpec | None
    ) -> Call:
        """Fill a slot with what ``read`` has returned, or with an adapter from a folder."""
        call, slot = partial(Call, shape=()), int32(place.slot)
        train, bank = (state.train, content), (state.bank, content)
        if isinstance(place, TrainSlot) and form == "bits":  # the scale is among them
            return call("swap_in", step=self._swap.back, state=train, rest=(slot,))
        assert adapter is not None
        rest = slot, self._scale(adapter)
        match place, form:
            case TrainSlot(), "state":
                return call("write_adapter", step=self._adapters.write, state=train, rest=rest)
            case BankSlot(), "weights":
                return call("to_bank", step=self._adapters.to_bank, state=bank, rest=rest)
            case BankSlot(), "bits":
                return call("page_in", step=self._page_in, state=bank, rest=rest)
            case _:
                raise AssertionError(f"{place} takes no {form}")

    def gather(self, one: Any) -> Call:
        """Copy an adapter to every device, so that process 0 can write it."""
        return Call("gather", (), self._gather, (one,))

    def moves(self, step: MoveStep, state: WorkerState) -> list[Call]:
        """Return the calls of a move, with abstract arrays."""
        (source, target), pair = next(each for each in PAIRS.items() if each[1].step == step)
        adapter, form, calls = AdapterSpec(rank=self.setup.max_rank), pair.carries, list[Call]()
        if source is Fresh:
            return [self.create(state, 0, 0, adapter)]
        if source in (TrainSlot, BankSlot):
            calls.append(self.read(state, source(0), form))
        if target in (TrainSlot, BankSlot):
            calls.append(self.write(state, target(0), form, self.like(target, form), adapter))
        if source in (TrainSlot, BankSlot) and form == "weights" and jax.process_count() > 1:
            calls.append(self.gather(self.like(source, form)))
        return calls

    def like(self, place: type[Slot], form: Form) -> Any:
        """Return abstract arrays like those that ``write`` puts into a slot."""
        train, bank = self.declared.train, self.declared.bank
        match form:
            case "state":
                return abstract(self.mesh, slot_weights(train))
            case "weights":
                return abstract(self.mesh, one_adapter(train.w))
            case "bits":
                return abstract(self.mesh, vector(train if place is TrainSlot else bank.w, self.mesh))

    def _scale(self, adapter: AdapterSpec) -> np.ndarray:
        experts = adapter.expert_scale(self.model.expert_rank_divisor)
        return np.array([adapter.scale, experts], np.float32)
