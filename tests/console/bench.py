"""Measures how much open consoles slow training down: `python -m tests.console.bench --help`.

A shared machine varies by a tenth from one quarter of a minute to the next. So times with and without
consoles alternate often, neighbours are compared, and the error of the mean is printed.
"""

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil
import tinker
from tinker import types

from spmd_tx.demo import tiny_model
from tests.console.open_consoles import PAGES
from tests.sdk.server import AS_USUAL, BASE_MODEL, Server, serving

SPEC = tiny_model.Spec(n_heads=4, n_kv_heads=2, vocab_size=384, max_positions=1024)
SECONDS = 120  # for one result
SETTLE_SECONDS = 1.0  # until consoles have read what there is, or have gone
WARM_UP_SECONDS = 10.0


class Consoles:
    """Opens and closes consoles in a process of their own, as they must not slow the training client down."""

    def __init__(self, url: str, run: str, page: str, count: int) -> None:
        program = [sys.executable, "-m", "tests.console.open_consoles", url, run, page, str(count)]
        self._process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.cpu = psutil.Process(self._process.pid)

    def tell(self, word: str) -> None:
        """Say "open" or "close", and wait until it is done."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline().strip() == word, "the process of the consoles has ended"
        time.sleep(SETTLE_SECONDS)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(SECONDS)
        assert self._process.stdout is not None
        self._process.stdout.close()


class Measured(NamedTuple):
    """Tells of one piece of training. All but the steps are seconds of a step."""

    steps: int
    wall: float
    coordinator: float  # of CPUs, as the next two
    workers: float
    consoles: float


@dataclass
class Bench:
    """Trains one run, and samples from it."""

    trainer: tinker.TrainingClient
    sampler: tinker.SamplingClient
    server: Server
    consoles: Consoles
    groups: int  # of four samples each, per step
    found: dict[bool, list[Measured]] = field(default_factory=lambda: {False: [], True: []})

    def round(self, seconds: float, number: int) -> None:
        """Measure once with consoles and once without, in the other order each time."""
        for are_open in (False, True) if number % 2 else (True, False):
            self.consoles.tell("open" if are_open else "close")
            self.found[are_open].append(self.measure(seconds))

    def measure(self, seconds: float) -> Measured:
        before, start, steps = self._cpu_seconds(), time.perf_counter(), 0
        while time.perf_counter() < start + seconds:
            self._step()
            steps += 1
        wall = time.perf_counter() - start
        after = self._cpu_seconds()
        cpu = [(later - earlier) / steps for earlier, later in zip(before, after, strict=True)]
        return Measured(steps, wall / steps, *cpu)

    def _step(self) -> None:
        tokens = [1 + n % 300 for n in range(250)]
        inputs = {"target_tokens": tokens, "weights": [1.0] * len(tokens)}
        datum = types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
        passed = self.trainer.forward_backward([datum] * 4, "cross_entropy")
        stepped = self.trainer.optim_step(types.AdamParams(learning_rate=1e-4))
        prompt = types.ModelInput.from_ints(tokens[:100])
        params = types.SamplingParams(max_tokens=16)
        drawn = [self.sampler.sample(prompt, 4, params) for _ in range(self.groups)]
        for each in (passed, stepped, *drawn):
            each.result(SECONDS)

    def _cpu_seconds(self) -> tuple[float, float, float]:
        coordinator = psutil.Process(self.server.process.pid)
        workers = sum(_cpu_seconds(worker) for worker in coordinator.children())
        return _cpu_seconds(coordinator), workers, _cpu_seconds(self.consoles.cpu)


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


@contextmanager
def training(directory: Path, options: argparse.Namespace) -> Iterator[Bench]:
    model = tiny_model.write(directory / "model", SPEC)
    with serving(model, directory / "data", environment=AS_USUAL, train_tokens=1024) as server:
        server.wait_until_ready()
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-bench")
        trainer = service.create_lora_training_client(BASE_MODEL, rank=8).result(SECONDS)
        sampler = trainer.save_weights_and_get_sampling_client().result(SECONDS)
        consoles = Consoles(server.url, trainer.model_id, options.page, options.consoles)
        bench = Bench(trainer, sampler, server, consoles, options.groups)
        bench.measure(WARM_UP_SECONDS)
        yield bench
        consoles.close()
        service.close("success").result(SECONDS)


def report(found: dict[bool, list[Measured]], consoles: int) -> None:
    without, beside = found[False], found[True]
    speeds = [math.log(one.wall / other.wall) for one, other in zip(without, beside, strict=True)]
    print(f"steps/s with {consoles} consoles over those without, {len(speeds)} pairs: {_interval(speeds)}")
    for part in ("coordinator", "workers"):
        pairs = zip(without, beside, strict=True)
        logs = [math.log(getattr(one, part) / getattr(other, part)) for one, other in pairs]
        print(f"CPU seconds of a step of the {part}, without over with: {_interval(logs)}")
    for name, some in (("without", without), ("with", beside)):
        steps = sum(each.steps for each in some)
        wall = sum(each.steps * each.wall for each in some)
        print(f"{name}: {steps / wall:.2f} steps/s; milliseconds of CPUs for a step:", end=" ")
        parts = ("coordinator", "workers", "consoles")
        spent = {part: sum(each.steps * getattr(each, part) for each in some) / steps for part in parts}
        print(", ".join(f"{part} {1000 * seconds:.1f}" for part, seconds in spent.items()))


def _interval(logs: list[float]) -> str:
    mean = statistics.fmean(logs)
    error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    bounds = math.exp(mean - 2 * error), math.exp(mean + 2 * error)
    middle = math.exp(statistics.median(logs))
    return f"{math.exp(mean):.3f} (95 %: {bounds[0]:.3f} to {bounds[1]:.3f}; median {middle:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", choices=PAGES, default="run", help="that the consoles show")
    parser.add_argument("--consoles", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each half of a pair")
    parser.add_argument("--groups", type=int, default=0, help="of four samples that are drawn in each step")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, training(Path(directory), options) as bench:
        for number in range(options.pairs):
            bench.round(options.seconds, number)
            pair = bench.found[True][-1], bench.found[False][-1]
            print(f"{number + 1}: {pair[1].wall / pair[0].wall:.3f}", flush=True)
        report(bench.found, options.consoles)


if __name__ == "__main__":
    main()
