"""Every entry of the table is called against a server with keys, by two accounts."""

import asyncio
import gc
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from spmd_tx.coordinator.storage.database import in_database
from spmd_tx.coordinator.tenancy import keys
from spmd_tx.coordinator.tenancy.keys import NewKeyOptions
from tests.conformance.all_checks import TWICE, entries
from tests.conformance.registry import Check
from tests.conformance.world import World
from tests.sdk.conftest import certificates_are_read_once as certificates_are_read_once
from tests.sdk.examples import SECONDS
from tests.sdk.server import Server

pytestmark = [
    pytest.mark.filterwarnings("ignore:(DEPRECATED|Using the future):FutureWarning"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # the SDK leaves sockets open
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::tinker.lib.experimental.ExperimentalWarning"),
]


@pytest.fixture(scope="module")
def world(shared_server: Server, seeing_server: Server, shared_model_dir: Path) -> Iterator[World]:
    data_dir = shared_server.data_dir
    tokens = [asyncio.run(in_database(None, data_dir, _new_key(owner))) for owner in ("owner", "stranger")]
    _wait_until_keys_are_asked_for(shared_server)
    world = World(shared_server, seeing_server, shared_model_dir, *tokens)
    yield world
    world.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()  # the SDK's sockets, here and not in the middle of somebody else's test


@pytest.fixture(scope="module")
def world_of_futures(world: World) -> World:
    """The same; methods are called on clients that may not be there yet."""
    assert world.trained
    return replace(world, as_future=True)


CHECKS = {f"{entry.check.__module__.rpartition('.')[2]}.{entry.check.__name__}": entry for entry in entries}


@pytest.mark.parametrize("check", [pytest.param(entry.check, id=name) for name, entry in CHECKS.items()])
def test_it_does_what_the_table_says(check: Check, world: World):
    check(world)


OF_CLIENTS = [name for name, entry in CHECKS.items() if entry.group in TWICE]


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(CHECKS[name].check, id=name, marks=[pytest.mark.slow] if number % 3 else [])
        for number, name in enumerate(OF_CLIENTS)
    ],
)
def test_it_does_so_on_the_future_of_a_client(check: Check, world_of_futures: World):
    check(world_of_futures)


def _wait_until_keys_are_asked_for(server: Server) -> None:
    deadline = time.monotonic() + SECONDS
    while httpx.get(f"{server.url}/api/v1/get_server_capabilities").status_code != 401:
        assert time.monotonic() < deadline, "the server has not seen the new keys"
        time.sleep(0.1)


def _new_key(owner: str) -> Callable:
    async def new_key(db) -> str:
        return (await keys.create(db, NewKeyOptions(owner))).token

    return new_key
