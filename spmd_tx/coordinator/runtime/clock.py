"""A clock in seconds since the epoch that runs evenly, even when somebody sets the machine's clock.

It is read once from the machine's clock when the process starts, and counted on from there. While the machine
is suspended, it stands still. For times that people agree on, such as an expiry, use time.time().
"""

import time

_STARTED_AT = time.time() - time.monotonic()


def now() -> float:
    return _STARTED_AT + time.monotonic()
