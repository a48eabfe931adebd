"""Calls foreign code, which may abort, hang or leak, in a child process with limits on time and memory.

The child is a fresh interpreter: it shares no memory, no files and no secrets with this process, and ends
with it. Its start takes about 0.1 s.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from spmd_tx import errors
from spmd_tx.errors import ForeignCodeFailed, RequestError
from spmd_tx.processes.child_messages import (
    Broke,
    Call,
    RequestRefused,
    Returned,
    StorageFailed,
    decode_answer,
)
from spmd_tx.processes.environments import of_foreign_code

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 16
QUOTED_BYTES = 4096  # of what a child prints
MEMORY = 512 << 20  # bytes


@dataclass(frozen=True)
class Allowance:
    """Limits the time and memory of a call."""

    seconds: float
    memory: int = MEMORY  # bytes of address space, including about 50 MiB for the interpreter
    environment: Mapping[str, str] = field(default_factory=dict)  # beyond what every child gets


async def call_outside(function: str, arguments: Mapping[str, object], allowance: Allowance) -> Any:
    """Call ``package.module:function`` in a child and return its result; both pass through msgpack.

    Raises the function's own RequestError or OSError, and ForeignCodeFailed if the child fails in any other
    way. Cancelling the call ends the child.
    """
    call = Call(
        function=function, arguments=dict(arguments), seconds=allowance.seconds, memory=allowance.memory
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "spmd_tx.processes.child_main", str(os.getpid())),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=of_foreign_code(os.environ) | dict(allowance.environment),
        start_new_session=True,  # so that it is killed together with its own children
    )
    try:
        async with asyncio.timeout(allowance.seconds):
            said, words, _ = await asyncio.gather(
                _all(process.stdout, function, allowance.memory),
                _end_of(process.stderr),
                _tell(process.stdin, msgspec.msgpack.encode(call)),
            )
            code = await process.wait()
    except TimeoutError:
        raise ForeignCodeFailed(
            f"{function} took longer than {allowance.seconds:g} s, and was ended"
        ) from None
    finally:
        with suppress(ProcessLookupError, PermissionError):  # it may have ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    return _value(function, said, code, words)


def _value(function: str, said: bytes, code: int, words: str) -> Any:
    try:
        answer = decode_answer(said)
    except msgspec.DecodeError:
        how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
        logger.error("%s ended by %s: %s", function, how, words)
        raise ForeignCodeFailed(f"{function} ended by {how} without an answer") from None
    match answer:
        case Returned(value=value):
            return value
        case RequestRefused(error=name, message=message):
            kind = getattr(errors, name, RequestError)
            raise kind(message) if kind is not errors.TooManyRequests else RequestError(message)
        case StorageFailed(number=number, message=message, path=path):
            raise OSError(number, message, path)
        case Broke(message=message, traceback=traceback):
            logger.error("%s failed:\n%s", function, traceback)
            raise ForeignCodeFailed(f"{function} failed: {message}")


async def _tell(stream: asyncio.StreamWriter | None, content: bytes) -> None:
    assert stream is not None
    with suppress(ConnectionError):  # it may be gone already; its end says why
        stream.write(content)
        await stream.drain()
        stream.close()


async def _all(stream: asyncio.StreamReader | None, function: str, most: int) -> bytes:
    assert stream is not None
    content = bytearray()
    while chunk := await stream.read(CHUNK_BYTES):
        content += chunk
        if len(content) > most:
            raise ForeignCodeFailed(f"{function} answers with more than {most} bytes")
    return bytes(content)


async def _end_of(stream: asyncio.StreamReader | None) -> str:
    assert stream is not None
    content = b""
    while chunk := await stream.read(CHUNK_BYTES):
        content = (content + chunk)[-QUOTED_BYTES:]
    return content.decode(errors="replace").strip()
