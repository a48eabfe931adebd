"""Serves with a worker, this file, that compiles no program whose name is in the file HELD_PROGRAM."""

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.forked import run_spmd_tx

LOOK_SECONDS = 0.05


def hold() -> None:
    from spmd_tx.worker.programs.compiled import Programs  # not in the server, which has no JAX

    compile_it, file = Programs._compile, Path(os.environ["HELD_PROGRAM"])

    def held(self: Programs, program: Any, call: Any, *rest: Any) -> Any:
        while file.exists() and str(call) == file.read_text():
            time.sleep(LOOK_SECONDS)
        return compile_it(self, program, call, *rest)

    Programs._compile = held


def run(*arguments: str) -> None:
    """Run ``spmd-tx``, whose workers hold the program."""
    from spmd_tx.coordinator.server import serve

    serve.serve.__defaults__ = ((str(Path(__file__)),),)
    run_spmd_tx(*arguments)


if __name__ == "__main__":
    from spmd_tx.worker import main
    from spmd_tx.worker.engine import Engine

    hold()
    sys.exit(main.main(sys.argv[1:], Engine.start))
