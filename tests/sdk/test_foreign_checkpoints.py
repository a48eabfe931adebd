"""Checkpoints of another base model: the coordinator refuses them, and without it the workers do."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import tinker

from spmd_tx.demo import tiny_model
from tests.sdk.examples import SECONDS, batch, drawn, random_tokens, sample, train
from tests.sdk.server import BASE_MODEL, serving

MUTANT = [sys.executable, str(Path(__file__).with_name("serve_without_checks.py"))]
PROMPT = random_tokens(10, seed=0)


def client(server):
    return tinker.ServiceClient(base_url=server.url, api_key="tml-test")


@pytest.fixture
def foreign(model_dir, tmp_path):
    """A data directory with checkpoints of a model of another size, which has the same name."""
    other = tiny_model.write(tmp_path / "other", tiny_model.Spec(n_layers=3, d_model=96))
    with serving(other, tmp_path / "of-other") as server:
        server.wait_until_ready()
        with client(server) as service:
            trainer = service.create_lora_training_client(BASE_MODEL, rank=8).result(SECONDS)
            paths = (
                trainer.save_state("state").result(SECONDS).path,
                trainer.save_weights_for_sampler("sampler").result(SECONDS).path,
            )
    (tmp_path / "data").mkdir()
    shutil.copytree(tmp_path / "of-other" / "checkpoints", tmp_path / "data" / "checkpoints")
    return paths


@pytest.mark.slow  # tests/worker/test_engine.py loads such folders into an engine
@pytest.mark.filterwarnings("ignore:DEPRECATED")  # load_state, which loads into a model that is there
def test_workers_refuse_what_a_coordinator_without_checks_lets_them_load(model_dir, tmp_path, foreign):
    state, sampler = foreign
    with serving(model_dir, tmp_path / "data", command=MUTANT) as server:
        server.wait_until_ready()
        with client(server) as service:
            trainers = [
                service.create_lora_training_client(BASE_MODEL, rank=8, seed=1).result(SECONDS)
                for _ in range(2)
            ]
            for load in (trainers[0].load_state, trainers[0].load_state_with_optimizer):
                with pytest.raises(tinker.RequestFailedError, match="of another base model"):
                    load(state).result(SECONDS)
            strange = service.create_sampling_client(model_path=sampler).result(SECONDS)
            with pytest.raises(tinker.RequestFailedError, match=r"of this base model|in this base model"):
                sample(strange, PROMPT, drawn(max_tokens=4, seed=5))
            losses = [train(each, batch(0)) for each in trainers]
            np.testing.assert_array_equal(losses[0], losses[1])
            versions = [each.save_weights_and_get_sampling_client().result(SECONDS) for each in trainers]
            tokens = [sample(each, PROMPT, drawn(max_tokens=8, seed=5)).tokens for each in versions]
            assert tokens[0] == tokens[1]
        assert "restarting" not in server.log
        assert "Traceback" not in server.log
