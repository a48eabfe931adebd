"""The single dispatch from a command to the engine's step for it."""

from collections.abc import Mapping
from typing import Any, Protocol, assert_never, runtime_checkable

import jax
import numpy as np

from spmd_tx.protocol.commands import (
    AnyCommand,
    Compile,
    CreateAdapter,
    CustomLoss,
    Decode,
    DropPaged,
    DropSwapped,
    Forward,
    ForwardBackward,
    LoadSampler,
    LoadState,
    OptimStep,
    PageIn,
    PageOut,
    Prefill,
    SaveSampler,
    SaveState,
    Shutdown,
    Snapshot,
    SwapIn,
    SwapOut,
    WriteSampler,
)
from spmd_tx.worker.blocks import Joined

# Arrays and metrics of a reply, which the device may still be computing.
Result = tuple[Mapping[str, jax.Array | np.ndarray | Joined], Mapping[str, Any]]

NOTHING: Result = ({}, {})


@runtime_checkable
class Steps(Protocol):
    """Defines what the engine can do: one method per command."""

    def create_adapter(self, command: CreateAdapter) -> Result: ...
    def forward_backward(self, command: ForwardBackward) -> Result: ...
    def forward(self, command: Forward) -> Result: ...
    def custom_loss(self, command: CustomLoss) -> Result: ...
    def optim_step(self, command: OptimStep) -> Result: ...
    def save_state(self, command: SaveState) -> Result: ...
    def load_state(self, command: LoadState) -> Result: ...
    def snapshot(self, command: Snapshot) -> Result: ...
    def swap_out(self, command: SwapOut) -> Result: ...
    def swap_in(self, command: SwapIn) -> Result: ...
    def drop_swapped(self, command: DropSwapped) -> Result: ...
    def save_sampler(self, command: SaveSampler) -> Result: ...
    def write_sampler(self, command: WriteSampler) -> Result: ...
    def page_out(self, command: PageOut) -> Result: ...
    def page_in(self, command: PageIn) -> Result: ...
    def drop_paged(self, command: DropPaged) -> Result: ...
    def load_sampler(self, command: LoadSampler) -> Result: ...
    def prefill(self, command: Prefill) -> Result: ...
    def decode(self, command: Decode) -> Result: ...
    def compile(self, command: Compile) -> Result: ...


def execute(steps: Steps, command: AnyCommand) -> Result:
    """Run one command; Shutdown is the caller's to act on."""
    match command:
        case CreateAdapter():
            return steps.create_adapter(command)
        case ForwardBackward():
            return steps.forward_backward(command)
        case Forward():
            return steps.forward(command)
        case CustomLoss():
            return steps.custom_loss(command)
        case OptimStep():
            return steps.optim_step(command)
        case SaveState():
            return steps.save_state(command)
        case LoadState():
            return steps.load_state(command)
        case Snapshot():
            return steps.snapshot(command)
        case SwapOut():
            return steps.swap_out(command)
        case SwapIn():
            return steps.swap_in(command)
        case DropSwapped():
            return steps.drop_swapped(command)
        case SaveSampler():
            return steps.save_sampler(command)
        case WriteSampler():
            return steps.write_sampler(command)
        case PageOut():
            return steps.page_out(command)
        case PageIn():
            return steps.page_in(command)
        case DropPaged():
            return steps.drop_paged(command)
        case LoadSampler():
            return steps.load_sampler(command)
        case Prefill():
            return steps.prefill(command)
        case Decode():
            return steps.decode(command)
        case Compile():
            return steps.compile(command)
        case Shutdown():
            return NOTHING
        case _:
            assert_never(command)
