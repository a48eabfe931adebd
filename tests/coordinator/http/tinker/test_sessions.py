from spmd_tx.coordinator.runtime.mesh_record import MenuProgress


async def test_the_handshake_asks_for_compressed_protobuf(api):
    config = (await api.post("client/config", json={"sdk_version": "0.38.0"})).json()
    assert config["proto_compress_fwdbwd"] is True
    assert config["pjwt_auth_enabled"] is False
    assert (await api.post("client/dynamic_config", json={"sdk_version": "0.38.0"})).json()[
        "sample_cancel_enabled"
    ]


async def test_capabilities_name_the_model_and_its_context(api):
    (model,) = (await api.get("get_server_capabilities")).json()["supported_models"]
    assert model == {
        "model_name": "Qwen/Qwen3-0.6B",
        "max_context_length": 128,
        "trainable": True,
        "sampleable": True,
    }


async def test_telemetry_is_taken(api):
    assert (await api.post("telemetry", json={"events": []})).json() == {"status": "accepted"}


async def test_health_tells_what_the_server_is_doing(api, services):
    health = services.health
    (group,) = health.groups
    group.ready, group.record.busy = False, "loading weights 45 %"
    response = await api.get("healthz")
    assert (response.status_code, response.json()) == (
        503,
        {"status": "starting", "detail": "loading weights 45 %"},
    )
    group.ready, group.record.busy = True, None
    response = await api.get("healthz")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
    health.refusal = "it shuts down"
    response = await api.get("healthz")
    assert (response.status_code, response.json()) == (503, {"status": "stopping", "detail": "it shuts down"})


async def test_a_probe_tells_a_server_that_is_alive_from_one_that_is_ready(api, services):
    (group,) = services.health.groups
    group.ready, group.record.busy = False, "loading weights 45 %"
    alive, ready = await api.get("http://server/healthz"), await api.get("http://server/readyz")
    assert (alive.status_code, alive.json()) == (200, {"status": "ok"})
    assert (ready.status_code, ready.json()["detail"]) == (503, "loading weights 45 %")


async def test_a_probe_of_a_server_that_warms_up_says_how_far_it_is(api, services):
    services.health.groups[0].record.menu = MenuProgress(3, 40, ("forward_backward 4x256",))
    assert (await api.get("http://server/healthz")).json() == {
        "status": "ok",
        "programs": {"ready": 3, "planned": 40, "compiling": "forward_backward 4x256"},
    }


async def test_sessions_have_ids_of_their_own(api):
    bodies = [{"tags": [], "sdk_version": "0.38.0", "type": "create_session"}, {}]
    ids = {(await api.post("create_session", json=body)).json()["session_id"] for body in bodies}
    assert len(ids) == 2


async def test_a_client_that_comes_early_is_told_to_wait(api, services):
    (group,) = services.health.groups
    group.ready, group.record.busy = False, "loading weights 45 %"
    assert "loading weights 45 %" in (await api.post("create_session", json={})).json()["info_message"]


async def test_heartbeats_are_answered_until_the_session_is_finished(api, session_id, services):
    heartbeat = {"session_id": session_id, "type": "session_heartbeat"}
    assert (await api.post("session_heartbeat", json=heartbeat)).json() == {"type": "session_heartbeat"}
    finish = {"reason": {"type": "success"}, "detail": None}
    assert (await api.post(f"sessions/{session_id}/finish", json=finish)).status_code == 200
    response = await api.post("session_heartbeat", json=heartbeat)
    assert response.status_code == 410
    assert session_id in response.json()["detail"]


async def test_the_heartbeat_of_an_unknown_session_is_not_found(api):
    response = await api.post("session_heartbeat", json={"session_id": "nobody"})
    assert response.status_code == 404
    assert "nobody" in response.json()["detail"]


async def test_finishing_frees_the_session_once(api, session_id, services):
    for _ in range(2):
        body = {"reason": {"type": "errored"}, "detail": None}
        assert (await api.post(f"sessions/{session_id}/finish", json=body)).status_code == 200
    assert services.scheduler.ended_sessions == [session_id]


async def test_finishing_an_unknown_session_is_not_found(api):
    response = await api.post("sessions/nobody/finish", json={"reason": {"type": "success"}})
    assert response.status_code == 404


async def test_sessions_are_listed_newest_first(api):
    first, second = [(await api.post("create_session", json={})).json()["session_id"] for _ in range(2)]
    assert (await api.get("sessions?limit=20&offset=0&access_scope=owned")).json() == {
        "sessions": [second, first]
    }
    assert (await api.get("sessions?limit=1&offset=1")).json() == {"sessions": [first]}


async def test_a_session_tells_its_runs_and_samplers(api, session_id, model_id):
    sampling = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "Qwen/Qwen3-0.6B"}
    await api.post("create_sampling_session", json=sampling)
    session = (await api.get(f"sessions/{session_id}?access_scope=owned")).json()
    assert session["training_run_ids"] == [model_id]
    assert session["sampler_ids"] == [f"{session_id}:sample:0"]


async def test_a_session_can_be_given_to_a_project(api, session_id):
    response = await api.put(f"sessions/{session_id}/project", json={"project_id": "p1"})
    assert response.status_code == 200
