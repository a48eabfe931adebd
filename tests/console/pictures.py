"""Takes the pictures of docs/console.md: python -m tests.console.pictures [FOLDER].

Three tenants of a real server train the demo's tiny model, and its worker is killed meanwhile.
"""

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import httpx
import tinker

from spmd_tx.demo import tiny_model
from spmd_tx.demo.run import load_example
from tests.console.driver import drive
from tests.console.test_live import create_key, play
from tests.sdk.server import BASE_MODEL, Server, serving

EXAMPLE = load_example()
ROLES = {"ada": "admin", "grace": "user", "edsger": "user"}
RUNS = [
    ("ada", "words with o", 0.006),
    ("grace", "words with o, half the rate", 0.003),
    ("edsger", "words with o, slow", 0.0015),
]
STEPS = 40
KILLED_AFTER = 12
SUPERVISED = 8
SAVED_EVERY = 15  # steps


class Run:
    """Trains one run of a tenant."""

    def __init__(self, server: Server, key: str, name: str, learning_rate: float) -> None:
        self._server, self._key, self._rate = server, key, learning_rate
        service = tinker.ServiceClient(base_url=server.url, api_key=key)
        metadata = {"name": name, "learning_rate": str(learning_rate)}
        client = service.create_lora_training_client(BASE_MODEL, rank=16, seed=0, user_metadata=metadata)
        self.trainer: tinker.TrainingClient = client.result()
        self._tokenizer = self.trainer.get_tokenizer()
        self._places = count()

    def train(self, at_step: dict[int, threading.Event]) -> None:
        for step in self._steps():
            reward = {} if step.reward is None else {"reward": step.reward}
            self._log(next(self._places), reward | {"seconds": step.seconds})
            if step.phase != "reinforce":
                continue
            if step.number in at_step:
                at_step[step.number].set()
            if step.number % SAVED_EVERY == SAVED_EVERY - 1:
                self.trainer.save_weights_for_sampler(f"step {step.number + 1}").result()

    def go_on(self, is_over: threading.Event) -> None:
        """Train on, with a rate of almost nothing, so that there is something to see."""
        while not is_over.is_set():
            for _ in EXAMPLE.reinforcement_steps(self.trainer, self._tokenizer, 1e-9, 1):
                pass

    def _steps(self) -> Iterator:
        yield from EXAMPLE.supervised_steps(self.trainer, self._tokenizer, self._rate, SUPERVISED)
        yield from EXAMPLE.reinforcement_steps(self.trainer, self._tokenizer, self._rate, STEPS)

    def _log(self, place: int, metrics: dict[str, float]) -> None:
        address = f"{self._server.url}/api/v1/training_runs/{self.trainer.model_id}/metrics"
        body = {"step": place, "metrics": metrics}
        httpx.post(address, json=body, headers={"X-Api-Key": self._key}).raise_for_status()


def main(folder: Path) -> None:
    os.environ["SCREENSHOTS"] = str(folder.resolve())
    work = Path(tempfile.mkdtemp())
    model = tiny_model.write(work / "model", tiny_model.PRESETS["tiny"])
    keys = {owner: create_key(work / "data", owner, role) for owner, role in ROLES.items()}
    options = {"train_tokens": 1024, "decode_rows": 32, "snapshot_seconds": 5}
    with serving(model, work / "data", **options) as server, ThreadPoolExecutor(len(RUNS)) as threads:
        server.wait_until_ready()
        runs = [Run(server, keys[owner], name, rate) for owner, name, rate in RUNS]
        is_time = threading.Event()
        training = [
            threads.submit(run.train, {KILLED_AFTER: is_time} if run is runs[0] else {}) for run in runs
        ]
        is_time.wait(600)
        os.kill(server.worker_pids()[0], signal.SIGKILL)
        for each in training:
            each.result()
        for run, name in zip(runs, ("final", "final", "early"), strict=True):
            run.trainer.save_weights_for_sampler(name).result()
        runs[0].trainer.save_state("to go on from").result()
        play(server.url, keys["ada"], "agent-1")
        is_over = threading.Event()

        def go_on() -> None:
            training[:] = [threads.submit(run.go_on, is_over) for run in runs[:2]]

        try:
            shown = runs[1].trainer.model_id
            drive("pictures", server.url, {"go on": go_on}, key=keys["ada"], run=shown)
        finally:
            is_over.set()
        for each in training:
            each.result()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
