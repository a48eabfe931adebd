"""stable_reinforce through the real SDK, as recipes send it: from samples that the server has recorded."""

import dataclasses
import logging
from collections.abc import Sequence

import numpy as np
import pytest
import tinker
from tinker import types

from tests.sdk.examples import (
    SECONDS,
    datum,
    drawn,
    gradient_norm,
    logprobs_of,
    prompt,
    random_tokens,
    supervised,
    train,
)
from tests.sdk.server import BASE_MODEL, serving
from tests.sdk.shared_servers import SLOTS
from tests.support.ports import free_port

PROMPT = random_tokens(5, seed=8)
ADVANTAGES = (1.0, -0.5, 0.25)


def of_samples(sequences: Sequence[types.SampledSequence]) -> list[types.Datum]:
    """The datums of a recipe: prompt and sample, and where each token and each target comes from."""
    data = []
    for sequence, advantage in zip(sequences, ADVANTAGES, strict=True):
        id_, count, ahead = sequence.sequence_id, len(sequence.tokens), len(PROMPT) - 1
        plain = datum(
            [*PROMPT, *sequence.tokens[:-1]],
            target_tokens=[*[0] * ahead, *sequence.tokens],
            logprobs=[*[0.0] * ahead, *[-99.0] * count],  # what the client says does not count
            advantages=[*[0.0] * ahead, *[advantage] * count],
        )
        spans = [
            types.PromptProvenanceSpan(sequence_id=id_, length=len(PROMPT)),
            types.SampledProvenanceSpan(sequence_id=id_, length=count - 1),
        ]
        targets = [
            types.PromptProvenanceSpan(sequence_id=id_, offset=1, length=ahead),
            types.SampledProvenanceSpan(sequence_id=id_, length=count),
        ]
        data.append(plain.with_provenance(model_input=spans, loss_fn_inputs=targets))
    return data


def samples_of(trainer: tinker.TrainingClient, recorded: bool = True) -> list[types.SampledSequence]:
    sampler = trainer.save_weights_and_get_sampling_client(record_stability_info=recorded).result(SECONDS)
    return sampler.sample(prompt(PROMPT), 3, drawn(max_tokens=6, seed=2)).result(SECONDS).sequences


def move(trainer: tinker.TrainingClient, sequences: Sequence[types.SampledSequence]) -> None:
    """Make the samples likelier, so that they are off-policy."""
    train(trainer, [supervised([*PROMPT, *sequence.tokens]) for sequence in sequences])


def ratios(trainer: tinker.TrainingClient, sequences: Sequence[types.SampledSequence]) -> list[np.ndarray]:
    found = []
    for sequence in sequences:
        assert sequence.logprobs is not None
        now = logprobs_of(trainer, [supervised([*PROMPT, *sequence.tokens])])[len(PROMPT) - 1 :]
        found.append(np.exp(now - np.array(sequence.logprobs)))
    return found


def refused(future, *parts: str) -> None:
    with pytest.raises(tinker.RequestFailedError) as caught:
        future.result(SECONDS)
    assert caught.value.category == types.RequestErrorCategory.User
    for part in parts:
        assert part in str(caught.value)


def test_samples_are_weighed_with_what_the_server_recorded(trainer):
    sequences = samples_of(trainer)
    move(trainer, sequences)
    r = ratios(trainer, sequences)
    assert min(map(np.min, r)) < 1.5 < max(map(np.max, r)), "the test needs ratios on both sides of its limit"
    coefficient = 0.3
    weights = [np.minimum(each, 1.5) for each in r]
    slopes = [w * a - coefficient * (w - 1) for w, a in zip(weights, ADVANTAGES, strict=True)]
    expected = [
        supervised([*PROMPT, *sequence.tokens], [*[0.0] * (len(PROMPT) - 1), *slope.tolist()])
        for sequence, slope in zip(sequences, slopes, strict=True)
    ]
    trainer.forward_backward(expected, "cross_entropy")
    norm = gradient_norm(trainer)
    config = {"truncation": 1.5, "kl_coeff": coefficient, "kl_estimator": "k3"}
    output = trainer.forward_backward(of_samples(sequences), "stable_reinforce", config).result(SECONDS)
    assert gradient_norm(trainer) == pytest.approx(norm, rel=1e-4)
    assert [fields["logprobs"].to_numpy().shape for fields in output.loss_fn_outputs] == [(10,)] * 3
    plain = trainer.forward(of_samples(sequences), "stable_reinforce", {"truncation": 1.5}).result(SECONDS)
    assert plain.metrics["loss:sum"] < output.metrics["loss:sum"]


def test_a_session_is_told_once_that_the_formula_is_the_servers_own(new_trainer, caplog):
    first, second = new_trainer(), new_trainer()
    data = of_samples(samples_of(first))
    with caplog.at_level(logging.WARNING):
        for trainer in (first, second, first):
            trainer.forward_backward(data, "stable_reinforce").result(SECONDS)
    notes = [record for record in caplog.records if "formula of this server's own" in record.getMessage()]
    assert len(notes) == 1
    assert notes[0].name.startswith("tinker")


def test_what_was_not_recorded_is_refused_with_its_name_and_a_remedy(trainer, other_service):
    data = of_samples(samples_of(trainer, recorded=False))
    name = repr(data[0].loss_fn_input_spans[0].sequence_id)
    refused(
        trainer.forward_backward(data, "stable_reinforce"),
        "datum 0",
        f"nothing is recorded of sequence {name}",
        "record_stability_info=True",
    )
    foreign = other_service.create_lora_training_client(BASE_MODEL, rank=1).result(SECONDS)
    theirs = of_samples(samples_of(foreign))
    refused(trainer.forward_backward(theirs, "stable_reinforce"), "nothing is recorded of sequence")
    foreign.forward_backward(theirs, "stable_reinforce").result(SECONDS)
    bare = dataclasses.replace(data[0], model_input_spans=None, loss_fn_input_spans=None)
    refused(trainer.forward_backward([bare], "stable_reinforce"), "no loss_fn_input_spans", "with_provenance")
    config = {"kl_estimator": "k1"}
    refused(
        trainer.forward_backward(theirs, "stable_reinforce", config), "kl_estimator is 'k1'", "'k3' or 'k2'"
    )


@pytest.mark.slow
def test_a_killed_server_goes_on_with_what_it_has_recorded(new_trainer, model_dir, tmp_path):
    """The step before is taken again, to the same weights, and the samples of before still train."""
    uninterrupted = new_trainer()
    sequences = samples_of(uninterrupted)
    expected = [train(uninterrupted, of_samples(sequences), "stable_reinforce")]
    expected += go_on(uninterrupted, sequences)
    options = {"port": free_port(), "max_lora_adapters": SLOTS}
    with serving(model_dir, tmp_path / "data", **options) as server:
        server.wait_until_ready()
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
        trainer = service.create_lora_training_client(BASE_MODEL, rank=8, seed=1).result(SECONDS)
        same = samples_of(trainer)
        assert [each.tokens for each in same] == [each.tokens for each in sequences]
        found = [train(trainer, of_samples(same), "stable_reinforce")]
        server.process.kill()
        server.process.wait()
        with serving(model_dir, tmp_path / "data", **options) as again:
            again.wait_until_ready()
            found += go_on(trainer, same)
            assert "did not give the same result" not in again.log
            service.holder.close()
    assert found == expected


def go_on(trainer: tinker.TrainingClient, sequences: Sequence[types.SampledSequence]) -> list[float]:
    losses = [train(trainer, of_samples(sequences), "stable_reinforce") for _ in range(2)]
    return [*losses, *logprobs_of(trainer, [supervised(PROMPT)]).tolist()]
