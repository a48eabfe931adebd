"""``spmd-tx plan --compile``: the server's programs, compiled for devices that are not there."""

import math
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from spmd_tx.byte_sizes import show_size
from spmd_tx.cli.meshes import Refusals, possible_meshes, shown
from spmd_tx.config import PARALLEL_SIZES, ServerConfig
from spmd_tx.errors import StartError
from spmd_tx.models.declared.model import Model
from spmd_tx.worker.aot import environment
from spmd_tx.worker.memory.accelerators import Devices

if TYPE_CHECKING:  # they import JAX, for which the environment has to be set first
    from spmd_tx.worker.aot.compile import MenuProgram
    from spmd_tx.worker.aot.report import Prediction, ProgramReport
    from spmd_tx.worker.aot.target import CompileTarget
    from spmd_tx.worker.memory.plan import Plan

WIDTH = 140  # columns, where no terminal says how many there are


@dataclass(frozen=True)
class Wish:
    """Holds the options of ``--compile``."""

    only: tuple[str, ...] = ()  # beginnings of names of programs; empty: all
    hlo: Path | None = None
    minutes: float = math.inf  # after which what is known is printed


@dataclass(frozen=True)
class Task:
    """Holds what is to be compiled for one mesh."""

    config: ServerConfig
    devices: Devices
    plan: "Plan"
    target: "CompileTarget"
    programs: "list[MenuProgram]"
    hlo: Path | None
    name: str  # of the mesh, empty if there is only one
    until: float = math.inf  # time.monotonic

    @property
    def predicting(self) -> "list[MenuProgram]":
        """The programs from which the speed is predicted; empty if one of them is not to be compiled."""
        from spmd_tx.worker.aot.predict import NEEDED

        usual = [each for each in self.programs if each.wanted.is_usual]
        usual = [each for each in usual if each.wanted.kind in NEEDED]
        return usual if len(usual) == len(NEEDED) else []


@dataclass(frozen=True)
class CompiledMesh:
    """Holds what was found for one mesh."""

    task: Task
    programs: "list[ProgramReport]"
    predicted: "Prediction | None"  # None: a program that it needs is missing

    @property
    def config(self) -> ServerConfig:
        return self.task.config

    @property
    def failed(self) -> list[str]:
        return [each.name for each in self.programs if each.error is not None]

    @property
    def late(self) -> list[str]:
        return [each.name for each in self.programs if each.is_late]

    @property
    def is_whole(self) -> bool:
        return len(self.programs) == len(self.task.programs)


def run(config: ServerConfig, model: Model, devices: Devices, wish: Wish, *, as_json: bool) -> None:
    """Compile for each mesh that fits, the best last, and print what was found. Raises StartError."""
    until = time.monotonic() + 60 * wish.minutes
    environment.check(devices)
    environment.prepare(devices)
    _make_folder(wish.hlo)
    meshes, tasks = possible_meshes(config, model, devices), list[Task]()
    refusals = Refusals(config, devices)
    for mesh in meshes:
        try:
            task = task_for(config.with_mesh(mesh), model, devices, wish, is_one=len(meshes) == 1)
            tasks.append(replace(task, until=until))
        except StartError as error:
            refusals.add(mesh, error)
    if not tasks:
        raise refusals.error()
    for words in refusals.told():
        _say(words)
    by_speed = best_last(_with_programs(tasks, wish.only))
    if as_json:
        typer.echo(in_json(told(by_speed)))
    else:
        show(devices, by_speed)
    if late := sum(len(each.late) for each in by_speed):
        _say(
            f"{late} programs were not compiled within {wish.minutes:g} minutes; give more --minutes, the "
            "three parallel sizes, or --only for some programs"
        )
    if by_speed[-1].failed:
        raise StartError(f"could not be compiled: {', '.join(by_speed[-1].failed)}")


def best_last(tasks: Sequence[Task]) -> list[CompiledMesh]:
    """Compile for all meshes, and order them by their predicted speed.

    The other programs are compiled for the fastest mesh only, and for the next one if one of them fails.
    """
    if len(tasks) == 1 or not all(task.predicting for task in tasks):
        return sorted((compiled(task, task.programs) for task in tasks), key=_worth)
    by_speed = sorted((compiled(task, task.predicting) for task in tasks), key=_worth)
    while not by_speed[-1].is_whole:
        best = by_speed.pop()
        done = {each.name: each for each in best.programs}
        others = compiled(best.task, [each for each in best.task.programs if each.name not in done])
        done |= {each.name: each for each in others.programs}
        whole = [done[each.name] for each in best.task.programs]
        by_speed = sorted([*by_speed, replace(best, programs=whole)], key=_worth)
    return by_speed


def task_for(config: ServerConfig, model: Model, devices: Devices, wish: Wish, *, is_one: bool) -> Task:
    """Return what is to be compiled for a mesh. Raises StartError if nothing fits."""
    from spmd_tx.worker.aot.compile import programs_of
    from spmd_tx.worker.aot.target import target_for

    assert config.mesh is not None, "one of the meshes was chosen"
    plan = plan_for(config, model, devices)
    target = target_for(plan, devices)
    programs = programs_of(plan, target.mesh, wish.only)
    name = "" if is_one else shown(config.mesh)
    hlo = wish.hlo if is_one or wish.hlo is None else wish.hlo / name.replace(", ", "-")
    return Task(config, devices, plan, target, programs, hlo, name)


def _with_programs(tasks: Sequence[Task], only: Sequence[str]) -> list[Task]:
    """Leave out meshes that have none of the programs that are asked for. Raises StartError if all do."""
    from spmd_tx.worker.aot.compile import programs_of

    remaining = [task for task in tasks if task.programs]
    if remaining:
        return remaining
    every = programs_of(tasks[0].plan, tasks[0].target.mesh)
    names = dict.fromkeys(each.name.split()[0] for each in every)
    raise StartError(
        f"--only is {','.join(only)!r}, but no program's name begins like that; names begin with "
        f"{', '.join(names)}"
    )


def compiled(task: Task, programs: "Sequence[MenuProgram]") -> CompiledMesh:
    """Compile programs of a task. Raises StartError if their HLO cannot be written."""
    from spmd_tx.worker.aot.compile import compile_programs
    from spmd_tx.worker.aot.predict import predict
    from spmd_tx.worker.aot.target import answering_for

    def say(message: str) -> None:
        _say(f"{task.name}: {message}" if task.name else message)

    with answering_for(task.devices):
        reports = list(compile_programs(task.plan, task.target, programs, say, task.hlo, task.until))
    return CompiledMesh(task, reports, predict(reports))


def plan_for(config: ServerConfig, model: Model, devices: Devices) -> "Plan":
    """Return the memory plan for a mesh of the absent devices. Raises StartError."""
    from spmd_tx.coordinator.server.preflight import check_mesh, context_length
    from spmd_tx.coordinator.server.worker_setup import make_setup
    from spmd_tx.worker.aot.target import open_mesh
    from spmd_tx.worker.memory.offline import plan_on, with_kernels

    check_mesh(config, model)
    assert config.mesh is not None, "one of the meshes was chosen"
    setup = make_setup(config, None, context_length(config, model), model.expert_lora)
    setup = with_kernels(setup, model, devices)
    return plan_on(open_mesh(devices, *config.mesh), setup, model, devices)


def told(by_speed: Sequence[CompiledMesh]) -> dict[str, Any]:
    """Return what is printed as JSON: the best mesh in full, and the predictions for the others."""
    best = by_speed[-1]
    return {
        "programs": best.programs,
        "predicted": best.predicted,
        **sizes(best.config),
        "meshes": [sizes(each.config) | {"predicted": each.predicted} for each in reversed(by_speed)],
    }


def show(devices: Devices, by_speed: Sequence[CompiledMesh]) -> None:
    """Print a table of programs for each mesh, and what follows from them, the best mesh last."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for each in by_speed:
        console.print(f"{each.config.base_model} on {devices}, {each.config.sizes_as_options}")
        console.print(_table(each))
        for program in each.programs:
            if program.error is not None:
                console.print(f"{program.name} could not be compiled: {program.error}", markup=False)
        if not each.is_whole and not each.late:
            console.print("The other programs were not compiled, since another mesh is faster.")
        if each.predicted is not None:
            console.print(_prediction(each.predicted))
    if len(by_speed) > 1 and by_speed[-1].predicted is not None:
        console.print(f"best: {by_speed[-1].config.sizes_as_options}")
    console.print(
        "Of one device and one run of each program; of a decode, one token per row. What time takes is "
        "calculated, not measured; docs/memory.md tells how."
    )


def _table(each: CompiledMesh) -> Any:
    from rich.table import Table

    names = ("program", "memory", "planned", "TFLOP", "GB moved", "launches", "collectives", "roofline, ms")
    table = Table(*names)
    table.columns[0].no_wrap = True
    for one in each.programs:
        if not one.has_figures:
            table.add_row(one.name, "late" if one.is_late else "failed")
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


def _make_folder(path: Path | None) -> None:
    """Make the folder for HLO before minutes are spent. Raises StartError."""
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        problem = "" if os.access(path, os.W_OK) else "nothing can be written there"
    except OSError as error:
        problem = error.strerror
    if problem:
        raise StartError(f"--hlo {path} cannot be used: {problem}; give a folder that can be written to")


def _worth(each: CompiledMesh) -> tuple[bool, float]:
    """Order meshes by the predicted iteration, the best last."""
    if each.predicted is None:
        return False, -math.inf
    return not each.failed, -each.predicted.iteration_seconds


def in_json(facts: dict[str, Any]) -> str:
    return msgspec.json.format(msgspec.json.encode(facts)).decode()


def sizes(config: ServerConfig) -> dict[str, Any]:
    """Return the sizes of the mesh by their options."""
    return dict(zip(PARALLEL_SIZES, config.parallel_sizes, strict=True))


def _say(message: str) -> None:
    with suppress(BrokenPipeError):
        typer.echo(message, err=True)
