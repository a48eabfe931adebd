import json
import re
import signal
import socket
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path

import httpx
import psutil
import pytest

from spmd_tx.coordinator.sampling.new_job import draw_seeds
from spmd_tx.coordinator.wire import tinker_pb2
from spmd_tx.demo import tiny_model
from tests.coordinator.agent import agent_with_fake_worker
from tests.coordinator.mesh import fake_worker
from tests.coordinator.sampling.fake_device import BASE, VOCABULARY, continuation
from tests.coordinator.server import serve_with_fake_workers
from tests.support.databases import make_database
from tests.support.forked import Forked
from tests.support.ports import free_port
from tests.support.processes import has_ended, until_ended

SECRET = "the secret of this test"
PROMPT = [1, 2, 3, 4, 5]
MAIN = serve_with_fake_workers.main


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

    def probe(self, path):
        """Ask what an operator's probe asks."""
        return self.client.get(self.client.base_url.join(f"/{path}"))

    def wait_for(self, message):
        while message not in (line := self.process.stderr.readline()):
            assert line, "the server has ended"

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)
        return self.end()[0]

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
    if not Path(data_dir, "spmd_tx.db").exists():
        make_database(Path(data_dir))
    with Forked(MAIN, options) as process:
        running = Running(process)
        try:
            yield running
        finally:
            if running.client is not None:
                running.client.close()
            process.kill()


@pytest.fixture
def server(model_dir, tmp_path):
    with serving(model_dir, tmp_path) as running:
        running.wait_until_ready()
        yield running


def test_a_sample_comes_back_and_a_signal_ends_everything_in_order(server):
    for path in ("healthz", "readyz", "api/v1/healthz"):
        assert server.probe(path).json()["status"] == "ok"
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
    assert all(has_ended(worker) for worker in workers)


def test_the_event_loop_of_a_server_is_watched(server):
    server.process.send_signal(signal.SIGPROF)  # what the kernel does when nobody has looked for long
    code, errors = server.end()
    assert code == -signal.SIGPROF
    assert "in keep_looking" in errors


@pytest.mark.slow  # as in the two tests of two workers that follow
def test_two_workers_serve_as_one(model_dir, tmp_path):
    with serving(model_dir, tmp_path, num_processes=2, fully_sharded_data_parallel_size=2) as server:
        server.wait_until_ready()
        assert len(server.workers()) == 2
        server.retrieve(server.sample(server.session(), max_tokens=6)).raise_for_status()
        server.process.send_signal(signal.SIGINT)
        assert server.end()[0] == 0


def test_without_sizes_all_processes_have_a_device_and_the_next_start_has_the_same_mesh(model_dir, tmp_path):
    sizes = "--fully-sharded-data-parallel-size 2, --expert-parallel-size 1, --tensor-parallel-size 1"
    for reason in ("the least tensor parallelism", "as it was before"):
        with serving(model_dir, tmp_path, num_processes=2) as server:
            server.wait_until_ready()
            assert len(server.workers()) == 2
            server.retrieve(server.sample(server.session(), max_tokens=6)).raise_for_status()
            server.process.send_signal(signal.SIGINT)
            code, errors = server.end()
            assert code == 0
            assert f"mesh of 2 x cpu: {sizes} ({reason}" in errors


@pytest.mark.parametrize(
    "seed",
    [fake_worker.EXIT, pytest.param(fake_worker.RAISE, marks=pytest.mark.slow)],
    ids=["exit", "exception"],
)
def test_a_request_that_ends_the_workers_again_and_again_fails_and_the_rest_goes_on(server, seed):
    session_id = server.session()
    poison = server.create_model(session_id, 0, seed)
    harmless = server.sample(session_id, max_tokens=6)
    answer = server.retrieve(poison).json()
    assert answer["category"] == "server"
    assert re.search("the workers were lost 2 times while this request was carried out", answer["error"])
    assert tinker_pb2.SampleResponse.FromString(server.retrieve(harmless).content).sequences


@pytest.fixture
def held(tmp_path, monkeypatch):
    """While this file is there, no worker gets ready."""
    monkeypatch.setenv("FAKE_WORKER_WAITS_WHILE_THERE_IS", str(tmp_path / "held"))
    return tmp_path / "held"


def test_a_worker_that_is_killed_is_a_pause_for_clients_while_the_api_answers(held, server):
    session_id = server.session()
    [worker] = server.workers()
    worker.suspend()
    waiting = [server.create_model(session_id, 0, seed=0), server.sample(session_id, max_tokens=6)]
    held.touch()
    worker.kill()
    while server.probe("readyz").status_code == 200:
        pass
    assert server.probe("healthz").status_code == 200
    answer = server.probe("readyz").json()
    assert answer["status"] == "starting"
    assert "worker 0 on " in answer["detail"]
    assert "was killed by signal 9 (SIGKILL)" in answer["detail"]
    server.create_model(session_id, 1, seed=0)
    held.unlink()
    model, sample = map(server.retrieve, waiting)
    assert model.json()["model_id"]
    assert tinker_pb2.SampleResponse.FromString(sample.content).sequences
    assert server.probe("readyz").json() == {"status": "ok"}
    assert server.terminate() == 0


def test_workers_that_never_start_end_the_server_with_a_diagnosis(model_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_WORKER_FAILS_AT_START", "1")
    with serving(model_dir, tmp_path) as server:
        code, errors = server.end()
    assert code == 1
    assert "5 generations of workers in a row have ended without finishing any command" in errors
    assert "its last words: no device found. Unfinished requests are kept for the next start" in errors
    assert "Traceback" not in errors


def test_a_signal_lets_work_be_finished_but_takes_no_more(server):
    session_id = server.session()
    [worker] = server.workers()
    worker.suspend()
    unfinished = server.create_model(session_id, 0, seed=0)
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("shutting down")
    with pytest.raises(httpx.HTTPStatusError, match="503") as refused:
        server.create_model(session_id, 1, seed=0)
    assert refused.value.response.json() == {
        "detail": "the server is shutting down; send the request again when it is back",
        "error": "the server is shutting down; send the request again when it is back",
        "category": "server",
    }
    assert server.probe("healthz").status_code == 200
    assert server.probe("readyz").status_code == 503
    with closing(HTTPConnection(server.client.base_url.host, server.client.base_url.port)) as connection:
        body = json.dumps({"request_id": unfinished})
        connection.request("POST", "/api/v1/retrieve_future", body, {"content-type": "application/json"})
        worker.resume()  # it has asked by now
        assert json.load(connection.getresponse())["model_id"]
    code, errors = server.end()
    assert code == 0, errors


def test_what_is_not_finished_in_time_is_finished_by_the_next_server(model_dir, tmp_path):
    with serving(model_dir, tmp_path, drain_seconds=0.5) as server:
        server.wait_until_ready()
        session_id = server.session()
        server.workers()[0].suspend()
        unfinished = server.create_model(session_id, 0, seed=0)
        server.process.send_signal(signal.SIGTERM)
        answer = server.retrieve(unfinished)
        assert (answer.status_code, answer.json()["type"]) == (408, "try_again")
        code, errors = server.end()
        assert code == 0, errors
    with serving(model_dir, tmp_path) as server:
        server.wait_until_ready()
        assert server.retrieve(unfinished).json()["model_id"]


def test_a_second_signal_ends_the_server_at_once(server):
    server.create_model(server.session(), 0, fake_worker.HANG)
    workers = server.workers()
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("shutting down")
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 1
    until_ended(workers)


def test_a_server_that_is_killed_is_a_pause_for_clients_too(model_dir, tmp_path):
    with serving(model_dir, tmp_path) as server:
        server.wait_until_ready()
        session_id = server.session()
        server.workers()[0].suspend()
        unfinished = server.create_model(session_id, 0, seed=0)
        server.process.kill()
        server.end()
    with serving(model_dir, tmp_path) as server:
        server.wait_until_ready()
        assert server.retrieve(unfinished).json()["model_id"]


def test_workers_of_other_hosts_join_and_rejoin_a_server_that_was_killed(model_dir, tmp_path, monkeypatch):
    (tmp_path / "secret").write_text(SECRET)
    port = free_port()
    hosts = {
        "num_processes": 2,
        "fully_sharded_data_parallel_size": 2,
        "local_processes": 1,
        "worker_port": port,
        "secret_file": str(tmp_path / "secret"),
    }
    monkeypatch.setenv("SPMD_TX_SECRET", SECRET)
    options = {"coordinator": f"127.0.0.1:{port}", "process": 1}
    with Forked(agent_with_fake_worker.run, options) as agent:
        with serving(model_dir, tmp_path / "data", **hosts) as server:
            server.wait_until_ready()
            session_id = server.session()
            server.retrieve(server.sample(session_id, max_tokens=6)).raise_for_status()
            server.process.kill()
            server.end()
        with serving(model_dir, tmp_path / "data", **hosts) as server:
            server.wait_until_ready()
            server.retrieve(server.sample(session_id, 1, max_tokens=6)).raise_for_status()
            assert server.terminate() == 0
        _, said = agent.communicate(timeout=60)
        assert agent.returncode == 0, said
        assert said.count("worker 1: worker 1 is ready") == 2


def test_a_cache_too_small_for_one_sequence_is_refused(model_dir, tmp_path):
    with serving(model_dir, tmp_path, max_context_length=2048) as server:
        code, errors = server.end()
    assert code == 2
    assert "room for 1008 tokens per data shard, less than one sequence of 2048 tokens" in errors


def test_connections_without_end_take_no_files_from_the_log(model_dir, tmp_path, monkeypatch):
    """As many as the system would let it open, and more, with half a request each."""
    monkeypatch.setattr(f"{__name__}.MAIN", serve_with_fake_workers.with_few_files)
    with serving(model_dir, tmp_path) as server, ExitStack() as stack:
        server.wait_until_ready()
        session_id = server.session()
        address = server.client.base_url.host, server.client.base_url.port
        for number in range(320):
            half_open = stack.enter_context(socket.create_connection(address))
            half_open.sendall(b"POST /api/v1/optim_step HTTP/1.1\r\nhost: localhost\r\n")
            if number % 40 == 0:
                assert server.retrieve(server.create_model(session_id, number // 40, seed=0)).json()[
                    "model_id"
                ]
        assert server.probe("healthz").status_code == 200
        assert httpx.get(server.client.base_url.join("/healthz")).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        code, errors = server.end()
        assert code == 0, errors
        assert "cannot store or read" not in errors
        assert "Too many open files" not in errors


def test_addresses_of_ipv6_are_served_and_printed_in_brackets(model_dir, tmp_path):
    with serving(model_dir, tmp_path, host="[::1]") as server:
        line = server.process.stdout.readline()
        assert re.fullmatch(r"ready: http://\[::1\]:\d+\n", line), server.end()
        url = line.removeprefix("ready: ").strip()
        assert httpx.get(f"{url}/healthz").json()["status"] == "ok"
        assert server.terminate() == 0
