"""Bounds how many different metrics clients name in one run, since pages draw a curve for each."""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from contextlib import aclosing

import msgspec
from sqlalchemy import Text, cast, select

from spmd_tx.coordinator.requests.runs.run_metrics import CLIENT
from spmd_tx.coordinator.runtime.threads import compute
from spmd_tx.coordinator.storage.database import Database
from spmd_tx.coordinator.storage.row_pieces import in_pieces
from spmd_tx.coordinator.storage.tables import RunMetrics
from spmd_tx.errors import InvalidRequest

MOST_RUNS = 256  # whose names are remembered
ROWS, BYTES = 200, 1 << 20  # of a run's newest messages, from which its names are learned again
ROWS_AT_ONCE = 20


class MetricNames:
    """Remembers the names that clients have sent, as hashes."""

    def __init__(self, database: Database, most: int, most_characters: int) -> None:
        self._database = database
        self._most = most
        self._most_characters = most_characters
        self._known: OrderedDict[str, set[int]] = OrderedDict()  # by run, the last one used at the end

    async def add(self, run: str, names: Collection[str]) -> None:
        """Note the names of a message. Raises InvalidRequest if one is too long, or they are too many."""
        for name in names:
            if len(name) > self._most_characters:
                raise InvalidRequest(
                    f"the name of the metric {name[:40]!r}... has {len(name)} characters, and the most is "
                    f"{self._most_characters}; shorten it (the operator raises the limit "
                    "metric_name_characters)"
                )
        known = await self._of(run)
        fresh = [name for name in names if hash(name) not in known]
        if len(known) + len(fresh) > self._most:
            raise InvalidRequest(
                f"{run} has {len(known)} metrics of its client, this message names {len(fresh)} others, such "
                f"as {fresh[0]!r}, and a run has at most {self._most}; send the same names at each step (the "
                "operator raises the limit metric_names)"
            )
        known.update(map(hash, fresh))

    async def _of(self, run: str) -> set[int]:
        if run not in self._known:
            names = await self._read(run)
            self._known.setdefault(run, names)
            if len(self._known) > MOST_RUNS:
                self._known.popitem(last=False)
        self._known.move_to_end(run)
        return self._known[run]

    async def _read(self, run: str) -> set[int]:
        hashes, size = set[int](), 0
        query = select(cast(RunMetrics.metrics, Text)).where(
            RunMetrics.line == run, RunMetrics.kind == CLIENT
        )
        query = query.order_by(RunMetrics.number.desc()).limit(ROWS)
        async with self._database.reading() as db, aclosing(in_pieces(db, query, ROWS_AT_ONCE)) as pieces:
            async for piece in pieces:
                texts = [text for (text,) in piece]
                length = sum(map(len, texts))
                hashes |= await compute(length, _hashes, texts)
                size += length
                if size > BYTES:
                    break
        return hashes


def _hashes(texts: Iterable[str]) -> set[int]:
    return {hash(name) for text in texts for name in msgspec.json.decode(text)}
