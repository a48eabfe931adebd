"""Runs ``spmd-tx serve`` or its worker, which compiles HELD_PROGRAM only once the file LET_GO exists."""

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

LOOK_SECONDS = 0.05


def hold() -> None:
    from spmd_tx.worker.programs.compiled import Programs  # not in the server, which has no JAX

    compile_it = Programs._compile

    def held(self: Programs, program: Any, call: Any, *rest: Any) -> Any:
        while str(call) == os.environ["HELD_PROGRAM"] and not Path(os.environ["LET_GO"]).exists():
            time.sleep(LOOK_SECONDS)
        return compile_it(self, program, call, *rest)

    Programs._compile = held


if __name__ == "__main__":
    if "--process-id" in " ".join(sys.argv):
        from spmd_tx.worker import main
        from spmd_tx.worker.engine import Engine

        hold()
        sys.exit(main.main(sys.argv[1:], Engine.start))
    from spmd_tx.cli import main as cli
    from spmd_tx.coordinator.server import serve

    serve.serve.__defaults__ = ((str(Path(__file__)),),)
    sys.argv[0] = "spmd-tx"
    cli.main()
