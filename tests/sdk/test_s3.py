"""A server whose checkpoints are in S3: moto's server on loopback, which s3fs takes for the real one."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
from typer.testing import CliRunner

from spmd_tx.cli.main import app
from spmd_tx.coordinator.checkpoints.remote_files import RemoteFiles
from spmd_tx.errors import StartError
from tests.sdk.examples import SECONDS, batch, greedy, logprobs_of, random_tokens, sample, train
from tests.sdk.server import BASE_MODEL, serving
from tests.support.ports import free_port

pytestmark = pytest.mark.slow

QUESTION = batch(seed=9)
PROMPT = random_tokens(10, seed=0)
OUTAGE_SECONDS = 40  # longer than s3fs tries again by itself


@pytest.fixture(scope="module")
def endpoint():
    """Where S3 is, and its process."""
    pytest.importorskip("s3fs", reason="needs the environment of `make s3`")
    port = free_port()
    moto = Path(sys.executable).with_name("moto_server")
    process = subprocess.Popen([str(moto), "-H", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    client = httpx.Client(base_url=url, transport=httpx.HTTPTransport(retries=20))
    client.put("/bucket").raise_for_status()
    yield url, process
    client.close()
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def s3_options(endpoint):
    """What a server is started with."""
    url, _ = endpoint
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "test")
        patch.setenv("AWS_ENDPOINT_URL", url)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield {"checkpoints_base": "s3://bucket/checkpoints"}


@pytest.fixture(scope="module")
def live(model_dir, tmp_path_factory, s3_options):
    with serving(model_dir, tmp_path_factory.mktemp("s3") / "data", **s3_options) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture
def client(live):
    client = tinker.ServiceClient(base_url=live.url, api_key="tml-test")
    yield client
    client.close("success").result(SECONDS)


@pytest.fixture
def rest_of(live):
    client = tinker.RestClient(base_url=live.url, api_key="tml-test")
    yield client
    client.holder.close()


@pytest.fixture
def trained(client):
    trainer = client.create_lora_training_client(BASE_MODEL, rank=8, seed=1).result(SECONDS)
    train(trainer, batch(seed=0))
    return trainer


def objects(endpoint) -> str:
    """All names in the bucket."""
    return httpx.get(f"{endpoint[0]}/bucket?list-type=2").text


def forget_copies(server):
    shutil.rmtree(server.data_dir / "checkpoints")


def test_checkpoints_come_back_from_s3(client, rest_of, live, trained, endpoint):
    saved = trained.save_state("state", ttl_seconds=3600).result(SECONDS).path
    sampled = trained.save_weights_for_sampler("sampled").result(SECONDS).path
    exported = trained.save_weights_external("out").result(SECONDS).path
    expected = sample(client.create_sampling_client(model_path=sampled).result(SECONDS), PROMPT, greedy())
    forget_copies(live)
    resumed = client.create_training_client_from_state_with_optimizer(saved).result(SECONDS)
    np.testing.assert_array_equal(logprobs_of(resumed, QUESTION), logprobs_of(trained, QUESTION))
    sampler = client.create_sampling_client(model_path=sampled).result(SECONDS)
    assert sample(sampler, PROMPT, greedy()).tokens == expected.tokens
    url = rest_of.get_external_weights_urls(exported).result(SECONDS).urls["adapter_model.safetensors"]
    whole = httpx.get(url).raise_for_status().content
    assert httpx.get(url, headers={"range": "bytes=-100"}).content == whole[-100:]
    copied = rest_of.copy_weights(saved, "archive").result(SECONDS)
    for path in (saved, sampled, exported, copied):
        rest_of.delete_checkpoint_from_tinker_path(path).result(SECONDS)
    assert "<Key>checkpoints/spmd-tx-server</Key>" in objects(endpoint)
    assert objects(endpoint).count("<Key>") == 1


def test_while_s3_does_not_answer_saves_wait_and_others_train_on(live, client, trained, endpoint):
    other = client.create_lora_training_client(BASE_MODEL, rank=8, seed=2).result(SECONDS)
    endpoint[1].send_signal(signal.SIGSTOP)
    back = threading.Timer(OUTAGE_SECONDS, endpoint[1].send_signal, [signal.SIGCONT])
    back.start()
    saving = trained.save_state("waiting")
    train(other, batch(seed=1))
    assert "waiting" not in [path.name for path in (live.data_dir / "checkpoints").glob("*/weights/*")]
    path = saving.result(4 * SECONDS).path
    back.join()
    forget_copies(live)
    client.create_training_client_from_state(path).result(SECONDS)


def test_a_server_that_is_killed_during_an_upload_saves_again(model_dir, tmp_path, s3_options, endpoint):
    options = s3_options | {"checkpoints_base": "s3://bucket/second"}
    with serving(model_dir, tmp_path / "data", **options) as server:
        server.wait_until_ready()
        client = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
        trainer = client.create_lora_training_client(BASE_MODEL, rank=8, seed=1).result(SECONDS)
        train(trainer, batch(seed=0))
        endpoint[1].send_signal(signal.SIGSTOP)
        saving = trainer.save_state("state")
        while not list((server.data_dir / "checkpoints").glob("*/weights/.state.*.staged/*")):
            pass
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        endpoint[1].send_signal(signal.SIGCONT)
        port = int(server.url.rpartition(":")[2])
        with serving(model_dir, tmp_path / "data", port=port, **options) as again:
            again.wait_until_ready()
            path = saving.result(4 * SECONDS).path
            resumed = client.create_training_client_from_state(path).result(SECONDS)
            np.testing.assert_array_equal(logprobs_of(resumed, QUESTION), logprobs_of(trainer, QUESTION))
            client.close("success").result(SECONDS)


def test_exports_come_from_s3_and_go_there(trained, model_dir, tmp_path):
    path = trained.save_state("exported").result(SECONDS).path
    given = ["export", path, "--base-model", str(model_dir), "--checkpoints-base", "s3://bucket/checkpoints"]
    for out in ("s3://bucket/merged", str(tmp_path / "merged")):
        assert CliRunner().invoke(app, [*given, "--out", out], catch_exceptions=False).exit_code == 0
    remote, local = RemoteFiles("s3://bucket/merged"), tmp_path / "merged"
    assert {name: remote.read(name) for name in remote.sizes()} == {
        file.name: file.read_bytes() for file in local.iterdir()
    }
    with pytest.raises(StartError, match="holds a model or an adapter already"):
        CliRunner().invoke(app, [*given, "--out", "s3://bucket/merged"], catch_exceptions=False)
