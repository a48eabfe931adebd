"""Has the version in another folder write data_*.tar.zst: python -m tests.golden.write_earlier_data FOLDER

The folder is a checkout: git worktree add FOLDER VERSION. Its server is killed, as in a crash. Another of
that version goes on with a copy; later versions are to say the same.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from spmd_tx.demo import tiny_model
from tests.golden.earlier_data import KINDS, SPEC, begin, go_on, pack
from tests.sdk.server import QUICKLY, serving

COMMAND = (sys.executable, "-m", "spmd_tx.cli")


def write(kind: str, checkout: Path, folder: Path) -> None:
    of_checkout = {"PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}
    options: dict[str, Any] = {"command": COMMAND, "environment": QUICKLY | of_checkout, **KINDS[kind]}
    model_dir = tiny_model.write(folder / "model", SPEC)
    with serving(model_dir, folder / "data", **options) as server:
        server.wait_until_ready()
        names = begin(kind, server.url)
        workers = server.worker_pids()
        server.process.kill()
        server.process.wait()
        for worker in workers:
            os.kill(worker, 9)
    shutil.copytree(folder / "data", folder / "copy", symlinks=True)
    with serving(model_dir, folder / "copy", **options) as server:
        server.wait_until_ready()
        results = go_on(server.url, **names)
    pack(kind, folder / "data", {"names": names, "results": results})


if __name__ == "__main__":
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            write(kind, Path(sys.argv[1]).resolve(), Path(folder))
