"""Ports that are still free when a test listens on them, and again when it has restarted what listened.

A system gives sockets that ask for any port one of its upper range, so a port that was found in this way may
be another process's a moment later. Lower ones are nobody's who has not asked for them.
"""

import os
import random
import socket

FIRST, COUNT = 20_000, 1_000  # of each process that runs tests
PROCESS = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 12

_next = random.SystemRandom().randrange(COUNT)  # not where other tests on this machine begin


def free_port() -> int:
    """Find a port on which nobody listens; the next call finds another one."""
    global _next
    for _ in range(COUNT):
        _next = (_next + 1) % COUNT
        port = FIRST + PROCESS * COUNT + _next
        try:
            with socket.create_server(("", port)):
                return port
        except OSError:
            continue
    raise OSError(f"somebody listens on each of the {COUNT} ports of these tests")
