"""The programs of a server that trains all weights, and examples to compile them ahead of need."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_tx.protocol import commands
from spmd_tx.protocol.programs import ProgramShape
from spmd_tx.worker.memory.plan import Plan
from spmd_tx.worker.programs.call import Call
from spmd_tx.worker.programs.calls import Calls, adamw_inputs
from spmd_tx.worker.programs.examples import Menu
from spmd_tx.worker.state import WorkerState, declare
from spmd_tx.worker.steps.full import (
    make_full_forward,
    make_full_forward_backward,
    make_full_optim_step,
    make_publish,
)

SHARED = "optim_step", "forward", "forward_backward", "prefill", "decode"  # with a server of adapters


class FullCalls(Calls):
    """Makes the calls of steps that train all weights; those of samplers are as with adapters."""

    def _make_training(self, mesh: Mesh, declared: WorkerState) -> None:
        model, kernels = self._model, self._setup.kernels
        where = (model, mesh, declared.base, declared.train)
        self._forward = make_full_forward(*where, kernels=kernels)
        self._forward_backward = {
            level: make_full_forward_backward(*where, level, kernels=kernels) for level in self._plan.levels
        }
        self._optim_step = make_full_optim_step(model, mesh, declared.train)
        self._publish = make_publish(mesh, declared.base)
        self._whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))

    def optim_step(self, state: WorkerState, command: commands.OptimStep) -> Call:
        rest = (adamw_inputs(command),)
        return Call("optim_step", (), self._optim_step, (state.train,), rest=rest)

    def publish(self, state: WorkerState) -> Call:
        """Round the weights to a copy for samplers."""
        return Call("publish", (), self._publish, (state.train.w,))

    def whole(self, number: int, array: Array) -> Call:
        """Gather one array on every device; ``number`` is its place in the model."""
        return Call("whole", (number,), self._whole, (array,), variant=number)

    def _differentiated(self, state: WorkerState) -> tuple[Any, ...]:
        return state.train.w, state.train.grad_sum

    def _evaluated(self, state: WorkerState) -> tuple[Any, ...]:
        return (state.train.w,)


class FullMenu(Menu):
    """Makes calls with abstract arrays, as Menu does."""

    _calls: FullCalls

    def calls(self, shape: ProgramShape) -> Sequence[Call]:
        """Return the calls of a command of this shape; most of those that move weights have no program."""
        if shape.step == "save_sampler":
            return [self._calls.publish(self._state)]
        return super().calls(shape) if shape.step in SHARED else []


def menu_of(plan: Plan, mesh: Mesh) -> Menu:
    """Return the menu of an engine with this plan."""
    declared, setup = declare(plan), plan.sizes.setup
    if setup.full_copies:
        return FullMenu(plan, mesh, declared, FullCalls(plan, setup, mesh, declared))
    return Menu(plan, mesh, declared, Calls(plan, setup, mesh, declared))
