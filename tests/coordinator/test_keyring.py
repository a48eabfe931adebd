import asyncio
import logging
from contextlib import asynccontextmanager, suppress

import pytest

from spmd_tx.coordinator import keyring as keyring_module
from spmd_tx.coordinator import keys
from spmd_tx.coordinator.callers import EVERYONE, KeyLimits
from spmd_tx.coordinator.keyring import open_keyring
from spmd_tx.coordinator.keys import Wish
from spmd_tx.errors import Unauthorized


@pytest.fixture
def make(database):
    async def make(owner="alice", **wish):
        async with database.transaction() as db:
            return await keys.create(db, Wish(owner, **wish))

    return make


@pytest.fixture
def revoke(database):
    async def revoke(id):
        async with database.transaction() as db:
            await keys.revoke(db, id)

    return revoke


@pytest.fixture
async def keyring(database):
    return await open_keyring(database)


@pytest.fixture
def clock(monkeypatch):
    """The time, to be set."""

    class Clock:
        now = 1e9

        def time(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(keyring_module, "time", clock)
    monkeypatch.setattr(keys, "time", clock)
    return clock


async def last_used(database):
    async with database.reading() as db:
        return {row.owner: row.last_used_at for row in await keys.listed(db)}


@pytest.mark.parametrize("token", [None, "", "tml-local", "tml-" + "0" * 48])
def test_without_any_key_everyone_is_local_and_may_do_everything(keyring, token):
    assert keyring.caller(token) == EVERYONE


async def test_a_key_tells_who_calls_and_what_they_may(make, keyring):
    limits = KeyLimits(adapters=3)
    token, row = await make("bob", role="read-only", limits=limits)
    await keyring.look()
    caller = keyring.caller(token)
    assert (caller.owner, caller.role, caller.key_id, caller.limits) == ("bob", "read-only", row.id, limits)


@pytest.mark.parametrize("token", [None, "", "tml-local", "tml-" + "0" * 48])
async def test_once_there_is_a_key_nobody_comes_in_without_one(make, keyring, token):
    await make()
    await keyring.look()
    with pytest.raises(Unauthorized):
        keyring.caller(token)


async def test_the_end_of_the_last_key_opens_the_server_to_nobody(make, revoke, keyring, database):
    token, row = await make()
    await revoke(row.id)
    await keyring.look()
    for ring in (keyring, await open_keyring(database)):
        with pytest.raises(Unauthorized, match=f"API key {row.id} of 'alice' was revoked"):
            ring.caller(token)


async def test_a_key_expires_by_the_clock_alone(make, keyring, clock):
    token, _ = await make(lifetime=60.0)
    await keyring.look()
    clock.now += 59
    keyring.caller(token)
    clock.now += 1
    with pytest.raises(Unauthorized, match="has expired"):
        keyring.caller(token)


async def test_a_running_server_notices_new_and_revoked_keys(make, revoke, keyring, monkeypatch, caplog):
    monkeypatch.setattr(keyring_module, "SECONDS_BETWEEN_LOOKS", 0.01)
    watching = asyncio.create_task(keyring.watch())
    token, row = await make()
    async with asyncio.timeout(10):
        while "every request needs an API key" not in caplog.text:
            await asyncio.sleep(0.01)
        keyring.caller(token)
        await revoke(row.id)
        with suppress(Unauthorized):
            while True:
                keyring.caller(token)
                await asyncio.sleep(0.01)
    watching.cancel()
    await asyncio.wait([watching])  # its transaction must end before the database is closed


async def test_while_the_database_is_away_the_known_keys_count(make, keyring, database, monkeypatch, caplog):
    token, _ = await make()
    await keyring.look()
    looks = 0

    @asynccontextmanager
    async def gone():
        nonlocal looks
        looks += 1
        raise ConnectionRefusedError("the database is gone")
        yield

    monkeypatch.setattr(database, "reading", gone)
    monkeypatch.setattr(keyring_module, "SECONDS_BETWEEN_LOOKS", 0.001)
    with caplog.at_level(logging.WARNING):
        watching = asyncio.create_task(keyring.watch())
        while looks < 3:
            await asyncio.sleep(0.001)
        watching.cancel()
        await asyncio.wait([watching])
    assert caplog.text.count("cannot look at the API keys") == 1
    assert keyring.caller(token).owner == "alice"


async def test_the_last_use_is_written_down_at_most_once_a_minute(make, keyring, database, clock):
    token, _ = await make()
    await make("idle")
    await keyring.look()

    async def use_at(seconds):
        clock.now = 1e9 + seconds
        keyring.caller(token)
        await keyring.note_uses()
        await keyring.look()
        return await last_used(database)

    assert await use_at(0) == {"alice": 1e9, "idle": None}
    assert await use_at(59) == {"alice": 1e9, "idle": None}
    assert await use_at(60) == {"alice": 1e9 + 60, "idle": None}
