"""``spmd-tx plan --compile``: the server's programs, compiled for devices that are not there."""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from spmd_tx.byte_sizes import show_size
from spmd_tx.config import PARALLEL_SIZES, ServerConfig
from spmd_tx.errors import StartError
from spmd_tx.models.config import ModelConfig
from spmd_tx.worker.aot import environment
from spmd_tx.worker.memory.accelerators import Devices

if TYPE_CHECKING:  # they import JAX, for which the environment has to be set first
    from spmd_tx.worker.aot.report import Prediction, ProgramReport
    from spmd_tx.worker.memory.plan import Plan

Mesh = tuple[int, int, int]
WIDTH = 140  # columns, where no terminal says how many there are


@dataclass(frozen=True)
class Compiled:
    """Holds what was found for one mesh."""

    config: ServerConfig
    programs: "list[ProgramReport]"
    predicted: "Prediction | None"  # None: a program that it needs is missing

    @property
    def failed(self) -> list[str]:
        return [each.name for each in self.programs if each.error is not None]


@dataclass(frozen=True)
class Wish:
    """Holds the options of ``--compile``."""

    only: tuple[str, ...] = ()  # beginnings of names of programs; empty: all
    hlo: Path | None = None

    def of(self, mesh: Mesh, meshes: Sequence[Mesh]) -> "Wish":
        """Return the wish for one mesh: if there are several, each has a folder for its programs."""
        if self.hlo is None or len(meshes) == 1:
            return self
        return replace(self, hlo=self.hlo / "-".join(map(str, mesh)))


def run(
    config: ServerConfig,
    model: ModelConfig,
    devices: Devices,
    meshes: Sequence[Mesh],
    wish: Wish,
    *,
    as_json: bool,
) -> None:
    """Compile for each mesh that fits, the best last, and print what was found. Raises StartError."""
    environment.check(devices)
    environment.prepare(devices)
    found: list[Compiled] = []
    refusal: StartError | None = None
    for mesh in meshes:
        try:
            found.append(compiled(config.with_mesh(mesh), model, devices, wish.of(mesh, meshes), _say))
        except StartError as error:
            refusal = error
            if len(meshes) > 1:
                _say(f"{config.with_mesh(mesh).sizes_as_options}: {error}")
    if not found:
        raise refusal or StartError("no mesh of these devices fits the sizes that are given")
    found.sort(key=_worth)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(told(found))).decode())
    else:
        show(devices, found)
    if found[-1].failed:
        raise StartError(f"could not be compiled: {', '.join(found[-1].failed)}")


def compiled(
    config: ServerConfig, model: ModelConfig, devices: Devices, wish: Wish, say: Callable[[str], None]
) -> Compiled:
    """Compile the programs for one mesh. Raises StartError if nothing fits."""
    from spmd_tx.worker.aot.compile import compile_programs, programs_of
    from spmd_tx.worker.aot.predict import predict
    from spmd_tx.worker.aot.target import answering_for, target_for

    plan = plan_for(config, model, devices)
    target = target_for(plan, devices)
    programs = programs_of(plan, target.mesh, wish.only)
    if not programs:
        raise StartError(f"no program's name begins with {' or '.join(wish.only)}")
    with answering_for(devices):
        reports = list(compile_programs(plan, target, programs, say, wish.hlo))
    return Compiled(config, reports, predict(reports))


def plan_for(config: ServerConfig, model: ModelConfig, devices: Devices) -> "Plan":
    """Return the memory plan for a mesh of the absent devices. Raises StartError."""
    from spmd_tx.coordinator.server.preflight import check_mesh, context_length
    from spmd_tx.coordinator.server.worker_setup import make_setup
    from spmd_tx.worker.aot.target import open_mesh
    from spmd_tx.worker.memory.offline import plan_on, with_attention

    check_mesh(config, model)
    assert config.mesh is not None, "one of the meshes was chosen"
    setup = make_setup(config, None, context_length(config, model), model.expert_lora)
    setup = with_attention(setup, model, devices)
    return plan_on(open_mesh(devices, *config.mesh), setup, model, devices)


def told(found: Sequence[Compiled]) -> dict[str, Any]:
    """Return what is printed as JSON: the best mesh in full, and the predictions for the others."""
    best = found[-1]
    return {
        "programs": best.programs,
        "predicted": best.predicted,
        **_sizes(best.config),
        "meshes": [_sizes(each.config) | {"predicted": each.predicted} for each in reversed(found)],
    }


def show(devices: Devices, found: Sequence[Compiled]) -> None:
    """Print a table of programs for each mesh, and what follows from them, the best mesh last."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for each in found:
        console.print(f"{each.config.base_model} on {devices}, {each.config.sizes_as_options}")
        console.print(_table(each))
        for program in each.programs:
            if program.error is not None:
                console.print(f"{program.name} could not be compiled: {program.error}", markup=False)
        if each.predicted is not None:
            console.print(_prediction(each.predicted))
    if len(found) > 1 and found[-1].predicted is not None:
        console.print(f"best: {found[-1].config.sizes_as_options}")
    console.print(
        "Of one device and one run of each program; of a decode, one token per row. What time takes is "
        "calculated, not measured; docs/memory.md tells how."
    )


def _table(each: Compiled) -> Any:
    from rich.table import Table

    names = ("program", "memory", "planned", "TFLOP", "GB moved", "launches", "collectives", "roofline, ms")
    table = Table(*names)
    table.columns[0].no_wrap = True
    for one in each.programs:
        if one.error is not None:
            table.add_row(one.name, "failed")
            continue
        sent = sum(part.count for part in one.collectives)
        size = sum(part.bytes for part in one.collectives)
        table.add_row(
            one.name,
            show_size(one.memory_bytes),
            "" if one.planned_bytes is None else show_size(one.planned_bytes),
            f"{one.flops / 1e12:.3g}",
            f"{one.bytes_moved / 1e9:.3g}",
            f"{one.launches:.0f}",
            f"{sent:.0f} of {show_size(int(size))}" if sent else "",
            f"{1e3 * one.roofline_seconds:.3g}",
        )
    return table


def _prediction(predicted: "Prediction") -> str:
    return (
        f"predicted, at most: training {predicted.training_tokens:,.0f} tokens/s, prefill "
        f"{predicted.prefill_tokens:,.0f}, decode {predicted.decode_tokens:,.0f}; an iteration of "
        f"reinforcement learning {predicted.iteration_seconds:.1f} s "
        f"({predicted.iteration_sampling_seconds:.1f} sampling, "
        f"{predicted.iteration_training_seconds:.1f} training)"
    )


def _worth(each: Compiled) -> tuple[bool, float]:
    """Order meshes by the predicted iteration, the best last."""
    if each.predicted is None:
        return False, 0.0
    return not each.failed, -each.predicted.iteration_seconds


def _sizes(config: ServerConfig) -> dict[str, Any]:
    return dict(zip(PARALLEL_SIZES, config.parallel_sizes, strict=True))


def _say(message: str) -> None:
    with suppress(BrokenPipeError):
        typer.echo(message, err=True)
