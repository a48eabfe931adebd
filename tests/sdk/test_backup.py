"""What is there after a worker's end, a crash, and backup and restore by the commands of docs/backup.md."""

import os
import shutil
import signal
import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import openai
import pytest
import tinker

from tests.sdk.examples import SECONDS, batch, logprobs_of, train
from tests.sdk.server import BASE_MODEL, COMMAND, Server, serving
from tests.sdk.test_trajectories import play, scored_as_recorded, segments_of

QUESTION = batch(seed=9)


def use(server: Server) -> tuple[str, np.ndarray]:
    """Train, and save: where, and what the trained model says."""
    with tinker.ServiceClient(base_url=server.url, api_key="tml-test") as service:
        trainer = service.create_lora_training_client(BASE_MODEL, rank=8, seed=1).result(SECONDS)
        train(trainer, batch(seed=0))
        path = trainer.save_state("kept").result(SECONDS).path
        return path, logprobs_of(trainer, QUESTION)


def assert_is_there(server: Server, path: str, expected: np.ndarray) -> None:
    """Check that what was saved says the same, and can be trained."""
    with tinker.ServiceClient(base_url=server.url, api_key="tml-test") as service:
        trainer = service.create_training_client_from_state_with_optimizer(path).result(SECONDS)
        np.testing.assert_array_equal(logprobs_of(trainer, QUESTION), expected)
        train(trainer, batch(seed=1))


def run(*command: object) -> None:
    subprocess.run([str(each) for each in command], check=True, capture_output=True)


def assert_is_recorded(server: Server, answered: list[dict]) -> None:
    """Check that an agent's turns are as it was told, and have the log-probabilities of training."""
    assert segments_of(server.url, "kept") == answered
    with tinker.ServiceClient(base_url=server.url, api_key="tml-test") as service:
        trainer = service.create_lora_training_client(BASE_MODEL, rank=8).result(SECONDS)
        scored_as_recorded(trainer, answered)


@pytest.fixture(scope="module")
def used_server(model_dir, tmp_path_factory):
    with serving(model_dir, tmp_path_factory.mktemp("used") / "data") as server:
        server.wait_until_ready()
        yield server


def test_a_worker_that_is_killed_on_the_way_changes_no_token(used_server):
    """What a grammar allows follows from the tokens that are known."""
    url = f"{used_server.url}/oai/api/v1"
    with openai.OpenAI(base_url=url, api_key="tml-test", timeout=SECONDS, max_retries=0) as client:
        asked = {"messages": [{"role": "user", "content": "Who?"}], "extra_body": {"regex": "[a-z0-9]{120}"}}
        ask = partial(client.chat.completions.create, model=BASE_MODEL, max_tokens=200, seed=3, **asked)
        expected = ask().choices[0].message.content
        (worker,) = used_server.worker_pids()
        text = ""
        for event in ask(stream=True):
            if not text and event.choices and event.choices[0].delta.content:
                os.kill(worker, signal.SIGKILL)
            text += (event.choices and event.choices[0].delta.content) or ""
    assert text == expected
    assert used_server.worker_pids() != [worker]


def test_a_server_goes_on_after_a_crash_and_on_the_backup_of_one_that_runs(used_server, model_dir, tmp_path):
    data, copy = used_server.data_dir, tmp_path / "copy"
    play(used_server.url, "kept", turns=2)
    path, expected = use(used_server)
    answered = segments_of(used_server.url, "kept")
    run(COMMAND, "backup", copy, "--data-dir", data)
    used_server.process.kill()
    used_server.process.wait()
    with serving(model_dir, data) as server:
        server.wait_until_ready()
        assert_is_recorded(server, answered)
        assert server.terminate() == 0
    shutil.rmtree(data)
    with serving(model_dir, copy) as server:
        server.wait_until_ready()
        assert_is_there(server, path, expected)
        assert segments_of(server.url, "kept") == answered


@pytest.mark.slow
def test_a_server_starts_on_a_dump_of_postgresql_and_a_copy_of_the_files(model_dir, tmp_path, postgres):
    tools = Path(postgres.bin_path)
    postgres.psql("CREATE DATABASE backup_before;")
    before, after = (postgres.get_uri(database=name) for name in ("backup_before", "backup_after"))
    with serving(model_dir, tmp_path / "data", database_url=before) as server:
        server.wait_until_ready()
        path, expected = use(server)
        assert server.terminate() == 0
    run(tools / "pg_dump", "--format=custom", f"--file={tmp_path / 'dump'}", before)
    run("cp", "-a", tmp_path / "data", tmp_path / "copy")
    shutil.rmtree(tmp_path / "data")
    postgres.psql("DROP DATABASE backup_before;")

    run(tools / "psql", postgres.get_uri(), "--command", "CREATE DATABASE backup_after")
    run(tools / "pg_restore", f"--dbname={after}", tmp_path / "dump")
    (tmp_path / "copy" / "compilation_cache").unlink(missing_ok=True)
    with serving(model_dir, tmp_path / "copy", database_url=after) as server:
        server.wait_until_ready()
        assert_is_there(server, path, expected)
