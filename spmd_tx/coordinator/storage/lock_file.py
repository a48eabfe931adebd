"""A lock file that one server at a time holds, and that names its holder. All functions block."""

import fcntl
import os
import socket
from pathlib import Path
from typing import IO

from spmd_tx.errors import StartError


def lock(path: Path, what: str, option: str) -> IO[str]:
    """Lock the file until it is closed. Raises StartError when another server, named in it, holds the lock.

    The error names ``what`` is locked, and the ``option`` to change. The kernel unlocks when a process dies.
    """
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip()
        file.close()
        raise StartError(
            f"{what} is in use by another running server{f' ({holder})' if holder else ''}; "
            f"stop it, or choose another {option}"
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file
