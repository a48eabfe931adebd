"""Calls foreign code, which may abort, hang or leak, in a child process with limits on time and memory.

The child is a fresh interpreter: it shares no memory, no files and no secrets with this process, and ends
with it. What it costs is its start, 0.1 s or so, and what it imports; a ``LastingChild`` pays that once.
"""

import asyncio
import logging
import math
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from spmd_tx import errors
from spmd_tx.errors import UNREADABLE, ForeignCodeFailed, RequestError
from spmd_tx.processes.child_messages import (
    LENGTH_BYTES,
    AnyAnswer,
    Broke,
    ChildCall,
    RequestRefused,
    Returned,
    StorageFailed,
    decode_answer,
    encode,
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
    child = LastingChild(allowance)
    try:
        return await child.call(function, arguments, is_only=True)
    finally:
        await child.close()


class LastingChild:
    """Calls functions in one child process, one after the other.

    The child starts with the first call, and again when it has ended: because a call has failed in it or was
    cancelled, there were no calls for ``idle_seconds``, or somebody killed it.
    """

    def __init__(self, allowance: Allowance, idle_seconds: float = math.inf) -> None:
        self._allowance = allowance  # of each call
        self._idle_seconds = idle_seconds
        self._running: _Running | None = None
        self._idling: asyncio.Task[None] | None = None

    async def call(self, function: str, arguments: Mapping[str, object], is_only: bool = False) -> Any:
        """As ``call_outside``. One call at a time; none follows one that ``is_only``."""
        allowance = self._allowance
        call = ChildCall(
            function=function,
            arguments=dict(arguments),
            seconds=allowance.seconds,
            memory=allowance.memory,
            is_only=is_only,
        )
        is_usable = False
        self._stop_idling()
        try:
            if not self.is_running:
                await self.close()
            async with asyncio.timeout(allowance.seconds):
                if self._running is None:
                    self._running = await _start(allowance)
                answer = await self._running.exchange(call)
            is_usable = not isinstance(answer, Broke)
            return _value(function, answer)
        except TimeoutError:
            raise ForeignCodeFailed(
                f"{function} took longer than {allowance.seconds:g} s, and was ended"
            ) from None
        finally:
            if not is_usable:
                await self.close()
            elif self._idle_seconds < math.inf:
                self._idling = asyncio.create_task(self._idle())

    @property
    def is_running(self) -> bool:
        """Whether the next call finds a child that has started."""
        return self._running is not None and not self._running.has_ended

    async def close(self) -> None:
        """End the child and whatever it has started."""
        self._stop_idling()
        running, self._running = self._running, None
        if running is not None:
            await running.end()

    async def _idle(self) -> None:
        await asyncio.sleep(self._idle_seconds)
        self._idling = None  # a call does not stop what is ending
        await self.close()

    def _stop_idling(self) -> None:
        if self._idling is not None:
            self._idling.cancel()
            self._idling = None


class _Running:
    """A child that has been started."""

    def __init__(self, process: asyncio.subprocess.Process, most_bytes: int) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._calls = process.stdin
        self._answers = process.stdout
        self._most_bytes = most_bytes  # of an answer
        self._words = b""  # the last that it has printed
        self._listening = asyncio.create_task(self._listen())

    @property
    def has_ended(self) -> bool:
        if self._process.returncode is not None:
            return True
        try:
            os.kill(self._process.pid, 0)
        except ProcessLookupError:  # another thread has taken its exit code, and will pass it on
            return True
        return False

    async def exchange(self, call: ChildCall) -> AnyAnswer:
        """Raises ForeignCodeFailed if the child ends without an answer, or answers with too much."""
        telling = asyncio.create_task(self._tell(encode(call)))
        try:
            length = int.from_bytes(await self._answers.readexactly(LENGTH_BYTES))
            if length > self._most_bytes:
                raise ForeignCodeFailed(f"{call.function} answers with more than {self._most_bytes} bytes")
            return decode_answer(await self._answers.readexactly(length))
        except asyncio.IncompleteReadError:
            raise ForeignCodeFailed(await self._how_it_ended(call.function)) from None
        except UNREADABLE as error:
            raise ForeignCodeFailed(f"{call.function} wrote into its answer: {error}") from None
        finally:
            telling.cancel()
            await asyncio.wait([telling])

    async def end(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # it may have ended by itself
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        self._calls.close()
        self._listening.cancel()
        await asyncio.wait([self._listening])

    async def _tell(self, content: bytes) -> None:
        with suppress(ConnectionError):  # it may be gone already; its end says why
            self._calls.write(content)
            await self._calls.drain()

    async def _how_it_ended(self, function: str) -> str:
        code = await self._process.wait()
        await self._listening
        ending = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
        logger.error("%s ended by %s: %s", function, ending, self._words.decode(errors="replace").strip())
        return f"{function} ended by {ending} without an answer"

    async def _listen(self) -> None:
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(CHUNK_BYTES):
            self._words = (self._words + chunk)[-QUOTED_BYTES:]


async def _start(allowance: Allowance) -> _Running:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "spmd_tx.processes.child_main", str(os.getpid())),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=of_foreign_code(os.environ) | dict(allowance.environment),
        start_new_session=True,  # so that it is killed together with its own children
    )
    return _Running(process, allowance.memory)


def _value(function: str, answer: AnyAnswer) -> Any:
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
