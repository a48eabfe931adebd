"""Checks of TrainingClient. Each runs twice: on the client, and on the future of one."""

from typing import get_args

import numpy as np
import pytest
import tinker
from tinker import types

from tests.conformance.registry import TWINS, Standing, covers
from tests.conformance.world import DATA, PROMPT, World, settled, twins
from tests.sdk.examples import (
    ADAM_STEP,
    SECONDS,
    drawn,
    gradient_norm,
    logprobs_of,
    prompt,
    reinforced,
    supervised,
)
from tests.sdk.server import BASE_MODEL

HOUR = 3600
CLIP = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}


def loss_of(output: types.ForwardBackwardOutput) -> float:
    return output.metrics["loss:sum"]


def parameters_of(client: tinker.TrainingClient) -> np.ndarray:
    """Stands for them: what they make of the data."""
    return logprobs_of(client, DATA)


@covers(
    f"TrainingClient.forward{TWINS}",
    does="computes the loss and the log-probabilities of the targets, without gradient",
    effect="the loss is minus the sum of the log-probabilities; the gradient stays 0, the weights "
    "as they are",
)
def forward(world: World) -> None:
    trainer = world.new_trainer()
    for method in twins(trainer, "forward"):
        output = method(DATA, "cross_entropy")
        found = np.concatenate([each["logprobs"].to_numpy() for each in output.loss_fn_outputs])
        assert [len(each["logprobs"].data) for each in output.loss_fn_outputs] == [11, 6]
        assert loss_of(output) == pytest.approx(-found.sum(), rel=1e-5)
        np.testing.assert_array_equal(found, parameters_of(trainer))
    assert gradient_norm(trainer) == 0


@covers(
    f"TrainingClient.forward_backward{TWINS}",
    does="the same, and adds the gradient of the summed loss to the model's",
    effect="two calls give twice the gradient of one; every loss that the SDK names "
    "moves the weights; for `custom` and `stable_reinforce` see below",
)
def forward_backward(world: World) -> None:
    trainer = world.new_trainer()
    first, second = twins(trainer, "forward_backward")
    alone = first(DATA, "cross_entropy")
    norm = gradient_norm(trainer)
    assert loss_of(first(DATA, "cross_entropy")) == loss_of(second(DATA, "cross_entropy")) == loss_of(alone)
    assert gradient_norm(trainer) == pytest.approx(2 * norm, rel=1e-4)
    tokens = [3, 1, 4, 1, 5, 9]
    logprobs = settled(trainer.forward)([reinforced(tokens, [0.0] * 5, [1.0] * 5)], "importance_sampling")
    sampled = (np.array(logprobs.loss_fn_outputs[0]["logprobs"].data) - 0.2).tolist()
    rewarded = reinforced(tokens, sampled, [1.0, -1.0, 2.0, 0.0, 1.0])
    configs = {"ppo": CLIP, "cispo": CLIP, "dro": {"beta": 0.1}, "gspo": CLIP}
    for loss in set(get_args(types.LossFnType)) - {"cross_entropy", "custom", "stable_reinforce"}:
        datum = rewarded
        if loss == "gspo":
            mask = types.TensorData(data=[1.0] * 5, dtype="float32", shape=[5])
            inputs = {**rewarded.loss_fn_inputs, "sequence_ratio_mask": mask}
            datum = types.Datum(model_input=rewarded.model_input, loss_fn_inputs=inputs)
        output = first([datum], loss, configs.get(loss))
        assert np.isfinite(loss_of(output)), loss
        assert gradient_norm(trainer) > 0, loss


@covers(
    f"TrainingClient.optim_step{TWINS}",
    does="one step with the accumulated gradient, which it clears; each step has its own parameters",
    effect="the loss falls; without a gradient the weights stay; parameters of another optimizer are refused",
)
def optim_step(world: World) -> None:
    trainer = world.new_trainer()
    losses = []
    for method in twins(trainer, "optim_step"):
        losses.append(loss_of(settled(trainer.forward_backward)(DATA, "cross_entropy")))
        assert method(ADAM_STEP).metrics["unclipped_grad_l2:mean"] > 0
    losses.append(loss_of(settled(trainer.forward)(DATA, "cross_entropy")))
    assert losses[2] < losses[1] < losses[0]
    before = parameters_of(trainer)
    settled(trainer.optim_step)(types.AdamParams(learning_rate=0.0))
    np.testing.assert_array_equal(parameters_of(trainer), before)
    with pytest.raises(tinker.TinkerError, match="'adamw', send adam_params"):
        settled(trainer.optim_step)(types.DimuonParams(learning_rate=0.1))


@covers(
    f"TrainingClient.save_state{TWINS}",
    does="writes weights and optimizer state under a name; with a time to live, metadata, overwriting",
    effect="listed with its metadata and expiry; a taken name is refused, and replaced with overwrite=True",
)
def save_state(world: World) -> None:
    trainer = world.new_trainer()
    for method in twins(trainer, "save_state"):
        name = world.new_name()
        path = method(name, ttl_seconds=HOUR, user_metadata={"n": "1"}).path
        with pytest.raises(tinker.RequestFailedError, match=name):
            method(name)
        saved = world.listed(path)
        assert saved.user_metadata == {"n": "1"}
        assert saved.expires_at is not None
        assert method(name, overwrite=True).path == path
        assert world.listed(path).user_metadata is None


@covers(
    f"TrainingClient.load_state{TWINS}",
    does="loads the weights of a checkpoint into this model; its optimizer starts anew",
    effect="the log-probabilities are those of the saved model",
)
def load_state(world: World) -> None:
    for method in ("load_state", "load_state_async"):
        trainer = world.new_trainer(seed=8)
        settled(getattr(trainer, method))(world.state_path)
        np.testing.assert_array_equal(parameters_of(trainer), parameters_of(world.trained))


@covers(
    f"TrainingClient.load_state_with_optimizer{TWINS}",
    does="loads weights and optimizer state",
    effect="the next step leads exactly where it leads the saved model, and elsewhere than load_state",
)
def load_state_with_optimizer(world: World) -> None:
    after = {}
    for method in ("load_state", "load_state_with_optimizer", "load_state_with_optimizer_async"):
        trainer = world.new_trainer(seed=8)
        settled(getattr(trainer, method))(world.state_path)
        settled(trainer.forward_backward)(DATA, "cross_entropy")
        settled(trainer.optim_step)(ADAM_STEP)
        after[method] = parameters_of(trainer)
    original = world.new_trainer()  # the same steps as world.trained, and one more
    for _ in range(2):
        settled(original.forward_backward)(DATA, "cross_entropy")
        settled(original.optim_step)(ADAM_STEP)
    np.testing.assert_array_equal(after["load_state_with_optimizer"], parameters_of(original))
    np.testing.assert_array_equal(after["load_state_with_optimizer_async"], parameters_of(original))
    assert not np.array_equal(after["load_state"], parameters_of(original))


@covers(
    f"TrainingClient.save_weights_for_sampler{TWINS}",
    does="writes the weights to sample from, as a PEFT folder, under a name",
    effect="listed as of type sampler, with metadata and expiry",
)
def save_weights_for_sampler(world: World) -> None:
    for method in twins(world.new_trainer(), "save_weights_for_sampler"):
        name = world.new_name()
        path = method(name, ttl_seconds=HOUR, user_metadata={"n": "2"}).path
        saved = world.listed(path)
        assert (saved.checkpoint_type, saved.user_metadata) == ("sampler", {"n": "2"})
        assert saved.expires_at is not None


@covers(
    f"TrainingClient.save_weights_and_get_sampling_client{TWINS}",
    does="keeps the weights for one sampling client, on the device, without a name; snapshot or inflight",
    effect="what it samples has the log-probabilities that forward gives, before and after another step",
)
def save_weights_and_get_sampling_client(world: World) -> None:
    trainer = world.new_trainer()
    for kind in ("snapshot", "inflight"):
        for method in twins(trainer, "save_weights_and_get_sampling_client"):
            settled(trainer.forward_backward)(DATA, "cross_entropy")
            settled(trainer.optim_step)(ADAM_STEP)
            agrees_with_trainer(method(kind=kind), trainer)


@covers(
    f"TrainingClient.create_sampling_client{TWINS}",
    does="opens saved weights to sample from",
    effect="what it samples has the log-probabilities that forward gives; unknown weights are not found",
)
def create_sampling_client(world: World) -> None:
    trainer = world.new_trainer()
    settled(trainer.load_state)(world.state_path)
    for method in twins(trainer, "create_sampling_client"):
        agrees_with_trainer(method(world.sampler_path), world.trained)
        with pytest.raises(tinker.NotFoundError, match="no-such"):
            method(world.sampler_path.replace("shared", "no-such"))


@covers(
    f"TrainingClient.save_weights_external{TWINS}",
    does="writes a PEFT folder to be downloaded",
    effect="listed as of type external; its addresses are those of a PEFT adapter's files",
)
def save_weights_external(world: World) -> None:
    for method in twins(world.new_trainer(), "save_weights_external"):
        saved = method(world.new_name(), ttl_seconds=HOUR)
        assert "/external_weights/" in saved.path
        urls = settled(world.rest.get_external_weights_urls)(saved.path).urls
        assert {"adapter_config.json", "adapter_model.safetensors"} <= urls.keys()
        assert world.listed(saved.path).checkpoint_type == "external"


@covers(
    f"TrainingClient.get_info{TWINS}",
    does="tells base model, rank, optimizer and tokenizer of a model",
    effect="they are those that it was created with",
)
def get_info(world: World) -> None:
    trainer = world.new_trainer()
    for method in twins(trainer, "get_info"):
        info = method()
        assert (info.model_id, info.is_lora, info.lora_rank) == (model_id(trainer), True, 4)
        assert (info.model_data.model_name, info.model_name) == (BASE_MODEL, BASE_MODEL)
        assert info.optimizer_config.type == "adamw"


@covers(
    "TrainingClient.get_tokenizer",
    does="names the tokenizer, which the SDK loads",
    effect="its tokenizer encodes text, and decodes it again",
)
def get_tokenizer(world: World) -> None:
    tokenizer = world.new_trainer().get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("conformance")) == "conformance"


@covers(
    "TrainingClient.get_console_url",
    does="builds an address of the hosted console; with this server's host, it opens this console",
    effect="it ends with the model's ID",
    standing=Standing.LOCAL,
)
def get_console_url(world: World) -> None:
    trainer = world.new_trainer()
    assert trainer.get_console_url().endswith(f"/training_runs/{model_id(trainer)}")


@covers(
    "TrainingClient.get_telemetry",
    does="takes the SDK's telemetry, and drops it",
    effect="what is logged and flushed is accepted",
)
def get_telemetry(world: World) -> None:
    telemetry_is_accepted(world.new_trainer())


def telemetry_is_accepted(client: object) -> None:
    telemetry = client.get_telemetry()  # pyright: ignore[reportAttributeAccessIssue]
    if telemetry is not None:  # None: switched off by TINKER_TELEMETRY
        assert telemetry.log("conformance")


def model_id(trainer: object) -> str:
    return settled(trainer.get_info)().model_id  # pyright: ignore[reportAttributeAccessIssue]


def agrees_with_trainer(sampler: tinker.SamplingClient, trainer: tinker.TrainingClient) -> None:
    """The sampler's weights are the trainer's present ones."""
    sequence = sampler.sample(prompt(PROMPT), 1, drawn(max_tokens=5)).result(SECONDS).sequences[0]
    scored = logprobs_of(trainer, [supervised(PROMPT + list(sequence.tokens))])
    assert sequence.logprobs is not None
    np.testing.assert_allclose(sequence.logprobs, scored[-5:], atol=1e-4)
