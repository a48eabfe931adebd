"""A file that one server at a time holds, with the name of that server in it. All functions block."""

import fcntl
import os
import socket
from pathlib import Path
from typing import IO

from spmd_tx.errors import StartError


def holder_name() -> str:
    """What another server is told of this one."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def take(path: Path, what: str, option: str) -> IO[str]:
    """Hold the file until it is closed. Raises StartError when another server, named in it, does.

    ``what`` is what it stands for, ``option`` the one to change. The kernel lets go when a process dies.
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
    file.write(f"{holder_name()}\n")
    file.flush()
    return file
