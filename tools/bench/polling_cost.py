"""Measures what waiting for many samples costs the server: python -m tools.bench.polling_cost

Draws so many samples at once from a tiny model with the real SDK, with one poll per sample and with one poll
for all of them. Prints requests of each kind, CPU seconds of the coordinator, and seconds on the clock.
"""

import argparse
import collections
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import tinker
from tinker import _base_client

from spmd_tx.demo import tiny_model
from tests.sdk.examples import SECONDS, drawn, prompt, random_tokens, sample
from tests.sdk.server import BASE_MODEL, serving
from tests.sdk.shared_servers import SPEC

TOKENS = 100  # of each sample
SLOW_SECONDS = 600


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("samples", type=int, nargs="?", default=512, help="drawn at once; default: 512")
    samples = parser.parse_args().samples
    with tempfile.TemporaryDirectory() as folder:
        model_dir = tiny_model.write(Path(folder) / "model", SPEC)
        with serving(model_dir, Path(folder) / "data") as server:
            server.wait_until_ready()
            coordinator = psutil.Process(server.process.pid)
            for together in (False, True, False, True):
                measure(server.url, samples, together, coordinator)


def measure(url: str, samples: int, together: bool, coordinator: psutil.Process) -> None:
    service = tinker.ServiceClient(base_url=url, api_key="tml-test")
    flags = service.holder.get_client_config()
    service.holder._client_config = flags.model_copy(update={"sample_use_retrieve_futures": together})
    sampler = service.create_sampling_client(base_model=BASE_MODEL).result(SECONDS)
    tokens = random_tokens(10, seed=0)
    sample(sampler, tokens, drawn())
    sent, spent, began = count_requests(), sum(coordinator.cpu_times()[:2]), time.monotonic()
    params = [drawn(max_tokens=TOKENS, seed=seed) for seed in range(samples)]
    for future in [sampler.sample(prompt(tokens), 1, each) for each in params]:
        future.result(SLOW_SECONDS)
    seconds = time.monotonic() - began
    spent = sum(coordinator.cpu_times()[:2]) - spent
    how = "one poll for all" if together else "one poll each"
    print(f"{how}: {spent:.2f} s of CPU, {seconds:.1f} s, {dict(sent)}", flush=True)
    service.close("success").result(SECONDS)


def count_requests() -> collections.Counter[str]:
    """Count this process's requests from now on, by the last part of their path."""
    sent: collections.Counter[str] = collections.Counter()
    original = _base_client.AsyncAPIClient.request

    async def request(self: Any, cast_to: Any, options: Any, **more: Any) -> Any:
        sent[options.url.rpartition("/")[2]] += 1
        return await original(self, cast_to, options, **more)

    _base_client.AsyncAPIClient.request = request  # pyright: ignore[reportAttributeAccessIssue]
    return sent


if __name__ == "__main__":
    main()
