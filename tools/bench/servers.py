"""Starts our server or the peer's as a user would, and watches what its processes take of the machine."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from spmd_tx.protocol.addresses import free_port

HERE = Path(__file__).parent
STOP_SECONDS = 20.0
SAMPLING_SECONDS = 0.25  # between two looks at the memory
IDLE_WINDOW = 2.0  # seconds
IDLE_CORES = 0.3  # less than this in two windows is idle; both servers poll a little

MAX_ADAPTERS, MAX_RANK = 8, 32


@dataclass(frozen=True)
class Launch:
    """Describes how to start a server."""

    command: Sequence[str]
    environment: dict[str, str]
    folder: Path  # where it runs
    says_what_is_compiled: bool = False  # in the figures of /metrics


def total(text: str, name: str) -> float:
    """Return the sum of all series of a metric in the text of /metrics; KeyError without any."""
    values = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.M)
    if not values:
        raise KeyError(f"the server has no metric {name}")
    return sum(map(float, values))


def ours(
    python: Path, model: Path, port: int, folder: Path, cache: Path, options: Sequence[str] = ()
) -> Launch:
    """Describe our server on one device with default options; the cache keeps its compiled programs."""
    data_dir = folder / "data"
    data_dir.mkdir(parents=True)
    cache.mkdir(parents=True, exist_ok=True)
    (data_dir / "compilation_cache").symlink_to(cache)
    command = [str(python.with_name("spmd-tx")), "serve", "--num-processes", "1", "--base-model", str(model)]
    command += ["--port", str(port), "--data-dir", str(data_dir), *options]
    if not {"--max-lora-adapters"} & set(options):
        command += ["--max-lora-adapters", str(MAX_ADAPTERS)]
    command += ["--max-lora-rank", str(MAX_RANK)]
    # XLA's own caches would bring the data directory into the keys of the compiled programs.
    own = {"JAX_PLATFORMS": "cpu", "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none"}
    return Launch(command, os.environ | own, Path.cwd(), says_what_is_compiled=True)


def peer(python: Path, model: Path, port: int, folder: Path, cache: Path) -> Launch:
    """Describe SkyRL's JAX backend, with JAX's cache of compiled programs switched on, as in ours."""
    folder.mkdir(parents=True)
    command = [str(HERE / "peer_bin" / "uv"), "run", "-m", "skyrl.tinker.api", "--backend", "jax"]
    command += ["--base-model", str(model), "--port", str(port), "--host", "127.0.0.1"]
    command += ["--backend-config", f'{{"max_lora_adapters":{MAX_ADAPTERS},"max_lora_rank":{MAX_RANK}}}']
    command += ["--database-url", f"sqlite:///{folder / 'tinker.db'}"]
    command += ["--checkpoints-base", str(folder / "checkpoints")]
    own = {
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
        "PEER_PYTHON": str(python),
        "PATH": f"{HERE / 'peer_bin'}:{os.environ['PATH']}",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return Launch(command, inherited | own, folder)


class Server:
    """Holds a server's process; it may not answer yet."""

    def __init__(self, launch: Callable[[int], Launch], log: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.peak_mib = 0.0
        plan = launch(self.port)
        self._says_what_is_compiled = plan.says_what_is_compiled
        self.started = time.monotonic()
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                plan.command, env=plan.environment, cwd=plan.folder, stdout=output, stderr=output
            )
        self._is_over = threading.Event()
        self._watch = threading.Thread(target=self._sample_memory, daemon=True)
        self._watch.start()

    def wait_until_healthy(self, seconds: float) -> float:
        """Return the seconds until it answers. Raises RuntimeError if it ends before or takes too long."""
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with code {self.process.returncode}; see {self.log}")
            if self.age() > seconds:
                raise RuntimeError(f"the server did not answer within {seconds:.0f} s; see {self.log}")
            try:
                urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=5).read()
                return self.age()
            except OSError:
                time.sleep(0.05)

    def wait_until_idle(self, seconds: float) -> bool:
        """Wait while it compiles after its start; return whether it has finished in time."""
        began, idle = time.monotonic(), 0
        while idle < 2 and time.monotonic() - began < seconds:
            before = self.cpu_seconds()
            time.sleep(IDLE_WINDOW)
            is_idle = self.cpu_seconds() - before < IDLE_CORES * IDLE_WINDOW
            idle = idle + 1 if is_idle and not self._has_more_to_compile() else 0
        return idle == 2

    def _has_more_to_compile(self) -> bool:
        """As far as it says; on a busy machine it may look idle and is not."""
        if not self._says_what_is_compiled:
            return False
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        return total(text, "spmd_tx_programs_ready") < total(text, "spmd_tx_programs_planned")

    def age(self) -> float:
        return time.monotonic() - self.started

    def cpu_seconds(self) -> float:
        """Used so far by all its living processes."""
        return sum(_of_each(self._tree(), lambda process: sum(process.cpu_times()[:2])))

    def rss_mib(self) -> float:
        """Resident memory of all its processes; pages that they share count for each."""
        return sum(_of_each(self._tree(), lambda process: process.memory_info().rss / 2**20))

    def close(self) -> None:
        """Ask it to end, and end what is left of it."""
        self._is_over.set()
        self._watch.join()
        tree = self._tree()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(tree, timeout=STOP_SECONDS)
        for process in alive:
            _of_each([process], lambda one: one.kill())
        self.process.wait()

    def _tree(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.Error:
            return []

    def _sample_memory(self) -> None:
        while not self._is_over.wait(SAMPLING_SECONDS):
            self.peak_mib = max(self.peak_mib, self.rss_mib())


def _of_each(processes: list[psutil.Process], measure: Callable[[psutil.Process], Any]) -> list[Any]:
    found = []
    for process in processes:
        try:
            found.append(measure(process))
        except psutil.Error:
            continue  # it has just ended
    return found


def launcher(side: str, python: Path, model: Path, folder: Path, cache: Path) -> Callable[[int], Launch]:
    """Of a side, which is "ours" or "peer"; the server keeps its data in the folder."""
    build = {"ours": ours, "peer": peer}[side]
    executable = python if side == "ours" else Path(sys.executable)
    return lambda port: build(executable, model, port, folder, cache)
