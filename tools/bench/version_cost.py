"""Measures how long many sampler versions stop the worker's commands: python -m tools.bench.version_cost

64 adapters of 40 MB take turns in 8 sampler slots, as the coordinator's bank assigns them. For each save and
each change of version it prints how long the thread that runs commands was busy, and how long the devices
were: CPUs that stand in for them copy what accelerators copy beside other work. In milliseconds: median and
maximum by the clock, and the median of that thread's CPU time.
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

import tests.support.engine_setup  # noqa: F401
from spmd_tx.coordinator.sampling.bank import VersionBank
from spmd_tx.demo import tiny_model
from spmd_tx.protocol.commands import SPARE_BANK_SLOTS, AdapterSpec, AnyCommand
from spmd_tx.worker.engine import Engine
from spmd_tx.worker.programs.compiled import Programs
from tests.support import moves
from tests.support.tiny_setup import tiny_setup

SLOTS, ADAPTER = 8, AdapterSpec(rank=32)
SPEC = tiny_model.Spec(
    vocab_size=8192, d_model=1024, d_ff=3072, n_layers=20, n_heads=8, n_kv_heads=4, max_positions=64
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        setup = tiny_setup(
            model_dir=str(tiny_model.write(folder / "model", SPEC)),
            dtype="bfloat16",
            adapter_slots=2,
            bank_slots=SLOTS + SPARE_BANK_SLOTS,
            max_rank=ADAPTER.rank,
            idle_adapters=str(folder / "idle"),
        )
        unwritten = threading.Semaphore(0)
        programs = Programs(lambda _: None)
        engine = Engine.start(setup, programs, lambda _: None, lambda kind, **fields: unwritten.release())
        engine.execute(moves.create_adapter(seed=1, adapter=ADAPTER))
        one = jax.tree.leaves(engine.store._read(moves.save_sampler(0, 1, ADAPTER)))
        print(f"an adapter: {sum(leaf.nbytes for leaf in one) / 1e6:.0f} MB in fp32")
        VersionCost(engine, folder, unwritten).measure(options.versions, options.rounds)


class VersionCost:
    """Sends commands to an engine as the coordinator does, and notes how long they take."""

    def __init__(self, engine: Engine, folder: Path, unwritten: threading.Semaphore) -> None:
        self._engine, self._folder, self._unwritten = engine, folder, unwritten
        self._bank = VersionBank(SLOTS + SPARE_BANK_SLOTS, folder / "versions")

    def measure(self, versions: int, rounds: int) -> None:
        names = [f"version {number}" for number in range(versions)]
        self._timed("save, the first ones included", names, self._save)
        for number in range(rounds):
            self._timed(f"change of version, round {number + 1}", names, self._place)
        began_at = time.perf_counter()
        self._timed("save under a name", names, self._save_named)
        for _ in names:
            self._unwritten.acquire()
        print(f"until all files are written: {time.perf_counter() - began_at:.1f} s")

    def _timed(self, what: str, names: list[str], work: Callable[[str], None]) -> None:
        free, clock, cpu = [], [], []
        for name in names:
            began_at, spent = time.perf_counter(), time.thread_time()
            work(name)
            free.append(1000 * (time.perf_counter() - began_at))
            jax.block_until_ready(self._engine.state.bank)
            cpu.append(1000 * (time.thread_time() - spent))
            clock.append(1000 * (time.perf_counter() - began_at))
        stalled, done = (
            f"median {np.median(each):.1f} ms, maximum {max(each):.1f} ms" for each in (free, clock)
        )
        print(f"{what}: the thread {stalled}; the devices {done}; CPU {np.median(cpu):.1f} ms", flush=True)

    def _save(self, name: str) -> None:
        place = self._bank.reserve(name, ADAPTER)
        self._run(*place.before, moves.save_sampler(0, place.bank, ADAPTER))

    def _place(self, name: str) -> None:
        self._run(*self._bank.place(name).before)

    def _save_named(self, name: str) -> None:
        path, place = str(self._folder / "named" / name), self._bank.reserve(f"{name}, named", ADAPTER)
        self._run(*place.before, moves.save_sampler(0, place.bank, ADAPTER, path))

    def _run(self, *some: AnyCommand) -> None:
        for command in some:
            self._engine.execute(command)


if __name__ == "__main__":
    main()
