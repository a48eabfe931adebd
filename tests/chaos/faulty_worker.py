"""Runs a worker with named points (points.py) around its steps, and a cache of all that it compiles."""

import os
import re
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from jax._src import compiler, distributed

from spmd_tx import durable_files
from spmd_tx.models.adapter_formats import peft
from spmd_tx.protocol.commands import AnyCommand, Decode
from spmd_tx.worker import main
from spmd_tx.worker.engine import Engine
from spmd_tx.worker.storage import checkpoints
from tests.chaos.points import wrap

STEPS = (
    *("forward_backward", "optim_step", "decode", "save_state", "save_sampler", "load_sampler", "load_state"),
    *("snapshot", "encode_images"),
)


def put_in_points(worker: str) -> None:
    """Put points into this worker: w0.optim_step.during, ..."""
    for name in STEPS:
        wrap(Engine, "execute", f"{worker}.{name}", partial(_is, name))
    wrap(Engine, "execute", f"{worker}.read_ahead", _reads_ahead)
    wrap(checkpoints, "_wait", f"{worker}.writing")
    wrap(peft, "config_of", f"{worker}.config")  # the folder has its weights, but not this file yet
    wrap(durable_files, "put_in_place", f"{worker}.place", _is_version)


def _is(name: str, engine: Engine, command: AnyCommand) -> bool:
    return command.name == name


def _reads_ahead(_: Engine, command: AnyCommand) -> bool:
    return isinstance(command, Decode) and command.depths is not None and bool(command.depths.any())


def _is_version(folder: Path, place: Path) -> bool:
    return place.parent.name == "versions"


def keep_all_programs() -> None:
    """Cache all programs: on CPUs each process has its own, but JAX keeps only those of process 0."""
    write = compiler._cache_write
    state = distributed.global_state

    def write_as_process_0(*arguments: object) -> None:
        number, state.process_id = state.process_id, 0
        try:
            write(*arguments)  # pyright: ignore[reportArgumentType]
        finally:
            state.process_id = number

    compiler._cache_write = write_as_process_0


if __name__ == "__main__":
    found = re.search(r"--process-id (\d+)", " ".join(sys.argv))
    assert found is not None
    put_in_points(os.environ.get("CHAOS_WORKER") or f"w{found[1]}")
    keep_all_programs()
    sys.exit(main.main(sys.argv[1:], Engine.start))
