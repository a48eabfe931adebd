"""The names, groups and archive of runs: what people note about them in the console."""

import pytest

from tests.coordinator.http.console.test_run_states import no_run_is_kept as no_run_is_kept  # a fixture
from tests.coordinator.http.console.test_runs import numbers
from tests.coordinator.http.console.test_runs import run_id as run_id  # a fixture
from tests.coordinator.http.console.test_runs import three_runs as three_runs  # a fixture
from tests.coordinator.http.security.test_bounds_of_owners import bound as bound  # a fixture

RUNS = "http://server/console/api/runs"


async def test_a_run_gets_a_name_and_a_group_and_is_archived(api, session_id, three_runs):
    address = f"{RUNS}/{session_id}:train:"

    async def change(number, **body):
        return (await api.patch(f"{address}{number}", json=body)).raise_for_status().json()

    await change(1, name="Ablation A", group="sweep 1")
    await change(2, group="sweep 0")
    await change(1, archived=True)
    assert await numbers(api) == ([2, 0], None)
    assert await numbers(api, archived="true", sort="group") == ([1, 2, 0], None)
    assert await numbers(api, archived="true", search="ABLATION sweep") == ([1], None)
    assert await numbers(api, beginning=f"{session_id}:train:1") == ([1], None)
    run = (await api.get(f"{address}1")).json()
    assert (run["name"], run["group"], run["metadata"]) == ("Ablation A", "sweep 1", {"name": "half rate"})
    assert run["archived_at"] > 0
    run = await change(1, name=None, group=None, archived=False)
    assert (run["name"], run["group"], run["archived_at"]) == (None, None, None)
    assert await numbers(api, sort="group") == ([2, 1, 0], None)
    events = (await api.get("audit")).json()["entries"]
    assert [each["event"] for each in events][-4:] == ["run_changed"] * 4


@pytest.mark.parametrize("body", [{}, {"name": ""}, {"group": "x" * 201}, {"archived": None}, {"nam": "a"}])
async def test_an_odd_change_of_a_run_is_refused(api, run_id, body):
    refused = await api.patch(f"{RUNS}/{run_id}", json=body)
    assert refused.status_code == 400, refused.text


async def test_only_its_owner_and_admins_change_a_run_within_a_quota(client_for, bound):
    alice, mallory = await client_for("alice"), await client_for("mallory")
    root = await client_for("root", role="admin")
    session = (await alice.post("create_session", json={})).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "Qwen/Qwen3-0.6B"}
    created = await alice.post("create_model", json=body | {"lora_config": {"rank": 8}})
    address = f"{RUNS}/{created.json()['model_id']}"
    assert (await mallory.patch(address, json={"archived": True})).status_code == 404
    assert (await root.patch(address, json={"group": "kept"})).status_code == 200
    bound(metadata_bytes_per_day=40)
    assert (await alice.patch(address, json={"name": "a" * 20})).status_code == 200
    refused = await alice.patch(address, json={"name": "a" * 20})
    assert (refused.status_code, "metadata_bytes_per_day" in refused.text) == (400, True)
