"""Measures how long new weights are on their way to another group: python -m tools.bench.publishing

A server on this computer trains an adapter of 48 MB in one group, and another group samples it. After each
step the client saves the weights, and samples one token twice: the first of these samples waits for the
weights. In seconds: median and maximum.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tinker

from spmd_tx.demo import tiny_model
from tests.sdk.examples import SECONDS, batch, drawn, prompt, random_tokens, train
from tests.sdk.server import AS_USUAL, BASE_MODEL, Server, groups_of, serving

RANK = 128  # whose weights take 48 MB
SPEC = tiny_model.Spec(
    vocab_size=8192, d_model=1024, d_ff=3072, n_layers=5, n_heads=8, n_kv_heads=4, max_positions=256
)
GROUP = "rollouts"
PROMPT = prompt(random_tokens(8, seed=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=16)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny_model.write(folder / "model", SPEC)
        group = f"name={GROUP},role=sample"
        with serving(
            model, folder / "data", environment=AS_USUAL, max_lora_rank=RANK, dtype="bfloat16", group=group
        ) as server:
            server.wait_until_ready()
            while groups_of(server)[GROUP]["state"] != "ready":
                time.sleep(0.2)
            rounds = np.array([*measured(server, options.rounds)])
            report(rounds[2:], version_bytes(server))  # the first ones compile


def measured(server: Server, rounds: int) -> Iterator[tuple[float, float, float]]:
    """Yield the seconds of a save, of the first sample of its weights, and of the same sample once more."""
    with tinker.ServiceClient(base_url=server.url, api_key="tml-bench") as service:
        trainer = service.create_lora_training_client(BASE_MODEL, rank=RANK).result(SECONDS)
        for number in range(rounds):
            train(trainer, batch(seed=number))
            times = [time.perf_counter()]
            sampler = trainer.save_weights_and_get_sampling_client().result(SECONDS)
            times.append(time.perf_counter())
            for _ in range(2):
                sampler.sample(PROMPT, 1, drawn(max_tokens=1)).result(SECONDS)
                times.append(time.perf_counter())
            saved, first, again = np.diff(times)
            yield saved, first, again


def version_bytes(server: Server) -> int:
    """Return the size of the largest version that the server still keeps for its groups."""
    versions = (server.data_dir / "versions").iterdir()
    return max(sum(file.stat().st_size for file in version.rglob("*")) for version in versions)


def report(rounds: np.ndarray, size: int) -> None:
    saved, first, again = rounds.T
    print(f"{len(rounds)} versions of {size / 1e6:.0f} MB")
    for what, seconds in (
        ("until a save is answered", saved),
        ("the first sample of the weights", first),
        ("the same sample once more", again),
        ("from the save until the other group has the weights", saved + first - again),
    ):
        print(f"{what}: median {np.median(seconds):.2f} s, maximum {max(seconds):.2f} s")


if __name__ == "__main__":
    main()
