"""The main program of a child that child.py starts for one call: set the limits, call, answer."""

import ctypes
import importlib
import math
import os
import resource
import signal
import sys
import traceback

import msgspec

from spmd_tx.errors import RequestError
from spmd_tx.processes.child_messages import AnyAnswer, Broke, Call, RequestRefused, Returned, StorageFailed
from spmd_tx.processes.modest import be_modest

PR_SET_PDEATHSIG = 1
LATE_SECONDS = 5  # of processor time beyond the limit, until the kernel ends a child that its parent has not


def main(parent: int) -> None:
    """Run one call. ``parent`` is the id of the process that has started this one."""
    _end_with(parent)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # foreign code may print
    call = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Call)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    _limit(call)
    with answers:
        answers.write(msgspec.msgpack.encode(_answer(call)))


def _end_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that wanted an answer is gone")


def _limit(call: Call) -> None:
    seconds = math.ceil(call.seconds) + LATE_SECONDS
    for limit, value in (
        (resource.RLIMIT_AS, call.memory),
        (resource.RLIMIT_CPU, seconds),
    ):
        _, hardest = resource.getrlimit(limit)
        most = value if hardest == resource.RLIM_INFINITY else min(value, hardest)
        resource.setrlimit(limit, (most, most))
    be_modest()


def _answer(call: Call) -> AnyAnswer:
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
