"""What one owner may have: sessions, what hangs on them, metadata, and bytes of checkpoints."""

import pytest

from spmd_tx.bounds import Bounds
from spmd_tx.coordinator.catalog.catalog import open_catalog
from spmd_tx.coordinator.checkpoints.catalog import SaveOptions, open_checkpoints
from spmd_tx.coordinator.checkpoints.store import LocalStore
from spmd_tx.coordinator.wire.checkpoint_paths import CheckpointPath
from spmd_tx.errors import InvalidRequest
from spmd_tx.protocol.commands import AdapterSpec

BASE_MODEL = "Qwen/Qwen3-0.6B"
ADAPTER = AdapterSpec(rank=4)


@pytest.fixture
def bound(services, monkeypatch):
    def bound(**bounds):
        monkeypatch.setattr(services.quotas, "_bounds", Bounds(**bounds))

    return bound


async def refusal(client, path, **body):
    response = await client.post(path, json=body)
    assert response.status_code == 400, response.text
    return response.json()["detail"]


async def test_an_owner_has_a_number_of_open_sessions(client_for, bound, services):
    bound(open_sessions=2)
    alice, bob = await client_for("alice"), await client_for("bob")
    first, _ = [(await alice.post("create_session", json={})).json()["session_id"] for _ in range(2)]
    assert "'alice' has 2 open sessions" in await refusal(alice, "create_session")
    assert (await bob.post("create_session", json={})).status_code == 200
    await alice.post(f"sessions/{first}/finish", json={})
    assert (await alice.post("create_session", json={})).status_code == 200
    assert "limit open_sessions" in await refusal(alice, "create_session")
    assert (await open_catalog(services.database)).open_sessions_of("alice") == 2


async def test_an_owner_creates_a_number_of_sessions_in_a_day(client_for, bound):
    bound(sessions_per_day=3)
    alice, bob = await client_for("alice"), await client_for("bob")
    for _ in range(3):
        created = await alice.post("create_session", json={})
        await alice.post(f"sessions/{created.json()['session_id']}/finish", json={})
    assert "'alice' has created 3 sessions in a day" in await refusal(alice, "create_session")
    copy = {"source_path": "tinker://a/weights/b", "destination_project_id": "p"}
    assert "sessions in a day" in await refusal(alice, "copy_weights", **copy)
    assert (await bob.post("create_session", json={})).status_code == 200


async def test_an_owner_has_a_number_of_bytes_of_metadata_kept_in_a_day(client_for, bound):
    bound(metadata_bytes_per_day=1 << 20)
    alice, bob = await client_for("alice"), await client_for("bob")
    large = {"user_metadata": {"a": "x" * 60_000}}
    for _ in range(17):
        session = (await alice.post("create_session", json=large)).json()["session_id"]
    assert "limit metadata_bytes_per_day" in await refusal(alice, "create_session", **large)
    model = {"session_id": session, "base_model": BASE_MODEL, "lora_config": {"rank": 8}}
    assert "metadata_bytes_per_day" in await refusal(alice, "create_model", model_seq_id=0, **model, **large)
    assert (await alice.post("create_model", json={"model_seq_id": 0, **model})).status_code == 200
    assert (await bob.post("create_session", json=large)).status_code == 200


async def test_a_session_has_numbers_of_models_and_samplers(api, session_id):
    bounds, place = Bounds(), {"session_id": session_id, "base_model": BASE_MODEL}
    model = {**place, "lora_config": {"rank": 8}, "model_seq_id": bounds.models_per_session}
    assert "limit models_per_session" in await refusal(api, "create_model", **model)
    model["model_seq_id"] -= 1
    assert (await api.post("create_model", json=model)).status_code == 200
    copy = {"source_path": "tinker://a/weights/b", "session_id": session_id, "model_seq_id": 2**63 - 1}
    assert "limit models_per_session" in await refusal(api, "copy_weights", **copy)
    sampler = {**place, "sampling_session_seq_id": bounds.samplers_per_session}
    assert "limit samplers_per_session" in await refusal(api, "create_sampling_session", **sampler)
    sampler["sampling_session_seq_id"] -= 1
    assert (await api.post("create_sampling_session", json=sampler)).status_code == 200


async def failure(api, path, **body):
    """Of a request that was taken."""
    response = await api.post(path, json=body)
    assert response.status_code == 200, response.text
    answer = await api.post("retrieve_future", json={"request_id": response.json()["request_id"]})
    assert answer.json()["category"] == "user"
    return answer.json()["error"]


async def test_numbers_of_what_training_makes_fail_their_futures(api, model_id, session_id):
    bounds = Bounds()
    save = {"model_id": model_id, "seq_id": 1, "sampling_session_seq_id": bounds.samplers_per_session}
    assert "limit samplers_per_session" in await failure(api, "save_weights_for_sampler", **save)
    loss = {"session_id": session_id, "custom_loss_seq_id": bounds.custom_losses_per_session}
    more = {"name": "loss", "inputs": [{"name": "logprobs", "rank": 1}], "graph": {"nodes": []}}
    assert "limit custom_losses_per_session" in await failure(api, "create_custom_loss", **loss, **more)


async def test_the_bytes_of_an_owners_checkpoints_are_bounded_when_a_save_begins(
    api, services, tmp_path, session_id
):
    store = LocalStore(tmp_path / "checkpoints")
    checkpoints = await open_checkpoints(services.database, store, services.storage, 2000)

    async def save(name, size=1000, **options):
        path = CheckpointPath(f"{session_id}:train:0", "weights", name)
        staged = await checkpoints.begin(path, SaveOptions(**options))
        staged.mkdir(parents=True)
        (staged / "file").write_bytes(bytes(size))
        base = services.bases.default.checkpoints
        await checkpoints.complete(path, staged, ADAPTER, SaveOptions(**options), base)
        return path

    first = await save("a")
    await save("b")
    with pytest.raises(
        InvalidRequest, match=r"of 'local' have 2.0 KiB, and one owner may have 2.0 KiB; delete"
    ):
        await save("c")
    await save("b", 500, overwrite=True)
    await save("c", 500)
    with pytest.raises(InvalidRequest, match="limit checkpoint_bytes"):
        await checkpoints.copy(first, first._replace(name="copy"), SaveOptions())
    await checkpoints.delete(first)
    await save("d")
