"""What a child process runs (child.py): take the limits, call, answer, until there are no more calls."""

import importlib
import math
import os
import resource
import signal
import sys
import time
import traceback
from typing import BinaryIO

import msgspec

from spmd_tx.errors import RequestError
from spmd_tx.processes.child_messages import (
    LENGTH_BYTES,
    AnyAnswer,
    Broke,
    ChildCall,
    RequestRefused,
    Returned,
    StorageFailed,
    encode,
)
from spmd_tx.processes.modest import be_modest
from spmd_tx.processes.parent import end_with

LATE_SECONDS = 5  # of processor time beyond the limit, until the kernel ends a child that its parent has not


def main(parent: int) -> None:
    """Answer calls until there are no more. ``parent`` is the id of the process that has started this one."""
    end_with(parent)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # foreign code may print
    calls = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    be_modest()
    with calls, answers:
        while call := _next(calls):
            _limit(call)
            answers.write(encode(_answer(call)))
            answers.flush()


def _next(calls: BinaryIO) -> ChildCall | None:
    length = calls.read(LENGTH_BYTES)
    return msgspec.msgpack.decode(calls.read(int.from_bytes(length)), type=ChildCall) if length else None


def _limit(call: ChildCall) -> None:
    """Limit the memory and the processor time of a call.

    The kernel counts RLIMIT_CPU from the start of the process, and by clock ticks: of a process that lasts,
    neither it nor process_time shows how much is left. So each of its calls has a timer, which the next one
    sets again. A process of one call has a limit that its code cannot raise.
    """
    seconds = math.ceil(call.seconds) + LATE_SECONDS
    _set_limit(resource.RLIMIT_AS, call.memory)
    if call.is_only:
        seconds += math.ceil(time.process_time())
        _set_limit(resource.RLIMIT_CPU, seconds)
    else:
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _set_limit(limit: int, value: int) -> None:
    _, hardest = resource.getrlimit(limit)
    most = value if hardest == resource.RLIM_INFINITY else min(value, hardest)
    resource.setrlimit(limit, (most, most))


def _answer(call: ChildCall) -> AnyAnswer:
    """Make the call. It catches BaseException because a panic in Rust arrives as one that is no Exception."""
    try:
        module, _, name = call.function.partition(":")
        return Returned(value=getattr(importlib.import_module(module), name)(**call.arguments))
    except RequestError as error:
        return RequestRefused(error=type(error).__name__, message=str(error))
    except OSError as error:
        if error.errno is None:
            return _broke(error)
        path = None if error.filename is None else str(error.filename)
        return StorageFailed(number=error.errno, message=error.strerror or "", path=path)
    except BaseException as error:
        return _broke(error)


def _broke(error: BaseException) -> Broke:
    return Broke(message=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())


if __name__ == "__main__":
    main(int(sys.argv[1]))
