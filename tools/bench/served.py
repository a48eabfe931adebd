"""Starts a server without a model in its own process, and measures what it uses."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from spmd_tx.demo import tiny_model

SCRIPT = Path(__file__).parents[2] / "tests" / "coordinator" / "server" / "serve_with_fake_workers.py"
WORKER = Path(__file__).with_name("instant_worker.py")
STOP_SECONDS = 60


@dataclass
class Served:
    """Holds a running server."""

    process: subprocess.Popen[str]
    url: str
    start_seconds: float  # until it was ready, with its worker

    @property
    def pid(self) -> int:
        return self.process.pid

    def cpu(self) -> float:
        """Return the CPU seconds of the coordinator, without its worker."""
        times = psutil.Process(self.pid).cpu_times()
        return times.user + times.system

    def memory(self) -> int:
        """Return the bytes of memory that the coordinator uses now."""
        return psutil.Process(self.pid).memory_info().rss

    def peak_memory(self) -> int:
        """Return its peak memory in bytes, since its start or ``forget_peak``."""
        return _status(self.pid, "VmHWM") << 10

    def forget_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")


@contextmanager
def serving(
    directory: Path, script: Path = SCRIPT, worker: Path = WORKER, /, **options: object
) -> Iterator[Served]:
    model_dir = directory / "model"
    if not model_dir.exists():
        tiny_model.write(model_dir)
    options = {
        "base_model": str(model_dir),
        "served_model_name": "tiny",
        "data_dir": str(directory / "data"),
        "port": 0,
        "max_context_length": 1024,
        "max_lora_adapters": 64,
        "decode_rows": 64,
        **options,
    }
    command = [sys.executable, str(script), json.dumps(options), str(worker)]
    began = time.monotonic()
    with (directory / "server.log").open("a") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("ready: "), (directory / "server.log").read_text()[-2000:]
        yield Served(process, line.removeprefix("ready: ").strip(), time.monotonic() - began)
    finally:
        process.terminate()
        process.wait(STOP_SECONDS)
        process.stdout.close()


def _status(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    raise KeyError(name)
