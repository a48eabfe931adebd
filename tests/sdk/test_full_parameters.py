"""All weights of a model are trained through the real SDK, which asks for them with rank 0."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
from safetensors.numpy import load_file
from tinker import types

from spmd_tx.coordinator.training.losses import LOSSES
from spmd_tx.coordinator.wire.checkpoint_paths import parse
from spmd_tx.models.config import read_model_config
from tests.sdk.examples import (
    SECONDS,
    batch,
    datum,
    drawn,
    gradient_norm,
    logprobs_of,
    prompt,
    random_tokens,
    sample,
    supervised,
    train,
)
from tests.sdk.server import BASE_MODEL, COMMAND, Server, serving
from tests.sdk.test_stable_reinforce import of_samples, samples_of

pytestmark = pytest.mark.slow

ADAM = types.AdamParams(learning_rate=3e-3, weight_decay=0.01, grad_clip_norm=1.0)
DATA, QUESTION = batch(seed=0), batch(seed=9)
PROMPT = random_tokens(12, seed=5)


@pytest.fixture(scope="module")
def full_server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    data_dir = tmp_path_factory.mktemp("full") / "data"
    with serving(model_dir, data_dir, full_parameters=True, snapshot_seconds=0) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture
def tenant(full_server: Server) -> Iterator[tinker.ServiceClient]:
    assert full_server.process.poll() is None, full_server.log[-10_000:]
    client = tinker.ServiceClient(base_url=full_server.url, api_key="tml-test")
    yield client
    client.close("success").result(SECONDS)


def begin(tenant: tinker.ServiceClient, *, train_all: bool = True) -> tinker.TrainingClient:
    training = tenant.create_lora_training_client(
        BASE_MODEL, rank=0, train_mlp=train_all, train_unembed=train_all
    )
    return training.result(SECONDS)


def test_a_model_learns_samples_and_is_saved(tenant, full_server, model_dir):
    base = tenant.create_sampling_client(base_model=BASE_MODEL).result(SECONDS)
    before = sample(base, PROMPT, drawn())
    trainer = begin(tenant)
    info = trainer.get_info()
    assert (info.is_lora, info.lora_rank) == (False, 0)
    losses = [train(trainer, DATA, adam=ADAM) for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]

    path = trainer.save_weights_for_sampler("whole").result(SECONDS).path
    sampler = tenant.create_sampling_client(model_path=path).result(SECONDS)
    told = np.array(sampler.compute_logprobs(prompt(PROMPT)).result(SECONDS)[1:])
    np.testing.assert_allclose(told, logprobs_of(trainer, [supervised(PROMPT)]), atol=1e-4)
    after = sample(sampler, PROMPT, drawn())
    assert after.logprobs != before.logprobs
    assert sample(base, PROMPT, drawn()).logprobs == before.logprobs  # beside it, from another copy

    (written,) = full_server.data_dir.glob("checkpoints/*/sampler_weights/whole")
    assert read_model_config(written) == read_model_config(model_dir)
    old, new = load_file(model_dir / "model.safetensors"), load_file(written / "model.safetensors")
    assert old.keys() == new.keys()
    assert not any(np.array_equal(old[name].astype(np.float32), new[name]) for name in old)


def test_a_new_model_samples_the_bits_of_the_base_whatever_was_trained_before(tenant):
    base = tenant.create_sampling_client(base_model=BASE_MODEL).result(SECONDS)
    sampler = begin(tenant).save_weights_and_get_sampling_client().result(SECONDS)
    expected, drew = sample(base, PROMPT, drawn()), sample(sampler, PROMPT, drawn())
    assert (drew.tokens, drew.logprobs) == (expected.tokens, expected.logprobs)


def test_samplers_of_several_versions_take_turns(tenant):
    trainer = begin(tenant)
    samplers, answers = [], []
    for _ in range(2):
        train(trainer, DATA, adam=ADAM)
        samplers.append(trainer.save_weights_and_get_sampling_client().result(SECONDS))
        answers.append(sample(samplers[-1], PROMPT, drawn()))
    assert len({tuple(answer.logprobs) for answer in answers}) == 2
    futures = [sampler.sample(prompt(PROMPT), 4, drawn(40)) for sampler in samplers * 3]
    for sampler, answer in zip(samplers, answers, strict=True):
        assert sample(sampler, PROMPT, drawn()).logprobs == answer.logprobs
    assert all(len(future.result(SECONDS).sequences) == 4 for future in futures)


def test_groups_that_are_not_trained_stay(tenant, full_server, model_dir):
    trainer = begin(tenant, train_all=False)
    train(trainer, DATA, adam=ADAM)
    trainer.save_weights_for_sampler("attention").result(SECONDS)
    (written,) = full_server.data_dir.glob("checkpoints/*/sampler_weights/attention")
    old, new = load_file(model_dir / "model.safetensors"), load_file(written / "model.safetensors")
    moved = {name for name in old if not np.array_equal(old[name].astype(np.float32), new[name])}
    assert moved
    assert all("self_attn" in name or "input_layernorm" in name for name in moved)


def test_a_run_goes_on_from_its_state_and_from_an_export(tenant, full_server):
    trainer = begin(tenant)
    train(trainer, DATA, adam=ADAM)
    state = trainer.save_state("one").result(SECONDS).path
    export = trainer.save_weights_external("export").result(SECONDS).path
    weights = logprobs_of(trainer, QUESTION)
    train(trainer, DATA, adam=ADAM)
    expected = logprobs_of(trainer, QUESTION)

    with pytest.warns(FutureWarning, match="load_state"):  # deprecated, but in use
        trainer.load_state_with_optimizer(state).result(SECONDS)
    np.testing.assert_array_equal(logprobs_of(trainer, QUESTION), weights)
    train(trainer, DATA, adam=ADAM)
    np.testing.assert_array_equal(logprobs_of(trainer, QUESTION), expected)
    # Models of one session take turns on the device.
    other = tenant.create_training_client_from_state(export).result(SECONDS)
    np.testing.assert_array_equal(logprobs_of(other, QUESTION), weights)
    np.testing.assert_array_equal(logprobs_of(trainer, QUESTION), expected)


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != "stable_reinforce"])
def test_every_loss_is_that_of_an_adapter_that_does_nothing_yet(loss, tenant, server):
    """And all weights are trained by it."""
    ones = [1.0] * (len(PROMPT) - 1)
    chances = np.random.default_rng(0).uniform(-5.0, -0.1, len(ones)).tolist()
    more = {"sequence_ratio_mask": ones} if loss == "gspo" else {}
    given = {"target_tokens": PROMPT[1:], "logprobs": chances, "advantages": ones, **more}
    sent = supervised(PROMPT) if loss == "cross_entropy" else datum(PROMPT[:-1], **given)
    trainer, found = begin(tenant), []
    with tinker.ServiceClient(base_url=server.url, api_key="tml-test") as of_adapters:
        adapter = of_adapters.create_lora_training_client(BASE_MODEL, rank=4).result(SECONDS)
        for each in (adapter, trainer):
            found.append(each.forward_backward([sent], loss).result(SECONDS))
    expected, whole = found
    for name in ("logprobs", "elementwise_loss"):
        np.testing.assert_allclose(
            *(each.loss_fn_outputs[0][name].to_numpy() for each in found), rtol=0, atol=1e-4, err_msg=name
        )
    assert whole.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], abs=1e-3)
    norms = trainer.optim_step(ADAM).result(SECONDS).metrics
    assert norms is not None
    groups = {name: value for name, value in norms.items() if name.startswith("unclipped_grad_l2_")}
    assert {name.rpartition("_")[2] for name in groups} == {"attn:mean", "mlp:mean", "unembed:mean"}
    assert all(0 < value < np.inf for value in groups.values()), groups


def test_samples_of_all_weights_train_them_by_stable_reinforce(tenant):
    trainer = begin(tenant)
    data = of_samples(samples_of(trainer))
    found = trainer.forward_backward(data, "stable_reinforce").result(SECONDS)
    assert np.isfinite(found.metrics["loss:sum"])
    assert 0 < gradient_norm(trainer) < np.inf


def test_an_exported_model_is_the_base_of_another_server(tenant, full_server, model_dir, tmp_path):
    """Also one that is exported from the training checkpoint."""
    trainer = begin(tenant)
    train(trainer, DATA, adam=ADAM)
    expected = logprobs_of(trainer, QUESTION)
    for save in (trainer.save_weights_external, trainer.save_state):
        path = save("base").result(SECONDS).path
        base = tmp_path / parse(path).kind
        arguments = ["export", path, "--data-dir", full_server.data_dir, "--out", base, "--dtype", "float32"]
        arguments += ["--base-model", model_dir]
        subprocess.run([COMMAND, *map(str, arguments)], check=True)
        with serving(base, tmp_path / f"{base.name} data", full_parameters=True) as server:
            server.wait_until_ready()
            other = tinker.ServiceClient(base_url=server.url, api_key="tml-other")
            np.testing.assert_allclose(logprobs_of(begin(other), QUESTION), expected, rtol=0, atol=1e-4)
            other.close("success").result(SECONDS)


def test_another_client_waits_until_the_session_before_it_has_ended(tenant, full_server):
    first = begin(tenant)
    train(first, DATA, adam=ADAM)
    other = tinker.ServiceClient(base_url=full_server.url, api_key="tml-other")
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(begin, other)
        time.sleep(2)
        train(first, DATA, adam=ADAM)
        assert not waiting.done()
        tenant.close("success").result(SECONDS)
        train(waiting.result(SECONDS), DATA, adam=ADAM)
    other.close("success").result(SECONDS)


def run(tenant: tinker.ServiceClient, server: Server, kill_in: int | None = None) -> np.ndarray:
    """Train for six steps, in one of which a worker is killed; the log-probabilities after them."""
    trainer = begin(tenant)
    for step in range(6):
        gradient = trainer.forward_backward(DATA, "cross_entropy")
        update = trainer.optim_step(ADAM)
        if step == kill_in:
            os.kill(server.worker_pids()[-1], signal.SIGKILL)
        update.result(SECONDS)
        gradient.result(SECONDS)
    return logprobs_of(trainer, QUESTION)


def test_a_run_whose_worker_is_killed_ends_bit_for_bit(tenant, full_server):
    expected = run(tenant, full_server)
    tenant.close("success").result(SECONDS)
    again = tinker.ServiceClient(base_url=full_server.url, api_key="tml-test")
    np.testing.assert_array_equal(run(again, full_server, kill_in=3), expected)
    again.close("success").result(SECONDS)


def test_two_processes_write_a_whole_model_and_go_on_after_a_kill(model_dir, tmp_path):
    options = {"num_processes": 2, "fully_sharded_data_parallel_size": 2, "full_parameters": True}
    with serving(model_dir, tmp_path / "data", snapshot_seconds=0, **options) as server:
        server.wait_until_ready()
        tenant = tinker.ServiceClient(base_url=server.url, api_key="tml-two")
        trainer = begin(tenant)
        train(trainer, DATA, adam=ADAM)
        path = trainer.save_weights_for_sampler("whole").result(SECONDS).path
        sampler = tenant.create_sampling_client(model_path=path).result(SECONDS)
        told = np.array(sampler.compute_logprobs(prompt(PROMPT)).result(SECONDS)[1:])
        np.testing.assert_allclose(told, logprobs_of(trainer, [supervised(PROMPT)]), atol=1e-4)
        (written,) = server.data_dir.glob("checkpoints/*/sampler_weights/whole")
        old, new = load_file(model_dir / "model.safetensors"), load_file(written / "model.safetensors")
        assert old.keys() == new.keys()
        np.testing.assert_array_equal(run(tenant, server, kill_in=3), run(tenant, server))
        tenant.close("success").result(SECONDS)


def test_a_model_whose_write_is_killed_is_complete_or_not_there(model_dir, tmp_path):
    """Kill the worker, then the whole server, as soon as a file of the model is on the disk."""
    data, names = tmp_path / "data", {"model.safetensors", "config.json", "tokenizer.json"}

    def is_begun(name: str) -> bool:
        return any(name in str(path) for path in (data / "checkpoints").rglob("*"))

    def complete(name: str) -> list[Path]:
        found = list(data.glob(f"checkpoints/*/sampler_weights/{name}"))
        assert all(names <= {file.name for file in folder.iterdir()} for folder in found)
        return found

    with ExitStack() as servers:
        options = {"full_parameters": True, "snapshot_seconds": 0}
        started = [servers.enter_context(serving(model_dir, data, **options))]
        started[0].wait_until_ready()
        tenant = tinker.ServiceClient(base_url=started[0].url, api_key="tml-killed")
        trainer = begin(tenant)
        train(trainer, DATA, adam=ADAM)
        expected = logprobs_of(trainer, [supervised(PROMPT)])

        def kill_worker() -> None:
            os.kill(started[-1].worker_pids()[0], signal.SIGKILL)

        def kill_server() -> None:
            os.kill(started[-1].process.pid, signal.SIGKILL)
            started[-1].process.wait()
            port = started[-1].url.rpartition(":")[2]
            started.append(servers.enter_context(serving(model_dir, data, port=port, **options)))

        for name, kill in (("worker", kill_worker), ("server", kill_server)):
            saved = trainer.save_weights_for_sampler(name)
            while not is_begun(name):
                complete(name)
            complete(name)
            kill()
            path = saved.result(SECONDS).path
            assert len(complete(name)) == 1
            sampler = tenant.create_sampling_client(model_path=path).result(SECONDS)
            told = np.array(sampler.compute_logprobs(prompt(PROMPT)).result(SECONDS)[1:])
            np.testing.assert_allclose(told, expected, atol=1e-4)
        np.testing.assert_array_equal(logprobs_of(trainer, [supervised(PROMPT)]), expected)
        tenant.close("success").result(SECONDS)


def test_an_adapter_is_refused(tenant, full_server):
    with pytest.raises(tinker.BadRequestError, match="trains all weights"):
        tenant.create_lora_training_client(BASE_MODEL, rank=8).result(SECONDS)
    asked = {"base_model": BASE_MODEL, "lora_config": {"rank": 8}}
    answer = httpx.post(f"{full_server.url}/api/v1/external_weights_upload_start", json=asked)
    assert answer.status_code == 400
    assert "uploads are LoRA adapters and this server trains all weights" in answer.text
