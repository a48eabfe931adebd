"""Serves with workers without JAX, and on request as a mutant.

Waiting for the disk in the event loop is an entry at the level of errors, since a busy disk takes seconds. A
mutant's parser of tensors meets a rare shape with an exception, with the end of the process, or never ends.
"""

import asyncio
import logging
import os
import sys
from pathlib import Path

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.mesh import generations
from spmd_tx.coordinator.runtime import event_loop
from spmd_tx.coordinator.server import serve
from spmd_tx.coordinator.training import line
from spmd_tx.coordinator.wire import training_protobuf

RARE = 4096
MUTANTS = "raises", "exits", "hangs"
WORKER = str(Path(__file__).with_name("replay_worker.py"))


def _tell_of_waits_for_the_disk() -> None:
    for name in "fsync", "fdatasync":

        def told(descriptor, name=name, sync=getattr(os, name)):
            if asyncio._get_running_loop() is not None:
                logging.getLogger(__name__).error("%s in the event loop", name, stack_info=True)
            sync(descriptor)

        setattr(os, name, told)


def _mutate(mutant: str) -> None:
    read_tensor = training_protobuf._tensor

    def mutated(name, tensor):
        if RARE in tensor.shape:
            if mutant == "raises":
                raise KeyError(RARE)
            if mutant == "exits":
                os._exit(9)
            while mutant == "hangs":
                pass
        return read_tensor(name, tensor)

    training_protobuf._tensor = mutated


def main(options, mutant=None):
    generations.FIRST_DELAY = 0.01  # these workers start in no time
    line.SILENCE_SECONDS = 3.0  # numbers that never come are many here
    _tell_of_waits_for_the_disk()
    if mutant is not None:
        _mutate(mutant)
    config = ServerConfig(**options | {"data_dir": Path(options["data_dir"])})
    sys.exit(event_loop.run(serve.serve(config, [WORKER])))
