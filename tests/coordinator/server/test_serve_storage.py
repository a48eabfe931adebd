"""What becomes of a whole server, with fake workers, when its storage fails."""

import sqlite3
import threading
import time
from contextlib import closing, suppress

import httpx
import pytest

from spmd_tx.coordinator.wire import tinker_pb2
from spmd_tx.demo import tiny_model
from tests.coordinator.server.test_serve import Running, serving
from tests.support.disks import fill


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("model"))


def tokens(server: Running, request_id: str) -> bytes:
    """Poll like the SDK."""
    while (response := server.retrieve(request_id)).status_code == 408:
        pass
    assert response.status_code == 200
    (sequence,) = tinker_pb2.SampleResponse.FromString(response.content).sequences
    return sequence.tokens


def sample_status(server: Running, sampler: str, number: int) -> int:
    body = {
        "sampling_session_id": sampler,
        "seq_id": number,
        "num_samples": 1,
        "prompt": {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 4, "seed": 1},
    }
    return server.client.post("asample", json=body).status_code


def open_sampler(server: Running) -> str:
    return server.post(
        "create_sampling_session",
        session_id=server.session(),
        sampling_session_seq_id=0,
        base_model="tiny",
    )["sampling_session_id"]


def wait_until(condition):
    """Ends by the time limit of the test."""
    while not condition():
        time.sleep(0.05)


def test_a_database_that_is_locked_for_a_while_is_a_pause(model_dir, tmp_path):
    with serving(model_dir, tmp_path) as server:
        server.wait_until_ready()
        sampler = open_sampler(server)
        assert sample_status(server, sampler, 0) == 200
        with closing(sqlite3.connect(tmp_path / "spmd_tx.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            assert sample_status(server, sampler, 1) == 503
            assert server.probe("healthz").status_code in (200, 503)  # it answers
            other.execute("ROLLBACK")
        wait_until(lambda: sample_status(server, sampler, 1) == 200)
        assert server.terminate() == 0


def test_a_disk_that_is_full_for_a_while_is_a_pause(model_dir, small_disk):
    with serving(model_dir, small_disk, min_free_disk="0") as server:
        server.wait_until_ready()
        sampler = open_sampler(server)
        session_id = sampler.partition(":")[0]
        accepted = [server.sample(session_id, number, max_tokens=4, seed=1) for number in range(3)]
        ballast = fill(small_disk)
        numbers = iter(range(100, 10_000))
        wait_until(lambda: sample_status(server, sampler, next(numbers)) == 503)
        freeing = threading.Timer(1.0, ballast.unlink)
        freeing.start()
        assert all(tokens(server, request_id) for request_id in accepted)
        freeing.join()
        wait_until(lambda: sample_status(server, sampler, 50_000) == 200)
        assert server.terminate() == 0


def test_a_damaged_database_ends_the_server_with_the_remedy(model_dir, tmp_path):
    with serving(model_dir, tmp_path) as server:
        server.wait_until_ready()
        server.session()
        file = tmp_path / "spmd_tx.db"
        with closing(sqlite3.connect(file)) as other:
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            # Somebody else's change makes the server read its pages again.
            other.execute("INSERT INTO sessions (id, created_at, tags) VALUES ('other', 1.0, '[]')")
            other.commit()
            with file.open("r+b") as damaged:
                damaged.write(b"\xff" * file.stat().st_size)
        with suppress(httpx.TransportError):  # of a server that has ended
            while True:
                time.sleep(0.05)
                server.client.post("create_session", json={"tags": [], "sdk_version": "0.38.0"})
        code, errors = server.end()
        assert code == 2
        assert "spmd_tx.db is damaged" in errors
        assert "restore the last backup" in errors


def test_a_second_server_is_refused_and_told_of_the_first(model_dir, tmp_path):
    with serving(model_dir, tmp_path) as first:
        first.wait_until_ready()
        with serving(model_dir, tmp_path) as second:
            code, errors = second.end()
        assert code == 2
        assert f"in use by another running server (process {first.process.pid} on" in errors
        assert first.probe("healthz").status_code == 200


def test_metrics_tell_of_disk_and_workers(model_dir, tmp_path):
    with serving(model_dir, tmp_path) as server:
        server.wait_until_ready()
        wait_until(lambda: 'spmd_tx_disk_bytes{kind="database"}' in server.probe("metrics").text)
        answered = server.probe("metrics")
        assert answered.headers["content-type"].startswith("text/plain")
        values = dict(line.rsplit(" ", 1) for line in answered.text.splitlines() if line[0] != "#")
        assert float(values['spmd_tx_disk_bytes{kind="database"}']) > 4096
        assert float(values["spmd_tx_disk_free_bytes"]) > 0
        assert float(values["spmd_tx_storage_paused"]) == 0
        assert float(values['spmd_tx_generations_total{group="main"}']) == 1
