"""Measures what moving one adapter costs, without a server: python -m tools.bench.swap_cost

Milliseconds by the clock and of CPU, medians of several rounds that take turns, for a model of 8 layers of
width 512 and adapters of rank 32: out of a training slot and back, by host memory and by disk; into the
sampler bank from a training slot, from the bank to host memory and back, to a PEFT folder (the command, and
until the folder is complete), and from such a folder into the bank.
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
from spmd_tx.demo import tiny_model
from spmd_tx.protocol.commands import AdapterSpec, Move
from spmd_tx.worker.engine import Engine
from spmd_tx.worker.idle_adapters import IdleAdapters
from spmd_tx.worker.programs.compiled import Programs
from tests.support import moves
from tests.support.tiny_setup import tiny_setup

ROUNDS = 15
ADAPTER = AdapterSpec(rank=32)
SPEC = tiny_model.Spec(
    vocab_size=8192, d_model=512, d_ff=1536, n_layers=8, n_heads=8, n_kv_heads=4, max_positions=64
)


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny_model.write(folder / "model", SPEC)
        setup = tiny_setup(
            model_dir=str(model),
            dtype="float32",
            adapter_slots=4,
            max_rank=32,
            idle_adapters=str(folder / "idle"),
        )
        complete = threading.Semaphore(0)
        programs = Programs(lambda _: None)
        engine = Engine.start(setup, programs, lambda _: None, lambda kind, **fields: complete.release())
        engine.execute(moves.create_adapter(seed=1, adapter=ADAPTER))
        measure(engine, folder, complete)


def measure(engine: Engine, folder: Path, complete: threading.Semaphore) -> None:
    in_memory, on_disk = engine.store._idle, IdleAdapters(folder / "on-disk", 0)
    taken: dict[str, list[tuple[float, float]]] = {}  # clock, CPU
    size = 0

    def timed(what: str, work: Callable[[], object]) -> None:
        began_at, spent = time.perf_counter(), time.process_time()
        work()
        jax.block_until_ready((vars(engine.state), engine.state.train))
        each = time.perf_counter() - began_at, time.process_time() - spent
        taken.setdefault(what, []).append(each)

    def timed_move(what: str, move: Move) -> None:
        timed(what, lambda: engine.execute(move))

    out, back = moves.swap_out(0, "m"), moves.swap_in(0, "m")
    for number in range(ROUNDS + 1):
        peft = folder / f"version-{number}"
        engine.store._idle = in_memory
        timed_move("swap out", out)
        size = in_memory.host_bytes
        timed_move("swap in from host memory", back)
        engine.store._idle = on_disk
        engine.execute(out)
        timed("write to disk, in the background", on_disk.settle)
        timed_move("swap in from disk", back)
        timed_move("copy to the bank", moves.save_sampler(0, 1, ADAPTER))
        timed_move("bank to host memory", moves.page_out(1, "v"))
        timed_move("host memory to bank", moves.page_in(1, "v", ADAPTER))
        timed_move("bank to PEFT folder, the command", moves.write_sampler(1, peft, ADAPTER))
        timed("bank to PEFT folder, the rest", complete.acquire)
        timed_move("PEFT folder to bank", moves.load_sampler(2, peft, ADAPTER))
    print(f"an adapter: {size / 2**20:.1f} MiB of training state, {size / 2**22:.1f} MiB of weights")
    for what, each in taken.items():
        clock, cpu = 1000 * np.median(each[1:], axis=0)
        print(f"{what:35} {clock:7.1f} ms, {cpu:7.1f} ms of CPU")


if __name__ == "__main__":
    main()
