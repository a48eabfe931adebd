"""The unmodified SDK against the application, with a scheduler that answers by itself."""

import asyncio
import gc
import threading
import time
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import tinker
import uvicorn
from tinker import types

from spmd_tx.coordinator.http.app import make_app
from spmd_tx.coordinator.http.services import Services
from tests.coordinator.conftest import BASE_MODEL, run_services
from tests.coordinator.http.fake_scheduler import DRAWN_TOKEN, LOGPROB

SECONDS = 60  # until a test gives up on an answer

# The SDK leaves a socket of each handshake to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Server:
    """The application on a port, in a thread with a loop of its own; the SDK has one, too."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def start(self) -> None:
        self._thread.start()
        assert self._is_up.wait(SECONDS)

    def stop(self) -> None:
        self.uvicorn.should_exit = True
        self._thread.join(SECONDS)

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        async with run_everything(self._data_dir) as self.services:
            config = uvicorn.Config(make_app(self.services), port=0, log_level="warning", lifespan="off")
            self.uvicorn = uvicorn.Server(config)
            serving = asyncio.create_task(self.uvicorn.serve())
            while not self.uvicorn.started:
                await asyncio.sleep(0.01)
            port = self.uvicorn.servers[0].sockets[0].getsockname()[1]
            self.url = f"http://127.0.0.1:{port}"
            self._is_up.set()
            await serving


@asynccontextmanager
async def run_everything(data_dir: Path) -> AsyncIterator[Services]:
    async with run_services(data_dir) as services:
        yield services


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.stop()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()  # here, and not in the middle of somebody else's test


@pytest.fixture
def service_client(server: Server) -> Iterator[tinker.ServiceClient]:
    client = tinker.ServiceClient(base_url=server.url, api_key="tml-test", user_metadata={"k": "v"})
    yield client
    client.close("success").result(SECONDS)


@pytest.fixture(scope="module")
def rest_client(server: Server) -> Iterator[tinker.RestClient]:
    client = tinker.RestClient(base_url=server.url, api_key="tml-test")
    yield client
    client.holder.close()


@pytest.fixture
def training_client(service_client: tinker.ServiceClient) -> tinker.TrainingClient:
    return service_client.create_lora_training_client(BASE_MODEL, rank=8, seed=3).result(SECONDS)


def datum(length: int = 4) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(range(1, length + 1))),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.arange(2, length + 2)),
            "weights": types.TensorData.from_numpy(np.ones(length, np.float32)),
        },
    )


def requests_of(server: Server, training_client: tinker.TrainingClient) -> list[tuple[str, int]]:
    line = training_client.get_info().model_id
    arrived = server.services.scheduler.arrived
    return sorted((request.seq_id, request.kind) for request in arrived if request.line == line)


def test_the_service_names_its_model(rest_client):
    (model,) = rest_client.get_server_capabilities().result(SECONDS).supported_models
    assert (model.model_name, model.max_context_length) == (BASE_MODEL, 128)


def test_a_training_client_knows_its_model(training_client):
    info = training_client.get_info()
    assert info.model_data.model_name == info.model_data.tokenizer_id == BASE_MODEL
    assert info.lora_rank == 8
    assert info.model_id.endswith(":train:0")


def test_an_unknown_base_model_is_a_bad_request(service_client):
    with pytest.raises(tinker.BadRequestError, match=BASE_MODEL):
        service_client.create_lora_training_client("meta/unknown", rank=8).result(SECONDS)


def test_losses_come_back_per_datum_in_order(training_client):
    lengths = [4, 2, 7]
    output = training_client.forward_backward([datum(n) for n in lengths], "cross_entropy").result(SECONDS)
    assert [len(fields["logprobs"].data) for fields in output.loss_fn_outputs] == lengths
    assert output.metrics["loss:sum"] == pytest.approx(-LOGPROB * sum(lengths))


def test_a_call_of_many_chunks_comes_back_whole(training_client, server):
    count = 2 * 1024 + 1  # the SDK sends at most 1024 datums at once, the first chunk last
    output = training_client.forward_backward([datum(2)] * count, "cross_entropy").result(SECONDS)
    assert len(output.loss_fn_outputs) == count
    assert output.metrics["loss:sum"] == pytest.approx(-LOGPROB * 2 * count)
    kinds = ["create_model"] + ["forward_backward"] * 3
    assert requests_of(server, training_client) == list(enumerate(kinds))


def test_steps_are_pipelined_behind_their_batch(training_client, server):
    batch = training_client.forward_backward([datum()], "cross_entropy")
    step = training_client.optim_step(types.AdamParams(learning_rate=0.5))
    assert step.result(SECONDS).metrics == {"learning_rate": 0.5}
    assert batch.result(SECONDS).metrics
    training_client.forward([datum()], "cross_entropy").result(SECONDS)
    kinds = ["create_model", "forward_backward", "optim_step", "forward"]
    assert requests_of(server, training_client) == list(enumerate(kinds))


def test_a_failed_batch_leaves_the_client_usable(training_client):
    image = types.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=1)
    broken = types.Datum(model_input=types.ModelInput(chunks=[image]), loss_fn_inputs=datum().loss_fn_inputs)
    with pytest.raises(tinker.RequestFailedError) as caught:
        training_client.forward_backward([broken], "cross_entropy").result(SECONDS)
    assert caught.value.category == types.RequestErrorCategory.User
    assert "image" in str(caught.value)
    assert training_client.forward_backward([datum()], "cross_entropy").result(SECONDS).metrics


def test_saved_weights_sample_from_a_session_of_their_own(training_client):
    sampling_client = training_client.save_weights_and_get_sampling_client().result(SECONDS)
    params = types.SamplingParams(max_tokens=3, temperature=0.7, seed=1, stop=["\n"])
    prompt = types.ModelInput.from_ints([1, 2, 3])
    response = sampling_client.sample(prompt, num_samples=2, sampling_params=params).result(SECONDS)
    assert [sequence.tokens for sequence in response.sequences] == [[DRAWN_TOKEN] * 3] * 2
    assert response.sequences[0].logprobs == [LOGPROB] * 3
    assert response.sequences[0].stop_reason == "length"
    assert sampling_client.get_base_model() == BASE_MODEL


def test_prompt_logprobs_start_with_none(service_client):
    sampling_client = service_client.create_sampling_client(base_model=BASE_MODEL).result(SECONDS)
    logprobs = sampling_client.compute_logprobs(types.ModelInput.from_ints([1, 2, 3])).result(SECONDS)
    assert logprobs == [None, LOGPROB, LOGPROB]


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_flood_of_samples_is_held_back_and_answered_in_full(service_client, server, monkeypatch, count):
    sampling_client = service_client.create_sampling_client(base_model=BASE_MODEL).result(SECONDS)
    prompt, params = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=7)
    monkeypatch.setattr(server.services.quotas, "most_queued_tokens", count // 3 * (3 + 7))
    monkeypatch.setattr(server.services.scheduler, "is_paused", True)
    futures = [sampling_client.sample(prompt, 1, params) for _ in range(count)]
    deadline = time.monotonic() + SECONDS
    while sampling_client.holder._sample_backoff_until is None:
        assert time.monotonic() < deadline, "nothing is held back"
        time.sleep(0.01)
    server.loop.call_soon_threadsafe(server.services.scheduler.resume)
    answers = [future.result(SECONDS).sequences[0].tokens for future in futures]
    assert answers == [[DRAWN_TOKEN] * 7] * count
    assert server.services.queue.samples.total_tokens == 0


def test_too_long_a_prompt_is_a_bad_request(service_client):
    sampling_client = service_client.create_sampling_client(base_model=BASE_MODEL).result(SECONDS)
    prompt = types.ModelInput.from_ints([1] * 200)
    with pytest.raises(tinker.BadRequestError, match="too long"):
        sampling_client.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result(SECONDS)


def test_named_weights_are_sampled_by_path(service_client, training_client):
    path = training_client.save_weights_for_sampler("s1").result(SECONDS).path
    sampling_client = service_client.create_sampling_client(model_path=path).result(SECONDS)
    response = sampling_client.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=2))
    assert response.result(SECONDS).sequences[0].tokens == [DRAWN_TOKEN] * 2
    assert sampling_client.get_base_model() == BASE_MODEL


def test_a_saved_state_makes_a_new_training_client(service_client, training_client):
    path = training_client.save_state("ck1").result(SECONDS).path
    creators = [
        service_client.create_training_client_from_state,
        service_client.create_training_client_from_state_with_optimizer,
    ]
    for create_client in creators:
        resumed = create_client(path).result(SECONDS)
        assert resumed.get_info().lora_rank == 8
        assert resumed.optim_step(types.AdamParams(learning_rate=0.5)).result(SECONDS).metrics


def test_the_state_can_be_loaded_into_the_same_client(training_client):
    path = training_client.save_state("ck1").result(SECONDS).path
    with pytest.warns(FutureWarning, match="deprecated"):
        training_client.load_state(path).result(SECONDS)


def test_a_name_in_use_is_the_users_error(training_client):
    training_client.save_state("ck1").result(SECONDS)
    with pytest.raises(tinker.RequestFailedError, match="exists"):
        training_client.save_state("ck1").result(SECONDS)
    assert training_client.save_state("ck1", overwrite=True).result(SECONDS).path


def test_the_rest_client_lists_and_changes_what_was_saved(rest_client, training_client):
    path = training_client.save_state("ck1", ttl_seconds=7200).result(SECONDS).path
    training_client.save_weights_for_sampler("s1").result(SECONDS)
    run_id = training_client.get_info().model_id

    assert run_id in [
        run.training_run_id for run in rest_client.list_training_runs().result(SECONDS).training_runs
    ]
    run = rest_client.get_training_run(run_id).result(SECONDS)
    assert run.last_checkpoint.checkpoint_id == "weights/ck1"
    assert run.last_sampler_checkpoint.checkpoint_id == "sampler_weights/s1"
    listed = rest_client.list_checkpoints(run_id).result(SECONDS).checkpoints
    assert {checkpoint.checkpoint_type for checkpoint in listed} == {"training", "sampler"}
    assert len(rest_client.list_user_checkpoints().result(SECONDS).checkpoints) >= 2
    assert rest_client.get_weights_info_by_tinker_path(path).result(SECONDS).lora_rank == 8

    rest_client.set_checkpoint_ttl_from_tinker_path(path, None).result(SECONDS)
    rest_client.publish_checkpoint_from_tinker_path(path).result(SECONDS)
    (saved,) = [
        c for c in rest_client.list_checkpoints(run_id).result(SECONDS).checkpoints if c.tinker_path == path
    ]
    assert saved.expires_at is None
    assert saved.public
    rest_client.unpublish_checkpoint_from_tinker_path(path).result(SECONDS)
    rest_client.delete_checkpoint_from_tinker_path(path).result(SECONDS)
    assert len(rest_client.list_checkpoints(run_id).result(SECONDS).checkpoints) == 1
    training_client.optim_step(types.AdamParams()).result(SECONDS)
    assert rest_client.get_training_run(run_id).result(SECONDS).last_request_time > run.last_request_time


def test_the_rest_client_knows_sessions_and_samplers(rest_client, training_client):
    sampling_client = training_client.save_weights_and_get_sampling_client().result(SECONDS)
    session_id = training_client.get_info().model_id.split(":")[0]
    assert session_id in rest_client.list_sessions().result(SECONDS).sessions
    session = rest_client.get_session(session_id).result(SECONDS)
    assert session.training_run_ids == [f"{session_id}:train:0"]
    assert session.user_metadata == {"k": "v"}
    (sampler_id,) = session.sampler_ids
    assert rest_client.get_sampler(sampler_id).result(SECONDS).base_model == BASE_MODEL
    assert sampling_client.get_base_model() == BASE_MODEL


def test_closing_the_client_ends_its_session(server):
    with tinker.ServiceClient(base_url=server.url, api_key="tml-test") as client:
        training_client = client.create_lora_training_client(BASE_MODEL, rank=8).result(SECONDS)
        session_id = training_client.get_info().model_id.split(":")[0]
    assert session_id in server.services.scheduler.ended_sessions
