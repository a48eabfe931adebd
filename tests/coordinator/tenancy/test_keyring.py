import asyncio
import logging
from contextlib import asynccontextmanager, suppress
from urllib.parse import parse_qsl, urlsplit

import pytest
from sqlalchemy import delete, update

from spmd_tx.coordinator.http.security.signed_urls import SignedUrls
from spmd_tx.coordinator.runtime import metrics
from spmd_tx.coordinator.storage.tables import ApiKeyRow, ServerState
from spmd_tx.coordinator.tenancy import keyring as keyring_module
from spmd_tx.coordinator.tenancy import keys, keys_seen
from spmd_tx.coordinator.tenancy.callers import EVERYONE, KeyLimits
from spmd_tx.coordinator.tenancy.keyring import open_keyring
from spmd_tx.coordinator.tenancy.keys import NewKeyOptions
from spmd_tx.errors import Forbidden, Unauthorized
from tests.support.databases import mostly_sqlite


@pytest.fixture
def make(database):
    async def make(owner="alice", **options):
        async with database.transaction() as db:
            return await keys.create(db, NewKeyOptions(owner, **options))

    return make


@pytest.fixture
def revoke(database):
    async def revoke(id):
        async with database.transaction() as db:
            await keys.revoke(db, id)

    return revoke


@pytest.fixture
async def keyring(database, tmp_path):
    return await open_keyring(database, tmp_path)


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


@mostly_sqlite
@pytest.mark.parametrize("token", [None, "", "tml-local", "tml-" + "0" * 48])
def test_without_any_key_everyone_is_local_and_may_do_everything(keyring, token):
    assert keyring.caller(token) == EVERYONE


async def test_a_key_tells_who_calls_and_what_they_may(make, keyring):
    limits = KeyLimits(adapters=3)
    token, row = await make("bob", role="read-only", limits=limits)
    await keyring.look()
    caller = keyring.caller(token)
    assert (caller.owner, caller.role, caller.key_id, caller.limits) == ("bob", "read-only", row.id, limits)


@mostly_sqlite
@pytest.mark.parametrize("token", [None, "", "tml-local", "tml-" + "0" * 48])
async def test_once_there_is_a_key_nobody_comes_in_without_one(make, keyring, token):
    await make()
    await keyring.look()
    with pytest.raises(Unauthorized):
        keyring.caller(token)


async def test_the_end_of_the_last_key_opens_the_server_to_nobody(make, revoke, keyring, database, tmp_path):
    token, row = await make()
    await revoke(row.id)
    await keyring.look()
    for ring in (keyring, await open_keyring(database, tmp_path)):
        with pytest.raises(Unauthorized, match=f"API key {row.id} of 'alice' was revoked"):
            ring.caller(token)


@mostly_sqlite
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


@mostly_sqlite
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
    assert caplog.text.count("cannot read the API keys now") == 1
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


async def remove_rows(database):
    """What a bad restore does."""
    async with database.transaction() as db:
        await db.execute(delete(ApiKeyRow))


@pytest.mark.parametrize("lost", ["the file", "the flag", "nothing"])
async def test_once_there_were_keys_an_empty_table_opens_the_server_to_nobody(
    make, keyring, database, tmp_path, caplog, lost
):
    token, _ = await make()
    await keyring.look()
    await remove_rows(database)
    if lost == "the file":
        (tmp_path / keys_seen.FILE).unlink()
    elif lost == "the flag":
        async with database.transaction() as db:
            await db.execute(update(ServerState).values(had_keys=False))
    await keyring.look()
    for ring in (keyring, await open_keyring(database, tmp_path)):
        for shown in (token, None):
            with pytest.raises(Unauthorized, match="had API keys and finds none"):
                ring.caller(shown)
    assert "all API keys are gone" in caplog.text
    again, _ = await make()
    await keyring.look()
    assert keyring.caller(again).owner == "alice"


@mostly_sqlite
async def test_that_all_keys_are_gone_is_said_again_and_again_and_counted(make, keyring, database, caplog):
    def missing():
        return metrics.REGISTRY.get_sample_value("spmd_tx_keys_missing_seconds_total")

    await make()
    await keyring.look()
    before = missing()
    await remove_rows(database)
    for _ in range(keyring_module.LOOKS_BETWEEN_ERRORS + 1):
        await keyring.look()
    assert caplog.text.count("all API keys are gone") == 2
    seconds = keyring_module.SECONDS_BETWEEN_LOOKS * (keyring_module.LOOKS_BETWEEN_ERRORS + 1)
    assert missing() - before == pytest.approx(seconds)


async def test_an_operator_can_go_back_to_a_server_without_keys(make, keyring, database, tmp_path):
    await make()
    await keyring.look()
    async with database.transaction() as db:
        assert await keys_seen.forget(db, tmp_path) == 1
    await keyring.look()
    with pytest.raises(Unauthorized):  # it may listen on a network
        keyring.caller(None)
    assert (await open_keyring(database, tmp_path)).caller(None) == EVERYONE


@mostly_sqlite
async def test_that_there_are_keys_is_noted_once_the_disk_is_back(make, keyring, tmp_path, monkeypatch):
    await make()
    (tmp_path / keys_seen.FILE).mkdir()
    with pytest.raises(IsADirectoryError):
        await keyring.look()
    (tmp_path / keys_seen.FILE).rmdir()
    await keyring.look()
    assert (tmp_path / keys_seen.FILE).is_file()


@pytest.fixture
def urls():
    return SignedUrls(b"secret" * 6)


@pytest.fixture
def open_url(urls, keyring):
    """What the guard of all routes does with a signed URL."""

    def open_url(url):
        split = urlsplit(url)
        reader = urls.caller(split.path, dict(parse_qsl(split.query)))
        keyring.vouch(reader)
        return reader.owner

    return open_url


@mostly_sqlite
@pytest.mark.parametrize("owner, role", [("bob", "user"), ("root", "admin")])
async def test_a_signed_url_ends_with_the_key_that_it_was_made_with(
    make, revoke, keyring, urls, open_url, owner, role
):
    _, row = await make(owner, role=role)
    await make("bob")
    await keyring.look()
    url = urls.sign("http://server", "/a", "bob", row.id)
    assert open_url(url) == "bob"
    await revoke(row.id)
    await keyring.look()
    with pytest.raises(Forbidden, match="API key with which this URL was made"):
        open_url(url)


@mostly_sqlite
async def test_a_signed_url_ends_when_its_key_expires(make, keyring, urls, open_url, clock):
    _, row = await make("bob", lifetime=60.0)
    await keyring.look()
    url = urls.sign("http://server", "/a", "bob", row.id)
    assert open_url(url) == "bob"
    clock.now += 60
    with pytest.raises(Forbidden):
        open_url(url)


@mostly_sqlite
async def test_a_key_signs_for_others_only_as_admin(make, keyring, urls, open_url):
    _, row = await make("mallory")
    await keyring.look()
    with pytest.raises(Forbidden, match="does not see what belongs to 'bob'"):
        open_url(urls.sign("http://server", "/a", "bob", row.id))


@mostly_sqlite
async def test_a_url_that_was_made_without_keys_ends_when_there_are_keys(make, keyring, urls, open_url):
    url = urls.sign("http://server", "/a", "local", None)
    assert open_url(url) == "local"
    await make()
    await keyring.look()
    with pytest.raises(Forbidden):
        open_url(url)


@mostly_sqlite
async def test_a_mistake_in_looking_at_the_keys_is_reported_and_the_next_look_comes(
    make, keyring, monkeypatch, caplog
):
    token, _ = await make()
    await keyring.look()
    looks = []

    async def mistaken():
        looks.append(token)
        raise ZeroDivisionError

    monkeypatch.setattr(keyring, "look", mistaken)
    monkeypatch.setattr(keyring_module, "SECONDS_BETWEEN_LOOKS", 0.01)
    watching = asyncio.create_task(keyring.watch())
    while len(looks) < 3:
        assert not watching.done()
        await asyncio.sleep(0.01)
    watching.cancel()
    await asyncio.wait([watching])
    keyring.caller(token)
    assert caplog.text.count("internal error") == 1  # of all looks in a row
