"""Connects to PostgreSQL: engines that notice a lost connection, and the lock of the one server that writes.

The only connection that writes holds the lock, so a server that has lost the lock cannot write any more.
PostgreSQL releases it when that connection ends; keep-alives end it within a minute after the loss of a host.
"""

import inspect
import os
import secrets
import socket
from typing import Any

import asyncpg
from sqlalchemy import event
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from spmd_tx.errors import DatabaseTaken, StartError

LOCK = (0x53504D44, 1)  # among the advisory locks of the database

CONNECT_SECONDS = 10.0  # until a database server that does not answer counts as gone
STATEMENT_SECONDS = 120.0

LONGEST_NAME = 63  # bytes
KEEP_ALIVE = {  # seconds, but for the count
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
}

# Errors of asyncpg's own while it connects, for example to a server that is starting
CANNOT_CONNECT = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)

# What SQLAlchemy takes out of a URL for itself.
OF_SQLALCHEMY = {
    "async_creator_fn",
    "async_fallback",
    "prepared_statement_cache_size",
    "prepared_statement_name_func",
}

_HOLDER = """
    SELECT pid, application_name FROM pg_locks JOIN pg_stat_activity USING (pid)
    WHERE locktype = 'advisory' AND classid = $1 AND objid = $2 AND objsubid = 2 AND granted
    AND pg_locks.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


def check_options(url: URL) -> None:
    """Refuse what asyncpg does not know behind the ``?`` of a URL. Raises StartError."""
    supported = set(inspect.signature(asyncpg.connect).parameters) | OF_SQLALCHEMY
    unknown = sorted(set(url.query) - supported)
    if unknown:
        raise StartError(
            f"--database-url has {', '.join(unknown)} behind its ?, which asyncpg does not know; leave it "
            "out (it knows 'passfile', for example)"
        )


def make_engines(url: URL) -> tuple[AsyncEngine, AsyncEngine]:
    """The writer, whose one connection holds the lock, and the reader."""
    name = _connection_name()
    writer = _make_engine(url, name, pool_size=1, max_overflow=0)
    event.listen(writer.sync_engine, "connect", lambda connection, _: _lock(connection, name))
    return writer, _make_engine(url, f"{name[: LONGEST_NAME - 9]}, reading")


def make_engine_beside(url: URL) -> AsyncEngine:
    """An engine without the lock, for a command that runs beside the server."""
    return _make_engine(url, _connection_name())


def _make_engine(url: URL, name: str, **options: Any) -> AsyncEngine:
    arguments = {
        "timeout": CONNECT_SECONDS,
        "command_timeout": STATEMENT_SECONDS,
        "server_settings": {"application_name": name, **KEEP_ALIVE},
    }
    engine = create_async_engine(url, pool_pre_ping=True, connect_args=arguments, **options)
    event.listen(engine.sync_engine, "connect", _wait_for_disks)
    return engine


def _wait_for_disks(connection: Any, _: object) -> None:
    """Make commits wait for the disk, since results are promised to be durable. Stricter levels stay."""
    cursor = connection.cursor()
    try:
        cursor.execute("SHOW synchronous_commit")
        if cursor.fetchone()[0] == "off":
            cursor.execute("SET synchronous_commit TO on")
    finally:
        cursor.close()
        connection.commit()


def _connection_name() -> str:
    """A unique name under which PostgreSQL shows the connections of this server."""
    prefix = f"spmd-tx {secrets.token_hex(4)}, process {os.getpid()} on "
    return (prefix + socket.gethostname())[:LONGEST_NAME]


def _lock(connection: Any, name: str) -> None:
    """Lock the database for a new connection. Raises DatabaseTaken when another server holds the lock.

    If an earlier connection of this server holds it, that connection is ended. Raises TimeoutError then, and
    the next attempt may succeed.
    """
    cursor = connection.cursor()
    try:
        cursor.execute("SELECT pg_try_advisory_lock($1, $2)", LOCK)
        if cursor.fetchone()[0]:
            return
        cursor.execute(_HOLDER, LOCK)
        holder = cursor.fetchone()
        if holder is not None and holder[1] == name:
            cursor.execute("SELECT pg_terminate_backend($1)", (holder[0],))
    finally:
        cursor.close()
        connection.commit()
    if holder is None or holder[1] == name:
        raise TimeoutError("the database has not let go of an earlier connection of this server yet")
    raise DatabaseTaken(
        f"the database is in use by another running server ({holder[1]}); "
        "stop it, or choose another --database-url"
    )
