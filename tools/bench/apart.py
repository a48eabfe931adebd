"""Measures whether groups of workers wait for each other: python -m tools.bench.apart [--help]

A server on this computer has one group that trains a model and one that samples it. Their workers compute
nothing, but take as long as a device might: 2 s for a step of training, 10 ms for a step of decoding. The
output has the seconds of 8 samples of 200 tokens while the other mesh is idle and while it trains, and those
of a step of training while the other mesh is idle and while it scores texts.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import numpy as np
import tinker

from spmd_tx.demo import tiny_model
from spmd_tx.processes.parent import end_with
from tests.sdk.examples import SECONDS, batch, drawn, prompt, random_tokens
from tools.bench.instant_worker import SECONDS_OF

COMMANDS = {"forward_backward": 2.0, "decode": 0.01, "prefill": 0.05}  # seconds; of a Decode, for each step
BASE_MODEL, GROUP = "tiny", "rollouts"
WORKER = Path(__file__).with_name("instant_worker.py")
STOP_SECONDS = 60


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve with fake workers; yield the URL."""
    model = tiny_model.write(folder / "model")
    command = [sys.executable, "-m", "tools.bench.apart", "--serve"]
    for name, value in {
        "base-model": model,
        "served-model-name": BASE_MODEL,
        "data-dir": folder / "data",
        "port": 0,
        "warm-up": "off",
        "decode-rows": 64,
        "group": f"name={GROUP},role=sample",
    }.items():
        command += [f"--{name}", str(value)]
    with (folder / "log").open("w") as log:
        environment = os.environ | {SECONDS_OF: json.dumps(COMMANDS)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("ready: "), (folder / "log").read_text()[-2000:]
        yield line.removeprefix("ready: ").strip()
    finally:
        process.terminate()
        process.wait(STOP_SECONDS)
        process.stdout.close()


@contextmanager
def beside(work: Callable[[], object]) -> Iterator[None]:
    """Do work again and again in a thread meanwhile."""
    is_over = Event()

    def repeat() -> None:
        while not is_over.is_set():
            work()

    thread = Thread(target=repeat)
    thread.start()
    time.sleep(1.0)
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def median(work: Callable[[], object], rounds: int) -> float:
    """Return the median of the seconds that some work takes; the first time does not count."""
    times = [time.perf_counter()]
    for _ in range(rounds + 1):
        work()
        times.append(time.perf_counter())
    return float(np.median(np.diff(times)[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as name,
        serving(Path(name)) as url,
        tinker.ServiceClient(base_url=url, api_key="tml-bench") as service,
    ):
        trainer = service.create_lora_training_client(BASE_MODEL, rank=8).result(SECONDS)
        sampler = service.create_sampling_client(base_model=BASE_MODEL).result(SECONDS)
        text = prompt(random_tokens(64, seed=1))

        def train() -> None:
            trainer.forward_backward(batch(seed=1), "cross_entropy").result(SECONDS)
            trainer.optim_step(tinker.AdamParams(learning_rate=0.01)).result(SECONDS)

        def sample() -> None:
            answers = [sampler.sample(text, 1, drawn(200, seed)) for seed in range(8)]
            for answer in answers:
                answer.result(SECONDS)

        def score() -> None:
            for answer in [sampler.compute_logprobs(text) for _ in range(8)]:
                answer.result(SECONDS)

        told = [("8 samples of 200 tokens", sample, train), ("a step of training", train, score)]
        for what, work, others in told:
            alone = median(work, options.rounds)
            with beside(others):
                busy = median(work, options.rounds)
            slower = busy / alone - 1
            print(f"{what}: {alone:.2f} s alone, {busy:.2f} s beside the other mesh ({slower:+.1%})")


def serve() -> None:
    """Run ``spmd-tx serve`` with the arguments behind --serve, and fake workers."""
    from spmd_tx.cli import main as cli
    from spmd_tx.coordinator.server import serve

    end_with(os.getppid())
    serve.serve.__defaults__ = ((str(WORKER),),)
    sys.argv = ["spmd-tx", "serve", *sys.argv[2:]]
    cli.main()


if __name__ == "__main__":
    serve() if "--serve" in sys.argv else main()
