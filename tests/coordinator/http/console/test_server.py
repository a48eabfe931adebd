import asyncio

from sqlalchemy import update

from spmd_tx.coordinator.bases.health import GroupHealth
from spmd_tx.coordinator.runtime.mesh_record import ProgramRecord
from spmd_tx.coordinator.storage.tables import RequestRow
from spmd_tx.protocol.memory_plan import MemoryPlan
from tests.coordinator.conftest import running_group
from tests.coordinator.http.console.test_timeline import BASE_MODEL, finished_step, step
from tests.coordinator.http.routes import FINISH

PAGE = "http://server/console/api/server"
PLAN = MemoryPlan(
    pages=9, train_tokens=64, decode_rows=4, page_size=16, device_bytes=100, base_bytes=60, cache_bytes=40
)


async def page(client):
    return (await client.get(PAGE)).raise_for_status().json()


async def test_only_admins_see_the_server(client_for):
    refused = await (await client_for("alice")).get(PAGE)
    assert refused.status_code == 403
    assert "for admins, and your API key has the role user" in refused.json()["detail"]
    assert (await page(await client_for("root", role="admin")))["tenants"] == []


async def test_generations_have_the_reason_for_their_end(api, services):
    record = services.health.groups[0].record
    (before,) = (await page(api))["groups"]
    assert (before["mesh"], before["memory"], before["generations"]) == ({}, None, [])
    record.began(1, {"fsdp": 2, "ep": 1, "tp": 1}, ["node-a", "node-b"])
    record.ready("2 x cpu", PLAN)
    record.lost("worker 1 on node-b was killed by signal 9 (SIGKILL)")
    record.began(2, {"fsdp": 2, "ep": 1, "tp": 1}, ["node-a", "node-b"])
    record.programs.append(ProgramRecord("decode 8x256", 1.5, 7.0, 1, None))
    (found,) = (await page(api))["groups"]
    assert [(each["number"], each["reason"]) for each in found["generations"]] == [
        (2, None),
        (1, "worker 1 on node-b was killed by signal 9 (SIGKILL)"),
    ]
    assert (found["device"], found["hosts"]) == ("2 x cpu", ["node-a", "node-b"])
    assert found["programs"]["recent"][0]["program"] == "decode 8x256"
    uses = {each["use"]: each["bytes"] for each in found["memory"]["uses"]}
    assert uses == {
        "base weights": 60,
        "training slots": 0,
        "sampler slots": 0,
        "steps while they run": 0,
        "keys and values": 40,
    }


async def test_tenants_have_their_waits_and_shares(api, services, model_id):
    await finished_step(api, model_id, 1)
    services.scheduler.is_paused = True
    request_id = await step(api, model_id, 2)
    services.queue.note("sent", [request_id])
    services.queue.worked([request_id], 2.0)
    await step(api, model_id, 3)
    (tenant,) = (await page(api))["tenants"]
    assert (tenant["owner"], tenant["waiting"], tenant["running"], tenant["finished"]) == ("local", 1, 1, 2)
    assert tenant["device_share"] == 1.0
    assert 0 <= tenant["wait_median"] <= tenant["wait_most"] <= tenant["oldest_seconds"]


async def test_the_queue_has_the_oldest_unfinished_requests_with_their_owners(api, services, model_id):
    services.scheduler.is_paused = True
    ids = [await step(api, model_id, seq_id) for seq_id in range(1, 13)]
    services.queue.note("sent", ids[:1])
    found = await page(api)
    assert [each["id"] for each in found["queue"]] == ids[:10]
    assert found["queue_length"] == 12
    assert [each["is_running"] for each in found["queue"][:2]] == [True, False]
    assert {each["owner"] for each in found["queue"]} == {"local"}


async def test_a_tenant_keeps_its_name_when_its_session_has_ended(client_for):
    alice, admin = await client_for("alice"), await client_for("root", role="admin")
    session_id = (await alice.post("create_session", json={})).json()["session_id"]
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 8}}
    future = (await alice.post("create_model", json=body)).json()
    await alice.post("retrieve_future", json={"request_id": future["request_id"]})
    await alice.post(f"sessions/{session_id}/finish", json=FINISH)
    assert [tenant["owner"] for tenant in (await page(admin))["tenants"]] == ["alice"]


async def test_suspects_and_requests_given_up_are_listed(api, services, model_id):
    services.scheduler.is_paused = True
    ids = [await step(api, model_id, seq_id) for seq_id in (1, 2, 3)]
    for request_id, values in zip(ids, ({"losses": 1}, {"given_up": "it hangs"}, {"losses": 0}), strict=True):
        async with services.database.transaction() as db:
            await db.execute(update(RequestRow).where(RequestRow.id == request_id).values(**values))
    found = (await page(api))["suspects"]
    assert [(each["id"], each["losses"], each["reason"]) for each in found] == [
        (ids[1], 0, "it hangs"),
        (ids[0], 1, None),
    ]


async def test_the_disk_is_shown_as_measured(api, services):
    await asyncio.to_thread(services.storage.measure)
    services.storage.bytes_by_kind = {"payloads": 7}
    disk = (await page(api))["disk"]
    assert (disk["bytes_by_kind"], disk["problem"]) == ({"payloads": 7}, None)
    assert disk["free_bytes"] > 0


async def test_each_group_has_its_own_state_and_work(api, services, model_id):
    failed = "failed, and tried again later: no weights"
    services.health.groups.append(GroupHealth("teacher", "large", "large", "sample", problem="no weights"))
    services.health.groups[1].record.began(1, {"fsdp": 1, "ep": 1, "tp": 4}, ["node-c"])
    services.scheduler.is_paused = True
    ids = [await step(api, model_id, seq_id) for seq_id in (1, 2)]
    services.queue.note("sent", ids[:1])
    services.queue.worked(ids[:1], 2.0)
    main, teacher = (found := await page(api))["groups"]
    assert (main["waiting"], main["running"], teacher["waiting"], teacher["running"]) == (1, 1, 0, 0)
    assert main["busy"] > 0 == teacher["busy"]
    assert (main["role"], teacher["role"]) == ("train and sample", "sample")
    assert (teacher["state"], teacher["phase"], teacher["hosts"]) == ("failed", failed, ["node-c"])
    assert found["throughput"] == [] or max(each["busy"] for each in found["throughput"]) <= 0.5


async def test_requests_are_counted_where_they_are(api, services, model_id):
    services.health.groups.append(running_group("rollouts", role="sample"))
    services.scheduler.is_paused = True
    ids = [await step(api, model_id, seq_id) for seq_id in (1, 2, 3)]
    services.scheduler.elsewhere = dict.fromkeys(ids[1:], "rollouts")
    services.queue.note("sent", ids[1:2])
    main, rollouts = (await page(api))["groups"]
    assert (main["waiting"], main["running"], rollouts["waiting"], rollouts["running"]) == (1, 0, 1, 1)
