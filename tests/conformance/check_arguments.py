"""Checks of arguments that change what a method does, and of those that this service refuses."""

from typing import Any

import numpy as np
import pyrage
import pytest
import tinker
from tinker import types

from tests.conformance.check_rest import fetch
from tests.conformance.check_training import loss_of, parameters_of
from tests.conformance.registry import covers
from tests.conformance.world import DATA, World, settled
from tests.sdk.server import BASE_MODEL

AGE: Any = pyrage  # its functions have no types
DIMUON = types.DimuonOptimizerConfig()


@covers(
    "ServiceClient.create_training_client_from_state (weights_access_token)",
    does="reads the checkpoint with another API key, and makes a model of the caller's",
    effect="a stranger who has the owner's key can load it; one with a wrong key cannot",
)
def weights_access_token(world: World) -> None:
    load = settled(world.stranger.create_training_client_from_state)
    trainer = load(world.state_path, weights_access_token=world.key)
    np.testing.assert_array_equal(parameters_of(trainer), parameters_of(world.trained))
    with pytest.raises(tinker.APIStatusError, match="weights_access_token"):
        load(world.state_path, weights_access_token="tml-wrong")


@covers(
    "TrainingClient.save_weights_external (age_encryption_recipients)",
    does="encrypts every file, so that only the holders of the named keys can read it",
    effect="a recipient reads the adapter's configuration; a text that is no key is refused",
)
def age_encryption_recipients(world: World) -> None:
    identity = AGE.x25519.Identity.generate()
    save = settled(world.new_trainer().save_weights_external)
    path = save(world.new_name(), age_encryption_recipients=[str(identity.to_public())]).path
    urls = settled(world.rest.get_external_weights_urls)(path).urls
    assert all(name.endswith(".age") for name in urls)
    assert b'"r": 4' in AGE.decrypt(fetch(urls["adapter_config.json.age"]), [identity])
    with pytest.raises(tinker.RequestFailedError, match="nonsense"):
        save(world.new_name(), age_encryption_recipients=["age1nonsense"])


@covers(
    "ServiceClient.create_lora_training_client (optimizer=Dimuon)",
    does="makes an adapter that is trained with Dimuon; the formula is this service's own (training.md)",
    effect="its information names the optimizer; the loss falls; parameters of AdamW are refused",
)
def dimuon(world: World) -> None:
    trainer = settled(world.service.create_lora_training_client)(BASE_MODEL, rank=2, optimizer=DIMUON)
    assert settled(trainer.get_info)().optimizer_config.model_dump() == DIMUON.model_dump()
    losses = []
    for _ in range(3):
        losses.append(loss_of(settled(trainer.forward_backward)(DATA, "cross_entropy")))
        settled(trainer.optim_step)(types.DimuonParams(learning_rate=0.01))
    assert losses[2] < losses[1] < losses[0]
    with pytest.raises(tinker.TinkerError, match="has 'dimuon'"):
        settled(trainer.optim_step)(types.AdamParams())
