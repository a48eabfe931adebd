import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from spmd_tx import tiny_model
from spmd_tx.coordinator import tinker_pb2
from spmd_tx.coordinator.samples import draw_seeds
from tests.coordinator import fake_worker
from tests.coordinator.fake_workers import BASE, VOCABULARY, continuation

SCRIPT = Path(__file__).with_name("serve_with_fake_workers.py")
PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("model"))


class Running:
    """A server, and a client that talks to it."""

    def __init__(self, process):
        self.process = process
        self.log = []
        self.client = None

    def wait_until_ready(self):
        line = self.process.stdout.readline()
        assert line.startswith("ready: http://127.0.0.1:"), self.process.communicate(timeout=30)
        url = line.removeprefix("ready: ").strip()
        self.client = httpx.Client(base_url=f"{url}/api/v1/", timeout=60)

    def post(self, path, **body):
        return self.client.post(path, json=body).raise_for_status().json()

    def session(self):
        return self.post("create_session", tags=[], sdk_version="0.38.0")["session_id"]

    def create_model(self, session_id, number, seed):
        body = {"session_id": session_id, "model_seq_id": number, "base_model": "tiny"}
        return self.post("create_model", **body, lora_config={"rank": 4, "seed": seed})["request_id"]

    def sample(self, session_id, number=0, **params):
        sampler = self.post(
            "create_sampling_session", session_id=session_id, sampling_session_seq_id=0, base_model="tiny"
        )
        return self.post(
            "asample",
            sampling_session_id=sampler["sampling_session_id"],
            seq_id=number,
            num_samples=1,
            prompt={"chunks": [{"tokens": PROMPT, "type": "encoded_text"}]},
            sampling_params=params,
        )["request_id"]

    def retrieve(self, request_id):
        return self.client.post("retrieve_future", json={"request_id": request_id})

    def workers(self):
        return sorted(psutil.Process(self.process.pid).children(), key=lambda child: child.pid)

    def end(self):
        """Its exit code, and what it wrote to standard error."""
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


@contextmanager
def serving(model_dir, data_dir, **options):
    options = {
        "base_model": str(model_dir),
        "served_model_name": "tiny",
        "data_dir": str(data_dir),
        "port": 0,
        "max_context_length": 256,
        **options,
    }
    command = [sys.executable, str(SCRIPT), json.dumps(options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        running = Running(process)
        yield running
        if running.client is not None:
            running.client.close()
        process.kill()


@pytest.fixture
def server(model_dir, tmp_path):
    with serving(model_dir, tmp_path) as running:
        running.wait_until_ready()
        yield running


def test_a_sample_comes_back_and_a_signal_ends_everything_in_order(server):
    assert server.client.get("healthz").json() == {"status": "ok"}
    answer = server.retrieve(server.sample(server.session(), max_tokens=6, seed=3))
    assert answer.headers["content-type"] == "application/x-protobuf"
    [sequence] = tinker_pb2.SampleResponse.FromString(answer.content).sequences
    expected, _ = continuation(BASE, PROMPT, draw_seeds(3, "", 0), 6)
    assert max(expected) < VOCABULARY
    assert list(memoryview(sequence.tokens).cast("i")) == expected

    workers = server.workers()
    server.process.send_signal(signal.SIGTERM)
    code, errors = server.end()
    assert code == 0, errors
    assert "worker 0: worker 0 is ready" in errors
    assert "Traceback" not in errors
    assert not any(worker.is_running() for worker in workers)


def test_two_workers_serve_as_one(model_dir, tmp_path):
    with serving(model_dir, tmp_path, num_processes=2, fully_sharded_data_parallel_size=2) as server:
        server.wait_until_ready()
        assert len(server.workers()) == 2
        server.retrieve(server.sample(server.session(), max_tokens=6)).raise_for_status()
        server.process.send_signal(signal.SIGINT)
        assert server.end()[0] == 0


@pytest.mark.parametrize(
    "seed, story",
    [
        (fake_worker.EXIT, "worker 0 exited with code 7; its last words: .*the last words"),
        (fake_worker.RAISE, "worker 0 exited with code 1; worker 0 failed: ValueError: on purpose"),
    ],
    ids=["exit", "exception"],
)
def test_clients_are_told_how_a_worker_died(server, seed, story):
    session_id = server.session()
    answer = server.retrieve(server.create_model(session_id, 0, seed)).json()
    assert answer["category"] == "server"
    assert re.search(story, answer["error"])
    code, errors = server.end()
    assert code == 1, errors


def test_a_worker_that_is_killed_fails_what_is_pending_and_ends_the_server(server):
    session_id = server.session()
    hanging = server.create_model(session_id, 0, fake_worker.HANG)
    waiting = server.sample(session_id, max_tokens=6)
    os.kill(server.workers()[0].pid, signal.SIGKILL)
    for request_id in (hanging, waiting):
        answer = server.retrieve(request_id).json()
        assert answer["category"] == "server"
        assert "worker 0 was killed by signal 9 (SIGKILL)" in answer["error"]
    health = server.client.get("healthz")
    assert (health.status_code, health.json()["status"]) == (503, "failed")
    with pytest.raises(httpx.HTTPStatusError, match="503"):
        server.create_model(session_id, 1, seed=0)
    code, errors = server.end()
    assert code == 1
    assert "worker 0 was killed by signal 9" in errors


def test_a_second_signal_ends_the_server_at_once(server):
    server.create_model(server.session(), 0, fake_worker.HANG)
    workers = server.workers()
    server.process.send_signal(signal.SIGTERM)
    while "shutting down" not in server.process.stderr.readline():
        pass
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 1
    psutil.wait_procs(workers, timeout=30)
    assert not any(worker.is_running() for worker in workers)


def test_what_was_unfinished_when_the_server_stopped_has_failed_when_it_is_back(model_dir, tmp_path):
    with serving(model_dir, tmp_path) as server:
        server.wait_until_ready()
        unfinished = server.create_model(server.session(), 0, fake_worker.HANG)
        server.process.kill()
        server.end()
    with serving(model_dir, tmp_path) as server:
        server.wait_until_ready()
        assert server.retrieve(unfinished).json()["category"] == "server"


def test_a_cache_too_small_for_one_sequence_is_refused(model_dir, tmp_path):
    with serving(model_dir, tmp_path, max_context_length=2048) as server:
        code, errors = server.end()
    assert code == 2
    assert "room for 1008 tokens per data shard, less than one sequence of 2048 tokens" in errors
