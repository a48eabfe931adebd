"""Has the version in another folder write data_*.tar.zst: python -m tests.golden.write_earlier_data FOLDER

The folder is a checkout: git worktree add FOLDER VERSION. Its server is killed, as in a crash. Another of
that version goes on with a copy; later versions are to say the same. Arguments behind the folder choose which
archives to write, such as data_whole_weights_postgresql.tar.zst. Packages that only that version needs can be
installed into the folder: pip install --target FOLDER --no-deps flax. Those of PostgreSQL are by 62bcaf9c.
"""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from spmd_tx.demo import tiny_model
from tests.golden.earlier_data import KINDS, SPEC, WRITTEN, archive, begin, dump, go_on, pack, restore
from tests.sdk.server import QUICKLY, serving
from tests.support.databases import run_postgres
from tests.support.processes import kill

COMMAND = (sys.executable, "-m", "spmd_tx.cli")


def write(kind: str, place: Path, checkout: Path, folder: Path, postgres: Any) -> None:
    """``postgres`` is a server of it; None: the database is SQLite's."""
    of_checkout = {"PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}
    options: dict[str, Any] = {"command": COMMAND, "environment": QUICKLY | of_checkout, **KINDS[kind]}
    model_dir = tiny_model.write(folder / "model", SPEC)
    if postgres is not None:
        postgres.psql(f"CREATE DATABASE {kind};")
        options["database_url"] = postgres.get_uri(database=kind)
    with serving(model_dir, folder / "data", **options) as server:
        server.wait_until_ready()
        names = begin(kind, server.url)
        workers = server.worker_pids()
        server.process.kill()
        server.process.wait()
        kill(workers)
    if postgres is not None:
        dump(postgres, kind, folder / "data")
        options["database_url"] = restore(postgres, f"{kind}_copy", folder / "data")
    shutil.copytree(folder / "data", folder / "copy", symlinks=True)
    with serving(model_dir, folder / "copy", **options) as server:
        server.wait_until_ready()
        results = go_on(server.url, **names)
    pack(place, folder / "data", {"names": names, "results": results})


if __name__ == "__main__":
    checkout, *chosen = sys.argv[1:]
    with run_postgres() as postgres:
        for kind, on_postgres in WRITTEN:
            place = archive(kind, on_postgres)
            if not chosen or place.name in chosen:
                with tempfile.TemporaryDirectory() as folder:
                    write(
                        kind, place, Path(checkout).resolve(), Path(folder), postgres if on_postgres else None
                    )
