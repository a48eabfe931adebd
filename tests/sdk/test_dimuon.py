"""Models that are trained with Dimuon, through the SDK."""

import itertools
import os
import signal

import numpy as np
import pytest
import tinker
from tinker import types

from tests.sdk.examples import SECONDS, batch, gradient_norm, logprobs_of, train
from tests.sdk.server import BASE_MODEL, serving

DIMUON = types.DimuonOptimizerConfig()
STEP = types.DimuonParams(learning_rate=0.02)
DATA, QUESTION = batch(seed=1), batch(seed=9)


def new_trainer(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(BASE_MODEL, rank=4, seed=3, optimizer=DIMUON).result(SECONDS)


def dimuon_step(trainer: tinker.TrainingClient, data: list[types.Datum] = DATA) -> float:
    """Take one step; return the loss before it."""
    gradient = trainer.forward_backward(data, "cross_entropy")
    assert trainer.optim_step(STEP).result(SECONDS).metrics["unclipped_grad_l2:mean"] > 0
    return gradient.result(SECONDS).metrics["loss:sum"]


def test_the_loss_falls(service):
    trainer = new_trainer(service)
    assert trainer.get_info().optimizer_config.model_dump() == DIMUON.model_dump()
    losses = [dimuon_step(trainer) for _ in range(8)]
    assert losses[-1] < 0.9 * losses[0]
    assert all(later < earlier for earlier, later in itertools.pairwise(losses))


def test_a_saved_state_goes_on_exactly_with_its_optimizer(service, rest):
    trainer = new_trainer(service)
    for seed in range(3):
        dimuon_step(trainer, batch(seed))
    path = trainer.save_state("dimuon").result(SECONDS).path
    info = rest.get_weights_info_by_tinker_path(path).result(SECONDS)
    assert info.optimizer_config.model_dump() == DIMUON.model_dump()
    resumed = service.create_training_client_from_state_with_optimizer(path).result(SECONDS)
    assert resumed.get_info().optimizer_config.model_dump() == DIMUON.model_dump()
    anew = service.create_training_client_from_state(path, optimizer=DIMUON).result(SECONDS)
    ends = []
    for each in (trainer, resumed, anew):
        dimuon_step(each)
        ends.append(logprobs_of(each, QUESTION))
    np.testing.assert_array_equal(ends[0], ends[1])
    assert not np.array_equal(ends[0], ends[2])  # its momentum began at zero
    with_adam = service.create_training_client_from_state(path).result(SECONDS)
    assert with_adam.get_info().optimizer_config.type == "adamw"
    train(with_adam, DATA)


def test_parameters_of_another_optimizer_are_refused(service, trainer):
    with pytest.raises(tinker.RequestFailedError, match="adam_params are of 'adamw'"):
        new_trainer(service).optim_step(types.AdamParams()).result(SECONDS)
    with pytest.raises(tinker.RequestFailedError, match="this model has 'adamw', send adam_params"):
        trainer.optim_step(STEP).result(SECONDS)
    assert gradient_norm(trainer) == 0


@pytest.mark.slow  # a server of its own, whose worker is lost
def test_turns_and_a_lost_worker_change_no_bit(model_dir, tmp_path):
    with serving(model_dir, tmp_path / "data", max_lora_adapters=1, snapshot_seconds=0) as server:
        server.wait_until_ready()
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
        alone = new_trainer(service)
        undisturbed = [dimuon_step(alone, batch(seed)) for seed in range(6)]
        trainer, other = new_trainer(service), service.create_lora_training_client(BASE_MODEL).result(SECONDS)
        disturbed = []
        for seed in range(6):
            disturbed.append(dimuon_step(trainer, batch(seed)))
            train(other, DATA)  # takes the only slot
            if seed == 3:
                os.kill(server.worker_pids()[0], signal.SIGKILL)
        assert disturbed == undisturbed
        np.testing.assert_array_equal(logprobs_of(trainer, QUESTION), logprobs_of(alone, QUESTION))
        assert "did not give the same result" not in server.log
        service.holder.close()
