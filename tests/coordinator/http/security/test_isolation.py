"""Nobody learns of, reads or changes what belongs to somebody else, whichever route they try."""

import uuid
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import update

from spmd_tx.coordinator.storage.tables import ApiKeyRow, CheckpointRow
from tests.coordinator.http.routes import (
    ADMIN,
    BASE_MODEL,
    LISTINGS,
    OPEN,
    READING,
    REDIRECTS,
    SCHEMA,
    SIGN_IN,
    SIGNED,
    STREAM,
    TRACE,
    WITH_IDS,
    WITHOUT_IDS,
    Ids,
    all_routes,
    sample,
    send,
)
from tests.support.pictures import in_json, let_see, png


def what_it_ends(route) -> int:
    """Order routes so that what one of them ends or deletes is no longer needed."""
    method, path = route
    return 2 if method == "DELETE" else int(path.endswith("/finish"))


CASES = [(route, body) for route in sorted(WITH_IDS, key=what_it_ends) for body in WITH_IDS[route]]


def complaint_of(response) -> str:
    """Return the message of an error, in the format of Tinker's API or of OpenAI's."""
    body = response.json()
    return body["detail"] if "detail" in body else body["error"]["message"]


sqlite_only = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


async def set_up(client) -> Ids:
    """A session with one of everything."""

    async def result(route, **body):
        future = (await client.post(route, json=body)).raise_for_status().json()
        (await client.post("retrieve_future", json={"request_id": future["request_id"]})).raise_for_status()
        return future["request_id"]

    session = (await client.post("create_session", json={})).json()["session_id"]
    ids = Ids(session, "")
    lora = {"rank": 8}
    await result("create_model", session_id=session, model_seq_id=0, base_model=BASE_MODEL, lora_config=lora)
    await result("save_weights", model_id=ids.model, path=ids.name, seq_id=1)
    await result("save_weights_for_sampler", model_id=ids.model, path=ids.name, seq_id=2)
    await result("save_weights_external", model_id=ids.model, path=ids.name, seq_id=20)
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
    (await client.post("create_sampling_session", json=sampler)).raise_for_status()
    step = {"learning_rate": 1e-4}
    await result("optim_step", model_id=ids.model, seq_id=3, adam_params=step)
    text = {"tokens": [1], "type": "encoded_text"}
    prompt = {"chunks": [text, in_json(png()), text]}
    request = await result("asample", **(sample(ids, seq_id=1) | {"prompt": prompt}))
    upload = {"base_model": BASE_MODEL, "lora_config": lora}
    started = await client.post("external_weights_upload_start", json=upload)
    trajectory = (await client.post("trajectories", json={})).raise_for_status().json()["id"]
    return Ids(session, request, ids.name, started.raise_for_status().json()["upload_id"], trajectory)


@pytest.fixture(autouse=True)
def sees(services):
    """Let the model take images, so that there are some."""
    let_see(services.bases.default)


@pytest.fixture
async def alice(client_for):
    return await client_for("alice")


@pytest.fixture
async def mallory(client_for):
    return await client_for("mallory")


@pytest.fixture
async def hers(alice) -> Ids:
    return await set_up(alice)


@pytest.fixture
async def his(mallory) -> Ids:
    return await set_up(mallory)


def nobodys() -> Ids:
    trajectory = f"trj_{uuid.uuid4().hex[:24]}"
    return Ids(str(uuid.uuid4()), uuid.uuid4().hex, upload=str(uuid.uuid4()), trajectory=trajectory)


def told(response, ids: Ids):
    """Status and body, whatever the ids are."""
    text = response.text
    for name in ("session", "request", "upload", "trajectory"):
        text = text.replace(getattr(ids, name), name)
    return response.status_code, text, response.headers["content-type"]


async def test_every_route_is_tried(app):
    tried = (
        WITH_IDS.keys() | WITHOUT_IDS.keys() | LISTINGS | OPEN | REDIRECTS | SIGN_IN | SIGNED | SCHEMA | ADMIN
    )
    assert all_routes(app) == tried, "tests/coordinator/http/routes.py: put a route into one of these sets"


@sqlite_only
async def test_what_belongs_to_another_owner_is_answered_like_what_does_not_exist(alice, mallory, hers, his):
    for route, body in CASES:
        foreign = await send(mallory, route, hers, body(hers, his))
        unknown_ids = nobodys()
        unknown = await send(mallory, route, unknown_ids, body(unknown_ids, his))
        assert foreign.status_code == 404, route
        assert told(foreign, hers) == told(unknown, unknown_ids), route
    for route, body in CASES:  # all was in order but for the owner, and is still there
        own = await send(alice, route, hers, body(hers, hers))
        assert own.status_code in (200, 302) or is_refused_to_all(route, own), (route, own.text)


@sqlite_only
async def test_an_admin_may_do_everything(client_for, hers):
    admin = await client_for("root", role="admin")
    for route, body in CASES:
        answer = await send(admin, route, hers, body(hers, hers))
        assert answer.status_code in (200, 302) or is_refused_to_all(route, answer), (route, answer.text)


def is_refused_to_all(route, response) -> bool:
    """Whether it is the ttl of 0, or the end of an upload without files."""
    return response.status_code == 400 and route[1].endswith(("/ttl", "/external_weights_upload_finish"))


async def test_listings_show_only_what_is_the_callers(alice, mallory, client_for, hers, his):
    admin = await client_for("root", role="admin")

    async def listed(client):
        sessions = (await client.get("sessions")).json()["sessions"]
        runs = (await client.get("training_runs")).json()
        checkpoints = (await client.get("checkpoints")).json()
        assert runs["cursor"]["total_count"] == len(runs["training_runs"])
        assert checkpoints["cursor"]["total_count"] == len(checkpoints["checkpoints"])
        owners = {run["training_run_id"]: run["model_owner"] for run in runs["training_runs"]}
        return set(sessions), owners, {each["tinker_path"] for each in checkpoints["checkpoints"]}

    def paths(ids):
        return {ids.path(kind) for kind in ("weights", "sampler_weights", "external_weights")}

    assert await listed(alice) == ({hers.session}, {hers.model: "alice"}, paths(hers))
    assert await listed(mallory) == ({his.session}, {his.model: "mallory"}, paths(his))
    assert await listed(admin) == (
        {hers.session, his.session},
        {hers.model: "alice", his.model: "mallory"},
        paths(hers) | paths(his),
    )


@sqlite_only
async def test_a_trace_is_read_with_a_signature_of_its_owner_only(alice, mallory, hers, services):
    for client in (alice, mallory):
        assert (await send(client, TRACE, hers)).status_code == 403
    path = TRACE[1].format(session_id=hers.session)
    for owner, status in (("mallory", 404), ("alice", 200)):
        await alice.get(f"sessions/{hers.session}/trace_export")
        (key,) = (id for id, row in services.keyring._by_id.items() if row.owner == owner)
        url = services.signed_urls.sign("http://server", path, owner, key)
        assert (await mallory.get(url)).status_code == status


async def test_reports_show_only_what_is_the_callers(alice, mallory, client_for, hers, his):
    admin = await client_for("root", role="admin")
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    hours = {"starting_on": now - timedelta(hours=1), "ending_before": now + timedelta(hours=1)}
    hours = {name: time.isoformat() for name, time in hours.items()}

    async def seen(client):
        """Whose sessions appear, and whose names."""
        search = await client.post("sessions/search", json={"owner": {"type": "accessible"}})
        storage = (await client.get("billing/usage/checkpoints/current")).json()["data"]
        usage = (await client.get("billing/usage/events", params=hours)).json()
        entries = (await client.get("audit")).json()["entries"]
        sessions = [
            {each["session_id"] for each in search.json()["sessions"]},
            usage["sessions"].keys(),
            {
                entry["event_details"]["session_id"]
                for entry in entries
                if not entry["event_details"].keys() & {"key", "trajectory"}
            },
        ]
        owners = [
            {each["owner"] for each in search.json()["sessions"]},
            {event["user_id"] for event in usage["data"]},
            {item["org_user_urn"] for item in storage},
            {entry["event_details"]["owner"] for entry in entries} - {"root"},
        ]
        return sessions, owners

    assert await seen(alice) == ([{hers.session}] * 3, [{"alice"}] * 4)
    assert await seen(mallory) == ([{his.session}] * 3, [{"mallory"}] * 4)
    assert await seen(admin) == ([{hers.session, his.session}] * 3, [{"alice", "mallory"}] * 4)


@sqlite_only
async def test_loading_what_is_not_ones_own_fails_like_loading_what_does_not_exist(
    mallory, hers, his, services
):
    errors = []
    for seq_id, ids in ((4, hers), (5, nobodys())):
        load = {"model_id": his.model, "seq_id": seq_id, "path": ids.path("weights"), "optimizer": False}
        request = (await mallory.post("load_weights", json=load)).json()["request_id"]
        result = await mallory.post("retrieve_future", json={"request_id": request})
        errors.append(result.text.replace(ids.session, "SESSION"))
    assert errors[0] == errors[1]
    assert "does not exist" in errors[0]
    # Later requests of the model need not wait for the two.
    assert services.scheduler.consumed == [(his.model, 4), (his.model, 5)]


@sqlite_only
async def test_a_published_checkpoint_can_be_used_but_not_changed_by_others(alice, mallory, hers, his):
    for kind in ("weights", "sampler_weights"):
        address = f"training_runs/{hers.model}/checkpoints/{kind}/{hers.name}"
        assert (await alice.post(f"{address}/publish")).status_code == 200
        for change in (
            mallory.delete(address),
            mallory.delete(f"{address}/publish"),
            mallory.put(f"{address}/ttl", json={"ttl_seconds": 1}),
        ):
            assert (await change).status_code == 404
    path = hers.path("weights")
    sampler = {"session_id": his.session, "sampling_session_seq_id": 8}
    sample_from = sampler | {"model_path": hers.path("sampler_weights")}
    new = {"session_id": his.session, "model_seq_id": 9, "path": path, "optimizer": True}
    into = {"model_id": his.model, "seq_id": 4, "path": path, "optimizer": True}
    assert (await mallory.post("weights_info", json={"tinker_path": path})).status_code == 200
    assert (await mallory.post("create_sampling_session", json=sample_from)).status_code == 200
    for load in (new, into):
        request = (await mallory.post("load_weights", json=load)).json()["request_id"]
        result = await mallory.post("retrieve_future", json={"request_id": request})
        assert result.json()["path"] == path
    assert (await mallory.get(f"training_runs/{hers.model}/checkpoints")).status_code == 404


@sqlite_only
async def test_that_anothers_checkpoint_has_expired_is_not_told(alice, mallory, hers, services):
    async with services.database.transaction() as db:
        await db.execute(update(CheckpointRow).values(expires_at=1.0, is_public=False))
    body = {"tinker_path": hers.path("weights")}
    assert "has expired" in (await alice.post("weights_info", json=body)).text
    assert "does not exist" in (await mallory.post("weights_info", json=body)).text


@sqlite_only
async def test_a_refused_body_uses_up_no_number_of_anothers_model(alice, mallory, hers, services):
    no_step = {"model_id": hers.model, "seq_id": 4, "adam_params": "none"}
    for client, consumed in ((mallory, []), (alice, [(hers.model, 4)])):
        assert (await client.post("optim_step", json=no_step)).status_code == 400
        assert services.scheduler.consumed == consumed


async def test_rows_from_before_there_were_keys_belong_to_local(api, client_for):
    ids = await set_up(api)
    local, other = await client_for("local"), await client_for("other")
    body = {"tinker_path": ids.path("weights")}
    for client, status in ((local, 200), (other, 404)):
        assert (await client.get(f"sessions/{ids.session}")).status_code == status
        assert (await client.post("weights_info", json=body)).status_code == status


@sqlite_only
async def test_a_read_only_key_is_refused_wherever_something_would_change(client_for, alice, hers):
    reader = await client_for("alice", role="read-only")
    bodies = {route: body(hers, hers) for route, (body, *_) in WITH_IDS.items()} | WITHOUT_IDS
    bodies |= dict.fromkeys(LISTINGS - {STREAM})
    for route, body in bodies.items():
        response = await send(reader, route, hers, body)
        if route[0] == "GET" or route in READING:
            assert response.status_code in (200, 302), route
        else:
            assert response.status_code == 403, route
            assert "may only read" in complaint_of(response)


@sqlite_only
async def test_a_key_of_a_trajectory_opens_nothing_but_its_own_address(client_for, alice, hers, his):
    """Not even what is its owner's."""
    made = await alice.post(f"trajectories/{hers.trajectory}/keys", json={})
    sandbox = await client_for("alice")
    sandbox.headers["x-api-key"] = made.raise_for_status().json()["key"]
    bodies = {route: body(hers, hers) for route, (body, *_) in WITH_IDS.items()} | WITHOUT_IDS
    bodies |= dict.fromkeys((LISTINGS | ADMIN) - {STREAM})
    opened = set()
    for route, body in bodies.items():
        response = await send(sandbox, route, hers, body)
        if "/in/{trajectory}/" in route[1]:
            opened.add(response.status_code)
            assert (await send(sandbox, route, his, body)).status_code in (403, 404), route
        else:
            assert response.status_code == 403, route
            assert "can only sample in one trajectory" in response.text
    assert 200 in opened


@sqlite_only
@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"revoked_at": 1.0}, "was revoked"),
        ({"expires_at": 1.0}, "has expired"),
        ({"hash": "of another key"}, "does not know"),
        (None, "has none"),
    ],
    ids=["revoked", "expired", "unknown", "missing"],
)
async def test_without_a_valid_key_only_probes_are_answered(app, client_for, services, change, complaint):
    client = await client_for("alice")
    if change is None:
        del client.headers["x-api-key"]
    else:
        async with services.database.transaction() as db:
            await db.execute(update(ApiKeyRow).values(change))
        await services.keyring.look()
    for route in all_routes(app):
        response = await send(client, route, nobodys())
        status = 200 if route in OPEN else 403 if route in SIGNED | SIGN_IN else 401
        status = 302 if route in REDIRECTS else status
        assert response.status_code == status, route
        if status == 401:
            assert complaint in complaint_of(response)
            assert response.json().get("category", "user") == "user"
