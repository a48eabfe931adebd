import json

import pytest

from spmd_tx.coordinator.tenancy import keys
from tests.coordinator.http.real_server import bound as bound  # a fixture
from tests.coordinator.http.routes import BASE_MODEL


@pytest.fixture
async def admin(client_for):
    return await client_for("root", role="admin")


@pytest.fixture
async def alice(client_for):
    return await client_for("alice")


@pytest.fixture
async def checkpoint(alice):
    """The address of a checkpoint of hers, and its path."""

    async def result(route, **body):
        future = (await alice.post(route, json=body)).json()["request_id"]
        return (await alice.post("retrieve_future", json={"request_id": future})).json()

    session = (await alice.post("create_session", json={})).json()["session_id"]
    model = f"{session}:train:0"
    creation = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": BASE_MODEL,
        "lora_config": {"rank": 8},
    }
    await result("create_model", **creation)
    await result("save_weights", model_id=model, path="ck", seq_id=1)
    path = f"tinker://{model}/weights/ck"
    await result("load_weights", session_id=session, model_seq_id=1, path=path, optimizer=True)
    return f"training_runs/{model}/checkpoints/weights/ck", path


async def entries(client, **question):
    return (await client.get("audit", params=question)).raise_for_status().json()["entries"]


async def test_every_change_of_a_checkpoint_is_told_with_who_made_it(alice, admin, checkpoint):
    address, path = checkpoint
    await alice.put(f"{address}/ttl", json={"ttl_seconds": 3600})
    await alice.post(f"{address}/publish")
    await admin.delete(f"{address}/publish")
    copy = (
        await alice.post("copy_weights", json={"source_path": path, "destination_project_id": "p"})
    ).json()
    await alice.delete(address)
    told = await entries(alice, event_type="checkpoints")
    assert [(entry["event"], entry["event_details"]["actor"]) for entry in told] == [
        ("checkpoint_saved", "alice"),
        ("checkpoint_loaded", "alice"),
        ("checkpoint_ttl_set", "alice"),
        ("checkpoint_published", "alice"),
        ("checkpoint_unpublished", "root"),
        ("checkpoint_copied", "alice"),
        ("checkpoint_deleted", "alice"),
    ]
    assert {entry["tinker_path"] for entry in told} == {path, copy["tinker_path"]}
    assert told[0]["model_id"] == path.split("/")[2]
    assert told[2]["event_details"]["ttl_seconds"] == 3600
    assert told[5]["event_details"]["copied_from"] == path


async def test_what_was_refused_is_not_told(alice, checkpoint):
    address, _ = checkpoint
    before = await entries(alice)
    assert (await alice.put(f"{address}/ttl", json={"ttl_seconds": -1})).status_code == 400
    assert (await alice.delete(f"{address}x")).status_code == 404
    assert await entries(alice) == before


async def test_entries_name_keys_but_hold_no_secret(alice, admin, services):
    async with services.database.transaction() as db:
        token, row = await keys.create(db, keys.NewKeyOptions("alice"))
    async with services.database.transaction() as db:
        new = await keys.rotate(db, row.id, overlap=60.0)
        await keys.revoke(db, new.row.id)
        await keys.revoke(db, new.row.id)  # once is enough
    told = await entries(alice, event_type="organizations")
    assert [(entry["event"], entry["event_details"]["key"]) for entry in told[-4:]] == [
        ("key_created", row.id),
        ("key_created", new.row.id),
        ("key_rotated", row.id),
        ("key_revoked", new.row.id),
    ]
    assert {entry["event_details"]["actor"] for entry in told} == {"operator"}
    for secret in (token, new.token, keys.digest(token)):
        assert secret not in json.dumps(await entries(admin))


async def test_projects_have_their_own_events(alice, checkpoint):
    address, _ = checkpoint
    session = address.split("/")[1].split(":")[0]
    await alice.put(f"sessions/{session}/project", json={"project_id": "p"})
    (entry,) = await entries(alice, event_type="projects")
    assert entry["event_details"]["project_id"] == "p"
    assert await entries(alice, event_type="teams") == []


@pytest.mark.parametrize(
    "question", [{"event_type": "secrets"}, {"day": "yesterday"}, {"day": "10000-01-01"}], ids=str
)
async def test_questions_that_make_no_sense_are_refused(alice, question):
    assert (await alice.get("audit", params=question)).status_code == 400


@pytest.mark.parametrize("day", ["0001-01-01", "9999-12-31"])
async def test_the_first_and_the_last_day_of_the_calendar_have_no_entries(alice, day):
    assert await entries(alice, event_type="all", day=day) == []


async def test_a_long_day_is_read_in_parts_the_newest_first(alice, bound):
    for _ in range(7):
        (await alice.post("create_session", json={})).raise_for_status()
    whole = (await alice.get("audit")).json()
    assert (len(whole["entries"]), whole["next_before"]) == (8, None)  # with the key that was created
    bound(answer_bytes=600)
    found, before = [], {}
    while True:
        part = (await alice.get("audit", params=before)).raise_for_status().json()
        assert 0 < len(part["entries"]) <= 3
        found = part["entries"] + found
        if part["next_before"] is None:
            break
        before = {"before": part["next_before"]}
    assert found == whole["entries"]
