"""Measures what moving one adapter costs, without a server: python -m tools.bench.swap_cost

Milliseconds by the clock and of CPU, medians of several rounds that take turns, for a model of 8 layers of
width 512 and adapters of rank 32: out of a training slot and back, by host memory and by disk; into the
sampler bank from a training slot, from the bank to host memory and back, to a PEFT folder (the command, and
until the folder is complete), and from such a folder into the bank.
"""

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

import tests.support.engine_setup  # noqa: F401
from spmd_tx.demo import tiny_model
from spmd_tx.protocol import commands
from spmd_tx.protocol.commands import AdapterSpec
from spmd_tx.worker.engine import Engine
from spmd_tx.worker.idle_adapters import IdleAdapters
from spmd_tx.worker.programs.compiled import Programs
from tests.support.tiny_setup import tiny_setup

ROUNDS = 15
ADAPTER = AdapterSpec(rank=32)
SPEC = tiny_model.Spec(
    vocab_size=8192, d_model=512, d_ff=1536, n_layers=8, n_heads=8, n_kv_heads=4, max_positions=64
)


def main() -> None:
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
        engine = Engine.start(setup, Programs(lambda _: None), lambda _: None)
        engine.create_adapter(commands.CreateAdapter(slot=0, seed=1, adapter=ADAPTER))
        measure(engine, folder)


def measure(engine: Engine, folder: Path) -> None:
    in_memory, on_disk = engine._idle, IdleAdapters(folder / "on-disk", 0)
    taken: dict[str, list[tuple[float, float]]] = {}  # clock, CPU
    size = 0

    def timed(what: str, work: Callable[[], object]) -> None:
        began_at, spent = time.perf_counter(), time.process_time()
        work()
        jax.block_until_ready((vars(engine.state), engine.state.train))
        each = time.perf_counter() - began_at, time.process_time() - spent
        taken.setdefault(what, []).append(each)

    out, back = commands.SwapOut(slot=0, model="m"), commands.SwapIn(slot=0, model="m")
    for number in range(ROUNDS + 1):
        peft = str(folder / f"version-{number}")
        engine._idle = in_memory
        timed("swap out", lambda: engine.swap_out(out))
        size = in_memory.host_bytes
        timed("swap in from host memory", lambda: engine.swap_in(back))
        engine._idle = on_disk
        engine.swap_out(out)
        timed("write to disk, in the background", on_disk.settle)
        timed("swap in from disk", lambda: engine.swap_in(back))
        save = commands.SaveSampler(slot=0, bank=1, adapter=ADAPTER)
        timed("copy to the bank", lambda save=save: engine.save_sampler(save))
        timed("bank to host memory", lambda: engine.page_out(commands.PageOut(bank=1, version="v")))
        page_in = commands.PageIn(bank=1, version="v", adapter=ADAPTER)
        timed("host memory to bank", lambda command=page_in: engine.page_in(command))
        write, complete = commands.WriteSampler(bank=1, adapter=ADAPTER, path=peft), threading.Event()
        engine.on_written = lambda path, problem, complete=complete: complete.set()
        timed("bank to PEFT folder, the command", lambda command=write: engine.write_sampler(command))
        timed("bank to PEFT folder, the rest", complete.wait)
        load = commands.LoadSampler(bank=2, adapter=ADAPTER, path=peft)
        timed("PEFT folder to bank", lambda command=load: engine.load_sampler(command))
    print(f"an adapter: {size / 2**20:.1f} MiB of training state, {size / 2**22:.1f} MiB of weights")
    for what, each in taken.items():
        clock, cpu = 1000 * np.median(each[1:], axis=0)
        print(f"{what:35} {clock:7.1f} ms, {cpu:7.1f} ms of CPU")


if __name__ == "__main__":
    main()
