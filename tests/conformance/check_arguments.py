"""Checks of arguments that change what a method does, and of those that this service refuses."""

from typing import Any

import numpy as np
import pyrage
import pytest
import tinker
from tinker import types

from tests.conformance.check_rest import fetch
from tests.conformance.check_training import parameters_of
from tests.conformance.registry import Standing, covers
from tests.conformance.world import World, settled
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
    does="Dimuon has no public definition; AdamW is offered",
    effect="the request is refused: this service has 'adamw' only",
    standing=Standing.CANNOT_APPLY,
)
def dimuon(world: World) -> None:
    with pytest.raises(tinker.BadRequestError, match="'adamw' only"):
        settled(world.service.create_lora_training_client)(BASE_MODEL, rank=2, optimizer=DIMUON)
