"""Compiles the programs of a plan for the devices of its mesh, and reads from them what they need and do."""

import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from spmd_tx.errors import StartError
from spmd_tx.hlo.arrays import bits_of
from spmd_tx.hlo.cost import Cost, DeviceOperation, cost_of
from spmd_tx.hlo.frames import frames_of
from spmd_tx.sharding.weight import abstract
from spmd_tx.worker.aot.parts import seconds_by_part
from spmd_tx.worker.aot.programs import WantedProgram, wanted
from spmd_tx.worker.aot.report import CollectiveReport, CopyReport, ProgramReport
from spmd_tx.worker.aot.roofline import crosses_hosts, seconds
from spmd_tx.worker.aot.target import CompileTarget
from spmd_tx.worker.memory.plan import Plan
from spmd_tx.worker.programs.call import Call
from spmd_tx.worker.programs.examples import menu_of
from spmd_tx.worker.state import declare

LARGE = 16 << 20  # bytes of an array on a device from which on a copy of it is told of
HLO_DTYPES = {"bfloat16": "bf16", "float32": "f32", "float16": "f16", "int32": "s32", "uint32": "u32"}

OnProgress = Callable[[str], None]
SortedShape = tuple[str, tuple[int, ...]]  # dtype, and dimensions in ascending order, those of 1 left out


@dataclass(frozen=True)
class StateArray:
    """Names an array of the worker's state, or one layer of it."""

    name: str
    stacks: frozenset[int] = frozenset()  # elements of those that it may be a layer of; empty: it is whole


@dataclass(frozen=True)
class MenuProgram:
    """Holds one program that is to be compiled."""

    wanted: WantedProgram  # of the kind "other" where it is not that of the command's own step
    call: Call

    @property
    def name(self) -> str:
        return self.wanted.name


def programs_of(
    plan: Plan, mesh: Mesh, only: Sequence[str] = (), more: Sequence[WantedProgram] = ()
) -> list[MenuProgram]:
    """Return the programs of a plan, and more; with ``only``, those whose names begin with one of these."""
    menu, programs = menu_of(plan, mesh), dict[Hashable, MenuProgram]()
    for each in (*wanted(plan), *more):
        for number, call in enumerate(menu.calls(each.shape)):
            is_main = number == 0 and each.kind != "other"
            what = each if is_main else WantedProgram(str(call), "other", each.shape)
            programs.setdefault(call.key, MenuProgram(what, call))
    return [each for each in programs.values() if not only or each.name.startswith(tuple(only))]


def compile_programs(
    plan: Plan,
    target: CompileTarget,
    programs: Sequence[MenuProgram],
    progress: OnProgress,
    hlo: Path | None = None,
    until: float = math.inf,
) -> Iterator[ProgramReport]:
    """Yield the report of each program. With ``hlo``, write the text of each into this folder.

    What is not compiled at ``until``, a time of time.monotonic, is reported as late; a thread may go on with
    it. Raises StartError if the text cannot be written.
    """
    state = state_arrays(plan, target.mesh)
    for number, program in enumerate(programs, 1):
        if time.monotonic() < until:
            progress(f"compiling {program.name} ({number} of {len(programs)})")
        report, text = _compiled(target, program, state, until)
        if hlo is not None and text:
            _write(hlo / f"{program.name.replace(' ', '_').replace('/', '_')}.hlo", text)
        yield report


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise StartError(f"cannot write {path}: {error.strerror}; see to its folder and disk") from None


def _compiled(
    target: CompileTarget, program: MenuProgram, state: dict[SortedShape, StateArray], until: float
) -> tuple[ProgramReport, str]:
    each, began = program.wanted, time.monotonic()
    about: Any = {"name": each.name, "kind": each.kind, "planned_bytes": each.planned}
    try:
        compiled = _compiled_in_time(target, program.call, until) if began < until else None
    except (RuntimeError, ValueError, NotImplementedError, TypeError) as problem:  # of JAX, XLA or a kernel
        error = f"{type(problem).__name__}: {' '.join(str(problem).split())}"[:1000]
        return ProgramReport(**about, compile_seconds=time.monotonic() - began, error=error), ""
    about["compile_seconds"] = time.monotonic() - began
    if compiled is None:
        return ProgramReport(**about, is_late=True), ""
    text, memory = compiled.as_text(), compiled.memory_analysis()
    cost = per_step(cost_of(text), each.kind)
    report = ProgramReport(
        **about,
        memory_bytes=memory.temp_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        result_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        flops=cost.flops,
        bytes_moved=cost.bytes,
        collectives=collectives(cost, target.hosts),
        launches=cost.launches,
        sorts=sum(one.times for one in cost.sorts),
        sorted_numbers=sum(one.times * one.sorted_numbers for one in cost.sorts),
        copies=copies(cost, state),
        roofline_seconds=seconds(cost, target.peak, target.hosts),
        expected_seconds=seconds(cost, target.expected, target.hosts),
        parts=seconds_by_part(cost, frames_of(text), target.expected, target.hosts),
        tokens=each.tokens,
        is_usual=each.is_usual,
    )
    return report, text


def _compiled_in_time(target: CompileTarget, call: Call, until: float) -> Any:
    """Return what XLA made, or None if it takes too long: it cannot be stopped, but be left to itself."""
    lowered, options = call.step.lower(*call.abstract(target.mesh)), dict(target.options) or None
    if until == math.inf:
        return lowered.compile(compiler_options=options)
    result: Future[Any] = Future()

    def work() -> None:
        try:
            result.set_result(lowered.compile(compiler_options=options))
        except Exception as problem:  # whoever waits gets it
            result.set_exception(problem)

    Thread(target=work, daemon=True).start()
    with suppress(TimeoutError):
        return result.result(max(0.0, until - time.monotonic()))
    return None


def per_step(cost: Cost, kind: str) -> Cost:
    """Return the cost of one step of a decode, whose outermost loop takes one step in each turn."""
    return cost.divided(cost.turns) if kind == "decode" else cost


def collectives(cost: Cost, hosts: Sequence[int]) -> list[CollectiveReport]:
    """Add up the collectives of a program, the largest first."""
    reports: dict[tuple[str, str, int, bool], CollectiveReport] = {}
    for each in cost.collectives:
        one = each.collective
        if one is None or one.size == 1:  # an axis of one device sends nothing
            continue
        key = (one.name, one.dtype, one.size, crosses_hosts(each, hosts))
        before = reports.get(key)
        reports[key] = CollectiveReport(
            name=one.name,
            dtype=one.dtype,
            devices=one.size,
            between_hosts=key[3],
            count=each.times + (before.count if before else 0),
            bytes=each.times * one.bytes + (before.bytes if before else 0),
            sent_bytes=each.times * one.sent_bytes + (before.sent_bytes if before else 0),
        )
    return sorted(reports.values(), key=lambda each: -each.sent_bytes)


def state_arrays(plan: Plan, mesh: Mesh) -> dict[SortedShape, StateArray]:
    """Return the large frozen arrays and caches of a worker on one device, and one layer of each.

    A decode that reads its layers in a loop may copy each of them first. Stacks of one layer are left
    out, since both would have the same dimensions.
    """
    kept: dict[SortedShape, StateArray] = {}
    declared = declare(plan)
    state = abstract(mesh, {"base": declared.base, "bank": declared.bank, "cache": declared.cache})
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = ".".join(str(getattr(key, "name", getattr(key, "key", key))) for key in path)
        dims, item = leaf.sharding.shard_shape(leaf.shape), jnp.dtype(leaf.dtype)
        dtype, size = HLO_DTYPES.get(item.name, ""), math.prod(dims) * item.itemsize
        if "layers" in name and dims[0] == 1:
            continue
        if size >= LARGE:
            kept.setdefault(_place(dtype, dims), StateArray(name))
        if "layers" in name and size >= LARGE * dims[0]:
            place, stack = _place(dtype, dims[1:]), frozenset({math.prod(dims)})
            layer = kept.setdefault(place, StateArray(f"one layer of {name}", stack))
            if layer.stacks:  # else a whole array has these dimensions, too
                kept[place] = replace(layer, stacks=layer.stacks | stack)
    return kept


def _place(dtype: str, dims: Sequence[int]) -> SortedShape:
    return dtype, tuple(sorted(size for size in dims if size > 1))


def copies(cost: Cost, state: dict[SortedShape, StateArray]) -> list[CopyReport]:
    """Return the arrays of the state that a program writes anew as a whole, most bytes first."""
    reports: dict[tuple[str, str], CopyReport] = {}
    for each in cost.operations:
        for dtype, dims in each.written:
            kept = state.get(_place(dtype, dims))
            if kept is None or not _may_read(each, kept):
                continue
            size = each.times * math.prod(dims) * bits_of(dtype) / 8
            key = (kept.name, each.op)
            before = reports.get(key)
            reports[key] = CopyReport(
                array=kept.name,
                operation=each.op,
                count=each.times + (before.count if before else 0),
                bytes=size + (before.bytes if before else 0),
            )
    return sorted(reports.values(), key=lambda each: -each.bytes)


def _may_read(operation: DeviceOperation, kept: StateArray) -> bool:
    """Say whether an operation has the stack of a layer; activations may have a layer's dimensions, too."""
    return not kept.stacks or any(math.prod(dims) in kept.stacks for _, dims in operation.given)
