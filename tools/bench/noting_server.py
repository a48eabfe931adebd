"""Serves with real workers, and notes what planning costs; host_gaps.py starts it.

The file that the environment variable BENCH_PLANNING names gets a JSON line for each time that the
scheduler has looked for something to do: when, the CPU nanoseconds of its thread, those since the time
before, and the names of the commands that it has sent.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.mesh.hub import Hub
from spmd_tx.coordinator.runtime import event_loop
from spmd_tx.coordinator.scheduler.execution import Execution
from spmd_tx.coordinator.server import serve

PLANNING = "BENCH_PLANNING"


def note_planning(path: str) -> None:
    advance: Callable[[Execution], None] = Execution._advance
    send = Hub.send
    names, last = list[str](), 0
    file = open(path, "a", buffering=1)  # noqa: SIM115, open as long as the process

    def noted_send(hub: Hub, command, requests=()):  # noqa: ANN001, ANN202, those of Hub.send
        names.append(command.name)
        return send(hub, command, requests)

    def noted_advance(execution: Execution) -> None:
        nonlocal last
        began = time.thread_time_ns()
        advance(execution)
        ended = time.thread_time_ns()
        line = {"at": time.monotonic_ns(), "cpu": ended - began, "all": ended - last, "sent": names}
        print(json.dumps(line), file=file)
        names.clear()
        last = time.thread_time_ns()

    Hub.send = noted_send  # pyright: ignore[reportAttributeAccessIssue]
    Execution._advance = noted_advance  # pyright: ignore[reportAttributeAccessIssue]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("options", type=json.loads, help="of the server, as JSON")
    parser.add_argument("worker", help="command of its workers")
    given = parser.parse_args()
    note_planning(os.environ[PLANNING])
    config = ServerConfig(**given.options | {"data_dir": Path(given.options["data_dir"])})
    sys.exit(event_loop.run(serve.serve(config, [given.worker])))


if __name__ == "__main__":
    main()
