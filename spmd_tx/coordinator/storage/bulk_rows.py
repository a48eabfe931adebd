"""Writes and finds many rows of a table in one statement, since a statement costs more than a row.

SQLite releases the GIL at every statement, and gets it back late from a busy loop: so it gets all rows in
one. PostgreSQL's driver sends one statement with many sets of parameters in a single round trip.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select, text, tuple_
from sqlalchemy.orm import Session

from spmd_tx.coordinator.storage.tables import Base

RowValues = Mapping[str, object]

ROWS_AT_ONCE = 500  # SQLite takes 32,766 parameters


def insert(db: Session, table: type[Base], rows: Sequence[RowValues], and_then: str = "") -> None:
    """Insert rows of the database's own values. ``and_then`` follows the values: ON CONFLICT ..."""
    columns = _columns(rows)
    into = f"INSERT INTO {table.__tablename__} ({', '.join(columns)}) VALUES"
    if not _is_sqlite(db):
        _many(db, f"{into} ({_named(columns)}) {and_then}", rows)
        return
    for start in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[start : start + ROWS_AT_ONCE]
        _one(db, f"{into} {_places(columns, len(some))} {and_then}", some)


def update(db: Session, table: type[Base], key: str, rows: Sequence[RowValues]) -> None:
    """Update rows by their key, which must be the first column of each mapping."""
    columns = _columns(rows)
    assert not columns or columns[0] == key
    if not _is_sqlite(db):
        values = ", ".join(f"{name} = :{name}" for name in columns[1:])
        _many(db, f"UPDATE {table.__tablename__} SET {values} WHERE {key} = :{key}", rows)
        return
    values = ", ".join(f"{name} = new.column{place}" for place, name in enumerate(columns[1:], start=2))
    for start in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[start : start + ROWS_AT_ONCE]
        source = f"(VALUES {_places(columns, len(some))}) AS new"
        has_key = f"{table.__tablename__}.{key} = new.column1"
        _one(db, f"UPDATE {table.__tablename__} SET {values} FROM {source} WHERE {has_key}", some)


def find(
    db: Session,
    table: type[Base],
    keys: Sequence[str],
    values: Sequence[Sequence[object]],
    columns: Sequence[str],
) -> list[Sequence[Any]]:
    """The ``columns`` of the rows whose composite key is among the wanted ones.

    Given a list of such keys, SQLite would scan the whole table. So it joins the keys with the table instead.
    """
    if not _is_sqlite(db):
        key = tuple_(*(getattr(table, name) for name in keys))
        query = select(*(getattr(table, name) for name in columns))
        parts = [values[start : start + ROWS_AT_ONCE] for start in range(0, len(values), ROWS_AT_ONCE)]
        return [row for part in parts for row in db.execute(query.where(key.in_(part)))]
    rows: list[Sequence[Any]] = []
    for start in range(0, len(values), ROWS_AT_ONCE):
        some = values[start : start + ROWS_AT_ONCE]
        source = f"(VALUES {_places(keys, len(some))}) AS wanted"
        meets = " AND ".join(f"{name} = wanted.column{place}" for place, name in enumerate(keys, start=1))
        statement = f"SELECT {', '.join(columns)} FROM {source} CROSS JOIN {table.__tablename__} ON {meets}"
        parameters = tuple(value for key in some for value in key)
        rows += db.connection().exec_driver_sql(statement, parameters)
    return rows


def _is_sqlite(db: Session) -> bool:
    return db.get_bind().dialect.name == "sqlite"


def _columns(rows: Sequence[RowValues]) -> list[str]:
    return list(rows[0]) if rows else []


def _named(columns: Sequence[str]) -> str:
    return ", ".join(f":{name}" for name in columns)


def _places(columns: Sequence[str], count: int) -> str:
    row = f"({', '.join('?' * len(columns))})"
    return ", ".join([row] * count)


def _one(db: Session, statement: str, rows: Sequence[RowValues]) -> None:
    values = tuple(value for row in rows for value in row.values())
    db.connection().exec_driver_sql(statement, values)


def _many(db: Session, statement: str, rows: Sequence[RowValues]) -> None:
    if rows:
        db.execute(text(statement), list(rows))
