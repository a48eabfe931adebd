"""No route takes in silence what it does not know: a field of a body, at any depth, or a parameter."""

import copy
import re
import uuid
from collections.abc import Iterator
from typing import Annotated, Any

import httpx
import pytest
from litestar import Litestar, Response, get
from litestar.params import FromQuery, QueryParameter

from spmd_tx.coordinator.http.unknown_parameters import CHECKED, refuse_unknown
from spmd_tx.errors import InvalidRequest
from tests.coordinator.http.routes import (
    BASE_MODEL,
    LISTINGS,
    STREAM,
    WITH_IDS,
    WITHOUT_IDS,
    Ids,
    all_routes,
    sample,
    send,
)

IDS = Ids(str(uuid.uuid4()), uuid.uuid4().hex)
UNREAD = {("POST", f"/api/v1/{name}") for name in ("client/config", "client/dynamic_config", "telemetry")}
OPEN_OBJECTS = "metrics", "args"  # whose names are the client's own
TENSOR = {"data": [1, 2, 3], "dtype": "int64", "shape": [3]}
FULLER = {
    ("POST", "/api/v1/create_model"): {
        "session_id": IDS.session,
        "model_seq_id": 0,
        "base_model": BASE_MODEL,
        "lora_config": {"rank": 8, "seed": 1},
        "optimizer_config": {"type": "adamw"},
    },
    ("POST", "/api/v1/asample"): sample(IDS) | {"target_prompt_logprobs": TENSOR},
    ("POST", "/api/v1/forward_backward"): {
        "model_id": IDS.model,
        "seq_id": 1,
        "forward_backward_input": {
            "data": [
                {
                    "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
                    "loss_fn_inputs": {"target_tokens": TENSOR},
                }
            ],
            "loss_fn": "cross_entropy",
        },
    },
    ("POST", "/api/v1/sessions/search"): {
        "owner": {"type": "user", "owner_urns": ["a"]},
        "statuses": [{"type": "client_finished", "reasons": ["success"]}],
        "cursor": {"last_created_at": "2026-01-01T00:00:00Z", "last_session_id": "a"},
    },
}
BODIES = [
    *((route, body(IDS, IDS)) for route, bodies in WITH_IDS.items() for body in bodies),
    *((route, body) for route, body in WITHOUT_IDS.items() if route not in UNREAD),
    *FULLER.items(),
]


def places(body: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where the objects of a body are that have fields."""
    if isinstance(body, dict):
        if path[-1:] != ("loss_fn_inputs",):
            yield path
        for name, value in body.items():
            if name not in OPEN_OBJECTS:
                yield from places(value, (*path, name))
    elif isinstance(body, list):
        for index, value in enumerate(body):
            yield from places(value, (*path, index))


def with_field(body: Any, path: tuple[str | int, ...], value: object) -> Any:
    changed = copy.deepcopy(body)
    inner = changed
    for step in path:
        inner = inner[step]
    inner["misspelt"] = value
    return changed


CASES = [
    (route, body, place)
    for route, body in BODIES
    for place in places(body)
    if route[1].startswith(CHECKED)  # the others have rules, and tests, of their own
]
FILLED = {
    "{session_id}": IDS.session,
    "{run_id}": IDS.model,
    "{sampler_id}": IDS.sampler,
    "{kind}": "weights",
    "{number}": "0",
}


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_field_that_no_route_knows_is_refused_by_name_at_any_depth(api):
    assert len(CASES) > 50
    for route, body, place in CASES:
        answer = await send(api, route, IDS, with_field(body, place, 0.5))
        assert answer.status_code == 400, (route, place, answer.text)
        assert "misspelt" in answer.text, (route, place, answer.text)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_field_of_a_newer_sdk_that_asks_for_nothing_is_taken(api):
    session = await api.post("create_session", json={"tags": [], "sdk_version": "9.9.9", "newer": []})
    session_id = session.raise_for_status().json()["session_id"]
    body = {
        "session_id": session_id,
        "model_seq_id": 0,
        "base_model": BASE_MODEL,
        "type": "create_model",
        "lora_config": {"rank": 8, "newer": 0},
        "newer": False,
    }
    assert (await api.post("create_model", json=body)).status_code == 200
    step = {"model_id": f"{session_id}:train:0", "seq_id": 1, "adam_params": {"newer": None}, "newest": ""}
    assert (await api.post("optim_step", json=step)).status_code == 200


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_training_request_with_an_unknown_field_is_refused_and_its_number_consumed(api, services):
    session = (await api.post("create_session", json={})).json()["session_id"]
    model = {"session_id": session, "model_seq_id": 0, "base_model": BASE_MODEL}
    await api.post("create_model", json=model | {"lora_config": {"rank": 8}})
    wrong = {"model_id": f"{session}:train:0", "seq_id": 1, "adam_params": {"lr": 1.0}}
    refused = await api.post("optim_step", json=wrong)
    assert refused.status_code == 400
    assert "adam_params.lr is not known" in refused.text
    assert "learning_rate" in refused.text
    assert services.scheduler.consumed == [(f"{session}:train:0", 1)]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_parameter_that_no_route_knows_is_refused_by_name(api, app):
    routes = [
        (method, path)
        for method, path in sorted(all_routes(app))
        if method == "GET" and (method, path) in WITH_IDS.keys() | LISTINGS | WITHOUT_IDS.keys()
        if path.startswith(CHECKED) and (method, path) != STREAM
    ]
    assert len(routes) > 20
    for method, path in routes:
        filled = re.sub(r"\{\w+\}", lambda name: FILLED.get(name[0], "unknown"), path)
        answer = await api.request(method, f"http://server{filled}?limit_=5")
        assert answer.status_code == 400, (path, answer.text)
        assert "limit_" in answer.text


async def test_a_parameter_is_known_by_its_name_in_addresses():
    @get("/api/v1/things", sync_to_thread=False)
    def things(
        with_state: Annotated[str, QueryParameter(name="state")] = "", limit: FromQuery[int] = 1
    ) -> str:
        return f"{with_state} {limit}"

    handlers = {InvalidRequest: lambda _, error: Response(str(error), status_code=400)}
    app = Litestar([things], before_request=refuse_unknown, exception_handlers=handlers, openapi_config=None)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server/api/v1/") as client:
        assert (await client.get("things?state=open&limit=2")).text == "open 2"
        refused = await client.get("things?with_state=open")
    assert (refused.status_code, "'with_state'" in refused.text) == (400, True)
    assert "Known: limit, state" in refused.text


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_probes_and_metrics_may_be_asked_with_any_parameters(api):
    for path in ("healthz", "api/v1/healthz", "readyz", "metrics"):
        assert (await api.get(f"http://server/{path}?from=probe")).status_code == 200


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_an_admin_who_asks_for_what_is_owned_is_not_shown_what_others_own(client_for):
    alice, admin = await client_for("alice"), await client_for("root", role="admin")
    session = (await alice.post("create_session", json={})).json()["session_id"]
    model = {"session_id": session, "model_seq_id": 0, "base_model": BASE_MODEL}
    await alice.post("create_model", json=model | {"lora_config": {"rank": 8}})
    for path in (f"sessions/{session}", f"training_runs/{session}:train:0"):
        for scope, status in (("owned", 404), ("accessible", 200)):
            assert (await admin.get(path, params={"access_scope": scope})).status_code == status
            assert (await alice.get(path, params={"access_scope": scope})).status_code == 200


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_sample_of_other_weights_than_its_sessions_is_refused(api):
    session = (await api.post("create_session", json={})).json()["session_id"]
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
    await api.post("create_sampling_session", json=sampler)
    body = sample(Ids(session, ""))
    other = f"tinker://{session}:train:0/sampler_weights/final"
    refused = await api.post("asample", json=body | {"model_path": other})
    assert (refused.status_code, other in refused.text) == (400, True)
    refused = await api.post("asample", json=body | {"base_model": "meta-llama/Llama-3.1-8B"})
    assert (refused.status_code, "meta-llama" in refused.text) == (400, True)
    assert (await api.post("asample", json=body | {"base_model": BASE_MODEL})).status_code == 200
