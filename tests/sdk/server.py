"""Starts a server as an operator does: ``spmd-tx serve`` in a process of its own, with a tiny model."""

import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.support import quick_compilation
from tests.support.forked import Forked, run_spmd_tx
from tests.support.ports import free_port
from tests.support.processes import command_line

COMMAND = Path(sys.executable).with_name("spmd-tx")
COMPILED = Path(__file__).parents[2] / ".cache" / "jax-tests"  # shared by all tests that compile
BASE_MODEL = "tiny"
VOCABULARY = 512
CONTEXT = 512  # tokens
STOP_SECONDS = 60
QUICKLY = quick_compilation.ENVIRONMENT
AS_USUAL = dict[str, str]()

running: list["Server"] = []  # whose logs belong to the report of a failed test


class Server:
    """Holds a running server, its data and its log.

    ``command``: what starts it, for example COMMAND; without, ``run`` is called in a process that is forked
    from one with all imports.
    """

    def __init__(
        self,
        model_dir: Path,
        data_dir: Path,
        command: Sequence[str] = (),
        environment: Mapping[str, str] = QUICKLY,
        run: Callable[..., None] = run_spmd_tx,
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
        arguments = ["serve"]
        for name, value in options.items():
            for each in value if isinstance(value, list) else [value]:
                if each is not False:
                    arguments += ["--" + name.replace("_", "-"), *([] if each is True else [str(each)])]
        # XLA's own caches would bring the data directory into the keys of the compiled programs.
        environment = os.environ | {"JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none", **environment}
        self.process: subprocess.Popen[str] | Forked
        with self.log_path.open("w") as log:
            if command:
                self.process = subprocess.Popen(
                    [*command, *arguments], stdout=subprocess.PIPE, stderr=log, text=True, env=environment
                )
            else:
                self.process = Forked(run, *arguments, stderr=log, environment=environment)

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def is_closed(self) -> bool:
        assert self.process.stdout is not None
        return self.process.stdout.closed

    def wait_until_ready(self) -> None:
        """Wait until the server says that it is ready."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == f"ready: {self.url}\n", f"{line!r}\n{self.log}"

    def worker_pids(self) -> list[int]:
        """Return the workers' process ids, by their numbers."""
        children = psutil.Process(self.process.pid).children()  # some of which call foreign code
        workers = [child for child in children if _process_id(child) is not None]
        return [worker.pid for worker in sorted(workers, key=lambda worker: _process_id(worker) or 0)]

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


def groups_of(server: Server) -> dict[str, dict[str, Any]]:
    """Return what the server tells of its groups, by name."""
    return httpx.get(f"{server.url}/healthz", timeout=STOP_SECONDS).json()["groups"]


def generation_of(server: Server, group: str) -> int:
    """Return the number of a group's present generation of workers."""
    text = httpx.get(f"{server.url}/metrics", timeout=STOP_SECONDS).text
    (number,) = re.findall(rf'^spmd_tx_generation{{group="{group}"}} (\d+)', text, re.MULTILINE)
    return int(number)


def workers_of_group(server: Server, group: str) -> list[int]:
    """Return the process ids of the workers of a group."""
    children = psutil.Process(server.process.pid).children()
    its_own = ["--generation", str(generation_of(server, group))]
    return [child.pid for child in children if its_own in map(list, itertools.pairwise(command_line(child)))]


@contextmanager
def serving(model_dir: Path, data_dir: Path, **options: Any) -> Iterator[Server]:
    """Start a server; it may not be ready yet. It ends with the block, and its log is kept if that fails."""
    server = Server(model_dir, data_dir, **options)
    running.append(server)
    try:
        yield server
    finally:
        server.close()
    running.remove(server)


def forget_closed() -> None:
    """Leave out of later reports the servers of a test that has failed."""
    running[:] = [server for server in running if not server.is_closed]


def share_compiled_programs(data_dir: Path) -> None:
    """Most of the tests' time is compilation, and the same programs come back in every run."""
    COMPILED.mkdir(parents=True, exist_ok=True)
    data_dir.mkdir(parents=True, exist_ok=True)
    if not (data_dir / "compilation_cache").exists():
        os.symlink(COMPILED, data_dir / "compilation_cache")


def _process_id(child: psutil.Process) -> int | None:
    """Of a worker; None: it is none."""
    found = re.search(r"--process-id (\d+)", " ".join(command_line(child)))
    return None if found is None else int(found[1])
