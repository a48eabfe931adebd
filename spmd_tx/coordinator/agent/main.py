"""Runs ``spmd-tx worker``: an agent in a process of its own, until the server or a signal ends it."""

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from spmd_tx.config import LogFormat
from spmd_tx.coordinator.agent.agent import WORKER, Agent, AgentOptions
from spmd_tx.coordinator.runtime.logs import log_to_stderr
from spmd_tx.errors import StartError
from spmd_tx.protocol import addresses
from spmd_tx.protocol.secret import REMEDY, VARIABLE, read_secret


def shared_secret(file: Path | None) -> str:
    """Read the secret from the file or the environment. Raises StartError when there is none."""
    secret = read_secret(file)
    if secret is None:
        raise StartError(
            "a worker needs the secret of its server: give both the same --secret-file, "
            f"or {VARIABLE} in their environments; {REMEDY}"
        )
    return secret


async def run(options: AgentOptions, worker: Sequence[str] = WORKER, log_format: LogFormat = "text") -> int:
    """Run an agent. The result is the exit code. Raises StartError when this host is of no use."""
    try:
        addresses.split(options.coordinator)
    except ValueError as problem:
        raise StartError(f"--coordinator is {options.coordinator!r}; {problem}") from None
    log_to_stderr(log_format)
    agent = Agent(options, worker)
    running = asyncio.create_task(agent.run())
    loop, has_signal = asyncio.get_running_loop(), False

    def end(seconds: float) -> None:
        nonlocal has_signal
        if has_signal:
            agent.kill()
            os._exit(1)
        has_signal = True
        if seconds and agent.leave(seconds):
            loop.call_later(seconds, running.cancel)
        else:
            running.cancel()

    loop.add_signal_handler(signal.SIGINT, end, 0.0)
    loop.add_signal_handler(signal.SIGTERM, end, options.leave_seconds)
    await asyncio.wait([running])
    if not running.cancelled():
        running.result()
    return 0
