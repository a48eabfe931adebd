import time

import pytest

from spmd_tx.coordinator.storage.database import in_database, open_beside, open_database
from spmd_tx.coordinator.tenancy import keys
from spmd_tx.coordinator.tenancy.callers import KeyLimits
from spmd_tx.coordinator.tenancy.keys import NewKeyOptions
from spmd_tx.errors import StartError

DAY = 24 * 3600.0


@pytest.fixture
def change(database):
    """Do something with the keys in a transaction of its own."""

    async def change(work, *arguments):
        async with database.transaction() as db:
            return await work(db, *arguments)

    return change


async def test_only_the_hash_of_a_key_is_kept(change):
    token, row = await change(keys.create, NewKeyOptions("alice"))
    assert token.startswith("tml-")
    assert len(token) == len("tml-") + 48  # 192 bits
    (kept,) = await change(keys.listed)
    values = [str(getattr(kept, column.key)) for column in kept.__table__.columns]
    assert not any(token in value or token[4:] in value for value in values)
    assert kept.hash == row.hash == keys.digest(token)


async def test_no_two_keys_are_alike(change):
    tokens = {(await change(keys.create, NewKeyOptions("alice"))).token for _ in range(10)}
    assert len(tokens) == len({row.id for row in await change(keys.listed)}) == 10


async def test_a_key_has_the_owner_role_limits_and_end_that_were_wished_for(change):
    limits = KeyLimits(adapters=2, queued_requests=100, queued_tokens=5000, requests_per_second=12.5)
    await change(keys.create, NewKeyOptions("alice", "read-only", DAY, limits))
    (row,) = await change(keys.listed)
    assert (row.owner, row.role, row.revoked_at, row.last_used_at) == ("alice", "read-only", None, None)
    assert (row.adapters, row.queued_requests, row.queued_tokens, row.requests_per_second) == (
        2,
        100,
        5000,
        12.5,
    )
    assert row.expires_at == pytest.approx(time.time() + DAY, abs=60)


@pytest.mark.parametrize(
    "wish, message",
    [
        (NewKeyOptions(""), "--owner is ''"),
        (NewKeyOptions("a b"), "--owner is 'a b'; use up to 100 letters"),
        (NewKeyOptions("a" * 101), "--owner is"),
        (NewKeyOptions("alice", lifetime=0.0), "--expires-days is 0; it must be more than 0"),
        (NewKeyOptions("alice", limits=KeyLimits(adapters=-1)), "--adapters is -1"),
        (
            NewKeyOptions("alice", limits=KeyLimits(requests_per_second=float("nan"))),
            "--requests-per-second is nan",
        ),
    ],
    ids=repr,
)
async def test_a_key_that_makes_no_sense_is_refused(change, wish, message):
    with pytest.raises(StartError, match=message):
        await change(keys.create, wish)
    assert await change(keys.listed) == []


async def test_a_revoked_key_stays_in_the_list(change):
    _, row = await change(keys.create, NewKeyOptions("alice"))
    first = (await change(keys.revoke, row.id)).revoked_at
    assert (await change(keys.revoke, row.id)).revoked_at == first  # the second time changes nothing
    (kept,) = await change(keys.listed)
    assert keys.problem(kept, time.time()) == "was revoked"


async def test_a_rotated_key_is_valid_for_some_more_time(change):
    limits = KeyLimits(adapters=2)
    old_token, old = await change(keys.create, NewKeyOptions("alice", "admin", 30 * DAY, limits))
    token, new = await change(keys.rotate, old.id, DAY)
    assert token != old_token
    assert (new.owner, new.role, new.adapters) == ("alice", "admin", 2)
    assert new.expires_at == pytest.approx(time.time() + 30 * DAY, abs=60)  # a full life of its own
    before = next(row for row in await change(keys.listed) if row.id == old.id)
    assert before.expires_at == pytest.approx(time.time() + DAY, abs=60)
    assert keys.problem(before, time.time()) is None
    assert keys.problem(before, time.time() + 2 * DAY) == "has expired"


async def test_rotation_does_not_prolong_the_life_of_the_old_key(change):
    _, old = await change(keys.create, NewKeyOptions("alice", lifetime=60.0))
    await change(keys.rotate, old.id, DAY)
    before = next(row for row in await change(keys.listed) if row.id == old.id)
    assert before.expires_at == old.expires_at


async def test_a_key_that_is_not_valid_cannot_be_rotated(change):
    _, old = await change(keys.create, NewKeyOptions("alice"))
    await change(keys.revoke, old.id)
    with pytest.raises(StartError, match=f"key {old.id} was revoked; .*keys create --owner alice"):
        await change(keys.rotate, old.id, DAY)


async def test_an_unknown_key_is_named(change):
    with pytest.raises(StartError, match=r"there is no key 'nobody'; spmd-tx keys list"):
        await change(keys.revoke, "nobody")


async def test_a_key_may_be_named_by_the_beginning_of_its_id(change, monkeypatch):
    for id in ("aa11", "aa22", "b_33"):
        monkeypatch.setattr(keys.secrets, "token_hex", lambda _, id=id: id)
        await change(keys.create, NewKeyOptions("alice"))
    assert [await change(keys.whole_id, each) for each in ("aa1", "aa22", "b_")] == ["aa11", "aa22", "b_33"]
    with pytest.raises(StartError, match="aa11 and aa22 begin with 'aa'; give more of the ID"):
        await change(keys.whole_id, "aa")
    for none in ("", "a_", "aa111"):
        with pytest.raises(StartError, match=f"there is no key '{none}'"):
            await change(keys.whole_id, none)


async def test_keys_are_made_beside_a_server_that_runs(database, database_url, tmp_path):
    token, _ = await in_database(database_url, tmp_path, lambda db: keys.create(db, NewKeyOptions("alice")))
    async with database.reading() as db:
        (row,) = await keys.listed(db)
    assert row.hash == keys.digest(token)


async def test_keys_are_made_before_the_first_start(tmp_path):
    await in_database(None, tmp_path / "new", lambda db: keys.create(db, NewKeyOptions("alice")))
    database = await open_database(None, tmp_path / "new")  # nothing is left locked
    async with database.reading() as db:
        assert len(await keys.listed(db)) == 1
    await database.close()


async def test_a_command_that_is_refused_changes_nothing(database, database_url, tmp_path):
    async def work(db):
        await keys.create(db, NewKeyOptions("alice"))
        await keys.revoke(db, "nobody")

    with pytest.raises(StartError, match="nobody"):
        await in_database(database_url, tmp_path, work)
    async with database.reading() as db:
        assert await keys.listed(db) == []


async def test_a_database_that_cannot_be_opened_is_named(tmp_path):
    (tmp_path / "spmd_tx.db").write_text("no database" * 100)
    with pytest.raises(StartError, match=r"spmd_tx\.db is damaged"):
        await open_beside(None, tmp_path)
    with pytest.raises(StartError, match=r"cannot open the database .* check --database-url"):
        await open_beside("postgresql://nobody@127.0.0.1:1/none", tmp_path)
