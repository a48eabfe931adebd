"""Does what libraries may do to their process. Tests of child processes call it."""

import ctypes
import os
import resource
import signal
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from spmd_tx.coordinator.checkpoints import age
from spmd_tx.errors import InvalidRequest

Panic = type("PanicException", (BaseException,), {})


def add(left: int, right: int) -> int:
    print("this is not the answer", flush=True)
    return left + right


def note_pid(folder: str) -> None:
    (Path(folder) / str(os.getpid())).touch()


def refuse(text: str) -> None:
    raise InvalidRequest(f"{text!r} is refused")


def full_disk(path: str) -> None:
    raise OSError(28, "No space left on device", path)


def panic() -> None:
    raise Panic("index out of bounds")


def leave() -> None:
    sys.exit(0)


def abort() -> None:
    os.abort()


def access_nothing() -> None:
    ctypes.string_at(0)


def take_memory() -> int:
    return len(bytearray(4 << 30))


def boast() -> bytes:
    return bytes(64 << 20)


def babble(content: bytes) -> None:
    """Write where answers go, as a library may that takes any file for its own."""
    for file in range(3, 100):
        with suppress(OSError):
            if stat.S_ISFIFO(os.fstat(file).st_mode):
                os.write(file, content)


def hang(folder: str) -> None:
    """Hang with a grandchild, and ignore signals."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = os.fork()
    if child:
        written = Path(folder) / "pids.tmp"
        written.write_text(f"{os.getpid()} {child}")
        written.rename(Path(folder) / "pids")
    while True:
        time.sleep(3600)


def surroundings() -> dict:
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in ("RLIMIT_CORE", "RLIMIT_AS")}
    return {
        "environment": dict(os.environ),
        "stdin": sys.stdin.buffer.read(),
        "limits": limits,
        "niceness": os.nice(0),
        "session": _session(),
        "oom_score_adj": Path("/proc/self/oom_score_adj").read_text().strip(),
        "processor_seconds": resource.getrlimit(resource.RLIMIT_CPU),
        "processor_seconds_left": signal.getitimer(signal.ITIMER_PROF)[0],
        "pid": os.getpid(),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def _session() -> str:
    """Return the kernel's name of this session, with its niceness; "" if it does not group processes."""
    file = Path("/proc/self/autogroup")
    return file.read_text().strip() if file.exists() else ""


def end_of_each(recipients: list[str]) -> list[str]:
    """Return what becomes of each key, if the process survives."""
    return [_end_of(lambda text=text: age.check([text])) for text in recipients]


def _end_of(work: Callable[[], None]) -> str:
    try:
        work()
    except BaseException as error:
        return type(error).__name__
    return "taken"
