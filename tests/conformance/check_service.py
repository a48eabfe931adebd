"""Checks of ServiceClient, and of what it makes."""

import numpy as np
import pytest
import tinker

from tests.conformance.check_training import parameters_of, telemetry_is_accepted
from tests.conformance.registry import TWINS, Standing, covers
from tests.conformance.world import DATA, PROMPT, World, settled, twins
from tests.sdk.examples import ADAM_STEP, SECONDS, greedy, prompt, train
from tests.sdk.server import BASE_MODEL


@covers(
    f"ServiceClient.create_lora_training_client{TWINS}",
    does="makes an adapter of the base model; rank, seed, which parts are trained, metadata",
    effect="it trains; the same seed is the same model; its run has rank and metadata; other bases are "
    "refused",
)
def create_lora_training_client(world: World) -> None:
    losses = set()
    for method in twins(world.service, "create_lora_training_client"):
        trainer = method(BASE_MODEL, rank=2, seed=3, train_unembed=False, user_metadata={"k": "v"})
        train(trainer, DATA)
        losses.add(float(parameters_of(trainer).sum()))
        run = settled(world.rest.get_training_run)(trainer.model_id)
        assert (run.lora_rank, run.user_metadata) == (2, {"k": "v"})
        with pytest.raises(tinker.BadRequestError, match="serves 'tiny' only"):
            method("another/model")
    assert len(losses) == 1


@covers(
    f"ServiceClient.create_training_client_from_state{TWINS}",
    does="makes a model from a checkpoint; its optimizer starts anew",
    effect="weights and rank are those of the checkpoint; a stranger's checkpoint is not found",
)
def create_training_client_from_state(world: World) -> None:
    for service, stranger in zip(
        twins(world.service, "create_training_client_from_state"),
        twins(world.stranger, "create_training_client_from_state"),
        strict=True,
    ):
        trainer = service(world.state_path, user_metadata={"k": "v"})
        np.testing.assert_array_equal(parameters_of(trainer), parameters_of(world.trained))
        with pytest.raises(tinker.NotFoundError):
            stranger(world.state_path)


@covers(
    f"ServiceClient.create_training_client_from_state_with_optimizer{TWINS}",
    does="the same with the state of the optimizer",
    effect="the next step leads exactly where it leads the saved model",
)
def create_training_client_from_state_with_optimizer(world: World) -> None:
    original = settled(world.service.create_lora_training_client)(BASE_MODEL, rank=4, seed=5)
    for _ in range(2):
        train(original, DATA, adam=ADAM_STEP)
    for method in twins(world.service, "create_training_client_from_state_with_optimizer"):
        trainer = method(world.state_path)
        train(trainer, DATA, adam=ADAM_STEP)
        np.testing.assert_array_equal(parameters_of(trainer), parameters_of(original))


@covers(
    f"ServiceClient.create_sampling_client{TWINS}",
    does="opens the base model, or a checkpoint to sample from",
    effect="both sample, and differ; a stranger's checkpoint is not found",
)
def create_sampling_client(world: World) -> None:
    for service, stranger in zip(
        twins(world.service, "create_sampling_client"),
        twins(world.stranger, "create_sampling_client"),
        strict=True,
    ):
        drawn = [
            client.sample(prompt(PROMPT), 1, greedy(3)).result(SECONDS).sequences[0].logprobs
            for client in (service(base_model=BASE_MODEL), service(model_path=world.sampler_path))
        ]
        assert list(drawn[0]) != list(drawn[1])
        with pytest.raises(tinker.NotFoundError):
            stranger(model_path=world.sampler_path)


@covers(
    "ServiceClient.create_rest_client",
    does="a RestClient with the same address and key",
    effect="it sees the session's checkpoints",
)
def create_rest_client(world: World) -> None:
    rest = world.service.create_rest_client()
    assert world.state_path in {
        each.tinker_path for each in settled(rest.list_user_checkpoints)().checkpoints
    }


@covers(
    "ServiceClient.copy_weights",
    does="gives a checkpoint a second home in a new session, of the caller and with the client's project",
    effect="the copy can be loaded after the original is deleted, and is the same",
)
def copy_weights(world: World) -> None:
    original = world.trained.save_state(world.new_name()).result(SECONDS).path
    service = world.new_service(project_id=world.new_name())
    copy = settled(service.copy_weights)(original, ttl_seconds=3600)
    assert copy != original
    settled(world.rest.delete_checkpoint_from_tinker_path)(original)
    trainer = settled(world.service.create_training_client_from_state)(copy)
    np.testing.assert_array_equal(parameters_of(trainer), parameters_of(world.trained))


@covers(
    f"ServiceClient.get_server_capabilities{TWINS}",
    does="lists the models of this server",
    effect="it is the one that is served, with its context length",
)
def get_server_capabilities(world: World) -> None:
    for method in twins(world.service, "get_server_capabilities"):
        (model,) = method().supported_models
        assert (model.model_name, model.trainable, model.sampleable) == (BASE_MODEL, True, True)
        assert model.max_context_length > 0


@covers(
    "ServiceClient.close",
    does="ends the session: its models leave the device, its checkpoints stay",
    effect="its models take no more work, and its checkpoint can be loaded",
)
def close(world: World) -> None:
    service = world.new_service()
    trainer = settled(service.create_lora_training_client)(BASE_MODEL, rank=2, seed=1)
    path = trainer.save_state("kept").result(SECONDS).path
    settled(service.close)("errored", detail="on purpose")
    step = {"model_id": trainer.model_id, "seq_id": 2, "adam_params": {}}
    assert "errored" in world.failure(world.post("optim_step", step))
    settled(world.service.create_training_client_from_state)(path)


@covers(
    "ServiceClient.get_telemetry",
    does="takes the SDK's telemetry, and drops it",
    effect="what is logged and flushed is accepted",
)
def get_telemetry(world: World) -> None:
    telemetry_is_accepted(world.service)


@covers(
    "ServiceClient.get_console_url",
    does="builds an address of the hosted console; with this server's host, it opens this console",
    effect="it names the session",
    standing=Standing.LOCAL,
)
def get_console_url(world: World) -> None:
    session_id = world.trained.model_id.split(":")[0]
    assert world.service.get_console_url().endswith(f"/sessions/{session_id}")


@covers(
    "ServiceClient.holder",
    does="the SDK's own connections",
    effect="its session is the one on the server",
    standing=Standing.LOCAL,
)
def holder(world: World) -> None:
    assert world.service.holder.get_session_id() == world.trained.model_id.split(":")[0]
