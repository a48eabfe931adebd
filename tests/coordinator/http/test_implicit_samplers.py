import pytest

from spmd_tx.coordinator.checkpoints.catalog import SaveOptions
from spmd_tx.coordinator.http.implicit_samplers import ImplicitSamplers
from spmd_tx.coordinator.http.security.access import Access
from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.tenancy.callers import EVERYONE, Caller
from spmd_tx.coordinator.wire.checkpoint_paths import SAMPLER_WEIGHTS, CheckpointPath
from spmd_tx.coordinator.wire.futures import SEQ_IDS_PER_CLIENT
from spmd_tx.coordinator.wire.sessions import CreateSessionRequest
from spmd_tx.errors import InvalidRequest, NotFound
from spmd_tx.protocol.commands import AdapterSpec

BASE_MODEL = "Qwen/Qwen3-0.6B"
PATH = CheckpointPath("run", SAMPLER_WEIGHTS, "name")
TIMEOUT = 1800.0
ALICE, MALLORY = (Caller(owner, "user") for owner in ("alice", "mallory"))


def access(services, caller=EVERYONE):
    return Access(caller, services.catalog, services.checkpoints, services.queue)


async def save(services):
    options = SaveOptions(overwrite=True)
    partial = await services.checkpoints.begin(PATH, options)
    partial.mkdir(parents=True)
    (partial / "adapter_model.safetensors").write_bytes(b"weights")
    base = services.bases.default.checkpoints
    await services.checkpoints.complete(PATH, partial, AdapterSpec(rank=4), options, base)


async def test_a_model_is_sampled_with_one_sampler_and_ever_new_numbers(services):
    first, second = [await services.implicit_samplers.of(BASE_MODEL, access(services)) for _ in range(2)]
    assert first is second
    assert [next(first.numbers), next(second.numbers)] == [0, 1]
    assert first.row.model_path is None


async def test_its_session_ends_when_it_was_not_used_for_a_while_and_another_follows(services):
    catalog, samplers = services.catalog, services.implicit_samplers
    first = await samplers.of(BASE_MODEL, access(services))
    now = clock.now()
    await samplers.of(BASE_MODEL, access(services))
    assert await catalog.expire_sessions(now + TIMEOUT - 1, TIMEOUT) == []
    assert await catalog.expire_sessions(now + TIMEOUT + 60, TIMEOUT) == [first.row.session_id]
    second = await samplers.of(BASE_MODEL, access(services))
    assert second.row.id != first.row.id
    assert await catalog.problem(second.row) is None


async def test_each_set_of_weights_has_a_session_of_its_own(services):
    await save(services)
    base, old = [
        await services.implicit_samplers.of(model, access(services)) for model in (BASE_MODEL, str(PATH))
    ]
    await save(services)
    new = await services.implicit_samplers.of(str(PATH), access(services))
    assert len({each.row.session_id for each in (base, old, new)}) == 3
    assert old.row.model_path == new.row.model_path == str(PATH)


async def test_a_checkpoint_that_was_deleted_is_no_model(services):
    await save(services)
    await services.implicit_samplers.of(str(PATH), access(services))
    await services.checkpoints.delete(PATH)
    with pytest.raises(NotFound, match="does not exist"):
        await services.implicit_samplers.of(str(PATH), access(services))


@pytest.mark.parametrize("model, error", [("gpt-5", NotFound), ("tinker://x", InvalidRequest)])
async def test_other_models_are_refused(services, model, error):
    with pytest.raises(error, match=model):
        await services.implicit_samplers.of(model, access(services))


async def test_owners_have_sessions_of_their_own_and_share_only_what_is_published(services):
    await save(services)
    alice, bob = (access(services, Caller(name, "user")) for name in ("alice", "bob"))
    rows = [(await services.implicit_samplers.of(BASE_MODEL, each)).row for each in (alice, bob)]
    sessions = [await services.catalog.session(row.session_id) for row in rows]
    assert [session.owner for session in sessions] == ["alice", "bob"]
    with pytest.raises(NotFound, match="does not exist"):
        await services.implicit_samplers.of(str(PATH), alice)
    await services.checkpoints.set_public(PATH, True)
    assert (await services.implicit_samplers.of(str(PATH), alice)).row.model_path == str(PATH)


async def test_a_variant_of_the_model_is_the_model_and_another_model_is_unknown(services):
    sampler = await services.implicit_samplers.of(f"{BASE_MODEL}:peft:8", access(services))
    assert (sampler.row.base_model, sampler.row.model_path) == (BASE_MODEL, None)
    with pytest.raises(NotFound, match="the model 'gpt' does not exist; this server has 'Qwen"):
        await services.implicit_samplers.of("gpt", access(services))


async def session_of(services, caller=EVERYONE):
    session = await services.catalog.create_session(CreateSessionRequest(tags=[]), caller)
    return await services.catalog.add_sampler(session.id, 0, BASE_MODEL)


async def test_a_sampling_session_is_sampled_as_one_of_its_clients(services):
    row = await session_of(services)
    first, again = [await services.implicit_samplers.of(row.id, access(services)) for _ in range(2)]
    assert first is again
    assert (first.row.id, next(first.numbers)) == (row.id, SEQ_IDS_PER_CLIENT)
    after_a_restart = ImplicitSamplers(services.catalog, services.bases)
    assert next((await after_a_restart.of(row.id, access(services))).numbers) == 2 * SEQ_IDS_PER_CLIENT


async def test_a_sampling_session_that_has_ended_or_is_foreign_is_no_model(services):
    row = await session_of(services, ALICE)
    with pytest.raises(NotFound):
        await services.implicit_samplers.of(row.id, access(services, MALLORY))
    alice = access(services, ALICE)
    await services.implicit_samplers.of(row.id, alice)
    await services.catalog.end_session(row.session_id, "its client was silent")
    with pytest.raises(InvalidRequest, match="has ended"):
        await services.implicit_samplers.of(row.id, alice)
    with pytest.raises(NotFound):
        await services.implicit_samplers.of("unknown:sample:0", alice)
