"""How long the parts of a program take: as calculated from its operations, and as a profile tells."""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

from spmd_tx.hlo.cost import Cost, cost_of
from spmd_tx.hlo.frames import Frames, frames_of
from spmd_tx.worker.aot.parts import OTHER, added_up, seconds_by_part
from spmd_tx.worker.aot.roofline import Speeds, seconds
from spmd_tx.worker.memory.accelerators import ACCELERATORS

USUAL = "h200"  # whose figures are taken for a device that is not known
ONE_HOST = (0,)


@dataclass(frozen=True)
class Parts:
    """Holds seconds of one run, or of one of its equal parts."""

    predicted: float  # as ``spmd-tx plan --compile`` predicts
    predicted_parts: dict[str, float]
    measured_parts: dict[str, float]  # of the operations alone; empty if the profile does not name them


def parts_of(program: Any, args: list[Any], per: int = 1) -> tuple[Parts, Any]:
    """Run a program once under the profiler; return its parts and results. ``per`` as in Meter.measure."""
    text = program.as_text()
    frames, speeds = frames_of(text), Speeds.expected(ACCELERATORS[device_name()])
    cost = cost_of(text)
    # A loop whose turns are not known counts once, and any other as often as it runs.
    one_turn = cost if cost.turns == 1 else cost.divided(per)
    out, events = profiled(partial(program, *args))
    measured = measured_by_part(cost, frames, events)
    return Parts(
        predicted=seconds(one_turn, speeds, ONE_HOST),
        predicted_parts=seconds_by_part(one_turn, frames, speeds, ONE_HOST),
        measured_parts={part: spent / per for part, spent in measured.items()},
    ), out


def device_name() -> str:
    """Return the name of ACCELERATORS for the first device, or that of the usual one."""
    words = jax.devices()[0].device_kind.lower().replace("-", " ").split()
    return next((word for word in words if word in ACCELERATORS), USUAL)


def measured_by_part(cost: Cost, frames: Frames, events: dict[str, float]) -> dict[str, float]:
    """Add up by part what a profile tells of each operation by its name, the longest first.

    Loops and calls are no operations: what runs in them counts. Names that the program lacks, such as those
    of whole graphs of kernels, belong to no part.
    """
    found = added_up(cost, frames, lambda each: events.get(each.name, 0.0))
    known = {each.name for each in cost.operations}
    wholes = ("while", "call", "conditional", "async", "jit")
    rest = sum(spent for name, spent in events.items() if name not in known and not name.startswith(wholes))
    if rest:
        found[OTHER] = found.get(OTHER, 0.0) + rest
    return {part: spent for part, spent in found.items() if spent}


def profiled(run: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Return what a function returns, and the seconds of each operation that the devices ran meanwhile."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            out = jax.block_until_ready(run())
        found: dict[str, float] = {}
        for file in Path(folder).rglob("*.xplane.pb"):
            for name, spent in _operations(jax.profiler.ProfileData.from_file(str(file))):
                found[name] = found.get(name, 0.0) + spent
    return out, found


def _operations(profile: Any) -> Iterator[tuple[str, float]]:
    """Yield name and seconds of each operation: of the devices, or of the host if it is the device."""
    planes = list(profile.planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:")]
    for plane in devices or planes:
        for line in plane.lines:
            for event in line.events:
                name = dict(event.stats).get("hlo_op")
                if name is not None:
                    yield str(name), event.duration_ns / 1e9
