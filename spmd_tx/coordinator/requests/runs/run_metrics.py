"""Keeps the metrics of training runs: a row of each request, in the transaction that stores its outcome.

So a crash neither loses nor repeats one. Readers put the rows of a step together: those of its optim_step, of
the forward_backward requests since the step before, and what the client has sent.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from sqlalchemy import (
    ColumnElement,
    ScalarSelect,
    Select,
    Table,
    and_,
    case,
    delete,
    func,
    orm,
    select,
    update,
)
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from spmd_tx.coordinator.requests.records import Finished, Settled
from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.storage import bulk_rows
from spmd_tx.coordinator.storage.tables import Model, RunMetrics

FORWARD_BACKWARD, OPTIM_STEP, CLIENT = "forward_backward", "optim_step", "client"
WEIGHT = "num_datums:sum"  # of means, when several requests make one step
LAST_ROWS = 16  # that a run's newest values are taken from
THINNED_POINTS = 1000  # steps of a run that are left when it is old
MOST_THINNED = 20  # runs at a time, since the log waits meanwhile

Values = dict[str, float | None]
Column = InstrumentedAttribute[Any]


class Point(NamedTuple):
    """Holds what is known of one step of a run."""

    seq_id: int  # of its optim_step
    step: int  # from 0
    at: float  # seconds since the epoch
    metrics: Values


class _Row(NamedTuple):
    """Holds what points are made of."""

    seq_id: int
    kind: str
    at: float
    step: int | None
    metrics: Values


class Summary(NamedTuple):
    """Holds what a list of runs shows of one."""

    steps: int
    last_at: float | None
    last: Values


def add(db: orm.Session, settled: Iterable[Settled]) -> None:
    """Add the metrics of results, in a transaction of the caller's."""
    rows = [
        _row(each.request.line, each.request.seq_id, each.request.kind, each.outcome.metrics)
        for each in settled
        if isinstance(each.outcome, Finished) and each.outcome.metrics
    ]
    if rows:
        bulk_rows.insert(db, cast(Table, RunMetrics.__table__), rows)


def add_of_client(
    db: AsyncSession, line: str, seq_id: int, step: int | None, values: Mapping[str, float]
) -> None:
    """Add what a client says of a step: the one that it names, or the next one that is finished."""
    row = RunMetrics(
        line=line, seq_id=seq_id, kind=CLIENT, at=clock.now(), step=step, metrics=_finite(values)
    )
    db.add(row)


def _row(line: str, seq_id: int, kind: str, values: Mapping[str, float]) -> dict[str, object]:
    content = json.dumps(_finite(values))
    return {"line": line, "seq_id": seq_id, "kind": kind, "at": clock.now(), "metrics": content}


def _finite(values: Mapping[str, float]) -> Values:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


async def points(db: AsyncSession, line: str, after: int, limit: int) -> tuple[list[Point], int | None]:
    """Return the finished steps behind the one with the seq_id ``after`` (-1: all), and where to go on.

    That is None when there are no more steps now.
    """
    ends = select(RunMetrics.seq_id).where(_is_step(line), RunMetrics.seq_id > after)
    wanted = (await db.scalars(ends.order_by(RunMetrics.seq_id).limit(limit + 1))).all()
    if not wanted:
        return [], None
    last = wanted[:limit][-1]
    found = _points(await _between(db, line, after, last), await _next_step(db, line, after))
    by_step = {point.step: point for point in found}
    named = RunMetrics.step.between(found[0].step, found[-1].step)
    for row in await db.scalars(_of_client(line).where(named)):
        if row.step in by_step:
            by_step[row.step].metrics.update(row.metrics)
    return found, last if len(wanted) > limit else None


async def summary(db: AsyncSession, line: str) -> Summary:
    """Return how many steps a run has, and the newest value of each metric."""
    newest = (
        select(RunMetrics)
        .where(RunMetrics.line == line)
        .order_by(RunMetrics.seq_id.desc(), RunMetrics.number.desc())
        .limit(LAST_ROWS)
    )
    rows = (await db.scalars(newest)).all()
    last: Values = {}
    for row in reversed(rows):
        last |= row.metrics
    return Summary(await _count(db, line), max((row.at for row in rows), default=None), last)


async def forget(db: AsyncSession, before: float, thin_before: float) -> None:
    """Delete runs that have not changed since a time, and thin out those that have not since another."""
    unchanged = select(Model.id).where(_newest(RunMetrics.at) < before)
    await db.execute(
        delete(RunMetrics).where(RunMetrics.line.in_(unchanged)).execution_options(synchronize_session=False)
    )
    steps = select(func.count()).where(_is_step(Model.id)).scalar_subquery()
    thinnable = select(Model.id).where(
        _newest(RunMetrics.at) < thin_before,
        _newest(RunMetrics.step, RunMetrics.kind == OPTIM_STEP).is_(None),  # else it is thinned already
        steps > 2 * THINNED_POINTS,
    )
    for line in (await db.scalars(thinnable.limit(MOST_THINNED))).all():
        await _thin(db, line)


def _newest(column: Column, *conditions: ColumnElement[bool]) -> ScalarSelect[Any]:
    """Select what the newest row of a model's run has there, without reading the others."""
    rows = select(column).where(RunMetrics.line == Model.id, *conditions)
    return rows.order_by(RunMetrics.seq_id.desc(), RunMetrics.number.desc()).limit(1).scalar_subquery()


async def _thin(db: AsyncSession, line: str) -> None:
    """Leave about THINNED_POINTS of a run's steps, evenly and with their numbers, the last one among them."""
    ends = select(RunMetrics.number, RunMetrics.step).where(_is_step(line)).order_by(RunMetrics.seq_id)
    numbers, following = [], 0
    for number, step in await db.execute(ends):
        following = (following if step is None else step) + 1
        numbers.append({"number": number, "step": following - 1})
    stride = -(-len(numbers) // THINNED_POINTS)
    await db.execute(update(RunMetrics), numbers[::-1][::stride])
    ended = func.sum(case((RunMetrics.kind == OPTIM_STEP, 1), else_=0))  # steps from a row's own to the last
    newest_first = RunMetrics.seq_id.desc(), RunMetrics.number.desc()
    rows = select(RunMetrics.number, ended.over(order_by=newest_first).label("ended"))
    counted = rows.where(RunMetrics.line == line).subquery()
    is_between = and_(counted.c.ended > 0, (counted.c.ended - 1) % stride != 0)
    await db.execute(
        delete(RunMetrics).where(RunMetrics.number.in_(select(counted.c.number).where(is_between)))
    )


async def _next_step(db: AsyncSession, line: str, after: int) -> int:
    """Return the number of the first step behind a seq_id; thinned runs have the numbers of theirs."""
    known = select(RunMetrics).where(_is_step(line), RunMetrics.seq_id <= after, RunMetrics.step.is_not(None))
    last = await db.scalar(known.order_by(RunMetrics.seq_id.desc()).limit(1))
    if last is None:
        return await _count(db, line, RunMetrics.seq_id <= after)
    since = await _count(db, line, RunMetrics.seq_id > last.seq_id, RunMetrics.seq_id <= after)
    return cast(int, last.step) + 1 + since


async def _count(db: AsyncSession, line: str, *conditions: ColumnElement[bool]) -> int:
    query = select(func.count()).select_from(RunMetrics).where(_is_step(line), *conditions)
    return await db.scalar(query) or 0


async def _between(db: AsyncSession, line: str, after: int, last: int) -> Sequence[_Row]:
    """Read columns: objects of thousands of rows take twice the time."""
    is_named = and_(RunMetrics.kind == CLIENT, RunMetrics.step.is_not(None))
    columns = RunMetrics.seq_id, RunMetrics.kind, RunMetrics.at, RunMetrics.step, RunMetrics.metrics
    query = select(*columns).where(
        RunMetrics.line == line, RunMetrics.seq_id > after, RunMetrics.seq_id <= last, ~is_named
    )
    # A client's row has the number of the request before it, so it comes behind that one.
    found = await db.execute(query.order_by(RunMetrics.seq_id, RunMetrics.number))
    return [_Row(*row) for row in found]


def _is_step(line: str | Column) -> ColumnElement[bool]:
    return and_(RunMetrics.line == line, RunMetrics.kind == OPTIM_STEP)


def _of_client(line: str) -> Select[RunMetrics]:
    return (
        select(RunMetrics)
        .where(RunMetrics.line == line, RunMetrics.kind == CLIENT)
        .order_by(RunMetrics.number)
    )


def _points(rows: Sequence[_Row], first: int) -> list[Point]:
    found: list[Point] = []
    passes: list[Values] = []
    said: Values = {}
    for row in rows:
        if row.kind == FORWARD_BACKWARD:
            passes.append(row.metrics)
        elif row.kind == CLIENT:
            said |= row.metrics
        else:
            step = first if row.step is None else row.step
            found.append(Point(row.seq_id, step, row.at, merged(passes) | row.metrics | said))
            passes, said, first = [], {}, step + 1
    return found


def merged(passes: Sequence[Values]) -> Values:
    """Put the metrics of several passes together, by the suffixes that the SDK knows."""
    if len(passes) <= 1:
        return dict(passes[0]) if passes else {}
    found: Values = {}
    for name in dict.fromkeys(name for each in passes for name in each):
        having = [each for each in passes if name in each]
        values = [each[name] for each in having]
        if any(value is None for value in values):
            found[name] = None
            continue
        numbers = cast(list[float], values)
        match name.rpartition(":")[2]:
            case "mean":
                weights = [each.get(WEIGHT) or 1.0 for each in having]
                found[name] = sum(w * n for w, n in zip(weights, numbers, strict=True)) / sum(weights)
            case "min":
                found[name] = min(numbers)
            case "max":
                found[name] = max(numbers)
            case _:
                found[name] = sum(numbers)
    return found
