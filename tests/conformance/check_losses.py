"""Checks of losses that need more than a name: of one's own, top-K targets, and stable_reinforce."""

import importlib.util
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from tests.conformance.registry import TWINS, covers
from tests.conformance.world import DATA, World, settled, twins
from tests.sdk.examples import datum, gradient_norm, prompt
from tests.sdk.test_stable_reinforce import move, of_samples, samples_of

HAS_TORCH = importlib.util.find_spec("torch") is not None

# What the SDK uploads of: def loss(logprobs, weights): return -(logprobs * weights).sum(), {}
WEIGHTED_NLL = {
    "name": "weighted_nll",
    "inputs": [{"name": "logprobs", "rank": 1}, {"name": "weights", "rank": 1}],
    "graph": {
        "format": 1,
        "nodes": [
            {"op": op, "name": name, "target": target, "args": args, "kwargs": {}}
            for op, name, target, args in (
                ("placeholder", "logprobs", "logprobs", []),
                ("placeholder", "weights", "weights", []),
                ("call_function", "mul", "operator.mul", [{"ref": "logprobs"}, {"ref": "weights"}]),
                ("call_method", "sum_1", "sum", [{"ref": "mul"}]),
                ("call_function", "neg", "operator.neg", [{"ref": "sum_1"}]),
                ("output", "output", "output", [{"tuple": [{"ref": "neg"}, {"dict": {}}]}]),
            )
        ],
    },
}


def loss_and_gradient(trainer: Any, loss: Any) -> tuple[float, float]:
    """What a call of forward_backward gives, and the norm of the gradient that it leaves."""
    return loss().metrics["loss:sum"], gradient_norm(trainer)


@covers(
    f"TrainingClient.forward_backward_custom{TWINS}",
    does="a loss in Python: forward here, its derivative from the client, backward here; an uploaded loss is "
    "computed here alone",
    effect="minus the sum of the log-probabilities, as a Python loss, gives the gradient of cross_entropy "
    "(without PyTorch, the requests that the SDK makes of it are sent one by one)",
)
def forward_backward_custom(world: World) -> None:
    trainer = world.new_trainer()
    settled(trainer.forward_backward)(DATA, "cross_entropy")
    expected = gradient_norm(trainer)
    if not HAS_TORCH:
        with pytest.raises(ImportError, match="PyTorch"):
            settled(trainer.forward_backward_custom)(DATA, lambda data, logprobs: (logprobs[0].sum(), {}))
        output = settled(trainer.forward)(DATA, "cross_entropy")
        assert "loss:sum" in output.metrics  # which the SDK replaces
        slopes = [np.ones(len(each["logprobs"].data)) for each in output.loss_fn_outputs]
        backward = [
            datum(
                each.model_input.to_ints(), target_tokens=each.loss_fn_inputs["target_tokens"], weights=slope
            )
            for each, slope in zip(DATA, slopes, strict=True)
        ]
        settled(trainer.forward_backward)(backward, "cross_entropy")
        assert gradient_norm(trainer) == pytest.approx(expected, rel=1e-4)
        return
    for method in twins(trainer, "forward_backward_custom"):
        output = method(
            DATA, lambda data, logprobs: (-sum(each.sum() for each in logprobs), {"own:sum": 7.0})
        )
        assert output.metrics["own:sum"] == 7.0
        assert gradient_norm(trainer) == pytest.approx(expected, rel=1e-4)


@covers(
    "ServiceClient.create_custom_loss",
    does="takes the traced graph of a loss, to be run here; refuses what is not on a list of operations",
    effect="loss and gradient are those of the same loss that is built in; an unknown operation is named "
    "(without PyTorch, the graph is sent as the SDK traces it)",
)
def create_custom_loss(world: World) -> None:
    service = world.new_service()
    trainer = settled(service.create_lora_training_client)("tiny", rank=4, seed=5)
    expected = loss_and_gradient(trainer, lambda: settled(trainer.forward_backward)(DATA, "cross_entropy"))
    if HAS_TORCH:
        handle = settled(service.create_custom_loss)(
            lambda logprobs, weights: (-(logprobs * weights).sum(), {}), {"logprobs": 1, "weights": 1}
        )
        found = loss_and_gradient(trainer, lambda: settled(trainer.forward_backward_custom)(DATA, handle))
    else:
        with pytest.raises(ImportError, match="PyTorch"):
            settled(service.create_custom_loss)(lambda logprobs: (logprobs.sum(), {}), {"logprobs": 1})
        addressed = {"session_id": service.holder.get_session_id(), "custom_loss_seq_id": 0}
        created = world.post("create_custom_loss", addressed | WEIGHTED_NLL)
        loss_id = world.post("retrieve_future", {"request_id": created["request_id"]})["loss_id"]
        found = loss_and_gradient(
            trainer, lambda: settled(trainer.forward_backward)(DATA, "custom", {"loss_id": loss_id})
        )
    assert found == pytest.approx(expected, rel=1e-5)
    nodes = [*WEIGHTED_NLL["graph"]["nodes"]]
    nodes[2] = nodes[2] | {"target": "os.system"}
    bad = WEIGHTED_NLL | {"graph": {"format": 1, "nodes": nodes}}
    addressed = {"session_id": service.holder.get_session_id(), "custom_loss_seq_id": 1}
    assert "os.system" in world.failure(world.post("create_custom_loss", addressed | bad))
    settled(service.close)("success")


@covers(
    "TrainingClient.forward_backward (top-K targets)",
    does="cross_entropy against K targets per position, dense or sparse, as distillation sends them",
    effect="loss and gradient are those of K datums with one target each",
)
def top_k_targets(world: World) -> None:
    trainer = world.new_trainer()
    tokens, targets = [3, 1, 4], np.array([[1, 5], [4, 9], [2, 6]])
    weights = np.array([[0.7, 0.3], [1.0, 0.0], [0.5, 0.25]], np.float32)
    apart = [datum(tokens, target_tokens=targets[:, k], weights=weights[:, k]) for k in range(2)]
    together = [datum(tokens, target_tokens=targets, weights=weights)]
    one = loss_and_gradient(trainer, lambda: settled(trainer.forward_backward)(apart, "cross_entropy"))
    two = loss_and_gradient(trainer, lambda: settled(trainer.forward_backward)(together, "cross_entropy"))
    assert two == pytest.approx(one, rel=1e-4)


@covers(
    "TrainingClient.forward_backward (stable_reinforce)",
    does="REINFORCE with truncated importance weights from what the server recorded while sampling; the "
    "formula is this service's own (losses.md)",
    effect="samples with record_stability_info and their spans train; without spans the request is refused "
    "with the remedy",
)
def stable_reinforce(world: World) -> None:
    trainer = world.new_trainer()
    sequences = samples_of(trainer)
    move(trainer, sequences)
    output = settled(trainer.forward_backward)(of_samples(sequences), "stable_reinforce", {"kl_coeff": 0.1})
    assert np.isfinite(output.metrics["loss:sum"])
    assert gradient_norm(trainer) > 0
    bare = types.Datum(
        model_input=prompt([1, 2, 3]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=[2, 3, 4], dtype="int64", shape=[3]),
            "advantages": types.TensorData(data=[1.0, 1.0, 1.0], dtype="float32", shape=[3]),
        },
    )
    with pytest.raises(tinker.RequestFailedError, match="with_provenance"):
        settled(trainer.forward_backward)([bare], "stable_reinforce")
