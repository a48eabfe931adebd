"""Keeps the metrics of training runs: a row of each request, in the transaction that stores its outcome.

So a crash neither loses nor repeats one. Readers (metric_pages.py) put the rows of a step together: those of
its optim_step, of the forward_backward requests since the step before, and what the client has sent of it.
What a client sends of steps of its own stays as it was sent: its count need not be the server's.
"""

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgspec
from sqlalchemy import (
    ColumnElement,
    ScalarSelect,
    Select,
    Text,
    and_,
    case,
    delete,
    exists,
    func,
    orm,
    select,
    update,
)
from sqlalchemy import cast as cast_in_sql
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from spmd_tx.coordinator.requests.records import Finished, NewOutcome
from spmd_tx.coordinator.requests.runs import run_alarms
from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.runtime.threads import compute
from spmd_tx.coordinator.storage import bulk_rows
from spmd_tx.coordinator.storage.tables import CheckpointRow, ModelRow, RunMetrics

FORWARD_BACKWARD, OPTIM_STEP, CLIENT = "forward_backward", "optim_step", "client"
WEIGHT = "num_datums:sum"  # of means, when several requests make one step
LAST_ROWS = 16  # that a run's newest values are taken from
THINNED_POINTS = 1000  # steps of a run that are left when it is old
MOST_THINNED = 20  # runs at a time, since the log waits meanwhile

NEWEST_FIRST = RunMetrics.seq_id.desc(), RunMetrics.number.desc()
IS_LOGGED = and_(RunMetrics.kind == CLIENT, RunMetrics.step.is_not(None))  # by a client, of its own steps

Values = dict[str, float | None]
Column = InstrumentedAttribute[Any]


class Summary(NamedTuple):
    """Holds what a list of runs shows of one."""

    steps: int
    last_at: float | None
    last: Values
    alarms: list[str]


def add(db: orm.Session, settled: Iterable[NewOutcome]) -> None:
    """Add the metrics of results, in a transaction of the caller's."""
    rows = [
        {
            "line": each.request.line,
            "seq_id": each.request.seq_id,
            "kind": each.request.kind,
            "at": clock.now(),
            "metrics": json.dumps(_finite(each.outcome.metrics)),
        }
        for each in settled
        if isinstance(each.outcome, Finished) and each.outcome.metrics
    ]
    bulk_rows.insert(db, RunMetrics, rows)


async def add_of_client(
    db: AsyncSession, line: str, seq_id: int, step: int | None, values: Mapping[str, float]
) -> int:
    """Add what a client says of a step of its own, or of the next one that is finished (None).

    What it says of the next one is one row, however many messages it takes. Returns the row's bytes.
    """
    row = RunMetrics(
        line=line, seq_id=seq_id, kind=CLIENT, at=clock.now(), step=step, metrics=_finite(values)
    )
    newest = await _newest_unnamed(db, line) if step is None else None
    if newest is not None and (newest.kind, newest.seq_id) == (CLIENT, seq_id):
        row.metrics = newest.metrics | row.metrics
        await db.execute(update(RunMetrics), [{"number": newest.number, "metrics": row.metrics}])
    else:
        db.add(row)
    return len(json.dumps(row.metrics))


async def _newest_unnamed(db: AsyncSession, line: str) -> RunMetrics | None:
    """Return the last of the rows from which points are made."""
    rows = select(RunMetrics).where(RunMetrics.line == line, ~IS_LOGGED)
    return await db.scalar(rows.order_by(*NEWEST_FIRST).limit(1))


def _finite(values: Mapping[str, float]) -> Values:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


async def summary(db: AsyncSession, line: str) -> Summary:
    """Return how many steps a run has, the newest value of each metric, and what needs a look."""
    return Summary(await count(db, line), *await _newest_values(db, line))


async def _newest_values(
    db: AsyncSession, line: str, *conditions: ColumnElement[bool]
) -> tuple[float | None, Values, list[str]]:
    """Return the time of the newest rows, the last value of each metric in them, and the alarms."""
    columns = RunMetrics.at, cast_in_sql(RunMetrics.metrics, Text)
    query = select(*columns).where(RunMetrics.line == line, *conditions)
    rows = (await db.execute(query.order_by(*NEWEST_FIRST).limit(LAST_ROWS))).all()
    texts = [text for _, text in reversed(rows)]
    last, alarms = await compute(sum(map(len, texts)), _together, texts)
    return max((at for at, _ in rows), default=None), last, alarms


def _together(texts: Iterable[str]) -> tuple[Values, list[str]]:
    """Return the last value of each metric, and the alarms."""
    decoded = [msgspec.json.decode(text, type=Values) for text in texts]
    return {name: value for each in decoded for name, value in each.items()}, run_alarms.alarms(decoded)


async def at_save(db: AsyncSession, line: str, seq_id: int) -> Values:
    """Return the newest value of each metric when a request's turn came."""
    _, last, _ = await _newest_values(db, line, RunMetrics.seq_id <= seq_id)
    return last


async def saved(db: AsyncSession, lines: Collection[str]) -> set[str]:
    """Return which of these runs have taken no step since their newest checkpoints."""
    if not lines:
        return set()
    newest = select(func.max(CheckpointRow.seq_id)).where(CheckpointRow.run_id == ModelRow.id)
    last = func.coalesce(newest.correlate(ModelRow).scalar_subquery(), -1)
    has_unsaved = exists().where(is_step(ModelRow.id), RunMetrics.seq_id > last)
    return set(await db.scalars(select(ModelRow.id).where(ModelRow.id.in_(lines), ~has_unsaved)))


async def forget(db: AsyncSession, before: float, thin_before: float) -> None:
    """Delete runs that have not changed since a time, and thin out those that have not since another."""
    unchanged = select(ModelRow.id).where(_newest(RunMetrics.at) < before)
    await db.execute(
        delete(RunMetrics).where(RunMetrics.line.in_(unchanged)).execution_options(synchronize_session=False)
    )
    steps = select(func.count()).where(is_step(ModelRow.id)).scalar_subquery()
    thinnable = select(ModelRow.id).where(
        _newest(RunMetrics.at) < thin_before,
        _newest(RunMetrics.step, RunMetrics.kind == OPTIM_STEP).is_(None),  # else it is thinned already
        steps > 2 * THINNED_POINTS,
    )
    for line in (await db.scalars(thinnable.limit(MOST_THINNED))).all():
        await _thin(db, line)


def _newest(column: Column, *conditions: ColumnElement[bool]) -> ScalarSelect[Any]:
    """Select what the newest row of a model's run has there, without reading the others."""
    rows = select(column).where(RunMetrics.line == ModelRow.id, *conditions)
    return rows.order_by(*NEWEST_FIRST).limit(1).scalar_subquery()


def newest_at() -> ScalarSelect[Any]:
    """Select the time of the newest metrics of a model's run, for a query of models."""
    return _newest(RunMetrics.at)


async def _thin(db: AsyncSession, line: str) -> None:
    """Leave about THINNED_POINTS of a run's steps, evenly and with their numbers, the last one among them.

    The steps that a client counts by itself are thinned in the same way, by themselves.
    """
    ends = select(RunMetrics.number, RunMetrics.step).where(is_step(line)).order_by(RunMetrics.seq_id)
    numbers, following = [], 0
    for number, step in await db.execute(ends):
        following = (following if step is None else step) + 1
        numbers.append({"number": number, "step": following - 1})
    stride = _stride(len(numbers))
    await db.execute(update(RunMetrics), numbers[::-1][::stride])
    ended = func.sum(case((RunMetrics.kind == OPTIM_STEP, 1), else_=0))  # steps from a row's own to the last
    rows = select(RunMetrics.number, ended.over(order_by=NEWEST_FIRST).label("place"))
    await _leave_each(db, rows.where(RunMetrics.line == line, ~IS_LOGGED), stride)
    are_logged = RunMetrics.line == line, IS_LOGGED
    logged = await db.scalar(select(func.count(RunMetrics.step.distinct())).where(*are_logged)) or 0
    place = func.dense_rank().over(order_by=RunMetrics.step.desc()).label("place")
    await _leave_each(db, select(RunMetrics.number, place).where(*are_logged), _stride(logged))


def _stride(steps: int) -> int:
    return max(1, -(-steps // THINNED_POINTS))


async def _leave_each(db: AsyncSession, rows: "Select[int, Any]", stride: int) -> None:
    """Delete rows whose place, counted from 1, is not one of every ``stride``."""
    placed = rows.subquery()
    is_between = and_(placed.c.place > 0, (placed.c.place - 1) % stride != 0)
    numbers = select(placed.c.number).where(is_between)
    await db.execute(delete(RunMetrics).where(RunMetrics.number.in_(numbers)))


async def count(db: AsyncSession, line: str, *conditions: ColumnElement[bool]) -> int:
    """Return how many finished steps of a run meet conditions."""
    query = select(func.count()).select_from(RunMetrics).where(is_step(line), *conditions)
    return await db.scalar(query) or 0


def is_step(line: str | Column) -> ColumnElement[bool]:
    return and_(RunMetrics.line == line, RunMetrics.kind == OPTIM_STEP)


def merged(passes: Sequence[Values]) -> Values:
    """Put the metrics of several passes together, by the suffixes that the SDK knows."""
    if len(passes) <= 1:
        return dict(passes[0]) if passes else {}
    together: Values = {}
    for name in dict.fromkeys(name for each in passes for name in each):
        having = [each for each in passes if name in each]
        values = [each[name] for each in having]
        if any(value is None for value in values):
            together[name] = None
            continue
        numbers = cast(list[float], values)
        match name.rpartition(":")[2]:
            case "mean":
                weights = [each.get(WEIGHT) or 1.0 for each in having]
                together[name] = sum(w * n for w, n in zip(weights, numbers, strict=True)) / sum(weights)
            case "min":
                together[name] = min(numbers)
            case "max":
                together[name] = max(numbers)
            case _:
                together[name] = sum(numbers)
    return together
