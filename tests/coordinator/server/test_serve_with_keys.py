"""A server in a process of its own, and keys that are made, revoked and rotated beside it."""

import asyncio
import gc
import time

import httpx
import pytest
import tinker

from spmd_tx.coordinator.storage.database import in_database
from spmd_tx.coordinator.tenancy import keys
from spmd_tx.coordinator.tenancy.keys import NewKeyOptions
from spmd_tx.demo import tiny_model
from tests.coordinator.server.test_serve import serving
from tests.support.databases import make_database

pytestmark = [  # the SDK leaves sockets open
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SECONDS = 20  # until a change must have been noticed; it takes about one


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def collect_sockets():
    """Now, and not in the test of somebody else."""
    yield
    gc.collect()


def change(data_dir, work, *arguments):
    """What spmd-tx keys does."""
    return asyncio.run(in_database(None, data_dir, lambda db: work(db, *arguments)))


def wait_for(status, client, token=None):
    """Ask until the answer is this one."""
    deadline = time.monotonic() + SECONDS
    headers = {} if token is None else {"x-api-key": token}
    while (response := client.get("sessions", headers=headers)).status_code != status:
        assert time.monotonic() < deadline, response.text
        time.sleep(0.1)


def test_a_running_server_takes_new_keys_and_forgets_revoked_ones(model_dir, tmp_path):
    with serving(model_dir, tmp_path) as server:
        server.wait_until_ready()
        session_id = server.session()
        token, row = change(tmp_path, keys.create, NewKeyOptions("local"))
        wait_for(401, server.client)
        wait_for(200, server.client, token)
        heartbeat = {"session_id": session_id}  # of a time without keys
        assert server.client.post("session_heartbeat", json=heartbeat).status_code == 401
        mine = server.client.post("session_heartbeat", json=heartbeat, headers={"x-api-key": token})
        assert mine.status_code == 200
        assert [server.probe(path).status_code for path in ("healthz", "readyz", "metrics")] == [
            200,
            200,
            401,
        ]
        second, _ = change(tmp_path, keys.rotate, row.id, 0.0)
        wait_for(401, server.client, token)
        wait_for(200, server.client, second)


def test_the_sdk_brings_its_key_and_says_why_one_is_refused(model_dir, tmp_path):
    make_database(tmp_path)
    alice, _ = change(tmp_path, keys.create, NewKeyOptions("alice"))
    reader, _ = change(tmp_path, keys.create, NewKeyOptions("alice", "read-only"))
    with serving(model_dir, tmp_path, host="0.0.0.0") as server:
        line = server.process.stdout.readline()
        assert line.startswith("ready: http://0.0.0.0:")
        url = line.removeprefix("ready: ").strip().replace("0.0.0.0", "127.0.0.1")
        service = tinker.ServiceClient(base_url=url, api_key=alice)
        trainer = service.create_lora_training_client("tiny", rank=4).result(SECONDS)
        run_id = trainer.model_id
        reading = tinker.RestClient(base_url=url, api_key=reader)
        assert reading.get_training_run(run_id).result(SECONDS).model_owner == "alice"
        with pytest.raises(tinker.PermissionDeniedError, match="may only read"):
            tinker.ServiceClient(base_url=url, api_key=reader).create_lora_training_client(
                "tiny", rank=4
            ).result(SECONDS)
        with pytest.raises(tinker.AuthenticationError, match="does not know this API key"):
            tinker.RestClient(base_url=url, api_key="tml-wrong").get_server_capabilities().result(SECONDS)
        service.close("success")
        with httpx.Client() as client:
            client.get(f"{url}/healthz").raise_for_status()
