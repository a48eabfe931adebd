"""The server that is fuzzed: a process with keys for two tenants, which can be killed and started again."""

import asyncio
import os
import re
import selectors
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
import psutil

from spmd_tx.coordinator.storage.database import in_database
from spmd_tx.coordinator.tenancy import keys
from spmd_tx.coordinator.tenancy.keys import NewKeyOptions
from tests.fuzz import serve
from tests.sdk.server import QUICKLY, share_compiled_programs
from tests.support.forked import Forked, run_spmd_tx
from tests.support.ports import free_port
from tests.support.processes import kill

OWNERS = "alice", "mallory"
READY_SECONDS = 120  # of a start, with replays
PROBE_SECONDS = 0.2  # between two probes
STAY_PROBES = 25
HANG_SECONDS = 30  # of /healthz: not slow, but stuck
# A turn with a tool has 220 tokens of these models' small vocabulary.
QUICK = {"max_context_length": 512, "snapshot_seconds": 1, "max_lora_adapters": 4}
REAL = {**QUICK, "max_context_length": 256, "train_tokens": 256, "decode_rows": 16, "warm_up": "off"}


class Served:
    """A server on one port and one data directory, through all of its starts."""

    def __init__(
        self,
        folder: Path,
        model_dir: Path,
        database_url: str | None,
        real: bool = False,
        mutant: str | None = None,
        options: Mapping[str, object] | None = None,
    ) -> None:
        """``options`` come before those that all servers of the fuzzer have."""
        self.folder, self.data_dir, self.log = folder, folder / "data", folder / "log"
        self.data_dir.mkdir()
        self.tokens = {owner: self._new_key(database_url, owner) for owner in OWNERS}
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        every: dict[str, object] = {"base_model": str(model_dir), "data_dir": str(self.data_dir)}
        every |= {"served_model_name": "tiny", "port": port} | (REAL if real else QUICK) | dict(options or {})
        every |= {} if database_url is None else {"database_url": database_url}
        if real:
            self._start = partial(Forked, run_spmd_tx, *_arguments(self.data_dir, every))
        else:
            self._start = partial(Forked, serve.main, every, mutant)
        self._process: Forked | None = None
        self.starts: list[float] = []  # seconds that each took
        self.has_hung = False

    def _new_key(self, database_url: str | None, owner: str) -> str:
        made = in_database(database_url, self.data_dir, lambda db: keys.create(db, NewKeyOptions(owner)))
        return asyncio.run(made).token

    def start(self) -> bool:
        """Whether it is ready after a while. What is left of the last start is killed."""
        self.kill()
        began = time.monotonic()
        environment = os.environ | {
            "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
            **QUICKLY,
            "PYTHONFAULTHANDLER": "1",
        }
        with self.log.open("a") as log:
            self._process = self._start(stderr=log, environment=environment)
        is_ready = _first_line(self._process).startswith("ready: ") and self._is_ready()
        self.starts.append(time.monotonic() - began)
        return is_ready

    def _is_ready(self) -> bool:
        deadline = time.monotonic() + READY_SECONDS
        while self.is_alive() and time.monotonic() < deadline:
            try:
                if httpx.get(f"{self.url}/readyz", timeout=HANG_SECONDS).status_code == 200:
                    return True
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        return False

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stays(self) -> bool:
        """Whether it is still there when it has been at all that it had not finished before."""
        for _ in range(STAY_PROBES):
            time.sleep(PROBE_SECONDS)
            try:
                httpx.get(f"{self.url}/healthz", timeout=HANG_SECONDS)
            except httpx.TransportError:
                self.kill()
                return False
        return True

    def give_up(self) -> None:
        """It hangs: end it in a way that leaves the stacks of its threads in the log."""
        self.has_hung = True
        if self._process is not None:
            self._process.send_signal(signal.SIGABRT)

    def kill(self) -> None:
        """As the kernel does it. Workers notice, and end."""
        if self._process is not None:
            children: list[psutil.Process] = []
            with suppress(psutil.NoSuchProcess):
                children = psutil.Process(self._process.pid).children(recursive=True)
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            self._process = None
            kill(children)

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", headers={"x-api-key": self.tokens["alice"]}, timeout=60).text
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0


class Prober(threading.Thread):
    """Asks for /healthz all the time that the server is up, and remembers for how long it stayed silent."""

    def __init__(self, served: Served) -> None:
        super().__init__(daemon=True)
        self._served = served
        self._is_over = threading.Event()
        self.is_paused = threading.Event()  # while the server is killed and starts
        self.longest = 0.0  # seconds

    def run(self) -> None:
        with httpx.Client(base_url=self._served.url, timeout=HANG_SECONDS) as client:
            while not self._is_over.wait(PROBE_SECONDS):
                if not self.is_paused.is_set():
                    self._probe(client)

    def _probe(self, client: httpx.Client) -> None:
        began = time.monotonic()
        try:
            client.get("/healthz").raise_for_status()
        except httpx.TimeoutException:
            if not self.is_paused.is_set():
                self._served.give_up()
        except httpx.TransportError:
            return  # it was killed, or has died, which others notice
        if not self.is_paused.is_set():
            self.longest = max(self.longest, time.monotonic() - began)

    def end(self) -> None:
        self._is_over.set()
        self.join()


@contextmanager
def serving(folder: Path, model_dir: Path, database_url: str | None, **how: object) -> Iterator[Served]:
    folder.mkdir()
    served = Served(folder, model_dir, database_url, **how)  # pyright: ignore[reportArgumentType]
    try:
        yield served
    finally:
        served.kill()


def _arguments(data_dir: Path, options: dict[str, object]) -> list[str]:
    share_compiled_programs(data_dir)
    arguments = ["serve"]
    for name, value in options.items():
        arguments += ["--" + name.replace("_", "-"), *([] if value is True else [str(value)])]
    return arguments


def _first_line(process: Forked) -> str:
    """What it says first, or nothing when it takes too long."""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        return process.stdout.readline() if selector.select(READY_SECONDS) else ""
