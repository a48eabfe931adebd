import pytest
from sqlalchemy import insert

from spmd_tx.coordinator.catalog.catalog import SamplerWeights, open_catalog
from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.storage.tables import ModelRow
from spmd_tx.coordinator.tenancy.callers import Caller
from spmd_tx.coordinator.wire.sessions import CreateSessionRequest
from spmd_tx.errors import InvalidRequest, NotFound

TIMEOUT = 100.0  # seconds


@pytest.fixture
async def catalog(database):
    return await open_catalog(database)


@pytest.fixture
async def session(catalog):
    return await catalog.create_session(CreateSessionRequest(user_metadata={"run": 1}, display_name="mine"))


async def add_model(database, session, number=0):
    model_id = f"{session.id}:train:{number}"
    async with database.transaction() as db:
        await db.execute(
            insert(ModelRow).values(
                id=model_id,
                session_id=session.id,
                base_model="base",
                rank=8,
                alpha=32.0,
                train_attn=True,
                train_mlp=True,
                train_unembed=False,
                created_at=0.0,
            )
        )
    return model_id


async def test_a_session_is_found_with_what_its_client_said(catalog, session):
    found = await catalog.open_session(session.id)
    assert (found.user_metadata, found.display_name) == ({"run": 1}, "mine")


@pytest.mark.parametrize("id", ["nobody", "a\0b", "':--"])
async def test_unknown_ids_are_not_found(catalog, id):
    for look_up in (catalog.session, catalog.model, catalog.sampler, catalog.heartbeat):
        with pytest.raises(NotFound, match="does not exist"):
            await look_up(id)


async def test_a_heartbeat_keeps_a_session(catalog, session):
    assert await catalog.heartbeat(session.id)
    assert await catalog.expire_sessions(clock.now() + TIMEOUT / 2, TIMEOUT) == []


async def test_a_client_that_is_late_is_told_from_one_that_is_there(catalog, session, monkeypatch):
    now = clock.now()
    monkeypatch.setattr(clock, "now", lambda: now)
    await catalog.heartbeat(session.id)
    now += 20
    assert catalog.silent_seconds(session.id) is None
    now += 20
    assert catalog.silent_seconds(session.id) == 40
    await catalog.heartbeat(session.id)
    assert catalog.silent_seconds(session.id) is None
    now += 40
    await catalog.end_session(session.id, "of a test")
    assert catalog.silent_seconds(session.id) is None


async def test_a_silent_session_expires_and_says_why(catalog, session):
    assert await catalog.expire_sessions(clock.now() + 2 * TIMEOUT, TIMEOUT) == [session.id]
    assert not await catalog.heartbeat(session.id)
    with pytest.raises(InvalidRequest, match="silent for 100 seconds"):
        await catalog.open_session(session.id)
    assert await catalog.expire_sessions(clock.now() + 2 * TIMEOUT, TIMEOUT) == []


async def test_a_session_ends_once(catalog, session):
    assert await catalog.end_session(session.id, "its client finished: success")
    assert not await catalog.end_session(session.id, "again")


async def test_what_belongs_to_an_ended_session_takes_no_requests(catalog, database, session):
    model = await catalog.model(await add_model(database, session))
    sampler = await catalog.add_sampler(session.id, 0, "base")
    assert await catalog.problem(model) is None
    await catalog.end_session(session.id, "its client finished: success")
    for row in (model, sampler):
        assert "its client finished" in await catalog.problem(row)


async def test_work_is_a_sign_of_life(catalog, database, session, monkeypatch):
    model = await catalog.model(await add_model(database, session))
    later = clock.now() + 2 * TIMEOUT
    monkeypatch.setattr(clock, "now", lambda: later)
    await catalog.problem(model)
    assert await catalog.expire_sessions(later + 1, TIMEOUT) == []


async def test_after_a_restart_sessions_models_and_samplers_go_on(catalog, database, session):
    model_id = await add_model(database, session)
    ephemeral = await catalog.add_sampler(session.id, 0, "base", SamplerWeights(model_id=model_id))
    ended = await catalog.create_session(CreateSessionRequest())
    other = await add_model(database, ended)
    await catalog.end_session(ended.id, "its client has closed it")

    restarted = await open_catalog(database)

    assert await restarted.heartbeat(session.id)
    assert await restarted.problem(await restarted.model(model_id)) is None
    assert await restarted.problem(await restarted.sampler(ephemeral.id)) is None
    assert [model.id for model in await restarted.open_models([])] == [model_id]
    assert {model.id for model in await restarted.open_models([ended.id])} == {model_id, other}
    assert (restarted.has_ended(session.id), restarted.has_ended(ended.id)) == (False, True)


async def test_the_owner_of_an_ended_session_with_work_left_is_known_after_a_restart(catalog, database):
    bobs = await catalog.create_session(CreateSessionRequest(), Caller("bob", "user"))
    await catalog.end_session(bobs.id, "its client finished: success")
    restarted = await open_catalog(database)
    await restarted.open_models([bobs.id])
    assert restarted.owner_of(bobs.id) == "bob"
    assert restarted.has_ended(bobs.id)


async def test_an_ended_session_stays_ended_after_a_restart(catalog, database, session):
    await catalog.end_session(session.id, "its client finished: success")
    assert not await (await open_catalog(database)).heartbeat(session.id)


async def test_a_models_adapter_is_remembered(catalog, database, session):
    model = await catalog.model(await add_model(database, session))
    assert (model.adapter.rank, model.adapter.train_unembed) == (8, False)


async def test_the_same_sampler_number_is_the_same_sampler(catalog, session):
    first = await catalog.add_sampler(session.id, 0, "base", SamplerWeights("tinker://r/sampler_weights/n"))
    second = await catalog.add_sampler(session.id, 0, "base", SamplerWeights("tinker://r/sampler_weights/n"))
    assert first.id == second.id == f"{session.id}:sample:0"


async def test_a_sampler_number_cannot_name_two_things(catalog, session):
    await catalog.add_sampler(session.id, 0, "base")
    with pytest.raises(InvalidRequest, match="already in use"):
        await catalog.add_sampler(session.id, 0, "base", SamplerWeights(model_id="model"))
