"""A process like a worker, as far as custom losses go: it runs one, says so, and waits to be killed."""

import sys
import threading
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from spmd_tx.worker.custom_loss.lanes import ChildProcess, LossLanes
from tests.worker.custom_loss.commands import command


def main(cache):
    lanes = LossLanes(
        partial(ChildProcess, 1 << 30, cache), 1, lambda kind, **fields: print(fields, flush=True)
    )
    lanes.submit(command(1))
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1])
