"""Measures what it costs to spread the same devices over two processes: python -m tools.bench.process_cost

Prints milliseconds of a training step (8 rows of 64 tokens, forward and backward) and of one step of decode
(4 rows per data shard) for each mesh, with one process and with two: the median and the least.
"""

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from tests.support.model_shapes import resized

DEVICES = 2
MESHES = [("dense", (2, 1, 1)), ("dense", (1, 1, 2)), ("mixture", (1, 2, 1)), ("mixture", (1, 1, 2))]
REPETITIONS = 30


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "place", type=int, nargs="*", help="given to its processes: how many they are, their port, a number"
    )
    place = parser.parse_args().place
    if place:
        measure(*place)
        return
    for processes in (1, 2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "tools.bench.process_cost", str(processes), str(port)]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        running = [
            subprocess.Popen([*command, str(number)], env=environment, stderr=subprocess.DEVNULL)
            for number in range(processes)
        ]
        assert [process.wait() for process in running] == [0] * processes


def measure(processes: int, port: int, process: int) -> None:
    import jax

    import tests.support.engine_setup  # noqa: F401

    jax.config.update("jax_num_cpu_devices", DEVICES // processes)
    if processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=processes, process_id=process)
    for kind, shape in MESHES:
        train, decode = steps(kind, shape)
        for what, step, count in (("training step", train, 1), ("decode step", decode, 8)):
            seconds = timed(step)
            if process == 0:
                median, least = np.median(seconds) / count, min(seconds) / count
                name = "fsdp {} ep {} tp {}".format(*shape)
                print(
                    f"{kind:8} {name:18} {what:14} {processes} process(es): "
                    f"median {1000 * median:7.1f} ms, least {1000 * least:7.1f} ms",
                    flush=True,
                )


def steps(kind: str, shape: tuple[int, int, int]) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a training step and a dispatch of eight decode steps, both compiled."""
    import jax

    from tests.support import tiny_engine, tiny_sampler

    d_ff = 1024 if kind == "dense" else 256
    tiny_engine.MODELS[kind] = resized(tiny_engine.MODELS[kind], d_model=256, d_ff=d_ff, n_layers=4)
    engine = tiny_engine.tiny_engine(shape, kind=kind)
    w = tiny_engine.random_adapters(1, engine.model)
    rows = [(tiny_engine.random_datum(row, row % 3),) for row in range(8)]
    batch, placed = engine.batch(rows), engine.place_adapters(w)
    gradient = engine.place_adapters(w)

    def train() -> None:
        nonlocal gradient
        gradient, *outputs = engine._forward_backward(
            engine.base, placed, gradient, tiny_engine.BOTH_SCALES, *batch
        )
        jax.block_until_ready((gradient, outputs))

    sampler = tiny_sampler.tiny_sampler(shape, kind=kind).reset(w=w)
    samples = [
        tiny_sampler.Sample(tiny_sampler.random_prompt(number, 13), slot=number % 3, max_tokens=8)
        for number in range(4)
    ]
    places = tiny_sampler.stand(samples, shards=sampler.data_shards)
    sampler.prefill(places)
    return train, lambda: sampler.decode(places)


def timed(step: Callable[[], object]) -> list[float]:
    """Return the seconds of each repetition, after two that do not count."""
    seconds = []
    for _ in range(REPETITIONS + 2):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return seconds[2:]


if __name__ == "__main__":
    main()
