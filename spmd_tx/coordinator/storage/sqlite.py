"""Opens SQLite's file: locks it, checks it for damage, and makes engines for it."""

import os
import sqlite3
import time
from contextlib import ExitStack, closing
from pathlib import Path
from shlex import quote
from typing import IO

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from spmd_tx.coordinator.storage import lock_file
from spmd_tx.errors import DatabaseDamaged, StartError

CHECK_SECONDS = 10.0  # after which the check of a large database stops
DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

# FULL: a commit is on the disk when it returns. The timeout is for users who open the file with another tool.
# SQLite cuts its write-ahead log back to 64 MiB.
PRAGMAS = (
    "journal_mode=WAL",
    "synchronous=FULL",
    "foreign_keys=ON",
    "busy_timeout=3000",
    f"journal_size_limit={64 << 20}",
)


def lock(file: Path) -> IO[str]:
    """Lock the file for this process, and check it. Raises StartError, or DatabaseDamaged. Blocks.

    The check uses no SQLAlchemy, which leaves a thread behind when a connection cannot be opened.
    """
    beside, what = file.with_name(f"{file.name}.lock"), f"the database {file}"
    try:
        with ExitStack() as stack:
            held = stack.enter_context(lock_file.lock(beside, what, "--data-dir or --database-url"))
            _check(file)
            stack.pop_all()
            return held
    except (OSError, sqlite3.Error) as error:
        raise _cannot_open(file, error) from error


def check_readable(file: Path) -> None:
    """Check that the file can be opened beside a server that uses it. Raises as ``lock`` does. Blocks."""
    try:
        with closing(sqlite3.connect(file)) as connection:
            connection.execute("PRAGMA schema_version")
    except sqlite3.Error as error:
        raise _cannot_open(file, error) from error


def make_engine(url: URL) -> AsyncEngine:
    engine = create_async_engine(url)
    event.listen(engine.sync_engine, "connect", _set_pragmas)
    return engine


def make_quick_engine(url: URL) -> Engine:
    """An engine for one thread that writes, without a change of threads at every statement."""
    engine = create_engine(url.set(drivername="sqlite"), pool_size=1, max_overflow=0)
    event.listen(engine, "connect", _set_pragmas)
    return engine


def is_damage(error: BaseException | None) -> bool:
    """Whether an error says that the file is corrupt."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in DAMAGE


def damaged(file: str, problem: str) -> DatabaseDamaged:
    return DatabaseDamaged(
        f"the database {file} is damaged: {problem}. Keep a copy of the data directory, check the disk, and "
        "restore the last backup (docs/backup.md); "
        f"sqlite3 {quote(file)} .recover shows what can still be read"
    )


def _cannot_open(file: Path, error: OSError | sqlite3.Error) -> StartError:
    if is_damage(error):
        return damaged(str(file), str(error))
    reason = error.strerror if isinstance(error, OSError) else error
    return StartError(
        f"cannot open the database {file}: {reason}; see that user {os.getuid()} may write there, "
        "or choose another --data-dir or --database-url"
    )


def _check(file: Path) -> None:
    """Run SQLite's quick check, for at most CHECK_SECONDS. Raises DatabaseDamaged."""
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA schema_version")
        deadline = time.monotonic() + CHECK_SECONDS
        connection.set_progress_handler(lambda: time.monotonic() > deadline, 100_000)
        try:
            verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_INTERRUPT:
                return
            raise
    if verdict != "ok":
        raise damaged(str(file), verdict.splitlines()[-1])


def _set_pragmas(connection: object, _: object) -> None:
    cursor = connection.cursor()  # pyright: ignore[reportAttributeAccessIssue]
    for pragma in PRAGMAS:
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
