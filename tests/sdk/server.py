"""Starts a server as an operator does: ``spmd-tx serve`` in its own process, with a tiny model."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from spmd_tx.coordinator.server.preflight import free_port

COMMAND = Path(sys.executable).with_name("spmd-tx")
COMPILED = Path(__file__).parents[2] / ".cache" / "jax-tests"  # shared by all tests that compile
BASE_MODEL = "tiny"
STOP_SECONDS = 60
# A program takes half the time to compile, and its numbers differ in their last bits only.
QUICKLY = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
AS_USUAL = dict[str, str]()

running: list["Server"] = []  # whose logs belong to the report of a failed test


class Server:
    """Holds a running server, its data and its log."""

    def __init__(
        self,
        model_dir: Path,
        data_dir: Path,
        command: Sequence[str] = (str(COMMAND),),
        environment: Mapping[str, str] = QUICKLY,
        **options: object,
    ) -> None:
        self.data_dir = data_dir
        self.log_path = data_dir.with_name(data_dir.name + ".log")
        self.url = f"http://127.0.0.1:{options.get('port') or free_port()}"
        share_compiled_programs(data_dir)
        options = {
            "base_model": model_dir,
            "served_model_name": BASE_MODEL,
            "port": self.url.rpartition(":")[2],
            "data_dir": data_dir,
            "num_processes": 1,
            # Few shapes: each one is compiled.
            "train_tokens": 256,
            "decode_rows": 16,
            "warm_up": "off",
            **options,
        }
        command = [*command, "serve"]
        for name, value in options.items():
            command += ["--" + name.replace("_", "-"), *([] if value is True else [str(value)])]
        # XLA's own caches would bring the data directory into the keys of the compiled programs.
        environment = os.environ | {"JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none", **environment}
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def wait_until_ready(self) -> None:
        """Wait until the server says that it is ready."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == f"ready: {self.url}\n", f"{line!r}\n{self.log}"

    def worker_pids(self) -> list[int]:
        """Return the workers' process ids, by their numbers."""
        workers = psutil.Process(self.process.pid).children()
        return [worker.pid for worker in sorted(workers, key=_process_id)]

    def terminate(self) -> int:
        """Send SIGTERM, and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        return self.process.wait(STOP_SECONDS)

    def close(self) -> None:
        """Kill everything that is left of it."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def serving(model_dir: Path, data_dir: Path, **options: Any) -> Iterator[Server]:
    """Start a server; it may not be ready yet."""
    server = Server(model_dir, data_dir, **options)
    running.append(server)
    yield server
    server.close()
    running.remove(server)


def share_compiled_programs(data_dir: Path) -> None:
    """Most of the tests' time is compilation, and the same programs come back in every run."""
    COMPILED.mkdir(parents=True, exist_ok=True)
    data_dir.mkdir(parents=True, exist_ok=True)
    if not (data_dir / "compilation_cache").exists():
        os.symlink(COMPILED, data_dir / "compilation_cache")


def _process_id(worker: psutil.Process) -> int:
    found = re.search(r"--process-id (\d+)", " ".join(worker.cmdline()))
    assert found is not None
    return int(found[1])
