"""Seconds since the epoch that run on evenly: what is measured with them survives a clock that is set.

Read once from the clock of the machine when the process starts, then counted on. While the machine is
suspended they stand still. For times that people agree on, as the end of a checkpoint, use time.time().
"""

import time

_STARTED_AT = time.time() - time.monotonic()


def now() -> float:
    return _STARTED_AT + time.monotonic()
