"""Reads and searches samples for pages: what is short in a thread, the rest in a child process.

Long bodies take seconds of Python, in which nothing else of this process could run. So the child reads the
files by itself, and returns what is shown.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from spmd_tx.bounds import Bounds
from spmd_tx.coordinator.bases.served_base import ServedBase
from spmd_tx.coordinator.requests.runs import sample_bodies
from spmd_tx.coordinator.requests.runs.sample_bodies import (
    SampleBody,
    Search,
    Searched,
    ShownSize,
    StoredSample,
    WantedSamples,
)
from spmd_tx.coordinator.text import token_texts
from spmd_tx.coordinator.text.model_text import LazyModelText
from spmd_tx.coordinator.text.prompt_texts import lasting_model_text
from spmd_tx.errors import ForeignCodeFailed, InvalidRequest
from spmd_tx.processes.child import Allowance, LastingChild

SHORT_BYTES = 64 << 10  # of all bodies
COMPRESSED = 16  # bytes of a body that a byte in a file counts for: files are compressed
IDLE_SECONDS = 60.0  # after which the child ends

READ = {False: sample_bodies.read_some, True: sample_bodies.read_alike}  # by whether they must be alike

_HERE = "spmd_tx.coordinator.requests.runs.sample_reader"


class SampleReader:
    """Reads the bodies of sample requests. It ends after some seconds, and has read one at least."""

    def __init__(self, payloads: Path, model: Path, text: LazyModelText, bounds: Bounds) -> None:
        """``payloads`` is where bodies are, ``model`` where the files of ``text`` are."""
        self._payloads, self._model, self._text = payloads, model, text
        self._seconds = bounds.search_seconds
        self._child = LastingChild(Allowance(bounds.text_seconds, bounds.text_memory_bytes), IDLE_SECONDS)
        self._is_free = asyncio.Lock()

    async def close(self) -> None:
        """End the child process. No call may be at work."""
        await self._child.close()

    async def read(
        self, stored: Sequence[StoredSample], size: ShownSize, *, alike: bool = False
    ) -> list[SampleBody | None]:
        """Return what the first of these hold, or those ``alike`` to the first. Raises InvalidRequest."""
        if _is_short(stored):
            return await asyncio.to_thread(READ[alike], self._payloads, stored, size, self._seconds)
        arguments = {"stored": stored, "size": size, "seconds": self._seconds, "alike": alike}
        return msgspec.convert(await self._outside("read_outside", arguments), list[SampleBody | None])

    async def search(
        self, stored: Sequence[StoredSample], wanted: WantedSamples, most: int, size: ShownSize
    ) -> Searched:
        """Return which of these requests are wanted. Raises InvalidRequest."""
        search = Search(wanted, most, size, self._seconds)
        if _is_short(stored):
            decode = partial(token_texts.texts, (await self._text.get()).tokenizer)
            return await asyncio.to_thread(search.run, self._payloads, stored, decode)
        arguments = {"stored": stored, "search": search, "model": str(self._model)}
        return Searched(*await self._outside("search_outside", arguments))

    async def _outside(self, function: str, arguments: dict[str, object]) -> Any:
        arguments["payloads"] = str(self._payloads)
        try:
            async with self._is_free:
                return await self._child.call(f"{_HERE}:{function}", arguments)
        except ForeignCodeFailed as error:
            raise InvalidRequest(
                "these samples are too long to be read for a page; ask for fewer at a time"
            ) from error


class SampleReaders:
    """Has a reader for each base model, from when it is first asked for."""

    def __init__(self, payloads: Path, bounds: Bounds) -> None:
        self._payloads, self._bounds = payloads, bounds
        self._readers: dict[str, SampleReader] = {}  # by the key of the base

    def of(self, base: ServedBase) -> SampleReader:
        reader = self._readers.get(base.key)
        if reader is None:
            model = base.model
            reader = SampleReader(self._payloads, model.directory, model.text, self._bounds)
            self._readers[base.key] = reader
        return reader

    async def close(self) -> None:
        await asyncio.gather(*(reader.close() for reader in self._readers.values()))


def _is_short(stored: Sequence[StoredSample]) -> bool:
    bodies = [body for each in stored for body in (each.payload, each.result) if body is not None]
    sizes = (len(body) if isinstance(body, bytes) else COMPRESSED * body.length for body in bodies)
    return sum(sizes) <= SHORT_BYTES


def read_outside(
    payloads: str, stored: list[Any], size: Any, seconds: float, alike: bool
) -> list[SampleBody | None]:
    """Read bodies in a child process."""
    samples = msgspec.convert(stored, list[StoredSample])
    return READ[alike](Path(payloads), samples, msgspec.convert(size, ShownSize), seconds)


def search_outside(payloads: str, model: str, stored: list[Any], search: Any) -> Searched:
    """Search bodies in a child process."""
    samples = msgspec.convert(stored, list[StoredSample])
    decode = partial(token_texts.texts, lasting_model_text(model).tokenizer)
    return msgspec.convert(search, Search).run(Path(payloads), samples, decode)
