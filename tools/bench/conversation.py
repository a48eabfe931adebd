"""Measures what the prefix cache saves in a conversation: python -m tools.bench.conversation

Prints, for every turn of a conversation that grows by 256 tokens, the seconds until its answer of 8 tokens is
there: when the turns are of one session, and when each is of a new one, which finds nothing in the cache.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tinker
from tinker import types

from spmd_tx.demo import tiny_model
from tests.sdk.server import BASE_MODEL, serving

TURNS, TURN_TOKENS, ANSWER_TOKENS = 7, 248, 8
SPEC = tiny_model.Spec(n_layers=4, d_model=256, d_ff=1024, max_positions=2048)


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = tiny_model.write(Path(directory) / "model", SPEC)
        with serving(model, Path(directory) / "data", train_tokens=2048) as server:
            server.wait_until_ready()
            for attempt in ("compiling", "measured"):
                for name in ("one session", "new sessions"):
                    seconds, hits = converse(lambda: _sampler(server.url), name == "one session", attempt)
                    times = " ".join(f"{each:.2f}" for each in seconds)
                    print(f"{attempt}, {name}: {times} s, found {hits}", flush=True)


def _sampler(url: str) -> tinker.SamplingClient:
    service = tinker.ServiceClient(base_url=url, api_key="tml-test")
    return service.create_sampling_client(base_model=BASE_MODEL).result()


def converse(
    new_sampler: Callable[[], tinker.SamplingClient], is_one_session: bool, text: str
) -> tuple[list[float], list[int]]:
    """Return the seconds and the cached tokens of every turn."""
    random = np.random.default_rng(len(text))
    sampler, tokens, seconds, hits = new_sampler(), list[int](), list[float](), list[int]()
    for turn in range(TURNS):
        tokens += random.integers(0, SPEC.vocab_size, TURN_TOKENS).tolist()
        sampler = sampler if is_one_session else new_sampler()
        params = types.SamplingParams(max_tokens=ANSWER_TOKENS, seed=turn, stop=[])
        start = time.monotonic()
        response = sampler.sample(types.ModelInput.from_ints(tokens), 1, params).result()
        seconds.append(time.monotonic() - start)
        hits.append(response.prompt_cache_hit_tokens)
        tokens += response.sequences[0].tokens
    return seconds, hits


if __name__ == "__main__":
    main()
