"""Measures the memory of steps, and keeps it, so that the next start compiles nothing to know it.

It is kept for processes that decide for themselves which programs they have: JAX's cache is off there.
"""

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from jax.sharding import Mesh

from spmd_tx.worker.memory.plan import Plan
from spmd_tx.worker.memory.sizes import BatchShape
from spmd_tx.worker.memory.steps import StepName
from spmd_tx.worker.programs.agreement import Agreement
from spmd_tx.worker.programs.examples import menu_of
from spmd_tx.worker.programs.surroundings import surroundings

PREFIX = "measured-"  # of the names of files


class KeptMeasurements:
    """Measures steps, unless all processes have kept the result."""

    def __init__(self, folder: Path, mesh: Mesh, agreement: Agreement) -> None:
        self._folder, self._mesh, self._agreement = folder, mesh, agreement

    def measure(self, plan: Plan, step: StepName, shape: BatchShape) -> int:
        """Return the bytes, as ``measure`` does."""
        subject = f"{step} {shape.rows} x {shape.length} with {plan.pages} pages"
        text = f"{subject}\n{surroundings(plan, self._mesh)}"
        path = self._folder / f"{PREFIX}{hashlib.sha256(text.encode()).hexdigest()}"
        kept = _read(path)
        if self._agreement.all_have(f"measured {subject}", kept is not None) and kept is not None:
            return kept
        measured = measure(plan, step, shape)
        _write(path, measured)
        return measured


def measure(plan: Plan, step: StepName, shape: BatchShape) -> int:
    """Compile the step's program, and read from XLA what it needs, as memory/measure.py's Measure says."""
    mesh = plan.sizes.mesh
    assert isinstance(mesh, Mesh), "programs are compiled for devices"
    call = menu_of(plan, mesh).calls(plan.program(step, shape))[0]
    lowered = call.step.lower(*call.abstract(mesh))
    return lowered.compile().memory_analysis().temp_size_in_bytes


def _read(path: Path) -> int | None:
    try:
        number = int(path.read_text())
        os.utime(path)  # for those who delete what was unused for longest
    except (OSError, ValueError):
        return None
    return number


def _write(path: Path, number: int) -> None:
    with suppress(OSError):  # then the next start measures again
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        unfinished.write_text(str(number))
        unfinished.replace(path)
