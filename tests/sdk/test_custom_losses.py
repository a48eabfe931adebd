import numpy as np
import pytest
import tinker
from tinker import types

from tests.custom_loss.recorded import recorded
from tests.sdk.examples import PLAIN_STEP, SECONDS, batch, datum, logprobs_of, random_tokens
from tests.sdk.raw_api import RawApi


def create(service: tinker.ServiceClient, api: RawApi, case: str, number: int = 0) -> str:
    """What the SDK does, which needs torch for it."""
    definition = recorded()[case].definition
    body = {"session_id": service.holder.get_session_id(), "custom_loss_seq_id": number, **definition}
    answer = api.retrieve(api.post("create_custom_loss", **body)["request_id"]).json()
    return answer["loss_id"]


def weighted(weight):
    """The data of ``batch`` with weights that follow from the number of tokens."""
    data = []
    for each in batch(0):
        tokens = each.model_input.to_ints()
        targets = each.loss_fn_inputs["target_tokens"].data
        data.append(datum(tokens, target_tokens=targets, weights=[weight(len(tokens))] * len(tokens)))
    return data


def test_a_custom_loss_trains_like_the_built_in_one_with_its_gradient_as_weights(service, api, new_trainer):
    loss_id = create(service, api, "length_normalised_nll")
    data = weighted(lambda tokens: 1 / tokens)
    ours, built_in = new_trainer(), new_trainer()
    custom = ours.forward_backward(data, "custom", {"loss_id": loss_id})
    plain = built_in.forward_backward(data, "cross_entropy")
    for trainer in (ours, built_in):
        trainer.optim_step(PLAIN_STEP).result(SECONDS)
    metrics, expected = custom.result(SECONDS).metrics, plain.result(SECONDS).metrics
    assert metrics["loss:sum"] == pytest.approx(expected["loss:sum"], rel=1e-5)
    assert metrics["surrogate_loss:sum"] == pytest.approx(expected["loss:sum"], rel=1e-5)
    np.testing.assert_allclose(logprobs_of(ours, data), logprobs_of(built_in, data), atol=1e-5)
    per_datum = [-output["logprobs"].to_numpy().mean() for output in custom.result(SECONDS).loss_fn_outputs]
    assert metrics["custom/perplexity:mean"] == pytest.approx(np.exp(per_datum).mean(), rel=1e-5)


def test_several_targets_per_position_go_through_a_custom_loss(service, api, trainer):
    loss_id = create(service, api, "top_k_entropy")
    tokens = random_tokens(10, 0)
    targets = types.TensorData(data=random_tokens(40, 1), dtype="int64", shape=[10, 4])
    data = [
        types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs={"target_tokens": targets})
    ]
    result = trainer.forward(data, "custom", {"loss_id": loss_id}).result(SECONDS)
    logprobs = result.loss_fn_outputs[0]["logprobs"].to_numpy().reshape(10, 4).astype(np.float64)
    probabilities = np.exp(logprobs) / np.exp(logprobs).sum(-1, keepdims=True)
    entropy = -(probabilities * np.log(probabilities)).sum(-1)
    assert result.metrics["loss:sum"] == pytest.approx(entropy.mean(), rel=1e-5)
    assert result.metrics["custom/largest:mean"] == pytest.approx(entropy.max(), rel=1e-5)


def test_a_datum_that_does_not_fit_fails_and_the_client_goes_on(service, api, trainer):
    loss_id = create(service, api, "focal")
    data = batch(0)
    broken = datum(random_tokens(5, 0), target_tokens=random_tokens(5, 1))
    failing = trainer.forward_backward([data[0], broken], "custom", {"loss_id": loss_id})
    with pytest.raises(
        tinker.RequestFailedError, match="datum 1: loss_fn_inputs lacks weights, which loss 'focal'"
    ):
        failing.result(SECONDS)
    trainer.forward_backward(data, "custom", {"loss_id": loss_id}).result(SECONDS)


def test_a_loss_of_another_session_does_not_exist(service, other_service, api, trainer):
    theirs = create(other_service, api, "focal")
    with pytest.raises(tinker.RequestFailedError, match="does not exist in this session"):
        trainer.forward_backward(batch(0), "custom", {"loss_id": theirs}).result(SECONDS)
