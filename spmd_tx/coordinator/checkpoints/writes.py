"""Tracks the folders that workers write while later commands run."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path

from spmd_tx.coordinator.runtime.futures import fail
from spmd_tx.errors import MeshError
from spmd_tx.protocol.reports import Reply, Written

Writing = asyncio.Future[str | None]  # gives None when the folder is complete, else the error


class Writes:
    """Holds what is being written, by path."""

    def __init__(self) -> None:
        self._writing: dict[str, Writing] = {}

    def expect(self, path: Path | str) -> Writing:
        """Expect a folder. Call this before the command that has it written is sent."""
        writing: Writing = asyncio.get_running_loop().create_future()
        self._writing[str(path)] = writing
        writing.add_done_callback(lambda _: self._writing.pop(str(path), None))
        return writing

    def take(self, report: Written) -> None:
        """Process a worker's report."""
        writing = self._writing.get(report.path)
        if writing is not None and not writing.done():
            writing.set_result(report.error)

    def abandon(self, error: MeshError) -> None:
        """Fail all writing: the workers are lost."""
        for writing in list(self._writing.values()):
            fail(writing, error)


async def written_after(reply: Awaitable[Reply], writing: Writing) -> str | None:
    """Wait for the reply to a command, then for its folder; return why that could not be written."""
    try:
        await reply
    except BaseException:
        writing.cancel()
        raise
    return await writing
