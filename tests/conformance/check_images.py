"""Checks of images in training data and in prompts, of a model that sees and of one that does not."""

import numpy as np
import pytest
import tinker
from tinker import types

from tests.conformance.registry import covers
from tests.conformance.world import World, settled
from tests.sdk.examples import ADAM_STEP, SECONDS, drawn, gradient_norm
from tests.sdk.seeing import PROMPT, SQUARE, TOKENS, datum, followed, ids, image, is_image, logprobs, square
from tests.sdk.server import BASE_MODEL

CLOSE = 2e-4  # nats
WRONG = [PROMPT[0], image(SQUARE, TOKENS[SQUARE] + 1), PROMPT[-1]]
MISCOUNTED = "expected_tokens is 65 and the image has 64"
POINTER = types.ImageAssetPointerChunk(location="tinker://image", format="png", expected_tokens=64)


def scored(prompt: list[types.ModelInputChunk]) -> np.ndarray:
    """Which tokens behind the first one have a log-probability."""
    return ~is_image(prompt)[1:]


@covers(
    "TrainingClient.forward_backward (images)",
    does="reads images between tokens, for [models that see](models.md#images): each counts as many tokens "
    "as its processor makes of it, and none of them has a loss",
    effect="the loss is minus the sum of the log-probabilities of text alone, though all weights are 1; it "
    "falls, and another picture gives another one; a wrong expected_tokens fails the request with the right "
    "one; a model of text refuses images",
)
def train_on_images(world: World) -> None:
    trainer = world.new_seeing_trainer()
    outputs = list[types.ForwardBackwardOutput]()
    for _ in range(2):
        outputs.append(settled(trainer.forward_backward)([datum(PROMPT)], "cross_entropy"))
        settled(trainer.optim_step)(ADAM_STEP)
    losses = [output.metrics["loss:sum"] for output in outputs]
    found = outputs[0].loss_fn_outputs[0]["logprobs"].to_numpy()
    assert found.shape == scored(PROMPT).shape
    assert losses[0] == pytest.approx(-found[scored(PROMPT)].sum(), rel=1e-5)
    assert losses[1] < losses[0]
    others = [datum([PROMPT[0], square(9), *PROMPT[2:]]), datum(PROMPT)]
    other, same = settled(trainer.forward)(others, "cross_entropy").loss_fn_outputs
    assert np.abs(other["logprobs"].to_numpy() - same["logprobs"].to_numpy())[-5:].max() > CLOSE
    with pytest.raises(tinker.RequestFailedError, match=MISCOUNTED):
        settled(trainer.forward_backward)([datum(WRONG)], "cross_entropy")
    with pytest.raises(tinker.RequestFailedError, match="kind 'image'; send encoded_text chunks"):
        settled(world.new_trainer().forward_backward)([datum(PROMPT)], "cross_entropy")


@covers(
    "SamplingClient.sample (images)",
    does="reads images between tokens, for [models that see](models.md#images); a prompt ends with text",
    effect="samples and the prompt's text have the trainer's log-probabilities, images have none "
    "(NaN on the wire) and no alternatives; a wrong expected_tokens, a pointer to an image, a prompt that "
    "ends with an image, and images to a model of text are refused",
)
def sample_images(world: World) -> None:
    trainer = world.seeing_service.create_lora_training_client(BASE_MODEL, rank=4, seed=5).result(SECONDS)
    sampler = world.maybe_awaited(trainer.save_weights_and_get_sampling_client())
    sample = settled(sampler.sample)
    asked = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2}
    answer = sample(types.ModelInput(chunks=PROMPT), 2, drawn(max_tokens=6, seed=2), **asked)
    for each in answer.sequences:
        trained = logprobs(trainer, followed(PROMPT, each.tokens))
        np.testing.assert_allclose(each.logprobs, trained[-6:], rtol=0, atol=CLOSE)
    assert [each is not None for each in answer.prompt_logprobs] == [False, *scored(PROMPT)]
    found, trained = [each for each in answer.prompt_logprobs if each is not None], logprobs(trainer, PROMPT)
    np.testing.assert_allclose(found, trained[scored(PROMPT)], rtol=0, atol=CLOSE)
    assert [len(row or ()) for row in answer.topk_prompt_logprobs[1:]] == (2 * scored(PROMPT)).tolist()
    for chunks, why in (
        (WRONG, MISCOUNTED),
        ([*PROMPT[:1], POINTER, *PROMPT[2:]], "pointer"),
        (PROMPT[:2], "ends with an image"),
    ):
        with pytest.raises(tinker.BadRequestError, match=why):
            sample(types.ModelInput(chunks=chunks), 1, drawn())
    with pytest.raises(tinker.BadRequestError, match="kind 'image'; this model takes text"):
        settled(world.new_sampler().sample)(types.ModelInput(chunks=PROMPT), 1, drawn())


@covers(
    "TrainingClient.forward_backward (stable_reinforce, images)",
    does="trains on samples behind images; their spans count an image as its tokens",
    effect="such samples train; the SDK refuses spans that leave an image out",
)
def reinforce_behind_images(world: World) -> None:
    trainer = world.seeing_service.create_lora_training_client(BASE_MODEL, rank=4, seed=5).result(SECONDS)
    sampler = trainer.save_weights_and_get_sampling_client(record_stability_info=True).result(SECONDS)
    asked = sampler.sample(types.ModelInput(chunks=PROMPT), 2, drawn(max_tokens=6, seed=2))
    sequences = asked.result(SECONDS).sequences
    data = [reinforced(each) for each in sequences]
    output = settled(trainer.forward_backward)(data, "stable_reinforce", {"kl_coeff": 0.1})
    assert np.isfinite(output.metrics["loss:sum"])
    assert gradient_norm(trainer) > 0
    with pytest.raises(ValueError, match="must tile it exactly"):
        reinforced(sequences[0], len(ids(PROMPT)) - TOKENS[SQUARE])


def reinforced(sequence: types.SampledSequence, length: int = len(ids(PROMPT))) -> types.Datum:
    """Make a datum of a sample behind PROMPT, whose spans say that this has so many tokens."""
    count, ahead = len(sequence.tokens), len(ids(PROMPT)) - 1
    zeros = [0.0] * ahead
    inputs = {"logprobs": [*zeros, *(sequence.logprobs or ())], "advantages": [*zeros, *[1.0] * count]}
    name = sequence.sequence_id
    read = [
        types.PromptProvenanceSpan(sequence_id=name, length=length),
        types.SampledProvenanceSpan(sequence_id=name, length=count - 1),
    ]
    targets = [
        types.PromptProvenanceSpan(sequence_id=name, offset=1, length=length - 1),
        types.SampledProvenanceSpan(sequence_id=name, length=count),
    ]
    plain = datum(followed(PROMPT, sequence.tokens), **inputs)
    return plain.with_provenance(model_input=read, loss_fn_inputs=targets)
