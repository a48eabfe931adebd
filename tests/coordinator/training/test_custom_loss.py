import numpy as np
import pytest

from spmd_tx.coordinator.training import execute
from spmd_tx.coordinator.training.execute import BEGUN_AT_ONCE
from spmd_tx.coordinator.wire import tinker_pb2 as pb
from spmd_tx.protocol.commands import CustomLoss, Forward, ForwardBackward, OptimStep
from tests.coordinator.recovery.generations import next_generation
from tests.coordinator.training.bench import forward_backward, logprobs, running
from tests.coordinator.training.fake_trainer import FakeCustomLosses

A, B = "alice:train:0", "bob:train:0"


@pytest.fixture
async def bench(tmp_path):
    async with running(tmp_path) as bench:
        await bench.result(bench.create(A))
        yield bench


def custom(*lengths, scale=2.0, loss_id=FakeCustomLosses.ID, config=None, **changes):
    """The fake loss is ``scale`` times the sum of a datum's logprobs."""
    scales = {} if scale is None else {"scale": np.atleast_1d(np.float32(scale))}
    body = forward_backward(*lengths, loss_fn="custom", **scales, **changes)
    request = pb.ForwardBackwardRequest.FromString(body)
    for datum in request.data:
        for name in ("logprobs", "advantages"):
            del datum.loss_fn_inputs[name]
    for key, value in ({"loss_id": loss_id} if config is None else config).items():
        request.loss_fn_config_v2[key].text = value
    return request.SerializeToString()


def train(bench, model, seq_id, *lengths, kind="forward_backward", **options):
    options |= {"forward_only": True} if kind == "forward" else {}
    return bench.log.submit(kind, model, seq_id, custom(*lengths, **options))


def training_commands(bench):
    return [type(command) for command in bench.workers.sent(Forward, CustomLoss, ForwardBackward, OptimStep)]


async def test_a_custom_loss_is_forward_then_the_loss_then_backward_with_its_gradient(bench):
    output = await bench.result(train(bench, A, 1, 10, 3))
    assert training_commands(bench) == [Forward, CustomLoss, ForwardBackward]
    (backward,) = bench.workers.sent(ForwardBackward)
    weights = backward.loss.weights[backward.rows.segments > 0]
    assert (weights == -2).all()
    assert [array.size for array in logprobs(output)] == [10, 3]
    total = 2 * sum(float(array.sum()) for array in logprobs(output))
    assert output.metrics["loss:sum"] == pytest.approx(total)
    assert output.metrics["surrogate_loss:sum"] == pytest.approx(total)
    assert output.metrics["custom/total:mean"] == pytest.approx(total / 2)
    assert (output.metrics["num_tokens:sum"], output.metrics["num_datums:sum"]) == (13, 2)


async def test_the_loss_gets_the_logprobs_and_the_inputs_of_every_datum(bench):
    await bench.result(train(bench, A, 1, 4, 2, token=3))
    (command,) = bench.workers.sent(CustomLoss)
    assert command.lengths.tolist() == [4, 2]
    assert command.values[0].tolist() == [-3.375] * 6
    assert command.values[1].tolist() == [2.0, 2.0]


async def test_forward_only_adds_nothing(bench):
    output = await bench.result(train(bench, A, 1, 10, kind="forward"))
    assert training_commands(bench) == [Forward, CustomLoss]
    assert output.metrics["loss:sum"] == pytest.approx(2 * float(logprobs(output)[0].sum()))
    assert "surrogate_loss:sum" not in output.metrics


async def test_the_next_request_goes_out_behind_the_backward_pass_without_waiting_for_it(bench):
    bench.workers.holds = (ForwardBackward, OptimStep)
    trained, stepped = train(bench, A, 1, 10), bench.step(A, 2)
    await bench.until(lambda: len(bench.workers.held) == 2)
    assert training_commands(bench) == [Forward, CustomLoss, ForwardBackward, OptimStep]
    bench.let_go()
    await bench.result(trained)
    await bench.result(stepped)


async def test_other_models_train_while_a_loss_is_waited_for(bench):
    await bench.result(bench.create(B))
    bench.workers.holds = (CustomLoss,)
    trained = train(bench, A, 1, 10)
    await bench.until(lambda: bench.workers.held)
    other = bench.train(B, 1, 10)
    await bench.until(lambda: bench.workers.sent(ForwardBackward))
    bench.let_go()
    await bench.result(other)
    await bench.result(trained)


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"scale": None}, "datum 0: loss_fn_inputs lacks scale, which loss 'fake' takes"),
        (
            {"scale": np.zeros(10)},
            "datum 0: scale has the shape [10], but loss 'fake' takes scale with rank 0: one number",
        ),
        ({"more": {"target_tokens": np.ones((10, 2), np.int64)}}, "takes logprobs with rank 1: [10]"),
        ({"more": {"target_tokens": np.full(10, 5000)}}, "datum 0: target_tokens has 5000 at position 0"),
        ({"loss_id": "loss-2"}, "custom loss 'loss-2' does not exist in this session"),
        ({"config": {}}, "loss_fn 'custom' takes loss_fn_config with one key, loss_id"),
        ({"config": {"loss_id": "loss-1", "beta": "1"}}, "with one key, loss_id"),
        ({"scale": -1.0}, "datum 0: it does not fit"),
        ({"scale": np.inf}, "datum 0: loss 'fake' is -inf; nothing was added to the model's gradient"),
        ({"scale": np.nan}, "datum 0: loss 'fake' is nan"),
    ],
)
async def test_what_cannot_be_trained_on_fails_alone_and_adds_nothing(bench, changes, problem):
    changes = dict(changes)
    more = changes.pop("more", {})
    message = await bench.failure(train(bench, A, 1, 10, **changes, **more))
    assert problem in message
    assert not bench.workers.sent(ForwardBackward)
    await bench.result(bench.step(A, 2))


async def test_after_a_crash_the_same_three_steps_run_again(bench):
    trained = [train(bench, A, 1, 10, 20), train(bench, A, 2, 5, scale=0.5)]
    await bench.result(bench.step(A, 3, learning_rate=0.25))
    for request_id in trained:
        await bench.result(request_id)
    weights, outcomes = bench.workers.weights[0], dict(bench.log.outcomes)
    await next_generation(bench)
    await bench.result(bench.step(A, 4, learning_rate=0.0))
    assert bench.workers.weights == {0: weights}
    assert {id: bench.log.outcomes[id] for id in outcomes} == outcomes
    assert training_commands(bench)[:3] == [Forward, CustomLoss, ForwardBackward]


@pytest.mark.parametrize("held", [Forward, CustomLoss, ForwardBackward])
async def test_workers_that_are_lost_in_any_of_the_steps_leave_nothing_half_done(bench, held):
    bench.workers.holds = (held,)
    trained, stepped = train(bench, A, 1, 10), bench.step(A, 2, learning_rate=1.0)
    await bench.until(lambda: bench.workers.held)
    await next_generation(bench)
    output = await bench.result(trained)
    await bench.result(stepped)
    assert bench.workers.weights[0] == pytest.approx(-output.metrics["loss:sum"])
    assert training_commands(bench) == [Forward, CustomLoss, ForwardBackward, OptimStep]


async def test_workers_that_are_lost_while_a_loss_runs_beside_the_commands_leave_nothing_half_done(bench):
    bench.workers.holds_losses = True
    trained, stepped = train(bench, A, 1, 10), bench.step(A, 2, learning_rate=1.0)
    await bench.until(lambda: bench.workers.losses)
    await next_generation(bench)
    output = await bench.result(trained)
    await bench.result(stepped)
    assert bench.workers.weights[0] == pytest.approx(-output.metrics["loss:sum"])
    assert training_commands(bench) == [Forward, CustomLoss, ForwardBackward, OptimStep]


async def test_who_waits_for_a_loss_is_told_what_becomes_of_it(bench):
    bench.workers.holds_losses = True
    trained = train(bench, A, 1, 10)
    await bench.until(lambda: bench.workers.losses)
    (number,) = bench.workers.losses
    bench.workers.tell_of_loss(number, "compiling custom loss 'fake'")
    assert bench.scheduler.status(trained).reason == "compiling custom loss 'fake'"
    assert bench.scheduler.status(trained).queue_state == "active"
    bench.workers.end_loss(number)
    await bench.result(trained)
    bench.workers.tell_of_loss(number, "compiling custom loss 'fake'")  # late
    waiting = train(bench, A, 2, 10)
    await bench.until(lambda: bench.workers.losses)
    assert bench.scheduler.status(waiting).reason is None


async def test_however_many_losses_run_another_model_trains(bench):
    """As many as may begin at once, and more."""
    bench.workers.holds_losses = True
    models = [f"mallory:train:{number}" for number in range(2 * BEGUN_AT_ONCE)]
    for model in models:
        await bench.result(bench.create(model))
    for model in models:
        train(bench, model, 1, 10)
    await bench.until(lambda: len(bench.workers.losses) == len(models))
    await bench.result(bench.train(A, 1, 10))
    assert len(bench.workers.losses) == len(models)


async def test_a_large_request_that_waits_for_its_loss_keeps_no_room_from_the_large_requests_of_others(
    bench, monkeypatch
):
    monkeypatch.setattr(execute, "SMALL_BYTES", 0)
    monkeypatch.setattr(execute, "PACKED", 1 << 40)  # each takes all the room
    bench.workers.holds_losses = True
    await bench.result(bench.create(B))
    waiting = train(bench, B, 1, 10)
    await bench.until(lambda: bench.workers.losses)
    await bench.result(bench.train(A, 1, 10))
    bench.workers.end_loss(*bench.workers.losses)
    assert (await bench.result(waiting)).metrics["num_tokens:sum"] == 10


async def test_a_loss_that_was_given_up_is_not_run_again_for_any_request(bench):
    bench.workers.holds_losses = True
    first = train(bench, A, 1, 10)
    await bench.until(lambda: bench.workers.losses)
    (number,) = bench.workers.losses
    bench.workers.end_loss(number, arrays={}, problem="compiling it takes too long", is_given_up=True)
    assert await bench.failure(first) == "compiling it takes too long"
    assert await bench.failure(train(bench, A, 2, 10)) == "compiling it takes too long"
    assert training_commands(bench) == [Forward, CustomLoss]
    await bench.result(bench.step(A, 3))


async def test_what_was_trained_with_a_loss_is_run_again_without_limits_even_if_the_loss_was_given_up(bench):
    trained = train(bench, A, 1, 10)
    await bench.result(trained)
    await bench.result(bench.step(A, 2, learning_rate=0.25))
    (command,) = bench.workers.sent(CustomLoss)
    assert command.limits is not None
    assert command.tenant == "alice"
    bench.custom_losses.give_up(FakeCustomLosses.ID, "it takes too long")
    weights = bench.workers.weights[0]
    await next_generation(bench)
    await bench.result(bench.step(A, 3, learning_rate=0.0))
    assert bench.workers.weights == {0: weights}
    (again,) = bench.workers.sent(CustomLoss)
    assert again.limits is None


async def test_an_error_of_the_servers_own_fails_the_request_and_adds_nothing(bench):
    bench.workers.holds_losses = True
    trained = train(bench, A, 1, 10)
    await bench.until(lambda: bench.workers.losses)
    (number,) = bench.workers.losses
    bench.workers.end_loss(number, arrays={}, problem="an error of the server's", is_ours=True)
    outcome = await bench.outcome(trained)
    assert (outcome.error, outcome.category) == ("an error of the server's", "server")
    assert not bench.workers.sent(ForwardBackward)
    await bench.result(bench.step(A, 2))
