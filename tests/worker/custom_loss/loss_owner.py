"""A process like a worker, as far as custom losses go: it runs one, says so, and waits to be killed."""

import threading
from functools import partial

from spmd_tx.worker.custom_loss.lanes import ChildProcess, LossLanes
from tests.worker.custom_loss.commands import command


def main(cache):
    lanes = LossLanes(
        partial(ChildProcess, 1 << 30, cache), 1, lambda kind, **fields: print(fields, flush=True)
    )
    lanes.submit(command(1))
    threading.Event().wait()
