"""Measures what compiling ahead of need takes from training: in a thread of the worker, and aside.

    python -m tools.bench.compile_cost --model DIR [--seconds 20] [--rounds 3]

One worker's engine trains the same micro-batch again and again, in rounds: with nothing else, while a thread
compiles other programs, and while the child process does. Figures are steps per second of the best and the
median round, and the longest step.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator

import jax

from spmd_tx.protocol.commands import (
    AHEAD,
    ASIDE,
    AdapterSpec,
    Compile,
    ForwardBackward,
)
from spmd_tx.protocol.programs import ProgramShape
from spmd_tx.protocol.setup import Setup
from spmd_tx.worker.engine import Engine
from spmd_tx.worker.programs.compiled import Programs
from spmd_tx.worker.programs.examples import _loss, _rows
from tests.support import moves

WAYS = {"nothing else": None, "a thread compiles": AHEAD, "compiled aside": ASIDE}


def setup(model: str, folder: str) -> Setup:
    return Setup(
        generation=1,
        num_processes=1,
        jax_coordinator="",
        model_dir=model,
        dtype="auto",
        fsdp=1,
        ep=1,
        tp=1,
        adapter_slots=4,
        bank_slots=4,
        max_rank=32,
        max_context=2048,
        page_size=16,
        kv_cache_tokens=4096,
        decode_rows=64,
        decode_steps=16,
        compilation_cache=f"{folder}/programs",
        idle_adapters=f"{folder}/idle",
    )


def others() -> Iterator[ProgramShape]:
    """Programs that nothing has compiled yet."""
    for length in itertools.count(32, 16):
        yield ProgramShape(step="forward_backward", rows=1, row_length=length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(options, folder)


def measure(options: argparse.Namespace, folder: str) -> None:
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    settled: list[int] = []
    programs = Programs(lambda _: None, lambda number, seconds, error: settled.append(number))
    engine = Engine.start(setup(options.model, folder), programs, lambda _: None)
    engine.execute(moves.create_adapter(seed=1, adapter=AdapterSpec(rank=32)))
    shape = ProgramShape(step="forward_backward", rows=1, row_length=256)
    command = ForwardBackward(rows=_rows(shape), loss=_loss(shape))
    jax.block_until_ready(engine.execute(command))
    menu, numbers = others(), itertools.count(1)
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    longest = dict.fromkeys(WAYS, 0.0)
    compiled = dict.fromkeys(WAYS, 0)
    for _ in range(options.rounds):
        for way, lane in WAYS.items():
            ordered, before, steps = 0, len(settled), 0
            began = time.monotonic()
            while (then := time.monotonic()) - began < options.seconds:
                if lane is not None and ordered == len(settled) - before:
                    ordered += 1
                    engine.execute(Compile(number=next(numbers), program=next(menu), lane=lane))
                jax.block_until_ready(engine.execute(command))
                longest[way] = max(longest[way], time.monotonic() - then)
                steps += 1
            rates[way].append(steps / (time.monotonic() - began))
            compiled[way] += len(settled) - before
            while ordered > len(settled) - before:
                time.sleep(0.1)
    for way, found in rates.items():
        speed = f"best {max(found):6.1f}  median {statistics.median(found):6.1f} steps/s"
        print(f"{way:20} {speed}  longest {1000 * longest[way]:5.0f} ms  compiled {compiled[way]}")
    programs.stop()


if __name__ == "__main__":
    main()
