"""A worker that notes when each command began and was answered: ``spmd-tx serve`` runs it for host_gaps.py.

Times go to the file that the environment variable BENCH_TIMES names, one JSON line for each command.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from spmd_tx.protocol.envelope import Envelope
from spmd_tx.worker import main as worker
from spmd_tx.worker.command_spans import CommandSpans
from spmd_tx.worker.engine import Engine

TIMES = "BENCH_TIMES"


class CommandTimes(CommandSpans):
    """Stands in for the spans that go to a collector."""

    def __init__(self, *_: object) -> None:
        self._file = open(os.environ[TIMES], "a", buffering=1)  # noqa: SIM115, closed at the exit
        self._times: dict[int, tuple[str, int]] = {}

    def __enter__(self) -> "CommandTimes":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()

    def begun(self, envelope: Envelope) -> None:
        self._times[envelope.sequence] = envelope.command.name, time.monotonic_ns()

    def ended(self, sequence: int) -> None:
        name, began = self._times.pop(sequence)
        line: dict[str, Any] = {"name": name, "began": began, "ended": time.monotonic_ns()}
        print(json.dumps(line), file=self._file)


if __name__ == "__main__":
    worker.open_command_spans = CommandTimes
    sys.exit(worker.main(sys.argv[1:], Engine.start))
