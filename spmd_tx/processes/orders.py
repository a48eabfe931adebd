"""The orders that a child process receives through a pipe from the process that has started it."""

import os
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue


def orders_from(pipe: Connection) -> SimpleQueue[bytes]:
    """Receive orders as they come, so that the sender never waits; exit when it is gone."""
    orders: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read, args=(pipe, orders), daemon=True).start()
    return orders


def _read(pipe: Connection, orders: SimpleQueue[bytes]) -> None:
    try:
        while True:
            orders.put(pipe.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)
