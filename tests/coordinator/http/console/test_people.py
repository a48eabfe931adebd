from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from spmd_tx.coordinator.http.console import people
from spmd_tx.coordinator.storage.tables import UsageRow
from spmd_tx.coordinator.tenancy.callers import KeyLimits

CONSOLE = "http://server/console/api"
HOUR = 500_000 * 3600


@pytest.fixture
async def root(client_for):
    return await client_for("root", role="admin")


async def keys_of(client):
    found = (await client.get(f"{CONSOLE}/keys")).raise_for_status().json()
    assert found["left_out"] == 0
    return {each["owner"]: each for each in found["keys"]}


def use(hour, owner, line, **tokens):
    amounts = dict.fromkeys(("trained", "forwarded", "prompt", "cached", "sampled"), 0) | tokens
    return UsageRow(hour=hour, owner=owner, line=line, session_id="s", checkpoints=0, **amounts)


@pytest.mark.parametrize("route", ["keys", "usage"])
@pytest.mark.parametrize("role", ["user", "read-only"])
async def test_only_admins_see_people(client_for, route, role):
    refused = await (await client_for("alice", role=role)).get(f"{CONSOLE}/{route}")
    assert refused.status_code == 403
    assert f"for admins, and your API key has the role {role}" in refused.json()["detail"]


async def test_keys_are_listed_without_their_secrets(root, client_for):
    limits = KeyLimits(adapters=2, requests_per_second=5.5)
    alice = await client_for("alice", role="read-only", lifetime=3600.0, limits=limits)
    answer = await root.get(f"{CONSOLE}/keys")
    assert alice.headers["x-api-key"] not in answer.text
    assert "hash" not in answer.text
    found = await keys_of(root)
    assert (found["root"]["is_own"], found["root"]["limits"], found["root"]["expires_at"]) == (True, {}, None)
    hers = found["alice"]
    assert (hers["role"], hers["is_own"], hers["problem"]) == ("read-only", False, None)
    assert hers["limits"] == {"adapters": 2, "requests_per_second": 5.5}
    assert hers["expires_at"] == pytest.approx(hers["created_at"] + 3600)


async def test_a_long_list_of_keys_is_cut_behind_the_newest(root, client_for, monkeypatch):
    await client_for("alice")
    monkeypatch.setattr(people, "MOST_KEYS", 1)
    found = (await root.get(f"{CONSOLE}/keys")).json()
    assert ([each["owner"] for each in found["keys"]], found["left_out"]) == (["alice"], 1)


async def test_a_server_without_keys_lists_none(api):
    assert await keys_of(api) == {}


async def test_an_admin_revokes_a_key_which_is_out_at_once(root, client_for):
    alice = await client_for("alice")
    id = (await keys_of(root))["alice"]["id"]
    (await root.delete(f"{CONSOLE}/keys/{id}")).raise_for_status()
    assert (await alice.get("sessions")).status_code == 401
    assert (await keys_of(root))["alice"]["problem"] == "was revoked"
    entries = (await root.get("audit", params={"day": datetime.now(UTC).date().isoformat()})).json()[
        "entries"
    ]
    (event,) = (each["event_details"] for each in entries if each["event"] == "key_revoked")
    assert (event["actor"], event["owner"], event["key"]) == ("root", "alice", id)
    missing = await root.delete(f"{CONSOLE}/keys/none")
    assert (missing.status_code, missing.json()["detail"]) == (404, "key 'none' does not exist")


async def test_a_key_is_revoked_by_admins_only(root, client_for):
    alice = await client_for("alice")
    id = (await keys_of(root))["root"]["id"]
    assert (await alice.delete(f"{CONSOLE}/keys/{id}")).status_code == 403
    assert (await root.get("sessions")).status_code == 200


async def test_usage_is_added_up_by_hour_and_owner(root, services, monkeypatch):
    monkeypatch.setattr(people, "clock", SimpleNamespace(now=lambda: HOUR + 3599.5))
    async with services.database.transaction() as db:
        db.add_all(
            [
                use(HOUR, "alice", "a", trained=5, sampled=1),
                use(HOUR, "alice", "b", trained=7, prompt=4, cached=3),
                use(HOUR, "bob", "c", forwarded=2),
                use(HOUR - 3600, "bob", "c", sampled=9),
                use(HOUR - 24 * 3600, "bob", "c", sampled=100),
            ]
        )
    found = (await root.get(f"{CONSOLE}/usage")).json()
    assert [tuple(each.values()) for each in found["hours"]] == [
        (HOUR - 3600, "bob", 0, 0, 0, 0, 9),
        (HOUR, "alice", 12, 0, 4, 3, 1),
        (HOUR, "bob", 0, 2, 0, 0, 0),
    ]
    assert (found["since"], found["until"], found["is_cut"]) == (HOUR - 23 * 3600, HOUR + 3599, False)
    longer = (await root.get(f"{CONSOLE}/usage", params={"hours": 25})).json()
    assert len(longer["hours"]) == 4
