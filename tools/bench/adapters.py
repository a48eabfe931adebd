"""Measures the cost of more adapters than slots: python -m tools.bench.adapters [--adapters 200] [--slots 8]

Creates adapters through the SDK on a server of its own, with a tiny model. At some numbers of adapters on the
way it trains every one of them for a step, one after the other in random order, and samples from some; prints
the latencies (milliseconds), what the swaps took, and the memory of coordinator and workers. In the end
it trains all of them at once.
"""

import argparse
import random
import re
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import tinker

from spmd_tx.demo import tiny_model
from tests.sdk.examples import ADAM_STEP, VOCABULARY, batch, prompt, random_tokens
from tests.sdk.server import BASE_MODEL, Server, serving

SECONDS = 600
STAGES = (8, 50, 200, 500, 1000)
TRAINED, SAMPLED = 100, 30  # at most, per stage
DATA = batch(seed=0, lengths=(200, 100, 150))

Work = Callable[[tinker.TrainingClient], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=int, default=200)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--rank", type=int, default=32)
    arguments = parser.parse_args()
    stages = sorted({*(stage for stage in STAGES if stage < arguments.adapters), arguments.adapters})
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        spec = tiny_model.Spec(n_heads=4, n_kv_heads=2, vocab_size=VOCABULARY, max_positions=512)
        model = tiny_model.write(folder / "model", spec)
        options = {"max_lora_adapters": arguments.slots, "max_lora_rank": arguments.rank}
        server = stack.enter_context(serving(model, folder / "data", **options))
        server.wait_until_ready()
        service = stack.enter_context(tinker.ServiceClient(base_url=server.url, api_key="tml-bench"))
        measure(server, service, stages, arguments.rank)


def measure(server: Server, service: tinker.ServiceClient, stages: list[int], rank: int) -> None:
    trainers: list[tinker.TrainingClient] = []
    for stage in stages:
        began_at = time.monotonic()
        seeds = range(len(trainers), stage)
        created = [service.create_lora_training_client(BASE_MODEL, rank=rank, seed=seed) for seed in seeds]
        trainers += [each.result(SECONDS) for each in created]
        print(f"{stage} adapters, the last {len(created)} in {time.monotonic() - began_at:.1f} s")
        before = swaps(server)
        chosen = random.Random(stage).sample(trainers, min(TRAINED, stage))
        report("step", timed(step, chosen))
        report("save and sample", timed(save_and_sample, chosen[:SAMPLED]))
        for name, (seconds, count) in swaps(server).items():
            seconds, count = seconds - before.get(name, (0, 0))[0], count - before.get(name, (0, 0))[1]
            print(f"  swap {name}: {count:.0f}, {1000 * seconds / max(1, count):.1f} ms on average")
        pids = [server.process.pid, *server.worker_pids()]
        sizes = [psutil.Process(pid).memory_info().rss >> 20 for pid in pids]
        print("  MiB of coordinator, workers:", *sizes, flush=True)
    began_at = time.monotonic()
    answers = [begin_step(trainer) for trainer in trainers]
    for answer in answers:
        answer.result(SECONDS)
    print(f"a step of all at once: {time.monotonic() - began_at:.1f} s")


def begin_step(trainer: tinker.TrainingClient) -> tinker.APIFuture[tinker.types.OptimStepResponse]:
    trainer.forward_backward(DATA, "cross_entropy")
    return trainer.optim_step(ADAM_STEP)


def step(trainer: tinker.TrainingClient) -> None:
    begin_step(trainer).result(SECONDS)


def save_and_sample(trainer: tinker.TrainingClient) -> None:
    sampler = trainer.save_weights_and_get_sampling_client().result(SECONDS)
    params = tinker.SamplingParams(max_tokens=8, temperature=0.0)
    sampler.sample(prompt(random_tokens(10, seed=0)), num_samples=1, sampling_params=params).result(SECONDS)


def timed(work: Work, trainers: Iterable[tinker.TrainingClient]) -> list[float]:
    """Return the milliseconds of each call."""
    taken = []
    for trainer in trainers:
        began_at = time.monotonic()
        work(trainer)
        taken.append(1000 * (time.monotonic() - began_at))
    return taken


def report(what: str, taken: list[float]) -> None:
    median, slow = np.quantile(taken, (0.5, 0.95))
    print(f"  {what}: {len(taken)} in random order, p50 {median:.0f} ms, p95 {slow:.0f} ms")


def swaps(server: Server) -> dict[str, tuple[float, float]]:
    """Return seconds and number of swaps by direction and tier."""
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        text = answer.read().decode()
    pattern = r'spmd_tx_swap_seconds_(sum|count)\{direction="(\w+)",group="main",tier="(\w+)"\} (\S+)'
    found = {(f"{way} {tier}", what): float(value) for what, way, tier, value in re.findall(pattern, text)}
    return {name: (found[name, "sum"], found[name, "count"]) for name, what in found if what == "sum"}


if __name__ == "__main__":
    main()
