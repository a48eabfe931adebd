"""Several base models behind one address: a teacher that answers while a student trains, through losses."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import httpx
import numpy as np
import pytest
import tinker

from spmd_tx.demo import tiny_model
from tests.sdk.examples import SECONDS, batch, digests, drawn, logprobs_of, prompt, random_tokens
from tests.sdk.raw_api import RawApi
from tests.sdk.server import (
    BASE_MODEL,
    COMMAND,
    QUICKLY,
    Server,
    generation_of,
    groups_of,
    serving,
    workers_of_group,
)
from tests.sdk.shared_servers import SPEC
from tests.support.ports import free_port

TEACHER = "teacher"
PROMPT = random_tokens(12, seed=3)
STEPS = 6


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model, with the student's tokenizer."""
    return tiny_model.write(tmp_path_factory.mktemp("teacher"), replace(SPEC, n_layers=1), seed=5)


def group_of(teacher_dir: Path) -> str:
    return f"name={TEACHER},base_model={teacher_dir},served_model_name={TEACHER},role=sample"


@contextmanager
def two_models(model_dir: Path, teacher_dir: Path, data_dir: Path, **options: object) -> Iterator[Server]:
    options = {"batch_invariant": True, "snapshot_seconds": 0, "group": group_of(teacher_dir), **options}
    with serving(model_dir, data_dir, **options) as server:
        server.wait_until_ready()
        yield server


def sampler_of(server: Server, base_model: str) -> httpx.Response:
    api = RawApi(server.url, base_model)
    body = {"session_id": api.session_id, "sampling_session_seq_id": 0, "base_model": base_model}
    return api.http.post("create_sampling_session", json=body)


def wait_until(claim, seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < deadline, "it did not become true in time"
        time.sleep(0.2)


def study(
    server: Server, disturbances: Mapping[int, Callable[[], None]] = MappingProxyType({})
) -> tuple[list, np.ndarray, list[str]]:
    """Distil: the student trains while the teacher samples and scores; after some steps something happens."""
    with tinker.ServiceClient(base_url=server.url, api_key="tml-test") as service:
        trainer = service.create_lora_training_client(BASE_MODEL, rank=8, seed=1).result(SECONDS)
        teacher = service.create_sampling_client(base_model=TEACHER).result(SECONDS)
        steps, answers = [], []
        for number in range(STEPS):
            steps.append(trainer.forward_backward(batch(number), "cross_entropy"))
            steps.append(trainer.optim_step(tinker.AdamParams(learning_rate=0.01)))
            answers.append(teacher.sample(prompt(PROMPT), 1, drawn(max_tokens=40, seed=number)))
            answers.append(teacher.compute_logprobs(prompt(PROMPT)))
            if number in disturbances:
                disturbances[number]()
        for step in steps:
            step.result(SECONDS)
        told = [answer.result(SECONDS) for answer in answers]
        texts = [(each.sequences[0].tokens, each.sequences[0].logprobs) for each in told[::2]]
        path = trainer.save_weights_for_sampler("v1").result(SECONDS).path
        return [texts, told[1::2]], logprobs_of(trainer, batch(seed=9)), digests(server.data_dir, path)


def assert_equal(found, expected) -> None:
    assert found[0] == expected[0]
    np.testing.assert_array_equal(found[1], expected[1])
    assert found[2] == expected[2]


def assert_both_are_served(server: Server) -> None:
    wait_until(lambda: all(each["state"] == "ready" for each in groups_of(server).values()))
    capabilities = httpx.get(f"{server.url}/api/v1/get_server_capabilities").json()["supported_models"]
    assert [each["model_name"] for each in capabilities] == [BASE_MODEL, TEACHER]
    assert [each["trainable"] for each in capabilities] == [True, False]
    assert httpx.get(f"{server.url}/readyz", params={"base": TEACHER}).status_code == 200
    assert httpx.get(f"{server.url}/readyz", params={"group": "nobody"}).status_code == 404


def assert_neither_notices_the_others_losses(server: Server) -> None:
    expected = study(server)
    generations = [(generation_of(server, "main"), generation_of(server, TEACHER))]

    def lose(group: str) -> None:
        before = generation_of(server, group)
        os.kill(workers_of_group(server, group)[0], signal.SIGKILL)
        wait_until(lambda: generation_of(server, group) > before)
        generations.append((generation_of(server, "main"), generation_of(server, TEACHER)))

    assert_equal(study(server, {2: lambda: lose(TEACHER), 4: lambda: lose("main")}), expected)
    (of_student, _), (same, of_teacher), (of_next_student, same_of_teacher) = generations
    assert same == of_student < of_next_student
    assert same_of_teacher == of_teacher == generation_of(server, TEACHER)
    assert generation_of(server, "main") == of_next_student


@pytest.mark.slow  # tests/sdk/test_three_groups.py has both, and one that samples for the student
def test_a_teacher_answers_beside_a_student_that_trains_and_neither_notices_the_others_losses(
    model_dir, teacher_dir, tmp_path
):
    with two_models(model_dir, teacher_dir, tmp_path / "data") as server:
        assert_both_are_served(server)
        assert_neither_notices_the_others_losses(server)


@pytest.mark.slow
def test_neither_a_teacher_nor_a_student_notices_that_the_server_is_killed(model_dir, teacher_dir, tmp_path):
    port = free_port()
    with two_models(model_dir, teacher_dir, tmp_path / "data", port=port) as server:
        expected = study(server)
        revived: list[Server] = []

        def kill_coordinator() -> None:
            server.process.kill()
            server.process.wait()
            revived.append(
                Server(
                    model_dir,
                    tmp_path / "data",
                    port=port,
                    batch_invariant=True,
                    snapshot_seconds=0,
                    group=group_of(teacher_dir),
                )
            )

        try:
            assert_equal(study(server, {STEPS // 2: kill_coordinator}), expected)
        finally:
            for each in revived:
                each.close()


@pytest.mark.slow
def test_a_group_with_damaged_or_absent_weights_fails_alone_and_comes_back_when_they_are_repaired(
    model_dir, teacher_dir, tmp_path
):
    damaged, absent = tmp_path / "damaged", tmp_path / "absent"
    damaged.mkdir()
    for file in teacher_dir.iterdir():
        content = file.read_bytes()
        (damaged / file.name).write_bytes(content[:-500] if file.suffix == ".safetensors" else content)
    port, secret = free_port(), {"SPMD_TX_SECRET": "a secret of this test"}
    listed = tmp_path / "groups.toml"
    listed.write_text(
        f'[[groups]]\nname = "late"\nbase_model = "{absent}"\nserved_model_name = "late"\nrole = "sample"\n'
    )
    options = {"worker_port": port, "environment": QUICKLY | secret, "config": listed}
    with two_models(model_dir, damaged, tmp_path / "data", **options) as server:
        wait_until(lambda: groups_of(server)[TEACHER]["state"] == "failed")
        assert "model.safetensors" in groups_of(server)[TEACHER]["detail"]
        late = groups_of(server)["late"]
        assert (late["state"], late["base_model"]) == ("failed", "late")
        assert f"{absent} is neither a directory" in late["detail"]
        refused = sampler_of(server, "late")
        assert refused.status_code == 503
        assert "group late has failed, and tried again later" in refused.text
        with tinker.ServiceClient(base_url=server.url, api_key="tml-test") as service:
            sampler = service.create_sampling_client(base_model=BASE_MODEL).result(SECONDS)
            assert sampler.compute_logprobs(prompt(PROMPT)).result(SECONDS)
        api = RawApi(server.url, TEACHER)
        answer = api.sample(api.create_sampler(), 0, PROMPT, max_tokens=4)
        assert answer.status_code == 503
        assert "group teacher has failed" in answer.text
        assert httpx.get(f"{server.url}/readyz").status_code == 200
        assert httpx.get(f"{server.url}/readyz", params={"group": TEACHER}).status_code == 503

        for file in teacher_dir.iterdir():
            (damaged / file.name).write_bytes(file.read_bytes())
        arguments = ("--coordinator", f"127.0.0.1:{port}", "--process-id", "0", "--group")
        with subprocess.Popen(
            [COMMAND, "worker", *arguments, TEACHER], env=os.environ | QUICKLY | secret
        ) as worker:
            wait_until(lambda: groups_of(server)[TEACHER]["state"] == "ready")
            assert api.sample(api.create_sampler(1), 0, PROMPT, max_tokens=4).status_code == 200
            worker.terminate()

        shutil.copytree(teacher_dir, absent)
        with subprocess.Popen(
            [COMMAND, "worker", *arguments, "late"], env=os.environ | QUICKLY | secret
        ) as worker:
            wait_until(lambda: groups_of(server)["late"]["state"] == "ready")
            worker.terminate()
        assert httpx.get(f"{server.url}/api/v1/get_server_capabilities").text.count('"late"') == 1
        assert sampler_of(server, "late").status_code == 200
        api.close()


@pytest.mark.slow
def test_the_work_of_a_base_that_is_served_no_more_waits_until_it_is_back(model_dir, teacher_dir, tmp_path):
    long = {"max_tokens": 300, "seed": 7, "temperature": 1.0, "stop": []}
    port = free_port()
    with two_models(model_dir, teacher_dir, tmp_path / "data", port=port) as server:
        wait_until(lambda: groups_of(server)[TEACHER]["state"] == "ready")
        api = RawApi(server.url, TEACHER)
        sampler = api.create_sampler()
        expected = api.retrieve(api.sample(sampler, 0, PROMPT, **long).json()["request_id"]).content
        (worker,) = workers_of_group(server, TEACHER)
        os.kill(worker, signal.SIGSTOP)
        request_id = api.sample(sampler, 1, PROMPT, **long).json()["request_id"]
        os.kill(worker, signal.SIGKILL)
        server.process.kill()
        server.process.wait()
    with serving(model_dir, tmp_path / "data", port=port, batch_invariant=True) as server:
        server.wait_until_ready()
        refused = api.sample(sampler, 2, PROMPT, **long)
        assert refused.status_code == 503
        assert "teacher is not served now" in refused.text
    with two_models(model_dir, teacher_dir, tmp_path / "data", port=port) as server:
        assert api.retrieve(request_id).content == expected
        api.close()


def test_a_server_whose_only_model_is_damaged_is_never_said_to_be_ready(model_dir, tmp_path):
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in model_dir.iterdir():
        content = file.read_bytes()
        (damaged / file.name).write_bytes(content[:-500] if file.suffix == ".safetensors" else content)
    with serving(damaged, tmp_path / "data") as server:
        printed, _ = server.process.communicate(timeout=SECONDS)
        assert printed == ""
        assert server.process.returncode == 2
        assert "model.safetensors" in server.log
