"""The programs of whole models: training all weights, and copying them to samplers."""

from typing import Any

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_tx.protocol.commands import DimuonStep, OptimStep
from spmd_tx.protocol.places import MoveStep
from spmd_tx.worker.memory.plan import Plan
from spmd_tx.worker.programs.call import Call
from spmd_tx.worker.state import WorkerState
from spmd_tx.worker.steps.adamw import adamw_inputs
from spmd_tx.worker.steps.full import (
    make_full_forward,
    make_full_forward_backward,
    make_full_optim_step,
    make_publish,
)


class ModelPrograms:
    """Makes the calls of steps that train and move all weights. ``state`` is the worker's, or abstract."""

    def __init__(self, plan: Plan, mesh: Mesh, declared: WorkerState) -> None:
        self.setup, self.model, self.mesh, self.declared = plan.sizes.setup, plan.sizes.model, mesh, declared
        model, kernels = self.model, self.setup.kernels
        training = (model, mesh, declared.base, declared.train)
        self.forward = make_full_forward(*training, kernels=kernels)
        self.forward_backward = {
            level: make_full_forward_backward(*training, level, kernels=kernels) for level in plan.levels
        }
        self._optim_step = make_full_optim_step(model, mesh, declared.train)
        self._publish = make_publish(mesh, declared.base.trained)
        self._whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))

    def evaluated(self, state: WorkerState) -> tuple[Any, ...]:
        """Return the arrays of ``forward``."""
        return state.train.w, state.base.images

    def differentiated(self, state: WorkerState) -> tuple[Any, ...]:
        """Return the arrays of ``forward_backward``."""
        return state.train.w, state.train.grad_sum, state.base.images

    def optim_step(self, state: WorkerState, command: OptimStep | DimuonStep) -> Call:
        assert isinstance(command, OptimStep), "Dimuon is for adapters"
        return Call(
            "optim_step", (), self._optim_step, (state.train,), rest=(adamw_inputs(self.model, command),)
        )

    def publish(self, state: WorkerState) -> Call:
        """Round the weights to a copy for samplers."""
        return Call("publish", (), self._publish, (state.train.w,))

    def whole(self, number: int, array: Array) -> Call:
        """Gather one array on every device; ``number`` is its place in the model."""
        return Call("whole", (number,), self._whole, (array,), variant=number)

    def moves(self, step: MoveStep, state: WorkerState) -> list[Call]:
        """Return the calls of a move, with abstract arrays; most moves have no program."""
        return [self.publish(state)] if step == "save_sampler" else []
