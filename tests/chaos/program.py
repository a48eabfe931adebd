"""The clients of the crash tests: program.py URL FOLDER SEED ROUNDS TENANT... runs tenants on the SDK.

All that the server answers goes into FOLDER/record.jsonl, one line per answer, with the time; values are
written so that equal lines mean equal bits. What the SDK logs besides its retries goes there too.
"""

import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import tinker

sys.path.insert(0, str(Path(__file__).parents[2]))

from spmd_tx.processes.parent import end_with
from tests.chaos import tenants

# What the SDK says when it tries again, or passes on why the server makes it wait.
RETRIES = "because of try_again", "is paused", "heartbeat failed", "telemetry"
DEPRECATED = "load_state"  # older programs use it


class Record:
    """Writes lines of several threads to one file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self._lock = threading.Lock()

    def write(self, tenant: str, what: str, value: object) -> None:
        line = json.dumps({"at": time.time(), "tenant": tenant, "what": what, "value": value})
        with self._lock:
            self._file.write(line + "\n")


class Complaints(logging.Handler):
    """Records what the SDK logs, apart from retries."""

    def __init__(self, record: Record) -> None:
        super().__init__(logging.WARNING)
        self._record = record

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if not any(phrase in message for phrase in (*RETRIES, DEPRECATED)):
            self._record.write("sdk", "log", message)


def main(url: str, folder: Path, seed: int, rounds: int, names: Sequence[str]) -> int:
    record = Record(folder / "record.jsonl")
    logging.getLogger("tinker").addHandler(Complaints(record))
    threads = [
        threading.Thread(target=_live, args=(getattr(tenants, name), url, record, seed, rounds))
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    record.write("program", "end", None)
    return 0


def _live(tenant: Callable[..., None], url: str, record: Record, seed: int, rounds: int) -> None:
    name = tenant.__name__

    def note(what: str, value: object) -> None:
        record.write(name, what, value)

    try:
        with tinker.ServiceClient(base_url=url, api_key="tml-" + name) as service:
            tenant(service, note, seed, rounds)
    except BaseException:
        note("error", traceback.format_exc())
        raise


if __name__ == "__main__":
    end_with(os.getppid())  # or it would ask for answers for ever when the tests are interrupted
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:]))
