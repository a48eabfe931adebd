"""Chooses the engine of a worker: of adapters, or of a model all of whose weights are trained."""

from collections.abc import Callable

from spmd_tx.protocol.setup import Setup
from spmd_tx.worker.engine import Engine
from spmd_tx.worker.full_engine import FullEngine
from spmd_tx.worker.programs.compiled import Programs


def start_engine(setup: Setup, programs: Programs, progress: Callable[[str], None]) -> Engine:
    """Load the base model and allocate everything else."""
    return (FullEngine if setup.full_copies else Engine).start(setup, programs, progress)
