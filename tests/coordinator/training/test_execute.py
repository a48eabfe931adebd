import asyncio
import itertools
from pathlib import Path

import numpy as np
import pyrage
import pytest

from spmd_tx.coordinator.training import saves
from spmd_tx.coordinator.training.execute import CHILDREN, CHILDREN_OF_ONE
from spmd_tx.coordinator.wire.checkpoint_paths import parse
from spmd_tx.coordinator.wire.checkpoints import SaveWeightsExternalRequest
from spmd_tx.protocol.commands import Forward, OptimStep
from spmd_tx.protocol.places import WeightsFolder
from tests.coordinator.training.bench import HALF, SHORT_ROWS, logprobs, running

A, B, C = "alice:train:0", "bob:train:0", "carol:train:0"


@pytest.fixture
async def bench(tmp_path):
    async with running(tmp_path) as bench:
        yield bench


# --- models -----------------------------------------------------------------------------------------


async def test_a_model_is_a_fresh_adapter_in_a_slot_of_its_own(bench):
    created = [bench.create(A, seed=3, rank=4), bench.create(B, rank=8, train_mlp=False)]
    assert await bench.result(created[0]) == {"type": "create_model", "model_id": A}
    await bench.result(created[1])
    first, second = bench.workers.sent("create_adapter")
    assert (first.target.slot, first.source.seed, first.adapter.rank) == (0, 3, 4)
    assert (second.target.slot, second.adapter.rank, second.adapter.train_mlp) == (1, 8, False)


async def test_a_model_that_cannot_be_created_fails_everything_after_it_in_the_same_words(bench):
    created, trained = bench.create(A, rank=64), bench.train(A, 1, 10)
    assert "lora_config.rank is 64; it must be between 1 and 8" in await bench.failure(created)
    assert f"{A} was not created: lora_config.rank is 64" in await bench.failure(trained)
    assert bench.workers.commands == []


async def test_a_slot_is_free_again_when_its_session_has_ended(bench):
    await bench.result(bench.create(A))
    await bench.result(bench.create(B))
    bench.scheduler.session_ended("alice")
    await bench.result(bench.create(C))
    assert bench.workers.sent("create_adapter")[-1].target.slot == 0


async def test_a_session_that_ends_still_gets_what_it_asked_for(bench):
    bench.workers.is_holding = True
    created, trained, stepped = bench.create(A), bench.train(A, 1, 10), bench.step(A, 2)
    await bench.until(lambda: len(bench.workers.held) == 3)
    bench.scheduler.session_ended("alice")
    bench.let_go()
    for request_id in (created, trained, stepped):
        await bench.result(request_id)
    assert "alice:train:0 is no longer on this server" in await bench.failure(bench.step(A, 3))


# --- forward and backward ---------------------------------------------------------------------------


async def test_results_come_per_datum_in_full_length(bench):
    bench.create(A)
    output = await bench.result(bench.train(A, 1, 10, 200, 3, token=4))
    assert [len(array) for array in logprobs(output)] == [10, 200, 3]
    np.testing.assert_array_equal(np.concatenate(logprobs(output)), np.float32(-4.5))
    assert dict(output.metrics) == {"loss:sum": 213 * 4.5, "num_tokens:sum": 213, "num_datums:sum": 3}


async def test_positions_of_weight_zero_have_logprobs_too(bench):
    bench.create(A)
    output = await bench.result(bench.train(A, 1, 4, weights=np.array([0, 0, 1, 0], np.float32)))
    assert logprobs(output)[0].tolist() == [-1.125] * 4
    assert output.metrics["loss:sum"] == 1.125


@pytest.mark.parametrize("weights", [[1, -1, 2, -2], [-3, -1, 0, 0], [0, 0, 0, 0]])
async def test_weights_are_factors_whatever_their_sign_and_sum(bench, weights):
    bench.create(A)
    output = await bench.result(bench.train(A, 1, 4, weights=np.array(weights, np.float32)))
    assert output.metrics["loss:sum"] == sum(weights) * 1.125


async def test_forward_only_leaves_the_gradient_alone(bench):
    bench.create(A)
    await bench.result(bench.train(A, 1, 10, kind="forward"))
    stepped = await bench.result(bench.step(A, 2))
    assert len(bench.workers.sent(Forward)) == 1
    assert stepped["metrics"]["unclipped_grad_l2:mean"] == 0.0


async def test_gradients_are_summed_over_datums_passes_and_chunks(bench):
    bench.create(A)
    bench.train(A, 1, 10)
    single = await bench.result(bench.step(A, 2))
    bench.train(A, 3, 10, 10)
    twice = await bench.result(bench.step(A, 4))
    bench.train(A, 5, 10)
    bench.train(A, 6, 10)
    accumulated = await bench.result(bench.step(A, 7))
    bench.train(A, 8, 10, weights=np.full(10, 2, np.float32))
    doubled = await bench.result(bench.step(A, 9))
    norms = [each["metrics"]["unclipped_grad_l2:mean"] for each in (single, twice, accumulated, doubled)]
    assert norms == [norms[0], 2 * norms[0], 2 * norms[0], 2 * norms[0]]


async def test_the_loss_of_a_request_is_the_same_number_alone_and_in_company(tmp_path):
    async with running(tmp_path, shapes=SHORT_ROWS) as bench:
        bench.create(A)
        bench.create(B)
        alone = await bench.result(bench.train(A, 1, *HALF))
        seq_id = await bench.hold(A, 2)
        shared = bench.train(A, seq_id, *HALF)
        bench.train(B, 1, *HALF)
        await bench.prepared(A)
        await bench.prepared(B)
        bench.let_go()
        together = await bench.result(shared)
        assert {0, 1} <= set(bench.workers.commands[-1].rows.slots.tolist())
        assert together.SerializeToString(deterministic=True) == alone.SerializeToString(deterministic=True)


async def test_a_failed_forward_backward_is_followed_by_a_good_one(bench):
    bench.create(A)
    wrong = bench.train(A, 1, 4, target_tokens=np.array([1, 2, 3, 1000]))
    right = bench.train(A, 2, 4)
    assert "datum 0: target_tokens has 1000 at position 3" in await bench.failure(wrong)
    await bench.result(right)


async def test_bytes_that_are_no_protobuf_fail_through_the_future(bench):
    bench.create(A)
    broken = bench.log.submit("forward_backward", A, 1, b"\xff\xff\xff")
    assert "not a protobuf ForwardBackwardRequest" in await bench.failure(broken)
    await bench.result(bench.train(A, 2, 4))


# --- optimizer --------------------------------------------------------------------------------------


async def test_every_adam_parameter_reaches_the_workers(bench):
    bench.create(A)
    wanted = {
        "learning_rate": 0.5,
        "beta1": 0.8,
        "beta2": 0.7,
        "eps": 1e-3,
        "weight_decay": 0.25,
        "grad_clip_norm": 2.0,
    }
    await bench.result(bench.step(A, 1, **wanted))
    (command,) = bench.workers.sent(OptimStep)
    assert {name: getattr(command, name) for name in wanted} == wanted


async def test_a_step_that_is_not_finite_is_refused_and_touches_nobody(bench):
    bench.create(A)
    bench.create(B)
    await bench.result(bench.train(B, 1, 4))
    await bench.result(bench.train(A, 1, 4, token=9, weights=np.full(4, 3e38, np.float32)))
    message = await bench.failure(bench.step(A, 2))
    assert "the optimizer step was not taken" in message
    assert "The accumulated gradient was cleared" in message
    assert (await bench.result(bench.step(B, 2)))["metrics"]["unclipped_grad_l2:mean"] == 4 * 1.125
    bench.train(A, 3, 4)
    assert (await bench.result(bench.step(A, 4)))["metrics"]["unclipped_grad_l2:mean"] == 4 * 1.125


async def test_a_wrong_adam_parameter_fails_the_step_and_keeps_the_gradient(bench):
    bench.create(A)
    bench.train(A, 1, 4)
    assert "adam_params.beta1 is 1.0" in await bench.failure(bench.step(A, 2, beta1=1.0))
    assert (await bench.result(bench.step(A, 3)))["metrics"]["unclipped_grad_l2:mean"] > 0


# --- checkpoints ------------------------------------------------------------------------------------


async def test_a_saved_state_loads_into_a_new_model(bench):
    bench.create(A, seed=7, rank=8)
    saved = await bench.result(bench.save(A, 1, "first"))
    assert saved == {"type": "save_weights", "path": f"tinker://{A}/weights/first"}
    loaded = await bench.result(bench.load(B, 0, saved["path"], optimizer=True))
    assert loaded == {"type": "load_weights", "path": saved["path"], "model_id": B}
    (command,) = bench.workers.sent("load_state")
    assert (command.target.slot, command.with_optimizer, command.adapter.rank) == (1, True, 8)
    assert bench.workers.weights == {0: 7.0, 1: 7.0}
    await bench.result(bench.train(B, 1, 4))


async def test_a_saved_state_loads_into_a_model_that_is_there(bench):
    bench.create(A, seed=7)
    saved = await bench.result(bench.save(A, 1, "first"))
    bench.train(A, 2, 4)
    bench.step(A, 3)
    await bench.result(bench.load(A, 4, saved["path"]))
    assert bench.workers.weights[0] == 7.0


async def test_a_checkpoint_may_be_deleted_while_it_is_on_its_way_to_the_workers(bench):
    bench.create(A, seed=7)
    saved = await bench.result(bench.save(A, 1, "first"))
    folder = next(bench.directory.glob("checkpoints/*/weights/first"))
    await bench.hold(A, 2)
    loading = bench.load(B, 0, saved["path"])
    await bench.until(lambda: B in bench.scheduler._execution.lines)
    await bench.prepared(B)
    await bench.checkpoints.delete(parse(saved["path"]))
    assert not folder.exists()
    bench.let_go()
    await bench.result(loading)
    assert bench.workers.weights[1] == 7.0
    assert not list(bench.directory.glob("versions/*"))


@pytest.mark.parametrize(
    "path, message",
    [
        ("tinker://alice:train:0/weights/none", "does not exist"),
        (
            "tinker://alice:train:0/sampler_weights/first",
            "cannot be trained; use one that save_state has saved",
        ),
        ("tinker://alice:train:0/external_weights/first", "does not exist"),
        ("weights/first", "is not a checkpoint path"),
    ],
)
async def test_a_model_from_a_checkpoint_that_cannot_be_loaded_is_not_created(bench, path, message):
    loading, training = bench.load(B, 0, path), bench.train(B, 1, 4)
    assert message in await bench.failure(loading)
    assert f"{B} was not created" in await bench.failure(training)
    await bench.result(bench.create(A))  # no slot was lost
    await bench.result(bench.create(C))


async def test_a_name_is_used_once_unless_it_is_to_be_overwritten(bench):
    bench.create(A, seed=7)
    saves = [bench.save(A, 1, "x"), bench.save(A, 2, "x"), bench.save(A, 3, "x", overwrite=True)]
    await bench.result(saves[0])
    assert "exists; choose another name" in await bench.failure(saves[1])
    await bench.result(saves[2])
    assert len(bench.workers.sent("save_state")) == 2


async def test_a_save_without_a_good_name_is_refused_before_the_workers_hear_of_it(bench):
    bench.create(A)
    assert "cannot be the name of a checkpoint" in await bench.failure(bench.save(A, 1, "a/b"))
    assert "ttl_seconds is 0" in await bench.failure(bench.save(A, 2, "a", ttl_seconds=0))
    assert "neither path nor sampling_session_seq_id" in await bench.failure(bench.save_for_sampler(A, 3))
    assert not bench.workers.sent("save_state", "save_sampler")


async def test_an_export_is_only_written_and_takes_no_place_among_the_samplers(bench):
    bench.create(A)
    wish = SaveWeightsExternalRequest(A, 1, "out", ttl_seconds=3600)
    exported = await bench.result(bench.submit("save_weights_external", A, 1, wish))
    assert exported["path"] == f"tinker://{A}/external_weights/out"
    (save,) = bench.workers.sent("save_sampler")
    assert isinstance(save.target, WeightsFolder)
    assert Path(save.target.path).parent.name == "external_weights"
    again = bench.submit("save_weights_external", A, 2, SaveWeightsExternalRequest(A, 2, "out"))
    assert "exists; choose another name" in await bench.failure(again)


RSA_WITHOUT_EXPONENT = "ssh-rsa AAAAB3NzaC1yc2EAAAAAAAAAAQA="  # the library of age panics on it


def export_for(recipient, seq_id):
    return SaveWeightsExternalRequest(A, seq_id, "out", age_encryption_recipients=[recipient])


async def test_an_export_to_what_is_no_key_fails_alone(bench):
    bench.create(A)
    failing = bench.submit("save_weights_external", A, 1, export_for(RSA_WITHOUT_EXPONENT, 1))
    assert "which is no public key" in await bench.failure(failing)
    await bench.result(bench.train(A, 2, 4))


async def test_an_export_whose_encryption_crashes_fails_alone(bench, monkeypatch):
    monkeypatch.setattr("spmd_tx.coordinator.checkpoints.age_recipients.check_recipients", list)
    bench.create(A)
    failing = bench.submit("save_weights_external", A, 1, export_for(RSA_WITHOUT_EXPONENT, 1))
    assert "PanicException" in await bench.failure(failing, category="server")
    await bench.result(bench.train(A, 2, 4))


@pytest.mark.parametrize("tenants, expected", [("abcdefgh", CHILDREN), ("a", CHILDREN_OF_ONE)])
async def test_few_exports_are_encrypted_at_a_time(bench, monkeypatch, tenants, expected):
    """A process for each: as many models as there are must not be as many processes."""
    at_once, most, models = 0, 0, [f"{name}:train:0" for name in "abcdefgh"]
    owners = dict(zip("abcdefgh", itertools.cycle(tenants), strict=False))
    monkeypatch.setattr(bench.catalog, "owner_of", owners.get)

    async def call_outside(*_):
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        for _ in range(10):
            await asyncio.sleep(0)
        at_once -= 1

    monkeypatch.setattr(saves, "call_outside", call_outside)
    recipient = str(pyrage.x25519.Identity.generate().to_public())
    exports = []
    for model in models:
        bench.create(model)
        wish = SaveWeightsExternalRequest(model, 1, "out", age_encryption_recipients=[recipient])
        exports.append(bench.submit("save_weights_external", model, 1, wish))
    for export in exports:
        await bench.result(export)
    assert most == expected


async def test_a_broken_disk_is_not_the_fault_of_the_client(bench, monkeypatch):
    async def broken(*_):
        raise OSError(5, "Input/output error")

    bench.create(A)
    monkeypatch.setattr(bench.checkpoints, "complete", broken)
    assert "Input/output error" in await bench.failure(bench.save(A, 1, "x"), category="server")
    await bench.result(bench.train(A, 2, 4))


async def test_a_save_waits_until_a_full_disk_has_room_again(bench, monkeypatch):
    monkeypatch.setattr("spmd_tx.coordinator.storage.outages.RETRY_SECONDS", 0.0)
    complete, full = bench.checkpoints.complete, [OSError(28, "No space left on device")] * 3

    async def complete_when_there_is_room(*arguments):
        if full:
            raise full.pop()
        await complete(*arguments)

    bench.create(A)
    monkeypatch.setattr(bench.checkpoints, "complete", complete_when_there_is_room)
    await bench.result(bench.save(A, 1, "x"))
    assert not full


async def test_weights_are_saved_as_they_are_between_the_steps_around_the_save(bench):
    bench.create(A, seed=7)
    bench.train(A, 1, 4)
    bench.step(A, 2, learning_rate=1.0)
    saved = bench.save_for_sampler(A, 3, sampling_session_seq_id=0)
    bench.train(A, 4, 4)
    bench.step(A, 5, learning_rate=1.0)
    result = await bench.result(saved)
    await bench.settled()
    assert result["sampling_session_id"] == "alice:sample:0"
    kinds = [command.name for command in bench.workers.commands]
    step = ["forward_backward", "optim_step"]
    assert kinds == ["create_adapter", *step, "save_sampler", *step]


async def test_an_ephemeral_save_stays_on_the_device_and_a_named_one_is_also_a_folder(bench):
    bench.create(A, seed=7)
    await bench.result(bench.save_for_sampler(A, 1, sampling_session_seq_id=0))
    named = await bench.result(bench.save_for_sampler(A, 2, "good"))
    assert named["path"] == f"tinker://{A}/sampler_weights/good"
    ephemeral_save, named_save = bench.workers.sent("save_sampler")
    assert ephemeral_save.also is None
    assert ephemeral_save.target != named_save.target
    folder = next(bench.directory.glob("checkpoints/*/sampler_weights/good"))
    assert {path.name for path in folder.iterdir()} == {"adapter_model.safetensors", "checkpoint.json"}


async def test_a_save_keeps_the_rank_it_was_asked_for_with(bench):
    bench.create(B, rank=8)
    saved = await bench.result(bench.save(B, 1, "x"))
    bench.create(A, rank=4)
    seq_id = await bench.hold(A, 1)
    bench.save_for_sampler(A, seq_id, sampling_session_seq_id=0)
    loading = bench.load(A, seq_id + 1, saved["path"])
    await bench.prepared(A, 2)
    bench.let_go()
    await bench.result(loading)
    assert [command.adapter.rank for command in bench.workers.sent("save_sampler", "load_state")] == [4, 8]


async def test_two_saves_on_one_sampler_number_are_refused(bench):
    bench.create(A)
    bench.create("alice:train:1")
    await bench.result(bench.save_for_sampler(A, 1, sampling_session_seq_id=0))
    again = bench.save_for_sampler("alice:train:1", 1, sampling_session_seq_id=0)
    assert "sampling_session_seq_id 0 of session 'alice' is already in use" in await bench.failure(again)


@pytest.mark.parametrize("kind", ["snapshot", "inflight"])
async def test_weights_that_samples_may_use_are_not_saved_over(bench, kind):
    bench.create(A)
    await bench.result(bench.save_for_sampler(A, 1, sampling_session_seq_id=0, kind=kind))
    again = await bench.failure(bench.save_for_sampler(A, 2, sampling_session_seq_id=0, kind=kind))
    assert "sampling_session_seq_id 0 of session 'alice' is already in use" in again
